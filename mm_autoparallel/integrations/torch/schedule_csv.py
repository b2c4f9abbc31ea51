"""A plan's order as the CSV of torch.distributed.pipelining, and what torch cannot part in it (the rows themselves:
pipeline/schedules/torch_csv.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mm_autoparallel.pipeline.schedules.action import INPUT
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.schedules.orders import read_orders
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, check_number, write_rows
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of
from mm_autoparallel.pipeline.schedules.whole import join_at_inputs, join_backwards
from mm_autoparallel.planner.plan import Plan


def write_csv(plan: Plan) -> str:
    """The order in which every stage of `plan` runs its forwards and backwards, whole ones on its first virtual stage.
    Raises PlanError for more than `MAX_ACTIONS`."""
    orders = orders_of(plan)
    return write_rows(join_backwards(orders.stages, orders.num_chunks, orders.v_shaped, 1)[0], orders.v_shaped)


def orders_of(plan: Plan) -> Orders:
    """The order of every stage of `plan`: found, given, or its schedule's. Raises PlanError for more than
    `MAX_ACTIONS`."""
    strategy = plan.strategy
    schedule = find_schedule(strategy.schedule, strategy.vpp)
    sizes = strategy.pp, strategy.vpp, plan.num_microbatches
    check_number(*sizes, "plan with a smaller global batch or a larger MBS")
    if plan.stage_orders:
        stages = read_orders(plan.stage_orders, *sizes)
    else:
        stages = tuple(schedule.order(*sizes, rank) for rank in range(strategy.pp))
    return Orders(stages, *sizes[1:], schedule.v_shaped)


def join_untrained(orders: Orders, num_frozen: int) -> tuple[Orders, str]:
    """`orders` as torch trains under them where the first `num_frozen` virtual stages train nothing, and what changed.

    The input of the first stage that trains needs no gradient. There torch's I does nothing on virtual stage 0, and W
    is the whole backward; on a later stage W gives no gradients at all, without a word. So that stage, and those before
    it, whose backward does nothing, run whole backwards. Nothing is said where they did already.
    """
    stages, parted = join_backwards(orders.stages, orders.num_chunks, orders.v_shaped, num_frozen + 1)
    if not parted:
        return orders, ""
    which = f"virtual stage{'s' * (len(parted) > 1)} {', '.join(map(str, parted))}"
    why = "the input of the first stage that trains needs no gradient, and torch cannot part a backward there"
    joined = Orders(stages, orders.num_chunks, orders.num_microbatches, orders.v_shaped)
    return joined, f"{which}: each I and W is written as one B, because {why}"


def join_recomputed(orders: Orders, recomputing: Sequence[int]) -> tuple[Orders, str]:
    """`orders` with whole backwards on the virtual stages that recompute layers, and what changed.

    torch computes weight gradients group by group, and runs a recomputed layer once more for each: W of a decoder layer
    takes ten times its forward (tests/benchmarks/example_orders.py measures it). Nothing is said where none is parted.
    """
    parted = [k for k in recomputing if _is_parted(orders, k)]
    if not parted:
        return orders, ""
    stages = join_at_inputs(orders.stages, orders.num_chunks, orders.v_shaped, parted)
    joined = Orders(stages, orders.num_chunks, orders.num_microbatches, orders.v_shaped)
    which = f"virtual stage{'s' * (len(parted) > 1)} {', '.join(map(str, parted))}"
    why = "torch's W would run each recomputed layer again for each of its weights"
    return joined, f"{which}: each I and W is written as one B, because {why}"


def _is_parted(orders: Orders, k: int) -> bool:
    num_stages = len(orders.stages)
    order = orders.stages[stage_of(k, num_stages, orders.v_shaped)]
    return bool(np.any((order[:, 0] == INPUT) & (order[:, 1] == k // num_stages)))


def find_frozen(layers: Sequence[Sequence[int]], untrained: Sequence[bool]) -> int:
    """How many virtual stages come before the first that holds something that trains, all of them if none does.

    layers: [virtual stages][blocks] how many each holds; untrained: of blocks.
    """
    trains = [any(count and not frozen for count, frozen in zip(held, untrained, strict=True)) for held in layers]
    return trains.index(True) if True in trains else len(trains)
