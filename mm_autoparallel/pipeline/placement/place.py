"""Place a problem: local search for good placements, the pattern tree and CP-SAT with path cuts for the proof.

Rounds of growing size, counted in moves, bounds and the solver's deterministic time, so that a run that ends proven
ends with the same placement every time. The tree goes first; it settles most chunked and all moderate problems. The
splits settle chunked ones that it leaves open, or leave a small gap; before both, where layers have several modes or
there are too many patterns, the fractional tree brings most of the bound at little cost. The path cuts settle long
one-chunk pipelines and whatever the others have no room for. The largest of their bounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut, stage_cuts
from mm_autoparallel.pipeline.placement.incumbents.anneal import NOTHING_FITS, Annealer
from mm_autoparallel.pipeline.placement.incumbents.balanced import balanced_starts
from mm_autoparallel.pipeline.placement.infeasible import explain_windows, least_overflow
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import SplitSearch
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns, list_patterns, load_limits
from mm_autoparallel.pipeline.placement.patterns.tree import PatternTree, boundaries_of
from mm_autoparallel.pipeline.placement.relaxation.duals import Proof
from mm_autoparallel.pipeline.placement.result import PlacementResult, Status
from mm_autoparallel.pipeline.placement.segments import Units, cut_into_units
from mm_autoparallel.pipeline.placement.tidy import drop_needless_modes
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph, short_graph
from mm_autoparallel.pipeline.simulate.loads import find_misfits, microbatch_classes
from mm_autoparallel.pipeline.simulate.step import simulate

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

#: A gap this small counts as none: what quantised times allow (formats: `optimal` is a gap of at most 1e-5).
OPTIMAL_GAP_FRACTION = 1e-5
#: Local searches side by side, each with a seed of its own. A fixed number, so that every machine finds the same.
NUM_ANNEALERS = 2
#: The tree begins again, with fewer patterns, once the best step has fallen below this fraction of where it began.
REBUILD_FRACTION = 0.999
#: Fractions of the best step below which nothing is shown to be, in turn; the last one is proof enough.
BOUND_FRACTIONS = (0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999, 0.9995, 1.0 - 0.5 * OPTIMAL_GAP_FRACTION)
#: The splits begin again, at a lower level, once theirs lies this far above the one that the best step asks for.
STALE_FRACTION = 5e-4
#: Steps of one placement differ by less, added up in different ways.
ROUNDING_FRACTION = 1e-9
#: Tasks of the splits between two looks at what they found.
SPLIT_TASKS = 200_000_000


class Work(NamedTuple):
    """The work of one round: annealing moves for each virtual stage, simulated tasks at most of them, of the tree and
    of the splits, deterministic seconds of the solver. Counted, not timed, so that every run takes the same way.
    """

    moves: int
    move_tasks: int
    tree_tasks: int
    split_tasks: int
    iterations: int
    solver_s: float


def _rounds(num_chunks: int) -> Iterator[Work]:
    """Growing rounds. With one chunk the starts are good and the solver proves; with more, annealing finds the best."""
    if num_chunks == 1:
        yield Work(50, 100_000_000, 200_000_000, 0, 0, 10.0)
        for n in count():
            yield Work(500 * 2**n, 1_000_000_000 * 2**n, 500_000_000 * 2**n, 0, 0, 20.0 * 2**n)
    else:
        yield Work(300, 100_000_000, 300_000_000, SPLIT_TASKS, 20, 0.3)
        # most of what annealing gains on large problems, in some two seconds: a better step also proves more
        yield Work(1_500, 400_000_000, 100_000_000, 2_000_000_000, 20, 0.3)
        for n in count():
            yield Work(10_000, 8_000_000_000, 300_000_000 * 2**n, 4_000_000_000 * 2**n, 20 * 2**n, 0.5 * 2**n)


@dataclass
class _Run:
    """The state of one call of `place`."""

    units: Units
    should_stop: Callable[[], bool]
    left_s: Callable[[], float]
    on_better: Callable[[float, Placement], None]
    gap_fraction: float
    upper_ms: float
    best: Placement | None = None
    lower_ms: float = 0.0
    num_cuts: int = 0
    num_bounds: int = 0
    proof: Proof = "none"
    cuts: list[Cut] = field(default_factory=list)
    splits: SplitSearch | None = None
    fractions: FractionalTree | None = None

    def offer(self, placement: Placement) -> float:
        """Take a placement if the simulator says that it fits and is faster than the best; the best step in ms."""
        timeline = simulate(self.units.problem, placement)
        peaks = timeline.peak_memory_bytes, timeline.peak_host_bytes
        if timeline.step_ms < self.upper_ms and not find_misfits(self.units.problem, *peaks):
            self.upper_ms, self.best = timeline.step_ms, placement
            self.on_better(timeline.step_ms, placement)
        return self.upper_ms

    def offer_patterns(self, best: list[tuple[StagePatterns, int]], step_ms: float) -> None:
        """The same of patterns that take step_ms. Raises TooManyPatterns where they fit by rounding only: a search that
        holds on to them finds nothing slower any more.
        """
        if self.offer(self.units.placement(*boundaries_of(self.units, best))) > step_ms * (1.0 + ROUNDING_FRACTION):
            raise TooManyPatterns

    @property
    def done(self) -> bool:
        return self.lower_ms >= self.upper_ms * (1.0 - max(self.gap_fraction, OPTIMAL_GAP_FRACTION))


def place(
    problem: Problem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float, Placement], None] = lambda *_: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
    hint: Placement | None = None,
    latest_cutoff_ms: Callable[[], float] = lambda: np.inf,
) -> PlacementResult:
    """The fastest placement of `problem` that fits its memory, with a bound on all others.

    time_limit_s: wall time after which the best so far is returned with its gap. should_stop: polled several times a
    second. cutoff_ms: steps that are not below it are of no interest; where there are none, the result has no
    placement, status "dominated" and about the cutoff as its bound. gap_fraction: the search may end this close to
    the best. on_better: called with each better placement and its step.
    hint: a placement to begin with. latest_cutoff_ms: asked as often as should_stop for a lower cutoff that others have
    reached meanwhile; a placement found before may then be above it, and is still told.
    Raises JobError where the problem contradicts itself (pins against the order).
    """
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf
    units = cut_into_units(problem)

    def stop() -> bool:
        stopped = time.monotonic() > deadline or should_stop()
        run.upper_ms = min(run.upper_ms, latest_cutoff_ms())
        return stopped

    def left_s() -> float:
        return deadline - time.monotonic()

    reason = explain_windows(units)
    if reason:
        return PlacementResult("infeasible", None, None, np.inf, np.inf, time.monotonic() - began, reason=reason)
    run = _Run(units, stop, left_s, on_better, gap_fraction, cutoff_ms)
    if hint is not None:
        run.offer(hint)
    infeasible = _search(run)
    solve_s = time.monotonic() - began
    if infeasible is not None:
        return replace(infeasible, solve_s=solve_s)
    if run.best is None:
        status: Status = "dominated" if np.isfinite(run.upper_ms) and run.done else "unknown"
        return PlacementResult(
            status, None, None, np.inf, run.lower_ms, solve_s, run.num_cuts, run.num_bounds, proof=run.proof
        )
    if not units.is_plain:
        run.best = drop_needless_modes(units, run.best)
    timeline = simulate(problem, run.best)
    optimal = run.lower_ms >= timeline.step_ms * (1.0 - OPTIMAL_GAP_FRACTION)
    return PlacementResult(
        "optimal" if optimal else "feasible",
        run.best,
        timeline,
        timeline.step_ms,
        min(run.lower_ms, timeline.step_ms),
        solve_s,
        run.num_cuts,
        run.num_bounds,
        proof=run.proof,
        cuts=tuple(run.cuts),
        prices=run.fractions.proof() if run.fractions and run.proof == "prices" else None,
    )


def _search(run: _Run) -> PlacementResult | None:
    """Improve and prove until done or told to stop; a result only where nothing fits at all."""
    problem, units = run.units.problem, run.units
    of = (problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    graphs = short_graph(*of), full_graph(*of)
    annealers = [Annealer(units, *graphs, seed) for seed in range(NUM_ANNEALERS)]
    tree: PatternTree | None = None
    tree_began_ms = np.inf
    has_room = not microbatch_classes(problem)[0]  # whether the tree can hold the problem: equal micro-batches, memory
    if has_room and problem.num_chunks == 1:
        balanced_starts(units, graphs[1], run.offer, run.should_stop)
    for work in _rounds(problem.num_chunks):
        if work.iterations and not (units.is_plain and has_room):
            _relax(run, work.iterations)
            if run.done or run.should_stop():
                return None
        moves = min(work.moves * problem.num_virtual_stages, work.move_tasks // graphs[0].num_tasks)
        _anneal(run, annealers, moves)
        if run.should_stop():
            return None
        if not np.isfinite(run.upper_ms):
            overflow = least_overflow(units, run.should_stop, run.left_s)
            if overflow.reason and overflow.proven:
                reason = overflow.reason
                return PlacementResult(
                    "infeasible", None, None, np.inf, np.inf, 0.0, reason=reason, overflow_bytes=overflow.overflow_bytes
                )
            if overflow.placement is None:
                return None
            run.offer(overflow.placement)
        if run.should_stop():
            return None
        if not np.isfinite(run.upper_ms):
            continue  # neither a placement that fits nor a proof that there is none: look longer
        polished = has_room and tree is not None and problem.num_chunks > 1
        if polished:  # the tree alone did not settle it: let it look around the best
            for radius in (0, 1):
                _polish(run, graphs, radius, work.tree_tasks // 4)
        if has_room and not run.should_stop():
            if run.upper_ms < tree_began_ms * REBUILD_FRACTION:
                tree = None
            try:
                if tree is None:
                    tree_began_ms = run.upper_ms
                    tree = _plant(run, units, graphs, run.upper_ms, run.gap_fraction)
                _grow(run, tree, work.tree_tasks)
                run.num_bounds = tree.num_nodes
                if tree.lower_bound_ms > run.lower_ms:
                    run.lower_ms, run.proof = tree.lower_bound_ms, "tree"
            except TooManyPatterns:
                has_room = False
            try:
                if not run.done and work.split_tasks:
                    _raise_bound(run, graphs, work.split_tasks)
            except TooManyPatterns:
                has_room = False
        if not run.done and not run.should_stop() and not (has_room and work.split_tasks):
            _cut(run, work.solver_s)
        if run.done or run.should_stop():
            return None
    return None


def _plant(
    run: _Run, units: Units, graphs: tuple[TaskGraph, TaskGraph], upper_ms: float, gap_fraction: float
) -> PatternTree:
    """A tree over everything in `units` that a step below upper_ms can use; it may end that close to it.

    Raises TooManyPatterns.
    """
    problem = units.problem
    patterns = []
    for stage in range(problem.num_stages):
        if run.should_stop():
            raise TooManyPatterns
        patterns.append(list_patterns(units, graphs[1], stage, *load_limits(problem, units, stage, upper_ms)))
    return PatternTree(units, patterns, *graphs, upper_ms, gap_fraction, run.should_stop)


def _polish(run: _Run, graphs: tuple[TaskGraph, TaskGraph], radius: int, num_tasks: int) -> None:
    """Search the tree of placements whose boundaries lie within `radius` units of the best one's."""
    if run.best is None or run.should_stop():
        return
    boundaries = np.array(run.units.boundaries(run.best)[0])
    near = replace(
        run.units,
        first=np.maximum(run.units.first, boundaries - radius),
        last=np.minimum(run.units.last, boundaries + radius),
    )
    with suppress(TooManyPatterns):
        _grow(run, _plant(run, near, graphs, run.upper_ms, run.gap_fraction), num_tasks)


