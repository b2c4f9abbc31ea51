"""Cut: a plan for many devices as a training that few can run, as Auto Settings cuts what it measures.

What divides a layer stays (TP, CP, EP as far as there are replicas, ZeRO); stages, chunks and micro-batches become one.
One stage's layers are left of the model, and two micro-batches of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

TEXT = "text"
NUM_MICRO_BATCHES = 2


def cut_plan(plan: Plan, num_devices: int) -> Plan | None:
    """`plan` on `num_devices`: itself where it is for so many, None where these cannot divide a layer as it does."""
    strategy = plan.strategy
    if strategy.world_size == num_devices:
        return plan
    dp, rest = divmod(num_devices, strategy.tp * strategy.cp)
    if rest or dp < 1:
        return None
    cut = Strategy(
        pp=1,
        tp=strategy.tp,
        dp=dp,
        mbs=1,
        cp=strategy.cp,
        ep=math.gcd(strategy.ep, dp * strategy.cp),
        zero=strategy.zero,
        etp=strategy.etp,
        cp_kind=strategy.cp_kind,
        sequence_parallel=strategy.sequence_parallel,
    )
    num_layers = max(1, sum(plan.layers[TEXT]) // strategy.pp)
    recomputed = num_layers if any(plan.recompute[TEXT]) else 0
    return replace(
        plan,
        strategy=cut,
        layers={TEXT: (num_layers,)},
        recompute={TEXT: (recomputed,)},
        global_batch_size=dp * NUM_MICRO_BATCHES,
        modes={},
        warnings=(),
    )


def cut_job(job: Mapping[str, Any], plan: Plan, num_nodes: int, devices_per_node: int) -> dict[str, Any]:
    """The job, as in a file, of the one strategy that `plan` has, with its layers and its batch on these devices."""
    strategy, num_layers = plan.strategy, sum(plan.layers[TEXT])
    layers = {**job["model"]["text"]["layers"], "num_layers": num_layers}
    if layers.get("experts"):
        dense = [number for number in layers["experts"]["dense_layers"] if number < num_layers]
        layers["experts"] = {**layers["experts"], "dense_layers": dense}
    sizes = ("pp", "tp", "cp", "dp", "ep", "mbs", "zero", "etp", "sequence_parallel")
    return {
        **job,
        "model": {**job["model"], "text": {**job["model"]["text"], "layers": layers}},
        "cluster": {
            "num_nodes": num_nodes,
            "devices_per_node": devices_per_node,
            "device": job["cluster"]["device"],  # levels of the network are its usual ones
        },
        "workload": {**job["workload"], "global_batch_size": plan.global_batch_size},
        "search": {**job["search"], **{name: [getattr(strategy, name)] for name in sizes}, "max_vpp": strategy.vpp},
    }
