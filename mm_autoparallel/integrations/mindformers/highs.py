"""HiGHS solves an exported model, in a process of its own: its library and OR-Tools cannot be loaded into one.

`main`, in that process, reads a start (column → value, JSON) on standard input, writes the solution in HiGHS's own
format (or its columns alone) and prints status, objective and bound as one JSON line. `ortools` is the one within
OR-Tools (SCIP where it has none).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mm_autoparallel.child_process import python_command
from mm_autoparallel.errors import BackendError, JobError
from mm_autoparallel.files import describe_value, read_text, temporary_of
from mm_autoparallel.streams import write_output

WHAT = "solution file"
_POLL_S = 0.2


@dataclass(frozen=True)
class HighsRun:
    """What HiGHS says of a model: its status in its own words, objective and bound (None: it has found none)."""

    status: str
    objective_ms: float | None
    lower_bound_ms: float | None


def check_highs() -> None:
    """Raise JobError where highspy is not installed."""
    if find_spec("highspy") is None:
        raise JobError(
            "solver HIGHS needs the package highspy, which is not installed: `pip install highspy`, or leave the "
            "solver out for CP-SAT"
        )


def solve_mps(
    model: Path,
    solution: Path,
    start: Mapping[str, float],
    time_limit_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    library: Literal["highspy", "ortools"] = "highspy",
) -> HighsRun:
    """Solve the model at `model` and write `solution`, where one is found; what is there stays otherwise.

    start: values of whole-number columns to begin with (may be empty). should_stop: polled several times a second.
    Raises BackendError where HiGHS fails.
    """
    written = temporary_of(solution)
    try:
        said = _run((str(model), str(written), str(time_limit_s), library), json.dumps(dict(start)), should_stop)
        if said.objective_ms is not None:
            written.replace(solution)
        return said
    finally:
        written.unlink(missing_ok=True)


def _run(arguments: tuple[str, ...], start: str, should_stop: Callable[[], bool]) -> HighsRun:
    """What `main` says in a process of its own."""
    process = subprocess.Popen(
        python_command(__name__, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = _wait(process, start)
        while said is None:
            if should_stop():
                return HighsRun("stopped", None, None)
            said = _wait(process, None)
    finally:
        process.kill()
        process.communicate()
    output, errors = said
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendError(f"HiGHS ended with code {process.returncode} on {arguments[0]}: {last}")
    return HighsRun(**json.loads(output.splitlines()[-1]))


def _wait(process: subprocess.Popen[str], begin: str | None) -> tuple[str, str] | None:
    """What the process wrote, once it has ended; None where it still runs after a while."""
    try:
        return process.communicate(begin, timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def read_solution(path: Path) -> dict[str, float]:
    """Column → value of the solution file at `path`: HiGHS's own format, or lines `name value` alone.

    Raises JobError naming file and line where it is neither.
    """
    lines = read_text(path, WHAT, "solution as HiGHS writes it").splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith("# Columns")), -1) + 1
    values: dict[str, float] = {}
    for number, line in enumerate(lines[begin:], start=begin + 1):
        if line.startswith("#"):
            break
        if not line.strip():
            continue
        name, _, text = line.strip().partition(" ")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise JobError(
                f"{WHAT} {path}: line {number} is {describe_value(line)}; a column and its value are expected"
            )
        if name in values:
            raise JobError(f"{WHAT} {path}: column {name} stands there twice (again in line {number})")
        values[name] = value
    if not values:
        raise JobError(f"{WHAT} {path}: it holds no columns; a solution as HiGHS writes it is expected")
    return values


def main(model: str, solution: str, seconds: str, library: str) -> None:
    """Solve with HiGHS's defaults from the start on standard input, and print what it says."""
    start: dict[str, float] = json.load(sys.stdin)
    if library == "ortools":
        said = _solve_with_ortools(model, Path(solution), float(seconds))
    else:
        said = _solve_with_highspy(model, Path(solution), float(seconds), start)
    write_output(json.dumps(asdict(said)) + "\n")


def _solve_with_ortools(model: str, solution: Path, seconds: float) -> HighsRun:
    """From no start: 9.15 crashes where it is given one. Its gap is 0, where highspy's default leaves 1e-4."""
    # its stubs hide those of the rest of OR-Tools' linear solvers from mypy
    model_builder = import_module("ortools.linear_solver.python.model_builder")
    program = model_builder.Model()
    if not program.import_from_mps_file(model):
        raise BackendError(f"{model} cannot be read")
    variables = program.get_variables()
    solver = model_builder.Solver("highs")
    if not solver.solver_is_supported():
        solver = model_builder.Solver("scip")
    if math.isfinite(seconds):
        solver.set_time_limit_in_seconds(seconds)
    status = solver.solve(program)
    bound_ms: float | None = None
    if status in (model_builder.SolveStatus.OPTIMAL, model_builder.SolveStatus.FEASIBLE):
        lines = (f"{variable.name} {solver.value(variable):.15g}\n" for variable in variables)
        solution.write_text("".join(lines), encoding="utf-8")
        bound_ms = solver.best_objective_bound if math.isfinite(solver.best_objective_bound) else None
        return HighsRun(status.name.capitalize(), solver.objective_value, bound_ms)
    return HighsRun(status.name.capitalize(), None, None)


def _solve_with_highspy(model: str, solution: Path, seconds: float, start: Mapping[str, float]) -> HighsRun:
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    if math.isfinite(seconds):
        solver.setOptionValue("time_limit", seconds)
    solver.readModel(model)
    if start:
        index = {name: n for n, name in enumerate(solver.getLp().col_names_)}
        names = [name for name in start if name in index]
        solver.setSolution(len(names), [index[name] for name in names], [start[name] for name in names])
    solver.run()
    info = solver.getInfo()
    found = info.primal_solution_status == 2  # HighsSolutionStatus kSolutionStatusFeasible
    if found:
        solver.writeSolution(str(solution), 0)
    bound = info.mip_dual_bound
    return HighsRun(
        solver.modelStatusToString(solver.getModelStatus()),
        info.objective_function_value if found else None,
        bound if math.isfinite(bound) else None,
    )
