"""Place a problem: local search for good placements, the pattern tree and CP-SAT with path cuts for the proof.

Rounds of growing size, counted in moves, bounds and the solver's deterministic time, so that a run that ends proven
ends with the same placement every time. The tree goes first; it settles most chunked and all moderate problems. The
path cuts settle long one-chunk pipelines and whatever the tree has no room for. The larger of their bounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from mm_autoparallel.placement.anneal import Annealer
from mm_autoparallel.placement.infeasible import explain_windows, least_overflow
from mm_autoparallel.placement.patterns import (
    TooManyPatterns,
    list_patterns,
    load_limits,
)
from mm_autoparallel.placement.start import balanced_starts
from mm_autoparallel.placement.tree import PatternTree, boundaries_of
from mm_autoparallel.placement.units import Units, cut_into_units
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.simulate.graph import full_graph, short_graph
from mm_autoparallel.simulate.loads import microbatch_classes, overfull_stages
from mm_autoparallel.simulate.step import CriticalPath, Timeline, simulate

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

#: A gap this small counts as none: what quantised times allow (formats: `optimal` is a gap of at most 1e-5).
OPTIMAL_GAP_FRACTION = 1e-5
#: Work of the first round: annealing moves for each virtual stage, simulated tasks at most of annealing and of the tree,
#: deterministic seconds of the solver. Each round has ROUND_GROWTH times the work of the one before.
FIRST_MOVES, FIRST_MOVE_TASKS, FIRST_TREE_TASKS, FIRST_SOLVER_S = 200, 100_000_000, 200_000_000, 1.0
ROUND_GROWTH = 4


@dataclass(frozen=True, eq=False)
class PlacementResult:
    """What is known of a problem.

    status: optimal (gap at most 1e-5), feasible (stopped early), infeasible (proven), unknown (stopped before anything
    was found), or, with a cutoff, dominated: no placement is below it. step_ms, peak_memory_bytes come from `simulate`.
    lower_bound_ms holds for every placement. num_cuts: path cuts of the master; num_bounds: bounds of the tree; both are
    effort, not quality. reason: for infeasible, the constraint that binds and the smallest relaxation.
    """

    status: Status
    placement: Placement | None
    timeline: Timeline | None
    step_ms: float
    lower_bound_ms: float
    solve_s: float
    num_cuts: int = 0
    num_bounds: int = 0
    reason: str = ""
    overflow_bytes: float = 0.0
    proof: Literal["tree", "cuts", "none"] = "none"
    paths: tuple[CriticalPath, ...] = field(default=())

    @property
    def gap_fraction(self) -> float:
        """How far the bound is below the step, 0 to 1."""
        if self.placement is None or self.step_ms <= 0:
            return 0.0 if self.status == "infeasible" else 1.0
        return max(0.0, 1.0 - self.lower_bound_ms / self.step_ms)

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        return tuple(float(b) for b in self.timeline.peak_memory_bytes) if self.timeline else ()


@dataclass
class _Run:
    """The state of one call of `place`."""

    units: Units
    should_stop: Callable[[], bool]
    left_s: Callable[[], float]
    on_better: Callable[[float], None]
    gap_fraction: float
    upper_ms: float
    best: Placement | None = None
    lower_ms: float = 0.0
    num_cuts: int = 0
    num_bounds: int = 0
    proof: Literal["tree", "cuts", "none"] = "none"
    paths: list[CriticalPath] = field(default_factory=list)

    def offer(self, placement: Placement) -> float:
        """Take a placement if the simulator says that it fits and is faster than the best; the best step in ms."""
        timeline = simulate(self.units.problem, placement)
        if timeline.step_ms < self.upper_ms and not overfull_stages(self.units.problem, timeline.peak_memory_bytes):
            self.upper_ms, self.best = timeline.step_ms, placement
            self.on_better(timeline.step_ms)
        return self.upper_ms

    @property
    def done(self) -> bool:
        return self.lower_ms >= self.upper_ms * (1.0 - max(self.gap_fraction, OPTIMAL_GAP_FRACTION))


def place(
    problem: Problem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda step_ms: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
    hint: Placement | None = None,
) -> PlacementResult:
    """The fastest placement of `problem` that fits its memory, with a bound on all others.

    time_limit_s: wall time after which the best so far is returned with its gap. should_stop: polled several times a
    second. cutoff_ms: steps that are not below it are of no interest; where there are none, the result has no
    placement, status "feasible" and the cutoff as its bound. gap_fraction: the search may end this close to the best.
    hint: a placement to begin with. Raises JobError where the problem contradicts itself (pins against the order).
    """
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf
    units = cut_into_units(problem)

    def stop() -> bool:
        return time.monotonic() > deadline or should_stop()

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
        status: Status = "feasible" if np.isfinite(cutoff_ms) and run.done else "unknown"
        return PlacementResult(
            status, None, None, np.inf, run.lower_ms, solve_s, run.num_cuts, run.num_bounds, proof=run.proof
        )
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
        paths=tuple(run.paths),
    )


def _search(run: _Run) -> PlacementResult | None:
    """Improve and prove until done or told to stop; a result only where nothing fits at all."""
    problem, units = run.units.problem, run.units
    equal = not microbatch_classes(problem)[0]
    of = (problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    short, full = short_graph(*of), full_graph(*of)
    annealer = Annealer(units, short, full)
    tree: PatternTree | None = None
    tree_began_ms = np.inf
    has_room = equal  # whether the tree can hold the problem
    work = 1
    if equal and problem.num_chunks == 1:
        balanced_starts(units, full, run.offer)
    while not run.should_stop() and not run.done:
        moves = work * min(FIRST_MOVES * problem.num_virtual_stages, FIRST_MOVE_TASKS // short.num_tasks)
        for restart in (True, False):
            _anneal(run, annealer, moves, restart)
        if not np.isfinite(run.upper_ms):
            overflow = least_overflow(units, run.should_stop, run.left_s)
            if overflow.placement is None:
                return None
            if overflow.overflow_bytes > 0 and overflow.proven:
                reason = overflow.reason
                return PlacementResult(
                    "infeasible", None, None, np.inf, np.inf, 0.0, reason=reason, overflow_bytes=overflow.overflow_bytes
                )
            run.offer(overflow.placement)
        if has_room and not run.should_stop() and np.isfinite(run.upper_ms):
            if tree is not None and run.upper_ms < tree_began_ms * 0.999:
                tree = None  # a better step known: fewer patterns are left, so begin again
            try:
                if tree is None:
                    tree_began_ms = run.upper_ms
                    most, least = load_limits(problem, units, run.upper_ms)
                    patterns = [list_patterns(units, full, s, most, least) for s in range(problem.num_stages)]
                    tree = PatternTree(units, patterns, short, full, run.upper_ms, run.gap_fraction, run.should_stop)
                _grow(run, tree, work * FIRST_TREE_TASKS)
            except TooManyPatterns:
                has_room = False
        if not run.done and not run.should_stop() and np.isfinite(run.upper_ms):
            _cut(run, work * FIRST_SOLVER_S)
        work *= ROUND_GROWTH
    return None


def _anneal(run: _Run, annealer: Annealer, num_moves: int, restart: bool) -> None:
    """One annealing run in slices short enough to stop at."""
    if run.best is not None and run.upper_ms < annealer.best_ms and not restart:
        annealer.adopt(run.best)
    before = annealer.best_ms
    annealer.run(num_moves, restart, run.should_stop)
    if annealer.best_ms < min(before, 1e30):
        run.offer(run.units.placement(*annealer.best_boundaries()))


def _grow(run: _Run, tree: PatternTree, num_tasks: int) -> None:
    """Advance the tree by about num_tasks simulated tasks."""
    some = max(50, 20_000_000 // tree.tasks_per_bound)
    stop_at = tree.num_nodes + num_tasks // tree.tasks_per_bound
    while not tree.exhausted and tree.num_nodes < stop_at and not run.should_stop():
        tree.advance(some, run.upper_ms)
        if tree.best is not None and tree.best_ms < run.upper_ms:
            run.offer(run.units.placement(*boundaries_of(run.units, tree.best)))
    run.num_bounds = tree.num_nodes
    if tree.lower_bound_ms > run.lower_ms:
        run.lower_ms = tree.lower_bound_ms
        run.proof = "tree"


def _cut(run: _Run, solver_s: float) -> None:
    """Let CP-SAT with path cuts work for solver_s of its deterministic time."""
    from mm_autoparallel.placement import cpsat

    try:
        result = cpsat.solve_with_cuts(
            run.units,
            run.upper_ms,
            run.paths or cpsat.stage_paths(run.units),
            solver_s,
            run.gap_fraction,
            run.should_stop,
            run.left_s,
            run.offer,
        )
    except cpsat.Unsupported:
        return
    run.paths = result.paths
    run.num_cuts = len(result.paths)
    if result.lower_bound_ms > run.lower_ms:
        run.lower_ms = result.lower_bound_ms
        run.proof = "cuts"
