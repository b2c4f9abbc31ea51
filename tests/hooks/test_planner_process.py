"""The search in a process of another environment: who may run it, what is asked and what comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import venv
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import BackendError, JobError, PlannerError
from mm_autoparallel.hooks import planner_process
from mm_autoparallel.hooks.planner_process import (
    SearchCrashed,
    check_planner,
    named_planner,
    search_in,
    simulate_in,
)
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job

# A training environment's pins leave no room for these (older_torch.py makes one; this is its fast form).
BLOCKED = """
import runpy, sys
sys.modules.update(dict.fromkeys(("ortools", "numba", "pandas", "highspy", "ray", "scipy")))
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The interpreter of an environment of its own, where this package is installed with its solver."""
    folder = tmp_path_factory.mktemp("planner")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    found = [str(repository), *(path for path in sys.path if path.endswith("-packages"))]
    (packages / "installed.pth").write_text("\n".join(found))
    return folder / "bin" / "python"


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], Path]:
    """An interpreter that is a shell script: $5 is the verb, $6 the folder."""

    def write(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture(scope="module")
def job() -> Job:
    layers = {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms", "gated": False}
    return parse_job(
        {
            "model": {"name": "toy", "text": {"vocab_size": 256, "layers": layers}},
            "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "a100-80g"},
            "workload": {"global_batch_size": 8, "seq_length": 32},
        },
        Path("job.yaml"),
    )


@pytest.mark.nightly
def test_another_environment_plans_what_this_one_profiled(
    launch: Callable[..., Any],
    copied: Path,
    planner: Path,
    one_rank: tuple[object, ...],
    profiled: Path,
) -> None:
    """Without a solver here the plan is the one of an environment that holds all, to the last figure."""
    script = copied / "blocked.py"
    script.write_text(BLOCKED.format(script=str(Path(__file__).parent / "toy_pretrain.py")))
    refused = launch(copied, *one_rank, script=script).wait()
    assert refused.code == 2
    assert "the search needs ortools and numba" in refused.stderr
    assert "--auto-parallel-python" in refused.stderr
    ended = launch(copied, *one_rank, "--auto-parallel-python", planner, script=script).wait()
    assert ended.code == 0, ended.stderr
    assert "proven" in ended.stdout
    name = "auto_parallel_search_optimal_config.json"
    assert f"wrote {name}" in ended.stderr
    assert (copied / name).read_text() == (profiled / name).read_text()


def test_an_environment_that_holds_all_may_be_named(planner: Path) -> None:
    check_planner(planner)


def test_a_solver_that_is_missing_here_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_planner(None)
    monkeypatch.setattr(planner_process, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"ortools and numba.*MM_AUTOPARALLEL_PYTHON"):
        check_planner(None)


def test_an_environment_without_the_package_is_refused(bare: Path) -> None:
    with pytest.raises(JobError, match=r"No module named 'mm_autoparallel'.*install mm-autoparallel"):
        check_planner(bare)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo hello", r"no search can run there; it ended with exit code 0; install"),
        ("echo SyntaxError: invalid syntax >&2; exit 1", r"exit code 1 and said: SyntaxError"),
        ('echo \'{"version": "0.0.1", "code": "x"}\' > $6/answer.json', r"it has mm-autoparallel 0\.0\.1, and this is"),
        (
            f'echo \'{{"version": "{planner_process.__version__}", "code": "x"}}\' > $6/answer.json',
            "other code of mm-autoparallel",
        ),
        ("echo '[1]' > $6/answer.json", "a mapping of keys to values is expected"),
    ],
)
def test_another_program_or_version_is_refused(stand_in: Callable[[str], Path], script: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        check_planner(stand_in(script))


def test_what_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no program")
    for name in (text, tmp_path, tmp_path / "nowhere", Path("no-such-python")):
        with pytest.raises(JobError, match=r"--auto-parallel-python is .* no program"):
            named_planner(name)
    monkeypatch.setenv(planner_process.VARIABLE, str(text))
    with pytest.raises(JobError, match=r"\$MM_AUTOPARALLEL_PYTHON is .* no program"):
        named_planner(None)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    with pytest.raises(JobError, match="cannot be started"):
        check_planner(named_planner(broken))


def test_a_flag_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(planner_process.VARIABLE, raising=False)
    assert named_planner(None) is None
    monkeypatch.setenv(planner_process.VARIABLE, "no-such-python")
    assert named_planner(Path(sys.executable)) == Path(sys.executable).absolute()


@pytest.mark.parametrize(("code", "message"), [(3, "nothing fits"), (124, "no plan in time"), (130, "stopped before")])
def test_errors_come_back_as_they_are(
    stand_in: Callable[[str], Path], job: Job, tmp_path: Path, code: int, message: str
) -> None:
    outcome = json.dumps({"code": code, "message": message})
    python = stand_in(f"echo '{outcome}' > $6/outcome.json; exit {code}")
    with pytest.raises(PlannerError, match=message) as failure:
        search_in(python, job, 1.0, tmp_path / "plan.json")
    assert failure.value.exit_code == code


def test_a_search_that_dies_is_told(stand_in: Callable[[str], Path], job: Job, tmp_path: Path) -> None:
    with pytest.raises(SearchCrashed, match="exit code 7") as failure:
        search_in(stand_in("exit 7"), job, None, tmp_path / "plan.json")
    assert failure.value.exit_code == 1
    with pytest.raises(BackendError, match="most likely for memory"):
        search_in(stand_in("kill -9 $$"), job, None, tmp_path / "plan.json")


def test_what_is_asked_stands_in_a_file(stand_in: Callable[[str], Path], job: Job, tmp_path: Path) -> None:
    python = stand_in(f"cp $6/search.json {tmp_path}/asked.json; echo '{{\"code\": 0}}' > $6/outcome.json")
    search_in(python, job, 2.5, tmp_path / "plan.json", tmp_path / "second.json", export_to="megatron-core")
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["schema"] == "mm-autoparallel/search/1"
    assert asked["time_limit_s"] == 2.5
    assert asked["results"] == [str(tmp_path / "plan.json"), str(tmp_path / "second.json")]
    assert asked["export_to"] == "megatron-core"
    assert parse_job(asked["job"], Path("asked.json")).model == job.model
    simulate_in(python, job, {"parallel_config": {"PP": 2}}, tmp_path / "plan.json")
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["decided"] == {"parallel_config": {"PP": 2}}
    assert asked["results"] == [str(tmp_path / "plan.json")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_search_once(
    stand_in: Callable[[str], Path], job: Job, tmp_path: Path, number: signal.Signals
) -> None:
    """It ends with what it has; a search that has nothing yet is an interrupted one."""
    wait = "i=0; while [ $i -lt 100 ]; do sleep 0.05; i=$((i+1)); done"
    (tmp_path / "outcome.json").write_text('{"code": 0}')
    note = f"echo heard >> {tmp_path}/heard; cp {tmp_path}/outcome.json $6; exit 0"
    for trap, heard in ((note, True), ("exit 1", False)):
        python = stand_in(f"trap '{trap}' {number.name[3:]}\n{wait}")
        timer = threading.Timer(0.7, os.kill, (os.getpid(), number))
        timer.start()
        with nullcontext() if heard else pytest.raises(KeyboardInterrupt):
            search_in(python, job, None, tmp_path / "plan.json")
        timer.join()
    assert (tmp_path / "heard").read_text() == "heard\n"
