"""`doctor` tries what `plan` uses, and says so where it does not work."""

from __future__ import annotations

import json

import pytest

from mm_autoparallel.api import doctor
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError


def test_here_nothing_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_try_torch", lambda: "not imported here: it takes seconds")
    doctor._small_job.cache_clear()
    assert main(["doctor", "--json"]) == 0
    assert doctor._small_job.cache_info().misses == 1  # one job for all that is tried
    document = json.loads(capsys.readouterr().out)
    found = {check["name"]: check["status"] for check in document["checks"]}
    assert document["works"]
    assert {name: found[name] for name in ("kernels", "plan", "place and verify")} == dict.fromkeys(
        ("kernels", "plan", "place and verify"), "works"
    )
    assert set(found.values()) <= {"works", "absent"}


def test_what_does_not_work_is_2_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise JobError("no solver today")

    monkeypatch.setattr(doctor, "_plan", fail)
    monkeypatch.setattr(doctor, "_place", lambda: "fine")
    monkeypatch.setattr(doctor, "_try_torch", lambda: "fine")
    assert main(["doctor"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]
    assert line.split() == ["plan", "broken", "no", "solver", "today"]


def test_what_is_optional_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    for name in ("_compile", "_plan", "_place"):
        monkeypatch.setattr(doctor, name, lambda: "fine")
    diagnosis = doctor.diagnose()
    assert diagnosis.works
    assert {check.name for check in diagnosis.checks if check.status == "absent"} == {
        "torch",
        "transformers",
        "ray",
        "highspy",
        "starlette",
        "uvicorn",
        "mcp",
        "argcomplete",
    }
