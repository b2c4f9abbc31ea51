"""`place --certificate` and `verify` as a user meets them: real processes, exit codes, one paragraph, one document."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from known_cases import large_case
from waiting import wait_until_used

from mm_autoparallel.pipeline.certify.certificate import write_certificate
from mm_autoparallel.pipeline.placement.place import place

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def certificate(run_cli: Run, repository: Path, tmp_path: Path) -> Path:
    path = tmp_path / "proof" / "certificate.json"
    result = run_cli("place", repository / "examples" / "place" / "problem.json", "--certificate", path)
    assert result.returncode == 0, result.stderr
    return path


@pytest.fixture
def open_claim(tmp_path: Path) -> Path:
    """A bound that nobody could confirm or refute within minutes."""
    problem, case = large_case("p16_v2_m128_n100")
    result = place(problem, gap_fraction=0.3)
    claimed = replace(result, proof="tree", lower_bound_ms=case["best_step_ms"] * 0.9995)
    write_certificate(tmp_path / "open.json", problem, claimed)
    return tmp_path / "open.json"


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one paragraph on standard error of a run that refused its input."""
    assert result.returncode == 2, result.stderr
    (told,) = (line for line in result.stderr.splitlines() if "compiling its kernels" not in line)
    return told


def test_what_place_writes_is_verified(run_cli: Run, certificate: Path) -> None:
    words = run_cli("verify", certificate)
    assert words.returncode == 0, words.stderr
    assert "placement confirmed" in words.stdout
    assert "bound confirmed: no placement is below" in words.stdout
    document = json.loads(run_cli("verify", certificate, "--json").stdout)
    written = json.loads(certificate.read_text(encoding="utf-8"))
    assert document["schema"] == "mm-autoparallel/verification/1"
    assert document["verified"] is True
    assert document["method"] == written["proof"]["method"]
    for key in ("step_ms", "lower_bound_ms", "gap_fraction"):
        assert document[key] == written[key]
    assert 0 <= document["seconds"] < 60


def test_a_false_claim_is_2(run_cli: Run, certificate: Path) -> None:
    document: dict[str, Any] = json.loads(certificate.read_text(encoding="utf-8"))
    certificate.write_text(json.dumps(document | {"step_ms": document["step_ms"] * 0.99}), encoding="utf-8")
    told = refused(run_cli("verify", certificate))
    assert f"certificate {certificate}: step_ms is" in told
    result = run_cli("verify", certificate, "--json")
    assert refused(result) == told
    answer = json.loads(result.stdout)
    assert answer["verified"] is False
    assert answer["reason"] in told


def test_a_file_that_is_none_is_2(run_cli: Run, certificate: Path, repository: Path) -> None:
    assert "no such file" in refused(run_cli("verify", "nowhere.json"))
    certificate.write_text(certificate.read_text(encoding="utf-8")[:-100], encoding="utf-8")
    assert "no valid JSON" in refused(run_cli("verify", certificate))
    assert "certificate" in refused(run_cli("verify", repository / "examples" / "place" / "problem.json"))


def test_a_bound_left_open_is_2_and_says_so(run_cli: Run, open_claim: Path) -> None:
    told = refused(run_cli("verify", open_claim, "--time-limit", "1"))
    assert "placement checked, bound not confirmed" in told


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once(repository: Path, open_claim: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mm_autoparallel.cli.main", "verify", str(open_claim)],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_used(process, 3.0)
    process.send_signal(signal.SIGINT)
    told = time.monotonic()
    output, errors = process.communicate(timeout=30)
    print(f"ended {time.monotonic() - told:.2f} s after the signal")
    assert process.returncode == 130, errors
    assert output == ""
    assert "interrupted" in errors
    assert "Traceback" not in errors
