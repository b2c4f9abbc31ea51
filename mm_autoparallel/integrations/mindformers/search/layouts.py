"""The best layout of a MindFormers pipeline: as the pipeline search counts recompute, then as MindFormers does it.

The pipeline search counts recomputed layers of each kind as if any of a chunk's layers could be; MindFormers
recomputes the first ones. Where dense and expert layers share a chunk these differ, in time and in memory. The
objective is that of the first count, so that it compares with other solvers'; the layout is the best of the second,
which is what trains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mm_autoparallel.errors import (
    BackendError,
    Interrupted,
    JobError,
    NoFeasiblePlan,
    PlanError,
    PlannerError,
    Unfinished,
)
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.integrations.mindformers import program
from mm_autoparallel.integrations.mindformers.highs import HighsRun, check_highs, read_solution, solve_mps
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.pipeline_problem import layout_of, placement_of
from mm_autoparallel.integrations.mindformers.recompute_kinds import COMM, SELECT
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate
from mm_autoparallel.units import format_bytes

#: Of the time limit, at most: for the objective (the rest is the layout's), and within each for what HiGHS begins with.
FIRST_FRACTION, START_FRACTION = 0.6, 0.3

#: Assumed: seconds of search before the whole program of a short interleaved run is solved, and of that at most.
SMALL_START_S, SMALL_PROGRAM_S = 4.0, 60.0

#: Steps this close are the same but for the rounding of sums.
SAME_STEP_FRACTION = 1e-9


@dataclass(frozen=True)
class Solver:
    """How to solve. use_highs: HiGHS solves the exported model, else CP-SAT and the search around it the problem.

    model_stem: the exported model is written to this path with `.mps` behind it, HiGHS's solution with `.sol`.
    """

    use_highs: bool
    model_stem: Path
    time_limit_s: float = math.inf
    should_stop: Callable[[], bool] = lambda: False
    on_better: Callable[[float], None] = lambda _: None


@dataclass(frozen=True, eq=False)
class FoundLayout:
    """A layout that fits. problem, placement, timeline: as MindFormers runs it, simulated exactly.

    objective_ms: the best step with recompute of any layers, as the solver that found it gives it; lower_bound_ms: on
    it, None where nothing was proven; any_layers_ms: what its placement simulates to, which can be more than HiGHS's
    objective. status: in the solver's words.
    """

    layout: Layout
    problem: Problem
    placement: Placement
    timeline: Timeline
    objective_ms: float
    lower_bound_ms: float | None
    any_layers_ms: float
    status: str
    solve_s: float
    models: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Solved:
    """What a solver found of one problem; lower_bound_ms None where nothing was proven, status in its words."""

    placement: Placement
    objective_ms: float
    lower_bound_ms: float | None
    status: str


def find_layout(problem: Problem, solver: Solver) -> FoundLayout:
    """The best layout of `problem`.

    Writes the exported model, and HiGHS's solution where it is the solver. Raises NoFeasiblePlan where nothing fits,
    Unfinished where nothing was found in time, JobError where HiGHS is not installed, OSError where nothing can be
    written.
    """
    if solver.use_highs:
        check_highs()
    variants = list(_expressible(problem))
    found = []
    for end, variant in variants:
        stem = solver.model_stem.with_name(solver.model_stem.name + end)
        share = replace(solver, model_stem=stem, time_limit_s=solver.time_limit_s / len(variants))
        found.append(_try_layout(variant, share))
    layouts = [layout for layout in found if isinstance(layout, FoundLayout)]
    if not layouts:
        nothing = [layout for layout in found if isinstance(layout, PlannerError)]
        raise next((one for one in nothing if isinstance(one, Unfinished)), nothing[0])
    best = min(layouts, key=lambda layout: layout.timeline.step_ms)
    if len(layouts) == 1:
        return best
    best = replace(best, models=tuple(model for layout in layouts for model in layout.models))
    bounds_ms = [layout.lower_bound_ms for layout in layouts if layout.lower_bound_ms is not None]
    bound_ms = min(bounds_ms) if len(bounds_ms) == len(layouts) else None
    is_proven = bound_ms is not None and best.objective_ms <= bound_ms * (1.0 + OPTIMAL_GAP_FRACTION)
    return replace(best, lower_bound_ms=bound_ms, status="optimal" if is_proven else "feasible")


def _try_layout(problem: Problem, solver: Solver) -> FoundLayout | NoFeasiblePlan | Unfinished:
    try:
        return _find_layout(problem, solver)
    except (NoFeasiblePlan, Unfinished) as nothing:
        return nothing


def _expressible(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """`problem` with no more kinds of recompute than MindFormers' lists can tell apart in one chunk, each with what its
    model's name ends in.
    """
    offered = {mode.name for block in problem.chain for mode in block.modes}
    if not {SELECT, COMM} <= offered:
        yield "", problem
        return
    for kept, left_out in ((SELECT, COMM), (COMM, SELECT)):
        chain = tuple(
            replace(block, modes=tuple(mode for mode in block.modes if mode.name != left_out))
            for block in problem.chain
        )
        yield f"_{kept}", replace(problem, chain=chain)


def _find_layout(problem: Problem, solver: Solver) -> FoundLayout:
    began = time.monotonic()
    any_layers = _without_groups(problem)
    models = [_export(any_layers, solver.model_stem)]
    is_mixed = sum(block.layer for block in problem.chain) > 1  # else both counts are the same
    counted = _solve(
        any_layers,
        solver,
        models[0],
        solver.time_limit_s * (FIRST_FRACTION if is_mixed else 1.0),
    )
    layout = layout_of(any_layers, counted.placement)
    counted_step_ms = simulate(any_layers, counted.placement).step_ms
    placement, timeline = _run(problem, layout)
    fits = not overfull_stages(problem, timeline.peak_memory_bytes)
    if not fits or timeline.step_ms > counted_step_ms * (1.0 + SAME_STEP_FRACTION):
        first_layers = solver.model_stem.with_name(solver.model_stem.name + "_first_layers")
        models.append(_export(problem, first_layers))
        left_s = max(1.0, solver.time_limit_s - (time.monotonic() - began))
        hint = placement if fits else None
        try:
            better = _solve(problem, solver, models[-1], left_s, hint).placement
        except (NoFeasiblePlan, Unfinished) as nothing:
            raise type(nothing)(
                f"{nothing} (MindFormers recomputes the first layers of a chunk; recompute of any would fit)"
            ) from None
        layout = layout_of(problem, better)
        placement, timeline = better, simulate(problem, better)
    return FoundLayout(
        layout,
        problem,
        placement,
        timeline,
        counted.objective_ms,
        counted.lower_bound_ms,
        counted_step_ms,
        counted.status,
        time.monotonic() - began,
        tuple(models),
    )


def solve(problem: Problem, solver: Solver) -> Solved:
    """The best placement of `problem` as it stands; the model is exported where HiGHS solves it.

    Raises NoFeasiblePlan where nothing fits, Unfinished where nothing was found in time.
    """
    model = solver.model_stem
    if solver.use_highs or _has_small_program(problem):
        model = _export(problem, solver.model_stem)
    return _solve(problem, solver, model, solver.time_limit_s)


def extract_layout(problem: Problem, path: Path, source: Path) -> FoundLayout:
    """The layout that the solution file at `path` says, for the model of `problem`, made of the file `source`.

    It may hold more than its stages' limits: see overfull_notes. Raises JobError where the file is none or of another
    model.
    """
    began = time.monotonic()
    values = read_solution(path)
    variants = [variant for _, variant in _expressible(problem)]
    problem = min(variants, key=lambda variant: _num_strange(variant, values))
    any_layers = _without_groups(problem)
    foreign = _foreign_columns(problem, values)
    if foreign:
        offered = dict.fromkeys(mode.name for block in problem.chain for mode in block.modes)
        raise JobError(
            f"solution file {path} is of another model: it has {foreign[0]}, and that of {source} has "
            f"{problem.num_stages} stages of {problem.num_chunks} chunks (columns TYPE_STAGE_CHUNK) and recompute "
            f"{', '.join(offered)}"
        )
    try:
        counted = program.placement_from_columns(any_layers, values)
        check_placement(any_layers, counted)
    except (JobError, PlanError) as error:
        raise JobError(f"solution file {path} is of another model than {source}: {error}") from None
    layout = layout_of(any_layers, counted)
    placement, timeline = _run(problem, layout)
    step_ms = simulate(any_layers, counted).step_ms
    solve_s = time.monotonic() - began
    return FoundLayout(layout, problem, placement, timeline, step_ms, None, step_ms, "extracted", solve_s)


def _num_strange(problem: Problem, values: Mapping[str, float]) -> int:
    """Columns that either `values` or the model of `problem` lacks."""
    missing = set(program.count_columns(problem).values()) - values.keys()
    return len(missing) + len(_foreign_columns(problem, values))


def _foreign_columns(problem: Problem, values: Mapping[str, float]) -> list[str]:
    """Columns of layers that the model of `problem` has not, but for those that say 0 of a kind that it has not."""
    known = set(program.count_columns(problem).values())
    places = {name.partition("_")[2] for name in known}
    beginnings = tuple(f"{what}_type" for what in (program.LAYERS, *program.MODE_COLUMNS.values()))

    def tells(name: str, value: float) -> bool:
        place = name.partition("_")[2]
        return value != 0 or not (place in places or place.startswith("type1_"))

    unknown = [(name, value) for name, value in values.items() if name.startswith(beginnings) and name not in known]
    return [name for name, value in unknown if tells(name, value)]


def overfull_notes(found: FoundLayout) -> list[str]:
    """A sentence for each stage that holds more than its limit."""
    peaks, limits = found.timeline.peak_memory_bytes, found.problem.memory_limit_bytes
    return [
        f"stage {stage} would hold {format_bytes(peaks[stage])} of {format_bytes(limits[stage])}: MindFormers "
        "recomputes the first layers of each chunk"
        for stage in overfull_stages(found.problem, peaks)
    ]


def check_layout(found: FoundLayout, layout: Layout, path: Path) -> None:
    """Raise PlanError where `layout`, as read back from the YAML at `path`, does not run as `found` says."""
    _, timeline = _run(found.problem, layout)
    same = abs(timeline.step_ms - found.timeline.step_ms) <= SAME_STEP_FRACTION * found.timeline.step_ms
    if not same or max(timeline.peak_memory_bytes - found.timeline.peak_memory_bytes) > 1.0:
        raise PlanError(
            f"{path} as it was written takes {timeline.step_ms:.6f} a step and was planned to take "
            f"{found.timeline.step_ms:.6f}; the layout in it is not the one that was found"
        )


def _run(problem: Problem, layout: Layout) -> tuple[Placement, Timeline]:
    placement = placement_of(problem, layout)
    return placement, simulate(problem, placement)


def _without_groups(problem: Problem) -> Problem:
    return replace(problem, chain=tuple(replace(block, recompute_group=None) for block in problem.chain))


def _export(problem: Problem, stem: Path) -> Path:
    model = stem.with_name(stem.name + ".mps")
    write_text_atomically(model, program.format_mps(program.build_program(problem), stem.name.replace(" ", "_")))
    return model


def _has_small_program(problem: Problem) -> bool:
    """Whether a solver ends with the exported model where the search around CP-SAT may not: short interleaved runs."""
    return problem.num_chunks > 1 and program.is_small(problem)


def _solve(problem: Problem, solver: Solver, model: Path, time_limit_s: float, hint: Placement | None = None) -> Solved:
    began = time.monotonic()
    is_small_one = not solver.use_highs and _has_small_program(problem)
    limit_s = time_limit_s * START_FRACTION if solver.use_highs or is_small_one else time_limit_s
    result = _place(problem, solver, min(limit_s, SMALL_START_S) if is_small_one else limit_s, hint)
    if is_small_one and result.status in ("feasible", "unknown") and not solver.should_stop():
        result = _place_small(problem, solver, model, time_limit_s - (time.monotonic() - began), result)
    if result.status == "infeasible":
        raise NoFeasiblePlan(result.reason)
    if result.placement is None and (not solver.use_highs or solver.should_stop()):
        raise _unfinished(solver, "stopped before a layout was found")
    if solver.use_highs:
        return _solve_with_highs(problem, solver, model, time_limit_s - (time.monotonic() - began), result.placement)
    assert result.placement is not None
    return Solved(result.placement, result.step_ms, result.lower_bound_ms, result.status)


def _unfinished(solver: Solver, how: str) -> Unfinished:
    what = f"{how}, which does not mean that there is none"
    return Interrupted(what) if solver.should_stop() else Unfinished(f"{what}; allow more time")


def _place(problem: Problem, solver: Solver, time_limit_s: float, hint: Placement | None) -> PlacementResult:
    return place(
        problem,
        time_limit_s=None if math.isinf(time_limit_s) else max(0.1, time_limit_s),
        should_stop=solver.should_stop,
        on_better=lambda step_ms, _: solver.on_better(step_ms),
        hint=hint,
    )


def _place_small(
    problem: Problem, solver: Solver, model: Path, time_limit_s: float, begun: PlacementResult
) -> PlacementResult:
    """`begun` with what the whole program tells, and where that does not end what more search does."""
    began = time.monotonic()
    limit_s = max(1.0, min(SMALL_PROGRAM_S, time_limit_s))
    columns: dict[str, float] = {}
    with TemporaryDirectory(prefix="mm-autoparallel-") as folder:
        solution = Path(folder) / "small.sol"
        try:
            said = solve_mps(model, solution, {}, limit_s, solver.should_stop, "ortools")
        except BackendError as failure:  # a second solver that breaks costs its time alone
            said = HighsRun(str(failure), None, None)
        if said.objective_ms is not None:
            columns = read_solution(solution)
    best = begun.placement
    if columns:
        found = program.placement_from_columns(problem, columns)
        timeline = simulate(problem, found)
        fits = not overfull_stages(problem, timeline.peak_memory_bytes - _SOLVER_SLACK_BYTES)
        best = found if fits and timeline.step_ms < begun.step_ms else best
    bound_ms = max(begun.lower_bound_ms, (said.lower_bound_ms or 0.0) * (1.0 - SAME_STEP_FRACTION))
    step_ms = simulate(problem, best).step_ms if best else math.inf
    result = replace(begun, placement=best, step_ms=step_ms)
    left_s = time_limit_s - (time.monotonic() - began)
    if bound_ms < step_ms * (1.0 - OPTIMAL_GAP_FRACTION) and left_s > 0 and not solver.should_stop():
        more = _place(problem, solver, left_s, best)
        bound_ms = max(bound_ms, more.lower_bound_ms)
        result = more if more.step_ms < step_ms or more.status == "infeasible" else result
    if result.placement is None:
        return result
    is_proven = bound_ms >= result.step_ms * (1.0 - OPTIMAL_GAP_FRACTION)
    return replace(result, lower_bound_ms=bound_ms, status="optimal" if is_proven else "feasible")


def _solve_with_highs(
    problem: Problem, solver: Solver, model: Path, time_limit_s: float, start: Placement | None
) -> Solved:
    """HiGHS on the exported model, from the placement that CP-SAT and the search around it found."""
    solution = model.with_suffix(".sol")
    columns = program.columns_from_placement(problem, start) if start else {}
    said = solve_mps(model, solution, columns, max(1.0, time_limit_s), solver.should_stop)
    found = [] if start is None else [start]
    if said.objective_ms is not None:
        placement = program.placement_from_columns(problem, read_solution(solution))
        if not overfull_stages(problem, simulate(problem, placement).peak_memory_bytes - _SOLVER_SLACK_BYTES):
            found.insert(0, placement)
    if not found:
        if said.status.lower() == "infeasible":
            raise NoFeasiblePlan(f"HiGHS on {model}: infeasible")
        raise _unfinished(solver, f"HiGHS on {model}: {said.status.lower()}, and no solution that fits")
    best = min(found, key=lambda placement: simulate(problem, placement).step_ms)
    is_theirs = said.objective_ms is not None and best is found[0]
    objective_ms = said.objective_ms if is_theirs and said.objective_ms else simulate(problem, best).step_ms
    return Solved(best, objective_ms, said.lower_bound_ms, said.status)


#: A row may be missed by HiGHS's primal_feasibility_tolerance, 1e-7 MiB here, and by integrality's 1e-6 of a layer.
_SOLVER_SLACK_BYTES = 4096.0
