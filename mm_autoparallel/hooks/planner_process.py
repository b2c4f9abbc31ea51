"""The search of a hook, in this environment or in a process of the one that --auto-parallel-python names.

A training environment's pins may leave no room for the solver (OR-Tools, numba). Profiling and training need neither;
the search needs no torch. So the interpreter of another environment, where this version of mm_autoparallel is installed
with its dependencies, may do it. Two processes are started there, through child_process.py:

    check FOLDER   before anything is profiled: imports the solver, then writes version and code to FOLDER/answer.json
    search FOLDER  reads FOLDER/search.json (job, profiles, time limit, where the plans go), writes the plans, and at
                   last FOLDER/outcome.json: exit code and the paragraph that goes with it

What it says on the way goes to this process's own standard output and error, and the signals that this process gets go
to it: Ctrl-C ends it with the best plan so far. It has none of PYTHONPATH and PYTHONHOME, which are the training
environment's, and dies with this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mm_autoparallel import __version__
from mm_autoparallel.child_process import installed_command
from mm_autoparallel.errors import BackendError, JobError, PlanError, PlannerError
from mm_autoparallel.files import hash_sources, read_document, write_text_atomically
from mm_autoparallel.hooks.task import describe_job
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.records import Noun
from mm_autoparallel.reports.terminal import Progress, warn, writing
from mm_autoparallel.signals import (
    forwarded_signals,
    ignore_signals,
    interrupt_on_signal,
    interrupted_by_signals,
    stop_on_signal,
)
from mm_autoparallel.streams import tell_on_terminal
from mm_autoparallel.validation import parse_record

if TYPE_CHECKING:
    from mm_autoparallel.planner.plan import Plan

VARIABLE = "MM_AUTOPARALLEL_PYTHON"
"""Environment variable: what --auto-parallel-python says, where that flag is not given."""

NEEDED = ("ortools", "numba")
"""What a search imports beside what the hook itself needs."""

CHECK_S = 120.0
"""Assumed: the first import of a solver from a slow shared disk takes less."""

MODULE = "mm_autoparallel.hooks.planner_process"
ANSWER, REQUEST, OUTCOME = "answer.json", "search.json", "outcome.json"
INTERRUPTED = 130


class Answer(Noun):
    """To `check`: what is installed there. code: a hash of the package's sources."""

    version: str
    code: str


class Request(Noun):
    """What is to be searched: a job as in a file, its profiles, and where the best plans go, the best of all first.

    export_to: the framework that they are written for too, each into the folder of its own file's name. decided: a plan
    as in a file, which is simulated in the place of a search. Paths are seen from the working directory, which both
    processes have, so that the plans name the same files.
    """

    schema_name: Literal["mm-autoparallel/search/1"] = Field(alias="schema")
    job: dict[str, Any]
    profiles: tuple[str, ...]
    time_limit_s: float | None = Field(default=None, gt=0)
    results: tuple[str, ...] = Field(min_length=1)
    export_to: str | None = None
    decided: dict[str, Any] | None = None


class Outcome(Noun):
    """How a search ended: the exit code, and where that is not 0 the paragraph that says why."""

    code: int
    message: str = ""


class SearchCrashed(BackendError):
    """The process of the search ended by a bug; its own output says where."""

    exit_code = 1


