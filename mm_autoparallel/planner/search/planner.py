"""search: the best plan over all lawful strategies of a job, and the proof that there is none better.

Best is the least expected time: the step with the price of running out of memory (search/caution.py), which is the step
itself where devices are far from full. Bounds of steps bound it too.

Strategies are visited in the order of what they could take at least, those of one chunk a stage first, because they are
placed quickly and give a best step that rules out most others. Each is bounded first by the costs of its blocks, then,
its problem built, by paths and memory (`bounds`) and by what is known of problems that it cannot beat (`families`), and
placed only if that leaves it below the best step known; what `place` proves raises its bound further. When no strategy
is left whose bound is below the best step, that step is the optimum of the whole space. Strategies with equal pipelines
(the same numbers from other sizes) are placed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mm_autoparallel.errors import BackendError, Interrupted, Unfinished
from mm_autoparallel.garbage import collection_is_rare
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.problem import has_same_counts
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.solve.cache import SolvedCache
from mm_autoparallel.pipeline.solve.engines.engine import Engine
from mm_autoparallel.pipeline.solve.engines.in_process import InProcess
from mm_autoparallel.pipeline.solve.engines.local_processes import LocalProcesses, count_cores
from mm_autoparallel.pipeline.solve.engines.ray_cluster import RayCluster
from mm_autoparallel.pipeline.solve.task import Answer, Task
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION
from mm_autoparallel.planner.search import DEFAULT_TIME_LIMIT_S
from mm_autoparallel.planner.search.agenda import Agenda, is_too_much
from mm_autoparallel.planner.search.arrangements import Bough
from mm_autoparallel.planner.search.candidate import Candidate, Progress
from mm_autoparallel.planner.search.ends import list_ends
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.recall import find_known, remember, remember_probe
from mm_autoparallel.planner.search.relaxation import raise_no_plan
from mm_autoparallel.planner.search.result import SearchResult, Stopped, objective_of
from mm_autoparallel.planner.search.robust import find_contenders, weigh
from mm_autoparallel.planner.search.rough import Roughness
from mm_autoparallel.planner.search.scouting import meet_at_once, scouting_s
from mm_autoparallel.planner.search.slices import level_slice_s, next_slice_s, seems_long
from mm_autoparallel.planner.search.space import SpaceEntry, list_all_boughs, list_space
from mm_autoparallel.planner.search.starts import best_start
from mm_autoparallel.planner.search.step_end import rank_again
from mm_autoparallel.planner.search.telling import Telling

#: Until then every strategy is placed to the optimum; after it a gap that still counts as proven is enough. Assumed.
EXACT_S = 5.0
PROVEN_ENOUGH_FRACTION = 0.9 * PROVEN_GAP_FRACTION
SETTLE_S = 3.0  # a winner found by several processes is placed again where that took no longer; assumed
NUM_FIRST_RUNS = 3  # to try, that the result names at least
TIE_FRACTION = 1e-6  # steps this close are equal, and the strategy visited first wins


@collection_is_rare()
def search(
    job: Job,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT_S,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    top_k: int = 1,
    num_workers: int | None = None,
    cluster: RayCluster | None = None,
    cache: SolvedCache | None = None,
) -> SearchResult:
    """The fastest plans of `job` over all strategies within its limits, the best `top_k` of them.

    time_limit_s: None for as long as it takes. should_stop: polled several times a second; like the time limit it ends
    the search with the best so far and its gap. num_workers: processes that place at once, at most; None for the
    machine's cores, 1 for this process alone. cluster: workers that place in their stead. cache: what earlier searches
    found out, and where this one writes down what it does.
    Raises JobError where no strategy is lawful, ProfileError where a profile does not fit, NoFeasiblePlan where nothing
    fits, Unfinished where nothing was found in time, Interrupted where nothing was before should_stop.
    """
    began_s = time.monotonic()

    def look() -> None:
        is_late = time_limit_s is not None and time.monotonic() - began_s > time_limit_s
        if is_late or should_stop():
            end, error = ("came to its time limit", Unfinished) if is_late else ("was interrupted", Interrupted)
            raise error(f"the search {end} before it began", where=f"job file {job.path}")

    boughs = list_all_boughs(job, look)
    space = list_space(job, look, boughs)
    told = time_limit_s, should_stop, on_progress, top_k, cluster, cache, began_s
    run = _Search(CostModel(job), space, boughs, *told)
    run.place_all(cluster.num_workers if cluster else num_workers or count_cores())
    return rank_again(run.result(), run.costs, run.pipelines, top_k, should_stop)


def examine(
    job: Job | CostModel,
    entries: tuple[SpaceEntry, ...],
    time_limit_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    boughs: tuple[Bough, ...] = (),
) -> tuple[Estimate | None, tuple[Candidate, ...]]:
    """The best plan over these strategies alone, and those of `boughs`, in this process, and what became of each; None
    where there is none.

    Raises ProfileError where a profile does not fit.
    """
    costs, began_s = CostModel.of(job), time.monotonic()
    run = _Search(costs, entries, boughs, time_limit_s, should_stop, lambda _: None, 1, None, None, began_s)
    run.place_all(1)
    estimates, candidates = run.end()
    return next(iter(estimates), None), candidates


@dataclass(eq=False)
class _Search:
    """The state of one search. pipelines: those of the agenda, twins included.

    visited: those that were given to a solver, in their order. saved_s: what the cache spared. is_last_lap: the last
    open pipelines have all the time that is left.
    """

    costs: CostModel
    space: tuple[SpaceEntry, ...]
    boughs: tuple[Bough, ...]
    time_limit_s: float | None
    asked_to_stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    top_k: int
    cluster: RayCluster | None
    cache: SolvedCache | None
    began_s: float
    visited: list[Pipeline] = field(default_factory=list)
    interrupted: bool = False
    used_processes: bool = False
    saved_s: float = 0.0
    is_last_lap: bool = False
    engine_warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.job, self.telling, self.roughness = self.costs.job, Telling(self.on_progress), Roughness()
        self.agenda = Agenda(self.costs, self.boughs, self.scout)
        for entry in self.space:
            self.agenda.admit(entry, self.should_stop)
        self.pipelines = self.agenda.pipelines

    # ------------------------------------------------------------------------------------------------------- stopping

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        end_s = self.elapsed_s + self.agenda.branches.naming_s
        return np.inf if self.time_limit_s is None else self.time_limit_s - end_s

    def should_stop(self) -> bool:
        self.interrupted = self.interrupted or self.asked_to_stop()
        return self.interrupted or self.left_s <= 0

    # -------------------------------------------------------------------------------------------------------- knowing

    def ranked(self) -> list[Pipeline]:
        """Pipelines that have a plan, best first; of equally good ones, the one visited first."""
        ranked: list[Pipeline] = []
        for pipeline in (p for p in self.visited if p.placement is not None):
            at = len(ranked)
            while at > 0 and pipeline.rank_ms < ranked[at - 1].rank_ms * (1.0 - TIE_FRACTION):
                at -= 1
            ranked.insert(at, pipeline)
        return ranked

    @property
    def cutoff_ms(self) -> float:
        """What does not rank below it is of no interest: that of the last of the best plans asked for."""
        return next((p.rank_ms for p in self.ranked()[self.top_k - 1 :]), np.inf)

    @property
    def worth_ms(self) -> float:  # what does not rank below it is as good as the cutoff
        return (1.0 - max(self.gap_fraction, OPTIMAL_GAP_FRACTION)) * self.cutoff_ms

    @property
    def gap_fraction(self) -> float:
        is_early = self.elapsed_s + self.saved_s < EXACT_S and not self.is_last_lap
        return 0.0 if is_early else PROVEN_ENOUGH_FRACTION

    @property
    def lower_bound_ms(self) -> float:  # what waits is not below what it waits for
        still = (p for p in self.pipelines if not (p.infeasible or p.twin or p.is_waiting))
        return min([self.agenda.branches.least_ms, *(p.bound_ms for p in still)])

    def open_pipelines(self) -> list[Pipeline]:
        """Those of which something is still to be known."""
        cutoff_ms, gap_fraction = self.cutoff_ms, self.gap_fraction
        return [p for p in self.pipelines if p.twin is None and not p.is_closed(cutoff_ms, gap_fraction)]

    def progress(self) -> Progress:
        best_ms = min((p.rank_ms for p in self.visited), default=np.inf)
        branches = self.agenda.branches
        num_open = sum(len(p.strategies) for p in self.open_pipelines()) + branches.num_open(self.cutoff_ms)
        lower_bound_ms = min(self.lower_bound_ms, best_ms)
        number = len(self.agenda.entries) + branches.num_unlisted
        return Progress(best_ms, lower_bound_ms, number - num_open, number, self.elapsed_s, self.left_s)

    # -------------------------------------------------------------------------------------------------------- placing

    def place_all(self, num_workers: int) -> None:
        """Visit pipelines until none is open, in this process first, in several if much seems left."""
        engine: Engine = InProcess(self.should_stop, self.take)
        self.telling.tell(self.progress)
        try:
            while not self.should_stop():
                while engine.free and not self.should_stop():
                    self.agenda.num_idle = engine.free if self.used_processes else 0
                    pipeline = self.next_open(engine.has_answer)
                    if pipeline is None:  # or an answer may tell more
                        break
                    engine.give(self.make_task(pipeline, num_workers))
                answer = engine.wait()
                if answer is None:
                    break
                self.take(answer)
                engine.tell_cutoff(self.cutoff_ms)
                may_spread = (num_workers > 1 or self.cluster is not None) and not self.used_processes
                if may_spread and (self.agenda.has_dived or seems_long(self.pipelines, self.open_pipelines())):
                    self.used_processes = True
                    start = self.cluster.start if self.cluster else partial(LocalProcesses, num_workers)
                    engine = start(self.should_stop)
            while (late := engine.wait()) is not None:
                self.take(late)
        finally:
            engine.close()
            self.engine_warnings = engine.warnings
        if self.used_processes and not self.should_stop():
            self.settle()
        self.telling.tell(self.progress, is_last=True)

    def take(self, answer: Answer) -> None:
        """Learn what came of a task, or a better placement on its way."""
        pipeline = self.pipelines[answer.number]
        probe_fill = pipeline.probe_fill_fraction if pipeline.is_probing else None
        pipeline.take(answer, self.cutoff_ms)
        if answer.is_last:
            if probe_fill is None:
                remember(self.cache, pipeline)
            else:
                remember_probe(self.cache, pipeline, probe_fill, answer)
            if pipeline.is_closed(self.cutoff_ms, self.gap_fraction):
                self.agenda.close(pipeline, self.cutoff_ms)
            elif pipeline.given_up:
                self.agenda.set_aside(pipeline, self.cutoff_ms)
            else:
                self.agenda.push(pipeline)
        self.telling.tell(self.progress)

    def next_open(self, should_pause: Callable[[], bool]) -> Pipeline | None:
        """The next pipeline to place, after what the cache knows of it; None where none is left, or on should_pause."""
        while True:
            wanted = self.cutoff_ms, self.gap_fraction, self.roughness.fraction(self.elapsed_s, self.left_s)
            pipeline = self.agenda.next_open(*wanted, self.should_stop, should_pause)
            if pipeline is None:
                if self.should_stop() or should_pause() or not self.roughness.begin_again(self.agenda, self.cutoff_ms):
                    return None
                continue
            was_known = self.recall(pipeline)
            if pipeline.is_closed(self.cutoff_ms, self.gap_fraction):
                self.agenda.close(pipeline, self.cutoff_ms)
            elif was_known:
                self.agenda.push(pipeline)
            else:
                return pipeline

    def recall(self, pipeline: Pipeline) -> bool:
        """Learn what the cache knows of the problem that is to be placed; whether that spares placing it."""
        answer = find_known(self.cache, pipeline)
        if answer is None:
            return False
        self.visit(pipeline)
        self.saved_s += answer.solve_s
        was_probing = pipeline.is_probing
        pipeline.take(replace(answer, solve_s=0.0), self.cutoff_ms)
        if was_probing:
            return True
        pipeline.num_slices, pipeline.num_unfinished, pipeline.cached_s = 0, 0, answer.solve_s
        if not pipeline.is_placed(self.gap_fraction):
            pipeline.level.num_slices = 0
        return pipeline.level.num_slices > 0

    def visit(self, pipeline: Pipeline) -> None:
        """Number it among those that were placed."""
        if pipeline.visit < 0:
            pipeline.visit = len(self.visited)
            self.visited.append(pipeline)

    def scout(self, pipelines: Iterator[Pipeline]) -> None:
        """Meet a plan of each that is of interest, as far as there is time for that."""
        until_s = self.left_s - scouting_s(self.elapsed_s, self.left_s)
        for pipeline in pipelines:
            if self.should_stop() or self.left_s < until_s:
                return
            if not pipeline.is_closed(self.cutoff_ms, self.gap_fraction):
                self.visit(pipeline)
                meet_at_once(pipeline)

    def make_task(self, pipeline: Pipeline, num_workers: int) -> Task:
        self.visit(pipeline)
        assert pipeline.problem is not None
        neighbours = (p for p in self.ranked() if p.problem and has_same_counts(p.problem, pipeline.problem))
        at_fill = pipeline.sounding.plan_within(pipeline.probe_fill_fraction) if pipeline.is_probing else None
        known = at_fill or pipeline.level.placement or pipeline.placement
        hint = known or next((p.placement for p in neighbours), None)
        if pipeline.strategies[0].schedule == FREE:
            hint = best_start(pipeline, self.ranked(), hint)
        problem, cutoff_ms = pipeline.level.problem or pipeline.problem, min(self.cutoff_ms, pipeline.rank_ms)
        if pipeline.is_probing:
            problem = pipeline.problem_at(pipeline.probe_fill_fraction)
            cutoff_ms = min(cutoff_ms, pipeline.raising.cutoff_ms)
        elif pipeline.trimming.problem:
            problem, cutoff_ms = pipeline.trimming.problem, pipeline.trimming.cutoff_ms
        else:
            cutoff_ms = min(cutoff_ms, pipeline.level.step_ms)
        time_limit_s = next_slice_s(pipeline)
        # a level of memory may do with less than its best: what a slice shows can let it descend
        is_last = pipeline.num_unfinished and not pipeline.is_probing and np.isinf(pipeline.level.fill_fraction)
        if is_last and sum(not p.is_waiting for p in self.open_pipelines()) <= num_workers:
            time_limit_s, self.is_last_lap = np.inf, True
        if np.isfinite(pipeline.level.fill_fraction) and not pipeline.raising.is_on:
            time_limit_s = level_slice_s(time_limit_s, pipeline.level.slice_s, self.elapsed_s, self.left_s)
        time_limit_s = min(time_limit_s, self.left_s)
        return Task(pipeline.number, problem, cutoff_ms, self.gap_fraction, time_limit_s, hint, pipeline.within_ms)

    def settle(self) -> None:
        """Place the winner once more, from nothing: which of equally fast placements was found depends on when other
        processes ended, and the same job should give the same plan."""
        winner = next(iter(self.ranked()), None)
        is_quick = winner is not None and 0.0 < winner.solve_s <= SETTLE_S and winner.is_closed(np.inf, 0.0)
        if winner is None or winner.problem is None or not is_quick:
            return
        engine = InProcess(self.should_stop)
        problem = winner.problem_at(winner.found_fill_fraction)
        engine.give(Task(winner.number, problem, np.inf, 0.0, min(2 * winner.solve_s + 1.0, self.left_s)))
        answer = engine.wait()
        if answer and answer.placement and answer.step_ms <= winner.step_ms * (1.0 + TIE_FRACTION):
            winner.settle(answer)
            if winner.found_fill_fraction == winner.level.fill_fraction:
                remember(self.cache, winner)

    # --------------------------------------------------------------------------------------------------------- ending

    def end(self) -> tuple[tuple[Estimate, ...], tuple[Candidate, ...]]:
        """The best plans, and what became of every strategy."""
        for pipeline in sorted(self.pipelines, key=lambda p: p.strategies[0].schedule != FREE):
            pipeline.learn_from_betters()
        batch = self.job.workload.global_batch_size
        estimates = []
        for pipeline in self.ranked()[: self.top_k]:
            assert pipeline.placement is not None
            assert pipeline.problem is not None
            plan = plan_from_placement(pipeline.problem, pipeline.placement, pipeline.strategies[0], batch)
            estimates.append(evaluate(self.costs, plan))
        ends = list_ends(self.agenda, self.cutoff_ms, self.worth_ms, self.gap_fraction, self.why_stopped())
        return tuple(estimates), tuple(ends)

    def result(self) -> SearchResult:
        """The end of the search. Raises NoFeasiblePlan, Unfinished, or BackendError (processes died) without a plan."""
        estimates, candidates = self.end()
        if not estimates and self.engine_warnings and self.why_stopped() == "processes died":
            raise BackendError(f"no plan was found: {'; '.join(self.engine_warnings)}")
        if not estimates:
            suffices = {s: p.overflow_suffices for p in self.pipelines if p.infeasible for s in p.strategies}
            raise_no_plan(self.costs, candidates, suffices, self.why_stopped(), self.should_stop)
        robust = None
        if self.job.search.choice == "robust" and not self.should_stop():
            near = find_contenders(self.costs, self.pipelines, estimates[0], self.ranked()[0].rank_ms, self.should_stop)
            robust = weigh(self.costs, near, max(self.top_k, NUM_FIRST_RUNS))
        objective = objective_of(self.job.search, self.ranked()[0], self.pipelines, self.lower_bound_ms)
        return SearchResult(
            estimates=estimates,
            objective=objective,
            lower_bound_ms=objective.rank_bound_ms * (objective.step_ms / objective.rank_ms),
            candidates=candidates,
            stopped=self.why_stopped(),
            elapsed_s=self.elapsed_s,
            robust=robust,
            warnings=(*estimates[0].warnings, *self.engine_warnings, *(self.cache.warnings if self.cache else ())),
        )

    def why_stopped(self) -> Stopped:
        if any(p.left_out for p in self.pipelines) and not self.interrupted and self.lower_bound_ms < self.worth_ms:
            return "time limit"  # which left no time for what is this close
        if not self.agenda.branches.num_open(self.worth_ms) and all(map(is_too_much, self.open_pipelines())):
            return "finished"
        if self.interrupted:
            return "interrupted"
        return "time limit" if self.left_s <= 0 else "processes died"
