"""Pipeline: strategies that have one problem in common, and what is known of it while a search goes on.

What it takes at least is known from its blocks' costs alone before its problem is built, and its problem is forgotten
as soon as nothing more about it is of interest: of tens of thousands of strategies few are ever held as problems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION
from mm_autoparallel.planner.search.candidate import Bounded
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.floors import Floors
from mm_autoparallel.planner.search.judging import Judging
from mm_autoparallel.planner.search.level import Level, bounded_to, is_known, list_counted
from mm_autoparallel.planner.search.raising import Raising
from mm_autoparallel.planner.search.rough import LeftOut, of_level
from mm_autoparallel.planner.search.sounding import Sounding
from mm_autoparallel.planner.search.space import describe_strategy, strategy_key
from mm_autoparallel.planner.search.trimming import Trimming

#: Whether placing it took longer than its time (1), and no bound costs less (2); whether that takes long anyway; its
#: bound in ms; its number.
Rank = tuple[int, bool, float, int]

#: Fills tried at once where the fastest plan is far too full, by what they add to its step: most choices end near the
#: first (one more recomputed layer costs what it saves there), and the second is for what cannot be emptier.
PROBES = (1.01, 1.1)
PROBE_FACTOR = 1.03  # far too full is what ranks at more than this many times the step; assumed, as the probes are
#: Where the plan found at a limit is fuller than it counts, the next one leaves that plan out; and it leaves such a
#: part of the price where placing took longer than that, or so many came close to those before. Assumed.
STEP_DOWN, CLOSE_S, MOST_CLOSE = 0.85, 0.3, 40
#: Before it is placed a level is bounded anew only where it ends this much lower. Assumed.
WORTH_FRACTION = 0.98
SETTLED_FRACTION = 1e-6  # placements whose rank differs by less are equally good
_TOO_OFTEN = "it would run out of memory more often than search.fit_probability allows: "


@dataclass(eq=False)
class Pipeline:
    """One problem of the search. It is ranked by rank_ms, its step with the price of its chance (search/caution.py).

    found_fill_fraction: the level's at which its best plan was found. number: the place of its first strategy in the
    space; how it ranks where bounds are equal. within_ms: no placement of its level is below, in steps; elsewhere_ms:
    nor is any fuller one, as it ranks; betters_ms: nor any of those that it cannot beat; bounded_by: what says so.
    problem: None before it is built, and once nothing more is of interest; key: its content_key. cached_s: time that
    earlier searches spent on it. num_refinements: which bounds it has had after that of its blocks' costs (1:
    `work_bound_ms`, 2: `bound_step`, 3: sharpened). visit: when it was first placed, -1 if never. num_slices: how often
    it was placed; num_unfinished: how often that ended before the best placement was known. step_ms, rank_ms,
    placement: of the best plan. fastest_ms, fastest_fill_fraction: of the fastest met. overflow_suffices: limits higher
    by overflow_bytes would do. twin: the one that has the same problem and all its strategies. num_probes: fills tried;
    is_probing: one is just now. floors: what fills that were asked for take at least. promised_ms: what it
    may rank at, as far as is told before it is placed; 0 where nobody asked. is_favoured: placed before others of
    several chunks. betters: pipelines that it cannot beat; better: the one of them whose bound it has. waiting: those
    that it keeps waiting, as one of their betters; is_waiting: one of its own does so with it. given_up: every process
    that placed it died. cutoff_ms: the cutoff when it was closed. trimming: emptier plans that are looked for between
    its slices; sounding, raising: fills that are tried where its order is to be found, and where bounds say no more.
    left_out: the first level that ended roughly.
    """

    number: int
    strategies: list[Strategy]
    num_microbatches: int
    within_ms: float
    caution: Caution
    level: Level
    bounded_by: Bounded = "block costs"
    problem: Problem | None = None
    key: str = ""
    elsewhere_ms: float = np.inf
    betters_ms: float = 0.0
    num_refinements: int = 0
    visit: int = -1
    num_slices: int = 0
    num_unfinished: int = 0
    step_ms: float = np.inf
    rank_ms: float = np.inf
    placement: Placement | None = None
    found_fill_fraction: float = np.inf
    fastest_ms: float = np.inf
    fastest_fill_fraction: float = np.inf
    infeasible: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0
    overflow_suffices: bool = False
    solve_s: float = 0.0
    cached_s: float = 0.0
    twin: Pipeline | None = None
    num_probes: int = 0
    is_probing: bool = False
    probe_fill_fraction: float = np.inf
    promised_ms: float = 0.0
    is_favoured: bool = False
    betters: list[Pipeline] = field(default_factory=list)
    better: Pipeline | None = None
    waiting: list[Pipeline] = field(default_factory=list)
    is_waiting: bool = False
    given_up: bool = False
    cutoff_ms: float | None = None
    left_out: LeftOut | None = None
    trimming: Trimming = field(default_factory=Trimming)
    judging: Judging = field(default_factory=Judging)
    _num_close: int = 0
    floors: Floors = field(init=False)
    sounding: Sounding = field(init=False)
    raising: Raising = field(init=False)

    def __post_init__(self) -> None:
        self.floors, self.sounding = Floors(self.caution), Sounding(self.caution)
        self.raising = Raising(self.caution)

    @property
    def bound_ms(self) -> float:
        """No placement ranks below."""
        return max(self.betters_ms, min(self.ranked_ms, self.elsewhere_ms))

    @property
    def ranked_ms(self) -> float:
        """No placement of its level ranks below."""
        return self.floors.rank_ms(self.level.fill_fraction, self.within_ms)

    @property
    def has_chunks(self) -> bool:
        return self.strategies[0].vpp > 1

    @property
    def is_dear(self) -> bool:
        """Whether placing takes long, and a third bound comes before."""
        return self.has_chunks or bool(self.strategies[0].layouts)

    @property
    def is_refined(self) -> bool:
        return self.num_refinements == (3 if self.is_dear else 2)

    @property
    def rank(self) -> Rank:
        """The least is next: first turns, then what is bound without placing, then what holds the space down."""
        late = self.is_dear or bool((of := self.strategies[0].arrangement) and of.is_hard)
        if not self.num_unfinished or self.found_too_full or self.sounding.is_due:
            at_ms = max(self.bound_ms, self.promised_ms if self.is_refined else 0.0)
            return (0, late, 0.0 if self.is_favoured and not self.num_slices else at_ms, self.number)
        return (1 if self.has_chunks and self.level.has_turns(True) else 2, late, self.bound_ms, self.number)

    @property
    def name(self) -> str:
        return describe_strategy(self.strategies[0])

    def build(self, problem: Problem, key: str) -> None:
        """Take the problem, and the bound that its figures give."""
        self.problem, self.key, self.num_refinements = problem, key, 1
        self.raise_bound(work_bound_ms(problem), "work")

    def problem_at(self, fill: float) -> Problem:
        """The problem that all its placements filled to at most `fill` are placements of."""
        assert self.problem is not None
        return self.caution.limited(self.problem, fill, self.strategies[0])

    def join(self, twin: Pipeline) -> None:
        """Be one with another pipeline of the same problem."""
        self.twin, twin.strategies = twin, sorted(twin.strategies + self.strategies, key=strategy_key)

    def refine(self, cutoff_ms: float, should_stop: Callable[[], bool]) -> None:
        """Raise the bound by the next of the better ones, as far as is of interest; it may show that nothing fits."""
        assert self.problem is not None
        enough_ms = bounded_to(cutoff_ms, self.strategies[0])
        bound = bound_step(self.problem, self.num_refinements > 1, should_stop, self.within_ms, enough_ms)
        self.num_refinements += not bound.is_partial
        if bound.reason:
            self.infeasible, self.reason = True, bound.reason
            self.bounded_by = "memory" if bound.overflow_bytes or bound.by_host else "layers"
            self.overflow_bytes, self.overflow_suffices = bound.overflow_bytes, bound.exact
        else:
            is_mixed = self.has_chunks and self.num_refinements > 2
            self.raise_bound(bound.step_ms, "mixture of paths" if is_mixed else "paths")

    def learn_from_betters(self) -> None:
        """Take the bounds of the pipelines that it cannot beat, unless it is known to fit nowhere."""
        for better in () if self.infeasible else self.betters:
            bound_ms = min(better.bound_ms, self.rank_ms)
            if better.infeasible:
                self.infeasible, self.bounded_by, self.better = True, "another strategy", better
                self.reason = f"{better.name} needs no more bytes anywhere and does not fit: {better.reason}"
            elif bound_ms > self.bound_ms:
                self.betters_ms, self.bounded_by, self.better = bound_ms, "another strategy", better

    def raise_bound(self, step_ms: float, bounded_by: Bounded) -> None:
        """No placement of its level is below step_ms."""
        if step_ms > self.within_ms:
            self.bounded_by = bounded_by if step_ms > self.bound_ms else self.bounded_by
            self.within_ms = step_ms

    # -------------------------------------------------------------------------------------------------------- placing

    def take(self, answer: Answer, cutoff_ms: float) -> None:
        """Learn from having been placed once more, or from a better placement on the way. cutoff_ms: the search's."""
        if answer.placement is not None:
            self.offer(answer.placement, answer.step_ms, answer.is_last)
        if not answer.is_last:
            return
        self.solve_s += answer.solve_s
        was_probing, self.is_probing = self.is_probing, False
        if was_probing:
            self.floors.raise_to(self.probe_fill_fraction, answer.lower_bound_ms)
        if not (self.sounding.end() or self.trimming.end() or self.raising.end(self, answer)):
            self._take_slice(answer, cutoff_ms, was_probing)
        if self.strategies[0].schedule == FREE and not self.has_chunks:
            self.sounding.look(min(cutoff_ms, self.rank_ms), self.level.fill_fraction)

    def _take_slice(self, answer: Answer, cutoff_ms: float, was_probing: bool) -> None:
        self.num_slices += 1
        self.given_up = bool(answer.reason) and not answer.infeasible
        if not was_probing or self.given_up:
            self.reason = answer.reason
        least_ms = min(answer.step_ms, self.rank_ms, cutoff_ms)
        self.num_unfinished += not is_known(answer.lower_bound_ms, least_ms, PROVEN_GAP_FRACTION)
        if was_probing:
            return
        self.level.num_slices, self.level.slice_s = self.level.num_slices + 1, answer.solve_s
        if answer.infeasible:
            self.end_level(answer.reason, answer.overflow_bytes)
            return
        self.raise_bound(answer.lower_bound_ms, "placing")
        self.within_ms = max(min(self.within_ms, self.level.step_ms), self.floors.of(self.level.fill_fraction))

    def offer(self, placement: Placement, step_ms: float, is_last: bool) -> None:
        """Take a placement if it is better; the last of equally fast ones: no layer is in a mode there without need."""
        level = self.level
        if not self.is_probing and (step_ms <= level.step_ms if is_last else step_ms < level.step_ms):
            level.step_ms, level.placement = step_ms, placement
        rank_ms = self._judge(placement, step_ms)
        if np.isfinite(rank_ms) and (rank_ms <= self.rank_ms if is_last else rank_ms < self.rank_ms):
            self.rank_ms, self.step_ms, self.placement = rank_ms, step_ms, placement
            self.found_fill_fraction = self.probe_fill_fraction if self.is_probing else level.fill_fraction

    def _judge(self, placement: Placement, step_ms: float) -> float:
        """What a placement ranks by. Of all that keep the limits the fastest is remembered, however full it is."""
        assert self.problem is not None
        if self.caution.is_off:
            return step_ms
        fill = self.caution.fill_of(self.problem, placement, self.strategies[0])
        self.sounding.note(fill, step_ms, placement)
        if np.isfinite(fill) and step_ms < self.fastest_ms:
            self.fastest_ms, self.fastest_fill_fraction = step_ms, fill
        return self.caution.rank_ms(step_ms, fill)

    def settle(self, answer: Answer) -> None:
        """Take the placement that `found_fill_fraction` gives from nothing, in place of an equally good one."""
        assert answer.placement is not None
        rank_ms = self._judge(answer.placement, answer.step_ms)
        if rank_ms > self.rank_ms * (1.0 + SETTLED_FRACTION):
            return
        self.placement, self.step_ms, self.rank_ms = answer.placement, answer.step_ms, rank_ms
        if self.found_fill_fraction == self.level.fill_fraction:
            self.level.placement, self.level.step_ms = answer.placement, answer.step_ms
            self.within_ms = min(self.within_ms, answer.step_ms)

    def end_level(self, reason: str, overflow_bytes: float) -> None:
        """Its level has no placement at all."""
        self.within_ms = np.inf
        if np.isinf(self.elsewhere_ms):
            self.infeasible, self.reason, self.bounded_by = True, reason, "placing"
            if np.isinf(self.level.fill_fraction):
                self.overflow_bytes, self.overflow_suffices = overflow_bytes, overflow_bytes > 0
            else:
                self.reason = _TOO_OFTEN + reason.removeprefix(_TOO_OFTEN)

    # ---------------------------------------------------------------------------------------------------- lower levels

    def probe(self, cutoff_ms: float, gap_fraction: float) -> bool:
        """Whether to try a fill in between, because the best plan of its level is far too full, or what is less full
        may rank before it."""
        best_ms = min(cutoff_ms, self.rank_ms)
        far = best_ms > PROBE_FACTOR * self.within_ms
        is_lower = any(self.caution.fill_at(each) < self.level.fill_fraction for each in PROBES[self.num_probes :][:1])
        if far and is_lower and (self.is_placed(gap_fraction) or self.found_too_full):
            self._begin_probe()
        elif self.sounding.is_due and (fill := self.sounding.begin(best_ms, self.level.fill_fraction)):
            self.is_probing, self.probe_fill_fraction = True, fill
        return self.is_probing

    def _begin_probe(self) -> None:
        self.is_probing, self.probe_fill_fraction = True, self.caution.fill_at(PROBES[self.num_probes])
        self.num_probes += 1

    @property
    def found_too_full(self) -> bool:
        """Whether what was found in any order, whose proof comes late, is far too full, and no fill was tried yet."""
        is_first = self.num_slices == 1 and self.num_probes == 0 and self.strategies[0].schedule == FREE
        return is_first and PROBE_FACTOR * self.level.step_ms < self.rank_ms

    def foresee(self, should_stop: Callable[[], bool]) -> bool:
        """Before it is placed, where that takes long and its level is far too full: ask what it may rank at, by which
        it has its turn, and try that fill then. Whether it was asked now."""
        fill = self.caution.fill_at(PROBES[0])
        if not self.has_chunks or self.num_slices or self.caution.factor(self.level.fill_fraction) < PROBE_FACTOR:
            return False
        if fill in self.floors:
            if not self.num_probes and np.isfinite(self.floors.of(fill)):
                self._begin_probe()
            return False
        self.floors.raise_to(fill, bound_step(self.problem_at(fill), True, should_stop).step_ms)
        self.promised_ms = max(self.promised_ms, PROBES[0] * self.floors.of(fill))
        return True

    def is_placed(self, gap_fraction: float) -> bool:
        """Whether the best placement of its level is known."""
        return self.level.num_slices > 0 and is_known(self.within_ms, self.level.step_ms, gap_fraction)

    def descend(self, cutoff_ms: float, gap_fraction: float, rough_fraction: float, stop: Callable[[], bool]) -> bool:
        """Leave out what is too full to rank below the best, or by rough_fraction if no more is known; whether it did.

        No step of its level is below within_ms: what is filled beyond fill_at(aim / within_ms) ranks above `aim`. Where
        that is nothing and its best placement is known, that is fuller than the level counts or keeps no limits: each
        placement is judged by itself if they are few; else the level ends below it, whose bound the rest has."""
        if self.caution.is_off or self.is_closed(cutoff_ms, gap_fraction) or self.within_ms <= 0.0:
            return False
        fill, within_ms = self.level.fill_fraction, self.within_ms
        is_rough = of_level(rough_fraction, self.level.num_slices) > (fine := max(gap_fraction, OPTIMAL_GAP_FRACTION))
        keep = 1.0 - max(fine, of_level(rough_fraction, self.level.num_slices))
        aim_ms = keep * min(cutoff_ms, self.rank_ms)
        aim_ms = min(max(aim_ms, self.ranked_ms), self.elsewhere_ms) if rough_fraction else aim_ms
        lower = self.floors.fill_beyond(aim_ms, within_ms)
        if lower < fill * (1.0 if self.level.num_slices else WORTH_FRACTION):
            if is_rough and self.left_out is None:
                self.left_out = LeftOut(fill, within_ms, self.elsewhere_ms)
            self._leave_out(lower, aim_ms)
            return True
        if not self.is_placed(gap_fraction) or np.isinf(fill):
            return False
        if self.judging.judge(self, cutoff_ms, stop):
            return True
        assert self.level.placement is not None
        least = self.count_fill(self.level.placement)  # no level above has another best step
        lower = min(fill, least) * (1.0 - OPTIMAL_GAP_FRACTION)
        self._num_close += 1
        if self._num_close > MOST_CLOSE or self.level.slice_s > CLOSE_S:
            lower = min(lower, self.caution.fill_at(1.0 + STEP_DOWN * (self.caution.factor(fill) - 1.0)))
        self._leave_out(lower, within_ms * self.caution.factor(lower))
        return True

    def count_fill(self, placement: Placement) -> float:
        """How full levels count it."""
        return float(np.max(list_counted(self.problem_at(1.0), placement)))

    def _leave_out(self, fill: float, rank_ms: float) -> None:
        """Go on with what is filled to at most `fill`; what is fuller ranks at rank_ms at least."""
        self.elsewhere_ms = min(self.elsewhere_ms, rank_ms)
        self.floors.raise_to(self.level.fill_fraction, self.within_ms)
        self.level = Level(fill, known_cuts=self.level.list_cuts())
        self.raise_bound(self.floors.of(fill), "placing")

    def tighten(self, cutoff_ms: float, should_stop: Callable[[], bool]) -> None:
        """The bound of its level, in milliseconds, as far as that is of interest."""
        if np.isinf(self.within_ms):
            return
        self.level.problem = self.problem_at(self.level.fill_fraction)
        is_sharp = self.is_dear and self.is_refined
        enough_ms = bounded_to(min(cutoff_ms, self.rank_ms), self.strategies[0], is_sharp)
        tries = is_sharp or (self.strategies[0].schedule == FREE and not self.has_chunks)
        bound = bound_step(self.level.problem, tries, should_stop, enough_ms=enough_ms, settles=is_sharp)
        if bound.reason:
            self.end_level(bound.reason, 0.0)
        else:
            self.raise_bound(bound.step_ms, "mixture of paths" if is_sharp and self.has_chunks else "paths")

    def price(self, cutoff_ms: float, should_stop: Callable[[], bool]) -> bool:
        """Raise the bound of its level by another turn of a linear program; whether there was one."""
        ceiling_ms, problem = min(cutoff_ms, self.rank_ms), self.level.problem or self.problem
        assert problem is not None
        if np.isinf(ceiling_ms) or not self.level.price(problem, ceiling_ms, should_stop):
            return False
        self.raise_bound(self.level.priced_ms, "prices")
        return True

    # --------------------------------------------------------------------------------------------------------- closing

    def is_closed(self, cutoff_ms: float, gap_fraction: float) -> bool:
        """Whether nothing more about it is of interest: no placement of its level ranks below the cutoff, or the best
        one is known."""
        keep = 1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)
        return self.infeasible or max(self.betters_ms, self.ranked_ms) >= keep * min(cutoff_ms, self.rank_ms)

    def close(self, cutoff_ms: float) -> None:
        """Note what the cutoff was, and forget the problem unless a placement of it was found."""
        self.level.pricing = None
        self.cutoff_ms = cutoff_ms if self.cutoff_ms is None else self.cutoff_ms
        if self.placement is None and self.left_out is None:
            self.problem = None
