"""search: the best plan over all lawful strategies of a job, and the proof that there is none better.

Strategies are visited in the order of what they could take at least, those of one chunk a stage first, because they are
placed quickly and give a best step that rules out most others. Each is bounded first by work alone, then by paths and
memory (`bounds`), and placed only if that leaves it below the best step known; what `place` proves raises its bound
further. When no strategy is left whose bound is below the best step, that step is the optimum of the whole space.
Strategies with equal pipelines (the same numbers from other sizes) are placed once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mm_autoparallel.costs.stage import build_problem, overfull_reason
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.plan import PROVEN_GAP_FRACTION, Figures, Plan
from mm_autoparallel.problem import Problem
from mm_autoparallel.search.candidate import Candidate, Progress
from mm_autoparallel.search.dominated_modes import drop_dominated_modes
from mm_autoparallel.search.engines import Engine, InProcess, LocalProcesses, count_cores
from mm_autoparallel.search.pipeline import Pipeline, Rank
from mm_autoparallel.search.relaxation import raise_no_feasible_plan
from mm_autoparallel.search.space import SpaceEntry, list_space
from mm_autoparallel.search.task import Task
from mm_autoparallel.simulate.evaluate import Estimate, evaluate, plan_from_placement

#: Wall time after which the best so far is returned, start-up left out. Assumed: a person waits a minute.
DEFAULT_TIME_LIMIT_S = 50.0
#: Until then every strategy is placed to the optimum; after it a gap that still counts as proven is enough. Assumed.
EXACT_S = 5.0
PROVEN_ENOUGH_FRACTION = 0.9 * PROVEN_GAP_FRACTION
#: A strategy gets this long at first, and SLICE_GROWTH times as long once all others have had their turn; the last ones
#: get all that is left. Assumed.
FIRST_SLICE_S, SLICE_GROWTH = 3.0, 3.0
#: Other processes are started when this much work seems left; each loads its solvers for some two seconds.
PROCESSES_WORTH_S = 6.0
#: A winner found by several processes is placed again where that took no longer than this. Assumed.
SETTLE_S = 3.0
#: Steps this close are equal, and the strategy visited first wins.
TIE_FRACTION = 1e-6

Stopped = Literal["finished", "time limit", "interrupted", "processes died"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plan and what is known of all others.

    estimates: of the best plans, at most one for each pipeline, fastest first; the first is the answer.
    lower_bound_ms: no plan of the space is below. candidates: every strategy of the space, in its order.
    stopped: why the search ended. warnings: what to know before trusting it.
    """

    estimates: tuple[Estimate, ...]
    lower_bound_ms: float
    candidates: tuple[Candidate, ...]
    stopped: Stopped
    elapsed_s: float
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.estimates[0].plan

    @property
    def figures(self) -> Figures:
        """What the result file tells beside the plan."""
        return self.estimates[0].figures(self.lower_bound_ms)

    @property
    def gap_fraction(self) -> float:
        return self.figures.gap_fraction

    @property
    def proven(self) -> bool:
        """Whether the bound over the whole space is within 0.1 % of the step."""
        return self.figures.proven


def search(
    job: Job,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT_S,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    top_k: int = 1,
    num_workers: int | None = None,
) -> SearchResult:
    """The fastest plans of `job` over all strategies within its limits, the best `top_k` of them.

    time_limit_s: None for as long as it takes. should_stop: polled several times a second; like the time limit it ends
    the search with the best so far and its gap. num_workers: processes that place at once, at most; None for the
    machine's cores, 1 for this process alone. Raises JobError where no strategy is lawful, ProfileError where a profile
    does not fit, NoFeasiblePlan where nothing fits or nothing was found in time.
    """
    run = _Search(job, list_space(job), time_limit_s, should_stop, on_progress, top_k)
    run.place_all(num_workers or count_cores())
    return run.result()


