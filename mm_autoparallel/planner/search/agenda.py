"""Agenda: which pipeline is looked at next, and which need not be looked at.

The heap ranks pipelines by what they take at least. One that is popped gets its next better bound and goes back, until
it is closed or has had them all. Pipelines of equal problems become one; one that cannot beat another (`families`)
waits until that one is settled, and then has its bound. A named order of one chunk a stage, or a given one, is one of
those that are tried where the order is to be found, at the same costs: it waits for that strategy, until a turn of that
one ended without proof. Then it has a turn itself, for what is found of it is what the next turn begins with. So is a
named one of two chunks there and back, which runs no pairs, where the order of two chunks is to be found; but it does
not wait at all. Where bounds take long, the search dives now and then: fills of what was placed are tried, neighbours
of the best plan are placed, or of all that have a first bound, what promises most.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations

import numpy as np

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import count_communicator_kinds
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.schedules.catalog import FREE, SCHEDULES
from mm_autoparallel.pipeline.solve.dominated_modes import drop_dominated_modes
from mm_autoparallel.pipeline.solve.families import Families, content_key, figures_of
from mm_autoparallel.planner.search.arrangements import Bough
from mm_autoparallel.planner.search.branches import Branches
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.level import Level
from mm_autoparallel.planner.search.pipeline import PROBE_FACTOR, Pipeline, Rank
from mm_autoparallel.planner.search.scouting import can_scout, choose_first, list_kin
from mm_autoparallel.planner.search.space import SpaceEntry, judge

#: What was too much is looked at again once the best known is below this part of what it was then (assumed).
LESS = 0.999
#: Bounds are looked for so long at most before a pipeline is placed, without and with a fair plan: a better one closes
#: many. So long where other processes place, which would idle. So many of those that are bounded in part are looked at
#: for it at once (assumed).
DIVE_S, PATIENCE_S, SPREAD_S, NUM_DIVES = 5.0, 15.0, 3.0, 32


class Agenda:
    """`pipelines`: one for each strategy added; those found to have another's problem are its twins from then on.

    entries: every strategy that is listed so far. overfull: those of which a block ran out of memory when it was
    profiled, and what is known of that. boughs: what is not listed yet. scout: meets plans of some of those of several
    chunks (search/scouting.py). num_idle: processes that wait for something to place, while this one looks for bounds;
    0: this one places too. has_dived: whether bounds took that long once.
    """

    def __init__(
        self,
        costs: CostModel,
        boughs: tuple[Bough, ...] = (),
        scout: Callable[[Iterator[Pipeline]], None] = lambda _: None,
    ) -> None:
        self.pipelines: list[Pipeline] = []
        self.entries: list[SpaceEntry] = []
        self.overfull: dict[Strategy, str] = {}
        self._costs, self._steps = costs, LeastSteps(costs)
        self.branches = Branches(costs, self._steps, boughs)
        self.caution = Caution(costs.job)
        self._heap: list[Rank] = []
        self._set_aside: list[tuple[float, Pipeline]] = []
        self._begun: list[Pipeline] = []
        self._kin: dict[int, Pipeline] = {}
        self._families = Families()
        self._by_key: dict[str, Pipeline] = {}
        self._any_order: dict[Strategy, Pipeline] = {}
        self._scout, self._has_favourites = scout, False
        self.num_idle, self.has_dived, self._since_s = 0, False, 0.0

    def admit(self, entry: SpaceEntry, should_stop: Callable[[], bool], known_ms: float = 0.0) -> None:
        """Take a strategy of the space: where it is lawful, it will be looked at. known_ms: no placement of it is
        below."""
        self.entries.append(entry)
        strategy = entry.strategy
        if entry.reason is not None:
            return
        if reason := self._costs.overfull_reason(strategy):
            self.overfull[strategy] = reason
        else:
            self._add(strategy, 0.0 if should_stop() else self._steps.least_ms(strategy), known_ms)

    def _add(self, strategy: Strategy, least_ms: float, known_ms: float) -> None:
        """Add a strategy of which no placement is below least_ms, by its blocks, nor below known_ms."""
        num_microbatches = strategy.num_microbatches(self._costs.job.workload.global_batch_size)
        level = Level(self.caution.most_fill)
        self.pipelines.append(
            Pipeline(len(self.pipelines), [strategy], num_microbatches, least_ms, self.caution, level)
        )
        self.pipelines[-1].raise_bound(known_ms, "paths")
        if strategy.schedule == FREE:
            self._any_order[strategy] = self.pipelines[-1]
        self.push(self.pipelines[-1])

    def push(self, pipeline: Pipeline) -> None:
        """Look at it again when its turn comes; and once at those that wait for it where its order is not found yet."""
        heapq.heappush(self._heap, pipeline.rank)
        if _is_unproven(pipeline):
            self.release(pipeline)

    def next_open(
        self,
        cutoff_ms: float,
        gap_fraction: float,
        rough_fraction: float,
        should_stop: Callable[[], bool],
        should_pause: Callable[[], bool] = lambda: False,
    ) -> Pipeline | None:
        """The open pipeline of the least rank, its bound refined; None where there is none, and on should_pause.

        cutoff_ms, gap_fraction: as in `Pipeline.is_closed`; rough_fraction: as in `Pipeline.descend`. Raises
        ProfileError where a cost is missing.
        """
        self._since_s = self._since_s or time.monotonic()
        found = self._find_open(cutoff_ms, gap_fraction, rough_fraction, should_stop, should_pause)
        self._since_s = 0.0 if found else self._since_s
        return found

    def _find_open(
        self,
        cutoff_ms: float,
        gap_fraction: float,
        rough_fraction: float,
        should_stop: Callable[[], bool],
        should_pause: Callable[[], bool],
    ) -> Pipeline | None:
        keep = 1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)
        patience_s = PATIENCE_S if self._has_fair_plan() else DIVE_S
        if self.num_idle:  # one at least stays free: while all place, nobody looks for bounds
            patience_s = SPREAD_S if self.num_idle > 1 else math.inf
        dived: Pipeline | None = None
        while not should_stop() and not should_pause():
            if dived is None and time.monotonic() > self._since_s + patience_s:
                dived, self._since_s = self._dive(keep * cutoff_ms, should_stop), time.monotonic()
                self.has_dived = True
            if dived is not None and self._take_out(dived):
                pipeline = dived
            else:
                dived = None
                if self._list_next(cutoff_ms, keep, should_stop):
                    continue
                if not self._heap and not self._take_up_again(cutoff_ms):
                    return None
                if not self._has_favourites and self.pipelines[self._heap[0][-1]].has_chunks:
                    self._favour()
                pipeline = self.pipelines[heapq.heappop(self._heap)[-1]]
            self._find_betters(pipeline)
            pipeline.learn_from_betters()
            if any(_is_over(better, cutoff_ms, keep) for better in pipeline.betters):
                pipeline.elsewhere_ms, pipeline.within_ms = pipeline.bound_ms, math.inf
            if pipeline.is_closed(cutoff_ms, gap_fraction):
                self.close(pipeline, cutoff_ms)
                continue
            unsettled = (
                p for p in pipeline.betters if not (p.given_up or p.is_closed(cutoff_ms, gap_fraction) or is_found_v(p))
            )
            better = next((p for p in unsettled if not (_is_unproven(p) and pipeline.num_unfinished == 0)), None)
            if better is not None:
                better.waiting.append(pipeline)
                pipeline.is_waiting = True
                continue
            if pipeline.is_refined and pipeline.level.problem is None and math.isfinite(pipeline.level.fill_fraction):
                pipeline.tighten(cutoff_ms, should_stop)
                self.push(pipeline)
                continue
            was_due = pipeline.sounding.is_due
            if pipeline.is_refined and pipeline.probe(cutoff_ms, gap_fraction):
                return pipeline
            if was_due:  # others may come before it now
                self.push(pipeline)
                continue
            aim_ms = keep * min(cutoff_ms, pipeline.rank_ms)
            if pipeline.is_refined and pipeline.floors.climb(pipeline, aim_ms, should_stop):
                self.push(pipeline)
                continue
            if pipeline.is_refined and pipeline.trimming.begin(pipeline, cutoff_ms, should_stop):
                return pipeline
            if pipeline.num_refinements and pipeline.descend(cutoff_ms, gap_fraction, rough_fraction, should_stop):
                pipeline.tighten(cutoff_ms, should_stop)
                self.push(pipeline)
                continue
            if pipeline.is_refined:
                if pipeline.foresee(should_stop) or (
                    not pipeline.is_probing and pipeline.price(cutoff_ms, should_stop)
                ):
                    self.push(pipeline)
                    continue
                pipeline.raising.begin(pipeline, aim_ms)
                return pipeline
            if pipeline.num_refinements == 0:
                self._build(pipeline)
            else:
                pipeline.refine(cutoff_ms, should_stop)
                self._begun += [pipeline] if pipeline not in self._begun else []
            if pipeline.twin is None:
                self.push(pipeline)
        return None

    def _list_next(self, cutoff_ms: float, keep: float, should_stop: Callable[[], bool]) -> bool:
        """Go on with the branches, where the next of them is due; whether it is."""
        is_due = self.branches.least_ms < self._listed_below_ms(keep * cutoff_ms)
        for strategy, bound_ms in self.branches.advance(cutoff_ms, should_stop) if is_due else ():
            self.admit(judge(self._costs.job, strategy), should_stop, bound_ms)
        return is_due

    def _has_fair_plan(self) -> bool:
        """Whether a plan is known that is not far too full."""
        best = _best_of(self.pipelines)
        return best is not None and best.rank_ms <= PROBE_FACTOR * best.step_ms

    def _dive(self, worth_ms: float, should_stop: Callable[[], bool]) -> Pipeline | None:
        """What was placed and has a fill to try, the best of them; or of the neighbours of the best plan that of the
        least bound; or of those that have a bound and wait for more, the one that promises most by plans that are met
        at once, its own or of a named order that waits for it. None where nothing was met."""
        waiting = {rank[-1] for rank in self._heap}  # others are being placed
        due = [p for p in self.pipelines if p.sounding.is_due and p.number in waiting]
        if due:
            return min(due, key=lambda p: p.rank_ms)
        near = [p for p in self._neighbours(worth_ms, should_stop) if p.number in waiting]
        if near:
            return min(near, key=lambda p: p.bound_ms)
        self._begun = [p for p in self._begun if p.twin is None and not p.infeasible and p.bound_ms < worth_ms]
        new = sorted((p for p in self._begun if p.number not in self._kin), key=lambda pipeline: pipeline.bound_ms)
        kin = {p.number: next(filter(can_scout, (p, *p.waiting)), p) for p in new[:NUM_DIVES]}
        self._scout(self._built(kin.values()))
        self._kin |= kin
        promised = {p: min(p.fastest_ms, self._kin[p.number].fastest_ms) for p in self._begun if p.number in self._kin}
        met = [p for p, step_ms in promised.items() if math.isfinite(step_ms) and p.number in waiting]
        return min(met, key=lambda p: (p.rank[0], promised[p]), default=None)

    def _neighbours(self, worth_ms: float, should_stop: Callable[[], bool]) -> list[Pipeline]:
        """What differs in two sizes from the best of those that were placed, its order to be found, was not placed and
        may be below worth_ms by its bound."""
        best = _best_of(p for p in self.pipelines if p.num_slices)
        near = list_neighbours(best.strategies[0]) if best else ()
        found = [self._any_order.get(replace(strategy, schedule=FREE, orders=())) for strategy in near]
        fresh = [p for p in found if p and not (p.twin or p.num_slices or p.is_waiting) and p.bound_ms < worth_ms]
        for pipeline in fresh:
            if pipeline.num_refinements == 0:
                self._build(pipeline)
            if pipeline.twin is not None:
                self._take_out(pipeline)
            elif pipeline.num_refinements == 1 and pipeline.problem is not None:
                pipeline.refine(worth_ms, should_stop)
        return [p for p in fresh if not p.infeasible and p.problem is not None and p.bound_ms < worth_ms]

    def _take_out(self, pipeline: Pipeline) -> bool:
        """Out of the heap, before its turn; whether it was there."""
        at = next((at for at, rank in enumerate(self._heap) if rank[-1] == pipeline.number), None)
        if at is not None:
            self._heap[at] = self._heap[-1]
            self._heap.pop()
            heapq.heapify(self._heap)
        return at is not None

    def _favour(self) -> None:
        """Once the turn of several chunks has come: scout them, those of the sizes that are best with one chunk first,
        and favour what promises most."""
        self._has_favourites = True
        waiting, self._heap = [self.pipelines[rank[-1]] for rank in sorted(self._heap)], []
        chunked = [pipeline for pipeline in waiting if pipeline.has_chunks]
        kin = list_kin(self.pipelines, chunked)
        self._scout(self._built([*kin, *(p for p in chunked if p not in kin)]))
        for pipeline in choose_first(kin, chunked):
            pipeline.is_favoured = True
        self._heap += (pipeline.rank for pipeline in waiting if pipeline.twin is None)
        heapq.heapify(self._heap)

    def _built(self, pipelines: Iterable[Pipeline]) -> Iterator[Pipeline]:
        """Those that can be scouted, each with its problem built, but for twins."""
        for pipeline in filter(can_scout, pipelines):
            self._find_betters(pipeline)
            if pipeline.num_refinements == 0:
                self._build(pipeline)
            if pipeline.twin is None:
                yield pipeline

    def set_aside(self, pipeline: Pipeline, cutoff_ms: float) -> None:
        """It was given up while cutoff_ms was the best known: those that wait for it go on."""
        self._set_aside.append((cutoff_ms, pipeline))
        self.release(pipeline)

    def _take_up_again(self, cutoff_ms: float) -> bool:
        """Look again at those given up as too much when the best known was longer: less is then of interest. Whether
        there are any."""
        again = [p for then_ms, p in self._set_aside if is_too_much(p) and cutoff_ms < LESS * then_ms]
        self._set_aside = [each for each in self._set_aside if each[1] not in again]
        for pipeline in again:
            pipeline.given_up = False
            self.push(pipeline)
        return bool(again)

    def _listed_below_ms(self, worth_ms: float) -> float:
        """Branches of lower bounds are listed first: than the next pipeline's, and than what is still of interest.
        While no plan is found, those that are listed already go on, for a plan rules out most branches."""
        if not self._heap:
            return worth_ms
        is_unfinished, _, bound_ms, _ = self._heap[0]
        return min(worth_ms, bound_ms) if math.isfinite(worth_ms) or is_unfinished else 0.0

    def _build(self, pipeline: Pipeline) -> None:
        """Build its problem, or find that another pipeline has the same."""
        problem = drop_dominated_modes(build_problem(self._costs, pipeline.strategies[0]))
        shape, figures = figures_of(problem, not self.caution.is_off)
        if not self.caution.is_off:  # a fill counts them too
            figures = np.append(figures, count_communicator_kinds(pipeline.strategies[0]))
        key = content_key(shape, figures)
        twin = self._by_key.setdefault(key, pipeline)
        if twin is not pipeline:
            pipeline.join(twin)
            self.release(pipeline)
            return
        pipeline.build(problem, key)
        above, below = self._families.add(pipeline.number, shape, figures)
        pipeline.betters += (self.pipelines[number] for number in above)
        for number in below:
            self.pipelines[number].betters.append(pipeline)

    def _find_betters(self, pipeline: Pipeline) -> None:
        """Before it is built: where its order is a named or given one of one chunk, or a named one there and back, note
        the pipeline whose orders include it. Those that became one with another are that one."""
        if pipeline.num_refinements == 0 and not pipeline.betters and _may_be_found(pipeline):
            any_order = self._any_order.get(replace(pipeline.strategies[0], schedule=FREE, orders=()), pipeline)
            pipeline.betters += [any_order] if any_order is not pipeline else []
        pipeline.betters = [better.twin or better for better in pipeline.betters]

    def close(self, pipeline: Pipeline, cutoff_ms: float) -> None:
        """Nothing more about it is of interest: those that waited for it go on."""
        pipeline.close(cutoff_ms)
        self.release(pipeline)

    def release(self, pipeline: Pipeline) -> None:
        """Put those that wait for it back into the heap, but for what was found to be another's twin meanwhile; they
        are not below what it is not below."""
        for waiting in pipeline.waiting:
            waiting.is_waiting = False
            if waiting.twin is None:
                self._find_betters(waiting)
                waiting.learn_from_betters()
                self.push(waiting)
        pipeline.waiting.clear()


def _best_of(pipelines: Iterable[Pipeline]) -> Pipeline | None:
    """That of the best plan; None where there is no plan."""
    return min((p for p in pipelines if p.placement is not None), key=lambda p: p.rank_ms, default=None)


def list_neighbours(strategy: Strategy) -> Iterator[Strategy]:
    """Strategies that have twice one of its sizes and half of another, on as many devices; or twice or half its EP, or
    its micro-batch."""
    for one, other in permutations(("pp", "tp", "cp", "dp"), 2):
        half, rest = divmod(getattr(strategy, other), 2)
        if not rest:
            yield replace(strategy, **{one: 2 * getattr(strategy, one), other: half})
    for name in ("ep", "mbs"):
        half, rest = divmod(getattr(strategy, name), 2)
        yield replace(strategy, **{name: 2 * getattr(strategy, name)})
        if not rest:
            yield replace(strategy, **{name: half})


def is_found_v(pipeline: Pipeline) -> bool:
    """Whether its order, of two chunks there and back, is to be found."""
    return pipeline.has_chunks and pipeline.strategies[0].schedule == FREE


def _may_be_found(pipeline: Pipeline) -> bool:
    """Whether its order is one of those that are tried where the order of so many chunks is to be found."""
    schedule = SCHEDULES[pipeline.strategies[0].schedule]
    return not pipeline.has_chunks or (schedule.v_shaped and not schedule.pairs)


def _is_unproven(pipeline: Pipeline) -> bool:
    """Whether its order was to be found, and a turn ended without plan or proof: a named one is easier to place."""
    is_known = pipeline.placement is not None and not pipeline.num_unfinished
    return pipeline.strategies[0].schedule == FREE and pipeline.num_slices > 0 and not is_known


def _is_over(pipeline: Pipeline, cutoff_ms: float, keep: float) -> bool:
    """Whether it is no plan below the cutoff, and what is left of it is not of interest: nor is what cannot beat it."""
    is_beaten = max(pipeline.betters_ms, pipeline.ranked_ms) >= keep * cutoff_ms
    return is_beaten and not pipeline.infeasible and pipeline.rank_ms >= cutoff_ms


def is_too_much(pipeline: Pipeline) -> bool:
    """Whether it was given up because what its stages may hold, or what is left of it, is too much for its solvers."""
    strategy = pipeline.strategies[0]
    return pipeline.given_up and (bool(strategy.layouts) or strategy.schedule == FREE)
