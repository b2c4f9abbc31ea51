"""Starts: what is known of named orders there and back, as a beginning where such an order is to be found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.schedules.action import format_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.planner.search.pipeline import Pipeline


def best_start(pipeline: Pipeline, ranked: Sequence[Pipeline], known: Placement | None) -> Placement | None:
    """`known`, or the fastest placement of the same sizes under an order there and back that has a name, written out.

    ranked: pipelines with a plan. A named order whose placement is slower than the best that is known is none.
    """
    own = pipeline.strategies[0]
    best, least_ms = known, pipeline.step_ms if known is not None else float("inf")
    for other in ranked:
        strategy = next((one for one in other.strategies if replace(one, schedule=own.schedule) == own), None)
        if strategy is None or strategy == own or other.placement is None or other.step_ms >= least_ms:
            continue
        schedule = SCHEDULES[strategy.schedule]
        if schedule.v_shaped and not schedule.pairs:
            sizes = strategy.pp, strategy.vpp, pipeline.num_microbatches
            orders = tuple(format_order(schedule.order(*sizes, stage)) for stage in range(strategy.pp))
            best, least_ms = replace(other.placement, orders=orders), other.step_ms
    return best
