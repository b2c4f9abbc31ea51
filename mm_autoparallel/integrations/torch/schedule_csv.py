"""A plan's schedule as torch.distributed.pipelining reads it: a row of actions for each pipeline rank.

An action is `[stage][F|B][micro-batch]`, where stage is chunk x PP + rank (torch/distributed/pipelining/schedules.py,
_Action.from_str). What `2F0` means here differs: action.py has the micro-batch first and the chunk last.
"""

from __future__ import annotations

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.planner.plan import Plan

MAX_ACTIONS = 2_000_000
"""Assumed: of all ranks together; 64 stages of 4 chunks run 3,900 micro-batches with as many."""


def write_csv(plan: Plan) -> str:
    """The order in which every stage of `plan` runs its forwards and backwards. Raises PlanError for more than
    `MAX_ACTIONS`."""
    strategy = plan.strategy
    if 2 * plan.num_microbatches * strategy.pp * strategy.vpp > MAX_ACTIONS:
        raise PlanError(
            f"plan: {plan.num_microbatches} micro-batches on PP {strategy.pp} with VPP {strategy.vpp} are more than "
            f"{MAX_ACTIONS:,} actions, the most that are written; plan with a smaller global batch or a larger MBS"
        )
    order_of = find_schedule(strategy.schedule, strategy.vpp).order
    rows = []
    for rank in range(strategy.pp):
        order = order_of(strategy.pp, strategy.vpp, plan.num_microbatches, rank).tolist()
        rows.append(",".join(f"{chunk * strategy.pp + rank}{'FB'[kind]}{micro}" for kind, chunk, micro in order))
    return "".join(f"{row}\n" for row in rows)
