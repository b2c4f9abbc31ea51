"""Starts: what is known of named orders, as a beginning where such an order is to be found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mm_autoparallel.pipeline.problem import ChainBlock, Placement
from mm_autoparallel.pipeline.schedules.action import format_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.planner.search.pipeline import Pipeline


def best_start(pipeline: Pipeline, ranked: Sequence[Pipeline], known: Placement | None) -> Placement | None:
    """`known`, or the fastest placement of such sizes in a named order, of one chunk or there and back, written out.

    ranked: pipelines with a plan. A named order whose placement is slower than the best that is known is none.
    """
    own = pipeline.strategies[0]
    best, least_ms = known, pipeline.step_ms if known is not None else float("inf")
    for other in ranked:
        strategy = next((one for one in other.strategies if replace(one, schedule=own.schedule) == own), None)
        if strategy is None or strategy == own or other.step_ms >= least_ms:
            continue
        schedule = SCHEDULES[strategy.schedule]
        same = _in_modes_of(pipeline, other)
        if same is not None and (schedule.v_shaped or strategy.vpp == 1) and not schedule.pairs:
            sizes = strategy.pp, strategy.vpp, pipeline.num_microbatches
            orders = tuple(format_order(schedule.order(*sizes, stage)) for stage in range(strategy.pp))
            best, least_ms = replace(same, orders=orders), other.step_ms
    return best


def _in_modes_of(pipeline: Pipeline, other: Pipeline) -> Placement | None:
    """The placement of another one of the same sizes, its modes counted by name in those that are left of this one's;
    None where one of them is not left."""
    placement, theirs, own = other.placement, other.problem, pipeline.problem
    if placement is None or theirs is None or own is None:
        return None
    modes = tuple(tuple(map(_renamed, theirs.chain, own.chain, counts)) for counts in placement.modes)
    if any(
        sum(new) != sum(old)
        for rows in zip(modes, placement.modes, strict=True)
        for new, old in zip(*rows, strict=True)
    ):
        return None
    return replace(placement, modes=modes)


def _renamed(known: ChainBlock, own: ChainBlock, counts: tuple[int, ...]) -> tuple[int, ...]:
    named = {mode.name: number for mode, number in zip(known.modes, counts, strict=True)}
    return tuple(named.get(mode.name, 0) for mode in own.modes)
