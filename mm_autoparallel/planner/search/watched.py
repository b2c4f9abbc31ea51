"""A search that a person waits for: its kernels announced, its end in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.placement.compiling import PLACEMENT
from mm_autoparallel.pipeline.placement.orders.compiling import ORDERS
from mm_autoparallel.pipeline.placement.orders.v_shape.compiling import V_ORDERS
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS
from mm_autoparallel.pipeline.simulate.rooms import compile_rooms
from mm_autoparallel.pipeline.solve.engines.engine import Engine
from mm_autoparallel.pipeline.solve.engines.local_processes import LocalProcesses, count_cores
from mm_autoparallel.pipeline.solve.engines.ray_cluster import RayCluster
from mm_autoparallel.planner.search.check import Check, check_eliminated
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import describe_strategy
from mm_autoparallel.units import format_percent


def compile_search(schedules: Sequence[str] = (), max_vpp: int = 1) -> None:
    """Compile what a search runs before its clock does. schedules, max_vpp: the job's."""
    free = any(name and SCHEDULES[name].given_by == "placement" for name in schedules)
    compile_rooms((*(ORDERS if free else ()), *PLACEMENT, *(V_ORDERS if free and max_vpp >= V_CHUNKS else ())))


def check_watched(
    job: Job,
    result: SearchResult,
    number: int,
    should_stop: Callable[[], bool],
    cluster: RayCluster | None = None,
    on_done: Callable[[int, int], None] = lambda *_: None,
) -> Check:
    """`check_eliminated` on the cluster or this machine's cores. on_done: told how many of how many are placed."""
    engine: Engine = cluster.start(should_stop) if cluster else LocalProcesses(count_cores(), should_stop)
    return check_eliminated(job, result, number, engine, on_done)


def describe_end(result: SearchResult) -> str:
    """Lines: how many strategies ended how, what is known of all plans, what caution costs, what bounds spared, and
    what the rates leave open."""
    ends = Counter(candidate.status for candidate in result.candidates)
    told = ", ".join(f"{number} {status}" for status, number in ends.items())
    gap = f"{_describe_bound(result)} (gap {result.gap_fraction * 100:.3f} %)"
    how = "proven" if result.proven else f"not proven, {result.stopped}"
    head = f"{len(result.candidates)} strategies in {result.elapsed_s:.1f} s: {told}"
    lines = [head, f"{how}: {gap}", *_describe_caution(result), _describe_bounds(result), *_describe_robust(result)]
    lines += [one.words for one in (result.batch_ranking, result.step_end) if one]
    return "\n".join(lines)


def _describe_bound(result: SearchResult) -> str:
    """What no plan undercuts: where chances count that is no step, since a faster plan may fail more often."""
    goal, of = result.objective, " by its step of mean samples" if result.batch_ranking else ""
    of = " by its step alone" if result.step_end else of
    if goal.is_weighed:
        bound = f"no plan of this space ranks below {goal.rank_bound_ms:.2f} ms"
        return f"{bound}, this one ranks at {goal.rank_ms:.2f} ms{of}"
    fits = goal.fit_probability and f" that fits with a probability of {format_percent(goal.fit_probability)}"
    return f"no plan of this space{fits or ''} is below {result.lower_bound_ms:.2f} ms{of}"


def _describe_caution(result: SearchResult) -> list[str]:
    """What plans are ranked by where chances count, and what that costs; nothing where they decide nothing."""
    goal, answer = result.objective, result.estimates[0]
    if goal.fastest_ms is None or goal.fastest_oom_probability is None:
        return []
    lines = []
    if goal.is_weighed:
        price = f"{goal.failure_price:g} * P / (1 - P)"
        lines.append(f"plans are ranked by step * (1 + {price}), P their chance to run out of memory")
    ranking = result.batch_ranking or result.step_end
    if goal.caution_fraction > 0.0 and not (ranking and ranking.orders[0]):
        lines.append(
            f"caution costs {format_percent(goal.caution_fraction)}: the fastest plan met takes {goal.fastest_ms:.2f} "
            f"ms and runs out of memory with probability {format_percent(goal.fastest_oom_probability)}, this one with "
            f"{format_percent(answer.oom_probability)}"
        )
    return lines


def _describe_robust(result: SearchResult) -> list[str]:
    robust = result.robust
    if robust is None:
        return []
    best, answer = robust.contenders[0], robust.contenders[robust.answer]
    hangs = " and ".join(f"{name} ({format_percent(share)})" for name, share in robust.hangs_on_fraction)
    about = f"; their order hangs on {hangs}" if hangs else ""
    head = f"with the rates off as they may be, it is expected {format_percent(answer.expected_regret_fraction)} behind"
    if robust.answer:
        name = describe_strategy(best.estimate.plan.strategy)
        behind = format_percent(best.expected_regret_fraction)
        head += f" the best, and {name} {behind}: the plan that ranks first is written"
    else:
        head += f" the best, the least of {len(robust.contenders)} plans that could win"
    runs = [robust.contenders[i].estimate for i in robust.first_runs]
    chances = [format_percent(run.oom_probability) for run in runs]
    told = "; ".join(
        f"{describe_strategy(run.plan.strategy)} ({run.step_ms:.2f} ms, out of memory {chance})"
        for run, chance in zip(runs, chances, strict=True)
    )
    return [head + about, f"to try first: {told}"]


def _describe_bounds(result: SearchResult) -> str:
    lawful = [candidate for candidate in result.candidates if candidate.status != "unlawful"]
    num_eliminated = sum(candidate.is_eliminated for candidate in lawful)
    share = format_percent(num_eliminated / len(lawful))
    return f"bounds eliminated {num_eliminated} of {len(lawful)} lawful strategies ({share}) without a solver"


def describe_check(check: Check, result: SearchResult) -> str:
    """What the check of eliminated candidates showed, a line; and one for each mistake."""
    answer_ms = result.estimates[0].step_ms
    fastest = f"the fastest of them takes {check.fastest_ms:.2f} ms" if check.fastest_ms else "none of them fits"
    line = (
        f"check: {check.num_checked} of {check.num_eliminated} eliminated candidates placed: {fastest}, the "
        f"answer {answer_ms:.2f} ms; {check.num_settled} are proven to be no faster or not to fit, and "
        f"{len(check.mistakes)} contradict a bound"
    )
    return "\n".join([line, *check.mistakes])