class _Ended(PlannerError):
    """An error of the process that searched, with its words and its exit code."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.exit_code = outcome.code


# ------------------------------------------------------------------------------------------- in the hook's environment


def check_planner(python: Path | None) -> None:
    """Raises JobError where the search cannot run in `python` (None: in this process)."""
    if python is None:
        missing = [name for name in NEEDED if find_spec(name) is None]
        if missing:
            raise JobError(
                f"the search needs {' and '.join(missing)}, which the environment {sys.prefix} does not have; install "
                f"mm-autoparallel {__version__} with its dependencies in an environment of its own, and name that "
                f"one's interpreter by --auto-parallel-python or ${VARIABLE}"
            )
        return
    told = f"--auto-parallel-python {python}"
    install = f"install mm-autoparallel {__version__} with its dependencies there, or name another interpreter"
    with tempfile.TemporaryDirectory(prefix="mm-autoparallel-check-") as folder:
        said = _ask(python, folder, told)
        path = Path(folder) / ANSWER
        if not path.exists():
            raise JobError(f"{told}: no search can run there; {said}; {install}")
        answer = parse_record(Answer, read_document(path, "answer"), "answer", path)
    if answer.version != __version__:
        raise JobError(f"{told}: it has mm-autoparallel {answer.version}, and this is {__version__}; {install}")
    if answer.code != _own_code():
        raise JobError(f"{told}: it has other code of mm-autoparallel {__version__} than this environment; {install}")


def _ask(python: Path, folder: str, told: str) -> str:
    """Have `python` write its answer to `folder`; how it ended. Raises JobError where it does not start or end."""
    try:
        ended = subprocess.run(
            installed_command(python, MODULE, "check", folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=CHECK_S,
            env=_environment(),
        )
    except OSError as error:
        raise JobError(f"{told}: it cannot be started ({error.strerror or error}); name a Python interpreter") from None
    except subprocess.TimeoutExpired:
        raise JobError(f"{told}: it has not answered within {CHECK_S:g} s; name a Python interpreter") from None
    lines = [line.strip() for line in ended.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"it ended with exit code {ended.returncode}" + (f" and said: {lines[-1][:300]}" if lines else "")


def search_in(
    python: Path | None, job: Job, time_limit_s: float | None, *results: Path, export_to: str | None = None
) -> None:
    """Search plans for `job` in `python` (None: in this process), write the best to `results` and print them.

    Where there are fewer plans than `results`, files that stand in the place of the others are removed. export_to: as
    in Request. Raises what the search raises, SearchCrashed or BackendError where its process ends without an answer,
    and KeyboardInterrupt where it was interrupted before it had one.
    """
    if python is None:
        search_and_write(job, time_limit_s, results, export_to)
    else:
        _ask_for(python, job, time_limit_s=time_limit_s, results=[*map(str, results)], export_to=export_to)


def simulate_in(python: Path | None, job: Job, decided: Mapping[str, Any], result: Path) -> None:
    """Simulate the plan whose file has the content `decided`, and write it to `result` with what it takes.

    Raises as `search_in` does, PlanError where the plan does not fit `job`.
    """
    if python is None:
        simulate_and_write(job, decided, result)
    else:
        _ask_for(python, job, results=[str(result)], decided=dict(decided))


def _ask_for(python: Path, job: Job, **asked: Any) -> None:
    """What `python` is asked to do for `job`, done. Raises as `search_in` does."""
    request = Request.model_validate(
        {
            "schema": "mm-autoparallel/search/1",
            "job": describe_job(job),
            "profiles": [str(path) for path in job.profiles],
            **asked,
        }
    )
    with tempfile.TemporaryDirectory(prefix="mm-autoparallel-search-") as name:
        folder = Path(name)
        with writing(folder / REQUEST):
            write_text_atomically(folder / REQUEST, request.model_dump_json(by_alias=True))
        _run(python, folder)
        outcome_path = folder / OUTCOME
        outcome = parse_record(Outcome, read_document(outcome_path, "outcome"), "outcome", outcome_path)
    if outcome.code == INTERRUPTED and not outcome.message:
        raise KeyboardInterrupt
    if outcome.code != 0:
        raise _Ended(outcome)


def _run(python: Path, folder: Path) -> None:
    """The process that searches, from start to end. Raises where it leaves no outcome."""
    sys.stdout.flush()
    signals: list[int] = []
    process = subprocess.Popen(
        installed_command(python, MODULE, "search", str(folder)),
        stdin=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # Ctrl-C comes from here alone, once
    )

    def pass_on(number: int) -> None:
        signals.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)

    try:
        with forwarded_signals(pass_on):
            code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if (folder / OUTCOME).exists():
        return
    if signals:  # it was still importing
        raise KeyboardInterrupt
    told = f"the search in {python} ended without an answer"
    if code == -signal.SIGKILL:
        raise BackendError(
            f"{told}: it was killed by the system, most likely for memory (signal 9); what was profiled is kept, and "
            "the same command continues there"
        )
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    raise SearchCrashed(f"{told}, {how}; its own output above says where. What was profiled is kept")


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _own_code() -> str:
    return hash_sources([""])[:16]


# ---------------------------------------------------------------------------------------------- where the search runs


def search_and_write(job: Job, time_limit_s: float | None, results: Sequence[Path], export_to: str | None) -> None:
    """Search, write the result files, print plans and proof. Raises as `search` does, JobError where a file cannot be
    written."""
    from mm_autoparallel.api import load_solver, plan
    from mm_autoparallel.planner.search.candidate import progress_line

    load_solver()
    with Progress() as progress, stop_on_signal() as stop:
        result = plan(
            job,
            time_limit_s=time_limit_s,
            top_k=len(results),
            should_stop=stop.is_set,
            on_progress=lambda state: progress.show(partial(progress_line, state)),
        )
    for rank, path in enumerate(results):
        with writing(path):
            if rank < len(result.best):
                result.write(path, rank)
                _export(job, result.best[rank].plan, path, export_to)
            else:
                remove_plan(path)
    warn(result.warnings)

    from mm_autoparallel.reports.console import print_rich

    with suppress(BrokenPipeError):  # whoever read along has left; the file is what was asked for
        for part in result.renderables():
            print_rich(part)


def _export(job: Job, plan: Plan, path: Path, framework: str | None) -> None:
    """The files of `framework` that run the plan of the file at `path`, beside it; why there are none, where it cannot
    run the plan."""
    from mm_autoparallel.api.exported import export_plan

    if framework is None:
        return
    try:
        exported = export_plan(plan, job, framework, out=path.with_suffix(""), overwrite=True).exported
    except PlanError as error:
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        warn([f"{path} is not written for {framework}: {error}"])
        return
    warn(f"{path.with_suffix('')}: {sentence}" for sentence in exported.approximations)


def remove_plan(path: Path) -> None:
    """Take away what an earlier search left at `path`: a plan, and the folder of its files."""
    path.unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def simulate_and_write(job: Job, decided: Mapping[str, Any], result: Path) -> None:
    """Simulate the plan of a file's content, write its result file. Raises PlanError where it does not fit `job`."""
    from mm_autoparallel.api import simulate
    from mm_autoparallel.planner.plan import parse_plan, write_result

    simulation = simulate(job, parse_plan(dict(decided), job, "plan"))
    with writing(result):
        write_result(result, simulation.plan, simulation.estimate.figures(0.0))


