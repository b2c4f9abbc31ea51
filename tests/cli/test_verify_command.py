"""`verify` confirms what `place` wrote, and names the claim that does not hold."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def certificate(run_cli: Run, repository: Path, tmp_path: Path) -> Path:
    """The certificate of the example."""
    problem = repository / "examples" / "place" / "problem.json"
    placed = run_cli("place", problem, "--certificate", "certificate.json")
    assert placed.returncode == 0, placed.stderr
    return tmp_path / "certificate.json"


def test_a_certificate_is_confirmed(run_cli: Run, certificate: Path) -> None:
    result = run_cli("verify", certificate)
    assert result.returncode == 0, result.stderr
    document = json.loads(certificate.read_text())
    assert f"{document['step_ms']:.3f} ms a step" in result.stdout
    assert f"no placement takes less than {document['lower_bound_ms']:.3f} ms" in result.stdout


def faster(document: dict[str, Any]) -> None:
    document["step_ms"] *= 0.9


def higher_bound(document: dict[str, Any]) -> None:
    document["lower_bound_ms"] = document["step_ms"] * 1.1


def other_problem(document: dict[str, Any]) -> None:
    document["problem"]["num_microbatches"] += 1


def other_placement(document: dict[str, Any]) -> None:
    document["placement"]["layers"]["moe"] = [29, 0, 0, 0]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (faster, "step_ms"),
        (higher_bound, "lower_bound_ms"),
        (other_problem, "problem_sha256"),
        (other_placement, "placement"),
        (lambda d: d.pop("proof"), "proof is missing"),
    ],
)
def test_a_claim_that_fails_is_2(run_cli: Run, certificate: Path, edit: Edit, words: str) -> None:
    document = json.loads(certificate.read_text())
    edit(document)
    certificate.write_text(json.dumps(document))
    result = run_cli("verify", certificate)
    assert result.returncode == 2
    assert result.stdout == ""
    (told,) = result.stderr.splitlines()
    assert "certificate.json" in told
    assert words in told


def test_what_is_no_certificate_is_2(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"schema": ')
    result = run_cli("verify", "c.json")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