@dataclass(eq=False)
class _Search:
    """The state of one search. `heap` holds the pipelines that may still matter, by their rank.

    overfull: strategies of which a block ran out of memory when it was profiled, and what is known of that.
    """

    job: Job
    space: tuple[SpaceEntry, ...]
    time_limit_s: float | None
    asked_to_stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    top_k: int
    pipelines: list[Pipeline] = field(default_factory=list)
    heap: list[Rank] = field(default_factory=list)
    overfull: dict[Strategy, str] = field(default_factory=dict)
    num_visits: int = 0
    interrupted: bool = False
    used_processes: bool = False

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        by_problem: dict[Problem, Pipeline] = {}
        for entry in self.space:
            if entry.reason is not None:
                continue
            reason = overfull_reason(self.job, entry.strategy)
            if reason:
                self.overfull[entry.strategy] = reason
            else:
                problem = drop_dominated_modes(build_problem(self.job, entry.strategy))
                pipeline = by_problem.get(problem) or Pipeline(len(by_problem), problem)
                pipeline.strategies.append(entry.strategy)
                by_problem[problem] = pipeline
        self.pipelines = list(by_problem.values())
        self.heap = [pipeline.rank for pipeline in self.pipelines]
        heapq.heapify(self.heap)

    # ------------------------------------------------------------------------------------------------------- stopping

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        return np.inf if self.time_limit_s is None else self.time_limit_s - self.elapsed_s

    def should_stop(self) -> bool:
        self.interrupted = self.interrupted or self.asked_to_stop()
        return self.interrupted or self.left_s <= 0

    # -------------------------------------------------------------------------------------------------------- knowing

    def ranked(self) -> list[Pipeline]:
        """Pipelines that have a placement, fastest first; of equally fast ones, the one visited first."""
        placed = sorted((p for p in self.pipelines if p.placement is not None), key=lambda p: p.visit)
        ranked: list[Pipeline] = []
        for pipeline in placed:
            at = len(ranked)
            while at > 0 and pipeline.step_ms < ranked[at - 1].step_ms * (1.0 - TIE_FRACTION):
                at -= 1
            ranked.insert(at, pipeline)
        return ranked

    @property
    def cutoff_ms(self) -> float:
        """Steps that are not below it are of no interest: that of the last of the best plans asked for."""
        ranked = self.ranked()
        return ranked[self.top_k - 1].step_ms if len(ranked) >= self.top_k else np.inf

    @property
    def gap_fraction(self) -> float:
        return 0.0 if self.elapsed_s < EXACT_S else PROVEN_ENOUGH_FRACTION

    @property
    def lower_bound_ms(self) -> float:
        return min((p.bound_ms for p in self.pipelines if not p.infeasible), default=np.inf)

    def open_pipelines(self) -> list[Pipeline]:
        """Those of which something is still to be known."""
        cutoff_ms, gap_fraction = self.cutoff_ms, self.gap_fraction
        return [p for p in self.pipelines if not p.is_closed(cutoff_ms, gap_fraction)]

    def tell_progress(self, best_ms: float = np.inf) -> None:
        best_ms = min(best_ms, min((p.step_ms for p in self.pipelines), default=np.inf))
        num_open = sum(len(p.strategies) for p in self.open_pipelines())
        lower_bound_ms = min(self.lower_bound_ms, best_ms)
        self.on_progress(Progress(best_ms, lower_bound_ms, len(self.space) - num_open, len(self.space), self.elapsed_s))

    # -------------------------------------------------------------------------------------------------------- placing

    def place_all(self, num_workers: int) -> None:
        """Visit pipelines until none is open, in this process first, in several if much seems left."""
        engine: Engine = InProcess(self.should_stop, self.tell_progress)
        try:
            while not self.should_stop():
                while engine.free and not self.should_stop():
                    pipeline = self.next_open()
                    if pipeline is None:
                        break
                    engine.give(self.make_task(pipeline, num_workers))
                answer = engine.wait()
                if answer is None:
                    break
                pipeline = self.pipelines[answer.number]
                pipeline.take(answer)
                if not answer.reason:  # else it is infeasible, or every process that places it dies
                    heapq.heappush(self.heap, pipeline.rank)
                self.tell_progress()
                if num_workers > 1 and not self.used_processes and self.seems_left_s() > PROCESSES_WORTH_S:
                    self.used_processes = True
                    engine = LocalProcesses(num_workers, self.should_stop)
            while (late := engine.wait()) is not None:
                self.pipelines[late.number].take(late)
        finally:
            engine.close()
        if self.used_processes and not self.should_stop():
            self.settle()

    def next_open(self) -> Pipeline | None:
        """The open pipeline of the least rank, its bound refined; None where there is none."""
        cutoff_ms, gap_fraction = self.cutoff_ms, self.gap_fraction
        while self.heap and not self.should_stop():
            pipeline = self.pipelines[heapq.heappop(self.heap)[-1]]
            if pipeline.is_closed(cutoff_ms, gap_fraction):
                continue
            if pipeline.is_refined:
                return pipeline
            pipeline.refine()
            heapq.heappush(self.heap, pipeline.rank)
        return None

    def make_task(self, pipeline: Pipeline, num_workers: int) -> Task:
        if pipeline.visit < 0:
            pipeline.visit, self.num_visits = self.num_visits, self.num_visits + 1
        problem = pipeline.problem
        shape = (problem.num_stages, problem.num_chunks)
        neighbours = (p for p in self.ranked() if (p.problem.num_stages, p.problem.num_chunks) == shape)
        hint = pipeline.placement or next((p.placement for p in neighbours), None)
        cutoff_ms = min(self.cutoff_ms, pipeline.step_ms)
        time_limit_s, gap_fraction = FIRST_SLICE_S * SLICE_GROWTH**pipeline.num_slices, self.gap_fraction
        if pipeline.num_slices and len(self.open_pipelines()) <= num_workers:
            time_limit_s, gap_fraction = np.inf, PROVEN_ENOUGH_FRACTION
        time_limit_s = min(time_limit_s, self.left_s)
        return Task(pipeline.order, problem, cutoff_ms, gap_fraction, time_limit_s, hint)

    def seems_left_s(self) -> float:
        """What the open pipelines may take, by those of their kind that were placed; one alone gains nothing."""
        still_open = [p for p in self.open_pipelines() if p.is_refined]
        left_s = 0.0
        for has_chunks in (False, True):
            placed = [p.solve_s for p in self.pipelines if p.has_chunks == has_chunks and p.num_slices]
            num_open = sum(p.has_chunks == has_chunks for p in still_open)
            left_s += num_open * sum(placed) / max(len(placed), 1)
        return left_s if len(still_open) > 1 else 0.0

    def settle(self) -> None:
        """Place the winner once more, from nothing: which of its equally fast placements was found depends on when
        other processes ended, and the same job should give the same plan.
        """
        winner = next(iter(self.ranked()), None)
        if winner is None or winner.solve_s > SETTLE_S or not winner.is_closed(np.inf, 0.0):
            return
        engine = InProcess(self.should_stop)
        engine.give(Task(winner.order, winner.problem, np.inf, 0.0, min(2 * winner.solve_s + 1.0, self.left_s)))
        answer = engine.wait()
        if answer and answer.placement and answer.step_ms <= winner.step_ms * (1.0 + TIE_FRACTION):
            winner.placement, winner.step_ms = answer.placement, answer.step_ms
            winner.bound_ms = min(winner.bound_ms, winner.step_ms)

    # --------------------------------------------------------------------------------------------------------- ending

    def result(self) -> SearchResult:
        """The end of the search. Raises NoFeasiblePlan where there is no plan."""
        ranked, stopped = self.ranked(), self.why_stopped()
        candidates = tuple(self.candidates(stopped))
        if not ranked:
            suffices = {s: p.overflow_suffices for p in self.pipelines if p.infeasible for s in p.strategies}
            raise_no_feasible_plan(self.job, candidates, suffices)
        batch = self.job.workload.global_batch_size
        estimates = []
        for pipeline in ranked[: self.top_k]:
            assert pipeline.placement is not None
            plan = plan_from_placement(pipeline.problem, pipeline.placement, pipeline.strategies[0], batch)
            estimates.append(evaluate(self.job, plan))
        return SearchResult(
            estimates=tuple(estimates),
            lower_bound_ms=min(self.lower_bound_ms, estimates[0].step_ms),
            candidates=candidates,
            stopped=stopped,
            elapsed_s=self.elapsed_s,
            warnings=estimates[0].warnings,
        )

    def why_stopped(self) -> Stopped:
        if not self.open_pipelines():
            return "finished"
        if self.interrupted:
            return "interrupted"
        return "time limit" if self.left_s <= 0 else "processes died"

    def candidates(self, stopped: Stopped) -> Iterator[Candidate]:
        """Every strategy of the space with its end."""
        now = (self.cutoff_ms, self.gap_fraction, stopped)
        ends = {s: p.candidate_of(s, *now) for p in self.pipelines for s in p.strategies}
        for entry in self.space:
            if entry.reason is not None:
                yield Candidate(entry.strategy, "unlawful", entry.reason)
            elif entry.strategy in self.overfull:
                yield Candidate(entry.strategy, "infeasible", self.overfull[entry.strategy])
            else:
                yield ends[entry.strategy]
