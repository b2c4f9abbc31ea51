"""`place` of a problem with encoders, as a user meets it: tables, one JSON document, refusals of one paragraph."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.api.encoded import EncodedPlaceResult
from mm_autoparallel.pipeline.certify.digest import document_sha256

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


def test_certificates(run_cli: Run, example: Path, tmp_path: Path) -> None:
    """Written and confirmed; refused where an order, the bound or the decoder's part of it says something else."""
    path, told = tmp_path / "proof.json", tmp_path / "changed.json"
    placed = run_cli("place", example, "--certificate", path)
    assert placed.returncode == 0, placed.stderr
    confirmed = run_cli("verify", path)
    assert confirmed.returncode == 0, confirmed.stderr
    assert "bound confirmed: no placement is below 714.000 ms (gap 0.000 %)" in confirmed.stdout

    def refuse(change: Callable[[dict[str, Any]], object]) -> str:
        document = json.loads(path.read_text())
        change(document)
        told.write_text(json.dumps(document))
        with pytest.raises(mmap.PlanError) as refused:
            mmap.verify(told)
        return str(refused.value)

    def swap(document: dict[str, Any], one: str, other: str) -> None:
        words = document["placement"]["order"][3]
        at, to = words.index(one), words.index(other)
        words[at], words[to] = other, one

    def delay(document: dict[str, Any]) -> None:
        words = document["placement"]["order"][3]
        for name in ("4F0@vision", "0F0@vision"):  # the decoder's first forward waits for the latter
            words.insert(words.index("0F0"), words.pop(words.index(name)))

    def forget(document: dict[str, Any]) -> None:
        document["proof"]["decoder"] |= {"lower_bound_ms": None, "gap_fraction": None, "proof": {"method": "none"}}

    assert "runs pass 0 of vision out of its turn" in refuse(lambda d: swap(d, "0F0@vision", "4F0@vision"))
    assert "in another order than its schedule" in refuse(lambda d: swap(d, "0F0", "1F0"))
    assert "never ends" in refuse(delay)
    assert "does not run every action" in refuse(lambda d: d["placement"]["order"][3].pop())
    assert "step_ms is 700.0" in refuse(lambda d: d.update(step_ms=700.0))
    assert "more is not confirmed" in refuse(forget)
    assert "problem_sha256" in refuse(lambda d: d["problem"]["encoders"][0].update(feed_ms=2.0))
    assert "of another decoder" in refuse(lambda d: _with_sha(d["proof"]["decoder"], num_microbatches=7))
    assert "counts 90.000 GB on device 0" in refuse(lambda d: _with_sha(d["proof"]["decoder"], stage_static_bytes=9e10))


def _with_sha(certificate: dict[str, Any], **changes: object) -> None:
    """A certificate that says so, and a digest that goes with it."""
    certificate["problem"] |= changes
    certificate["problem_sha256"] = document_sha256(certificate["problem"])


def test_what_is_refused(run_cli: Run, example: Path, tmp_path: Path) -> None:
    """Every other use of such a file or its order."""
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


def test_phases_that_a_cap_forbids(run_cli: Run, example: Path, tmp_path: Path) -> None:
    """Where few passes may be ahead there are no phases to compare with, in the document and in words."""
    document, capped = json.loads(example.read_text()), tmp_path / "capped.json"
    document["encoders"][0]["most_ahead"] = 1
    capped.write_text(json.dumps(document))
    result = run_cli("place", capped, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["other_ways"]["phases_ms"] is None
    assert (
        "encoders in phases before and after it cannot run, as most_ahead is less"
        in mmap.place(mmap.read_problem(capped)).table()
    )


def test_nothing_fits(example: Path, run_cli: Run, tmp_path: Path) -> None:
    """Encoders count among what devices hold."""
    document = json.loads(example.read_text()) | {"memory_limit_bytes": 66e9}
    document["encoders"][0]["static_bytes"] = 40e9
    path = tmp_path / "full.json"
    path.write_text(json.dumps(document))
    result = run_cli("place", path)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "nothing feasible" in result.stderr