def _relax(run: _Run, num_iterations: int) -> None:
    """Raise the bound by parts of layers, in so many iterations for each virtual stage and unit."""
    from mm_autoparallel.pipeline.placement.relaxation.linear_program import Unrelaxable
    from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

    if not np.isfinite(run.upper_ms):
        return
    with suppress(Unrelaxable):
        tree = run.fractions = run.fractions or FractionalTree(run.units.problem)
        num_iterations *= run.units.problem.num_virtual_stages * run.units.num_units
        most = 1.0 - 0.5 * max(run.gap_fraction, OPTIMAL_GAP_FRACTION)
        tree.raise_bound(most * run.upper_ms, num_iterations, run.should_stop)
        if tree.lower_bound_ms > run.lower_ms:
            run.lower_ms, run.proof = tree.lower_bound_ms, "prices"


def _raise_bound(run: _Run, graphs: tuple[TaskGraph, TaskGraph], num_tasks: int) -> None:
    """Prove that nothing is below some fraction of the best step, then a larger one, for about num_tasks tasks.

    A search that need only refute much better placements has few patterns; what it refutes is a bound. One that is not
    done goes on in the next round.
    """
    most = 1.0 - 0.5 * max(run.gap_fraction, OPTIMAL_GAP_FRACTION)
    while num_tasks > 0 and not run.done and not run.should_stop():
        levels = (min(fraction, most) * run.upper_ms for fraction in BOUND_FRACTIONS)
        level_ms = next(level for level in levels if level > run.lower_ms * (1.0 + 1e-9))
        if run.splits is None or run.splits.target_ms > level_ms * (1.0 + STALE_FRACTION):
            run.splits = None
            with suppress(TooManyPatterns):
                tree = _plant(run, run.units, graphs, level_ms, 0.0)
                if tree.layers is None and tree.exhausted:
                    run.lower_ms, run.proof = tree.lower_bound_ms, "tree"
                    continue
                if tree.layers is not None:
                    run.splits = SplitSearch(run.units.problem, tree.layers, tree.patterns, graphs[1], level_ms)
            if run.splits is None:
                return
        splits = run.splits
        splits.target_ms = min(splits.target_ms, level_ms)
        before = splits.num_tasks
        splits.advance(min(num_tasks, SPLIT_TASKS), run.should_stop)
        num_tasks -= splits.num_tasks - before
        if splits.best is not None and splits.best_ms < run.upper_ms:
            run.offer_patterns(splits.best, splits.best_ms)
        if splits.exhausted:
            if splits.lower_bound_ms > run.lower_ms:
                run.lower_ms, run.proof = splits.lower_bound_ms, "mixtures"
            run.splits = None


