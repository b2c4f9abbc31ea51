"""Run: the state of one call of `place`, which its methods share, and the rounds of work that it gives them.

Work is counted in moves, simulated tasks, iterations and the solver's deterministic time, so that every run takes the
same way, and one that ends proven ends with the same placement every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.placement.incumbents.anneal import Annealer
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import BranchAndBound
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns
from mm_autoparallel.pipeline.placement.patterns.thinned import Spread, thin
from mm_autoparallel.pipeline.placement.patterns.tree import PatternTree, boundaries_of
from mm_autoparallel.pipeline.placement.relaxation.duals import Proof
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import find_misfits, microbatch_classes
from mm_autoparallel.pipeline.simulate.step import simulate

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

Floats = NDArray[np.float64]

#: Methods that list patterns.
TREE, MIXTURES, THINNED = "pattern tree", "path mixtures", "thinned mixtures"
#: Patterns are listed again, fewer of them, once the best step has fallen below this fraction of where they were.
REBUILD_FRACTION = 0.999
#: Steps of one placement differ by less, added up in different ways.
ROUNDING_FRACTION = 1e-9
#: Tasks that the mixtures simulate between two looks at what they found.
SPLIT_TASKS = 200_000_000


class Work(NamedTuple):
    """The work of one round: annealing moves for each virtual stage, simulated tasks at most of them and of the tree,
    deterministic seconds of the solver, simulated tasks of the mixtures, and iterations of the linear program for each
    virtual stage and segment.
    """

    moves: int
    move_tasks: int
    tree_tasks: int
    solver_s: float
    split_tasks: int = 0
    iterations: int = 0


def rounds(num_chunks: int) -> Iterator[Work]:
    """Growing rounds. With one chunk the starts are good and the solver proves; with more, annealing finds the best."""
    if num_chunks == 1:
        yield Work(50, 100_000_000, 200_000_000, 10.0, 4_000_000_000)
        for n in count():
            more = 2**n
            yield Work(500 * more, 1_000_000_000 * more, 500_000_000 * more, 20.0 * more, 4_000_000_000 * more)
    else:
        yield Work(300, 100_000_000, 300_000_000, 0.3, SPLIT_TASKS, 20)
        # most of what annealing gains on large problems, in some two seconds: a better step also proves more
        yield Work(1_500, 400_000_000, 100_000_000, 0.3, 4_000_000_000, 20)
        for n in count():
            yield Work(
                10_000, 8_000_000_000, 300_000_000 * 2**n, 0.5 * 2**n, 4_000_000_000 * 2**n, iterations=20 * 2**n
            )


@dataclass
class Run:
    """The state of one call of `place`.

    method_names: of those that this call may use. short, full: the schedule's graph with its middle left out, and
    whole. upper_ms, best: the best step known, or of interest, and its placement; lower_ms, proof: the bound of all
    placements and what shows it. infeasible: the result where nothing fits; ended: nothing more can be done,
    for `reason` where that is no proof.
    mixed: of layouts, what each stage may hold in a step below mixed_ms.
    tree, tree_began_ms: the tree and the best step that it began with; too_many_ms: method → the best step when it had
    too many patterns. splits, thinned, fractions, cuts: what the other proofs go on from; dive: what looks for better
    placements beside splits, where it can (dives). mixture_count: [m, 4K - 1 + P] the latest mixtures that they found.
    """

    segments: Segments
    method_names: frozenset[str]
    short: TaskGraph
    full: TaskGraph
    annealers: list[Annealer]
    should_stop: Callable[[], bool]
    left_s: Callable[[], float]
    on_better: Callable[[float, Placement], None]
    gap_fraction: float
    upper_ms: float
    round_number: int = 0
    best: Placement | None = None
    lower_ms: float = 0.0
    proof: Proof = "none"
    infeasible: PlacementResult | None = None
    ended: bool = False
    reason: str = ""
    mixed: list[StagePatterns] | None = None
    mixed_ms: float = 0.0
    tree: PatternTree | None = None
    tree_began_ms: float = np.inf
    too_many_ms: dict[str, float] = field(default_factory=dict)
    splits: BranchAndBound | None = None
    dive: BranchAndBound | None = None
    dives: bool = True
    thinned: BranchAndBound | None = None
    mixture_count: Floats | None = None
    fractions: FractionalTree | None = None
    cuts: list[Cut] = field(default_factory=list)
    num_cuts: int = 0
    num_bounds: int = 0

    # is_whole: whether the order is one of forwards and whole backwards, by a rule, as those methods take it that list
    # patterns, mix paths or relax; others play the graph, or see nothing of it but paths

    def __post_init__(self) -> None:
        problem = self.segments.problem
        self.has_chunks = problem.num_chunks > 1
        self.is_equal = not microbatch_classes(problem)[0]
        by_rule = find_schedule(problem.schedule, problem.num_chunks).given_by == "rule"
        self.is_whole = by_rule and not problem.splits

    @property
    def has_step(self) -> bool:
        """Whether there is a step to be beaten: one found, or a cutoff."""
        return bool(np.isfinite(self.upper_ms))

    def can_list(self, method: str) -> bool:
        """Whether a method may list the patterns of each stage: passes are whole, micro-batches equal, and it had not
        too many of them, or of a longer step. What is being refuted without light blocks is not listed with them.
        """
        is_fewer = self.upper_ms <= self.too_many_ms.get(method, np.inf) * REBUILD_FRACTION
        return self.is_whole and self.is_equal and is_fewer and (method == THINNED or self.thinned is None)

    @cached_property
    def light(self) -> tuple[Segments, Spread] | None:
        """The problem without its light blocks, where it has some (`thinned`)."""
        return thin(self.segments.problem) if self.has_chunks and not self.segments.has_layouts else None

    @property
    def can_thin(self) -> bool:
        """Whether mixtures can work without light blocks."""
        return THINNED in self.method_names and self.can_list(THINNED) and self.light is not None

    @property
    def mixes(self) -> bool:
        """Whether mixtures of paths can prove what the tree leaves open."""
        is_there = self.has_chunks and MIXTURES in self.method_names
        return is_there and self.can_list(TREE) and self.can_list(MIXTURES)

    @property
    def done(self) -> bool:
        return self.lower_ms >= self.upper_ms * (1.0 - max(self.gap_fraction, OPTIMAL_GAP_FRACTION))

    @property
    def most_fraction(self) -> float:
        """The part of the best step that, as a bound, is proof enough."""
        return 1.0 - 0.5 * max(self.gap_fraction, OPTIMAL_GAP_FRACTION)

    def offer(self, placement: Placement) -> float:
        """Take a placement if the simulator says that it fits and is faster than the best; the best step in ms."""
        timeline = simulate(self.segments.problem, placement)
        peaks = timeline.peak_memory_bytes, timeline.peak_host_bytes
        if timeline.step_ms < self.upper_ms and not find_misfits(self.segments.problem, *peaks):
            self.upper_ms, self.best = timeline.step_ms, placement
            self.on_better(timeline.step_ms, placement)
        return self.upper_ms

    def offer_patterns(self, best: list[tuple[StagePatterns, int]], step_ms: float) -> None:
        """The same of patterns that take step_ms. Raises TooManyPatterns where they fit by rounding only: a search that
        holds on to them finds nothing slower any more.
        """
        if self.offer(self.segments.placement(*boundaries_of(self.segments, best))) > step_ms * (
            1.0 + ROUNDING_FRACTION
        ):
            raise TooManyPatterns

    def raise_bound(self, lower_ms: float, proof: Proof) -> None:
        """Take a bound if it is above the one known."""
        if lower_ms > self.lower_ms:
            self.lower_ms, self.proof = lower_ms, proof