def main(verb: str, folder: str) -> int:
    """What this module does as a process: `check`, or `search` what stands in `folder`. The exit code."""
    interrupt_on_signal()
    tell_on_terminal()
    if verb == "check":
        from mm_autoparallel.api import load_solver

        load_solver()  # an answer means that it is there

        answer = Answer(version=__version__, code=_own_code())
        write_text_atomically(Path(folder) / ANSWER, answer.model_dump_json())
        return 0
    outcome = _search(Path(folder))
    ignore_signals()
    write_text_atomically(Path(folder) / OUTCOME, outcome.model_dump_json())
    return outcome.code


def _search(folder: Path) -> Outcome:
    try:
        path = folder / REQUEST
        request = parse_record(Request, read_document(path, "request"), "request", path)
        job = replace(parse_job(request.job, path), profiles=tuple(map(Path, request.profiles)))
        with interrupted_by_signals():
            if request.decided is not None:
                simulate_and_write(job, request.decided, Path(request.results[0]))
            else:
                search_and_write(job, request.time_limit_s, [*map(Path, request.results)], request.export_to)
    except PlannerError as error:
        return Outcome(code=error.exit_code, message=str(error))
    except KeyboardInterrupt:
        return Outcome(code=INTERRUPTED)
    return Outcome(code=0)


def named_planner(flag: Path | None) -> Path | None:
    """The interpreter that --auto-parallel-python (`flag`), else $MM_AUTOPARALLEL_PYTHON, names; None where neither.

    A bare name is looked for on the search path. Raises JobError where there is no such program.
    """
    from shutil import which

    named = str(flag) if flag is not None else os.environ.get(VARIABLE, "")
    if not named:
        return None
    found = which(Path(named).expanduser())
    if found is None:
        where = "--auto-parallel-python" if flag is not None else f"${VARIABLE}"
        raise JobError(f"{where} is {named!r}, which is no program that can be started; name a Python interpreter")
    return Path(found).absolute()  # not resolved: a virtual environment's interpreter is a link
