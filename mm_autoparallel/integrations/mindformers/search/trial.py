"""A candidate made small enough to be profiled on the devices at hand, its layers as they are.

Stages are taken away first, then data parallel ranks, and layers with them: what a layer computes and exchanges stays,
as far as its groups do. Two stages are kept where there are more, so that the ends stand apart. Every stage but the
last is recomputed; of the last as few layers as memory asks for, so that a profile shows layers both ways.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.memory_figures import MemoryFigures
from mm_autoparallel.integrations.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.search.lowest_memory import (
    lowest_of,
    memory_problem,
    most_layers,
    peaks_of,
)
from mm_autoparallel.integrations.mindformers.search.sized_memory import figures_of
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.planner.search.space import divisors

_LEAST_OF_KIND = 2
"""Layers of the last kind that a trial has recomputed, and not: the time of one is the distance of two."""


@dataclass(frozen=True)
class Trial:
    """divided: the candidate as it is profiled, one chunk a stage. layout: what its stages hold and recompute."""

    divided: Pretrain
    layout: Layout


def shrink(divided: Pretrain, rank_num: int, reserve_bytes: float | None = None) -> Trial | str:
    """The trial of a candidate on at most `rank_num` devices, or why there is none. reserve_bytes: see
    sized_memory.py, reserve_of.
    """
    reason = ""
    for dp, pp in _sizes(divided, rank_num):
        smaller = replace(divided, dp=dp, pp=pp, vp=1, num_microbatches=max(divided.num_microbatches, pp))
        try:
            job = build_job(smaller)
            unlawful = unlawful_reason(job.model, job.cluster, job.workload, strategy_of(smaller))
            trial = None if unlawful else _with_fewer_layers(divided, smaller, reserve_bytes)
        except JobError as error:  # of this candidate alone
            unlawful, trial = str(error), None
        if unlawful:
            reason = reason or unlawful
            continue
        if trial:
            return trial
        reason = "memory: of layers of each kind, recomputed and not, too few fit"
    least = divided.tp * divided.cp
    if not reason:
        reason = f"TP {divided.tp} x CP {divided.cp} alone are {least} devices"
    return f"{rank_num} devices are too few: {reason}"


def _sizes(divided: Pretrain, rank_num: int) -> Iterator[tuple[int, int]]:
    """dp and pp to try, the largest first: fewer stages, then fewer data parallel ranks, then a single stage."""
    ranks = divided.tp * divided.cp
    fewest = min(2, divided.pp)
    stages = [pp for pp in reversed(divisors(divided.pp)) if pp >= fewest]
    tried = [(divided.dp, pp) for pp in stages]
    tried += [(dp, pp) for pp in dict.fromkeys((fewest, 1)) for dp in reversed(divisors(divided.dp))]
    for dp, pp in dict.fromkeys(tried):
        if ranks * dp * pp <= rank_num:
            yield dp, pp


def _with_fewer_layers(whole: Pretrain, smaller: Pretrain, reserve_bytes: float | None) -> Trial | None:
    """`smaller` with as many layers as its share of the stages, or as many as fit.

    Multi-token prediction modules count among num_layers and stay, but are no layers that a stage could hold alone.
    """
    least = max(smaller.pp, whole.num_dense + 2 * _LEAST_OF_KIND) + whole.mtp_depth
    most = min(max(least, whole.num_layers * smaller.pp // whole.pp), whole.num_layers)
    if most < least:
        return None
    largest = replace(smaller, num_layers=most)
    most = min(most, most_layers(memory_problem(largest, _figures(largest, reserve_bytes)), _LEAST_OF_KIND))
    for num_layers in range(most, least - 1, -1):
        candidate = replace(smaller, num_layers=num_layers)
        memory = _figures(candidate, reserve_bytes)
        lowest = lowest_of(candidate, memory)
        if lowest.reason:
            continue
        layout = _find_layout(memory_problem(candidate, memory), lowest.layout, candidate.num_dense)
        if layout:
            return Trial(candidate, layout)
    return None


def _figures(divided: Pretrain, reserve_bytes: float | None) -> MemoryFigures:
    job = build_job(divided)
    return figures_of(divided, build_problem(job, strategy_of(divided)), job.workload, reserve_bytes)


def _find_layout(problem: Problem, lowest: Layout, num_dense: int) -> Layout | None:
    """Of layouts that fit and show layers both ways, that with fewest layers moved from the last stage of `lowest` to
    the first, and of those with fewest recomputed there. Neither fewer layers nor more recomputed ones need more room.
    """
    (layers,) = lowest.layers
    last = problem.num_stages - 1

    def layout_of(moved: int, again: int) -> Layout:
        shifted = (layers[0] + moved, *layers[1:-1], layers[-1] - moved) if moved else layers
        return Layout((shifted,), ((*shifted[:-1], max(0, again)),))

    def overfull(moved: int) -> list[int]:
        return overfull_stages(problem, peaks_of(problem, layout_of(moved, layers[-1] - moved - _LEAST_OF_KIND)))

    moves = range(layers[-1] if last else 1)
    fewest = bisect_left(moves, True, key=lambda moved: last not in overfull(moved))
    for moved in moves[fewest:]:
        if 0 in overfull(moved):
            return None  # the first stage has no room for more

        def is_right(again: int, moved: int = moved) -> bool:
            layout = layout_of(moved, again)
            fits = not overfull_stages(problem, peaks_of(problem, layout))
            return fits and _shows_recompute(layout, num_dense)

        tries = range(max(0, layers[-1] - moved - _LEAST_OF_KIND + 1))
        again = bisect_left(tries, True, key=is_right)
        if again < len(tries):
            return layout_of(moved, again)
    return None


def _shows_recompute(layout: Layout, num_dense: int) -> bool:
    """Whether some stage recomputes enough layers of the last kind."""
    return any(
        again - (num_dense if stage == 0 else 0) >= _LEAST_OF_KIND for stage, again in enumerate(layout.recompute[0])
    )