def _anneal(run: _Run, annealers: list[Annealer], num_moves: int) -> None:
    """One annealing run: on from the best placement with one chunk, where the starts are good; afresh, and one in each
    thread with a seed of its own, with more.
    """
    if run.units.problem.num_chunks == 1:
        if run.best is not None:
            annealers[0].adopt(run.best, run.upper_ms)
        annealers[0].run(num_moves, False, run.should_stop)
        annealers = annealers[:1]
    else:
        with ThreadPoolExecutor(len(annealers)) as threads:
            for started in [threads.submit(a.run, num_moves, True, run.should_stop) for a in annealers]:
                started.result()
    for annealer in annealers:
        if annealer.best_ms < min(run.upper_ms, NOTHING_FITS):
            run.offer(run.units.placement(*annealer.best_boundaries()))


def _grow(run: _Run, tree: PatternTree, num_tasks: int) -> None:
    """Advance the tree by about num_tasks simulated tasks."""
    some = max(50, 20_000_000 // tree.tasks_per_bound)
    stop_at = tree.num_nodes + num_tasks // tree.tasks_per_bound
    while not tree.exhausted and tree.num_nodes < stop_at and not run.should_stop():
        tree.advance(some, run.upper_ms)
        if tree.best is not None and tree.best_ms < run.upper_ms:
            run.offer_patterns(tree.best, tree.best_ms)


def _cut(run: _Run, solver_s: float) -> None:
    """Let CP-SAT with path cuts work for solver_s of its deterministic time."""
    from mm_autoparallel.pipeline.placement.cuts import solve as cpsat

    result = cpsat.solve_with_cuts(
        run.units,
        run.upper_ms,
        run.cuts or stage_cuts(run.units.problem),
        solver_s,
        run.gap_fraction,
        run.should_stop,
        run.left_s,
        run.offer,
    )
    run.cuts = result.cuts
    run.num_cuts = len(result.cuts)
    if result.lower_bound_ms > run.lower_ms:
        run.lower_ms = result.lower_bound_ms
        run.proof = "cuts"
