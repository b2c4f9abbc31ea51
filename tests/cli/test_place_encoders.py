"""`place` of a problem with encoders, as a user meets it: tables, one JSON document, refusals of one paragraph."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.api.encoded import EncodedPlaceResult

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def example(repository: Path) -> Path:
    return repository / "examples" / "place" / "encoders.json"


def test_the_document_has_the_order_of_every_device(run_cli: Run, example: Path) -> None:
    result = run_cli("place", example, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "mm-autoparallel/placement/1"
    assert (document["status"], document["step_ms"]) == ("optimal", 714.0)
    assert document["lower_bound_ms"] == pytest.approx(714.0)
    assert document["other_ways"] == {"decoder_ms": 676.0, "phases_ms": 748.0, "chain_ms": 765.0}
    assert document["layers"] == {"text": [8, 8, 8, 8]}
    order = document["order"]
    assert [sorted(word for word in words if word.endswith("F0@vision")) for words in order] == [
        [f"{m}F0@vision", f"{m + 4}F0@vision"] for m in (3, 2, 1, 0)
    ]
    assert order[3][0] == "0F0@vision"
    for words in order:
        assert len(words) == len(set(words)) == 2 * 8 + 2 * 2
        assert [word for word in words if word.endswith("F0")] == [f"{m}F0" for m in range(8)]


def test_what_is_refused(run_cli: Run, example: Path, tmp_path: Path) -> None:
    """A certificate, and every other use of such a file or its order."""
    refused = run_cli("place", example, "--certificate", tmp_path / "proof.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "certificates are of problems without encoders" in refused.stderr
    assert not (tmp_path / "proof.json").exists()
    exported = run_cli("schedules", "export", example, "--to", "torch", "--out", tmp_path / "order.csv")
    assert exported.returncode == 2
    assert "has encoders, and `place` alone plans these" in exported.stderr


def test_as_functions(example: Path) -> None:
    """The face takes and tells the same."""
    problem = mmap.read_problem(example)
    found = mmap.place(problem)
    assert isinstance(found, EncodedPlaceResult)
    assert (found.status, found.step_ms, found.reason) == ("optimal", 714.0, "")
    assert found.gap_fraction < 1e-5
    assert "optimal: 714.000 ms a step; no placement is below 714.000 ms" in found.table()
    assert "748.000 ms" in found.table()
    assert found.to_dict()["other_ways"]["phases_ms"] == 748.0
    assert "<table" in found._repr_html_()
    with pytest.raises(mmap.JobError, match="certificates are of problems without encoders"):
        found.write_certificate("proof.json")


def test_nothing_fits(example: Path, run_cli: Run, tmp_path: Path) -> None:
    """Encoders count among what devices hold."""
    document = json.loads(example.read_text()) | {"memory_limit_bytes": 66e9}
    document["encoders"][0]["static_bytes"] = 40e9
    path = tmp_path / "full.json"
    path.write_text(json.dumps(document))
    result = run_cli("place", path)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "nothing feasible" in result.stderr
