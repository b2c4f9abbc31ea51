"""Plans of decoders drawn at random, and the jobs that they are for."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan

DENSE: dict[str, Any] = {
    "num-layers": 24,
    "hidden-size": 256,
    "ffn-hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 256,
    "max-position-embeddings": 256,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
}
"""Megatron-LM's flags of a small decoder."""

EXPERTS = DENSE | {"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 512}

_SIZES_ONLY = ("seq-length", "hidden-dropout", "attention-dropout")


def make_job(sizes: dict[str, Any], plan: Plan, **workload: Any) -> Job:
    """The job that `plan` is for. workload: its keys, over the usual ones."""
    model = {key: value for key, value in sizes.items() if key not in _SIZES_ONLY}
    kinds = {"context_parallel": plan.strategy.cp_kind} if plan.strategy.cp_kind else {}
    document = {
        "model": model | {"padded-vocab-size": 512},
        "cluster": {"num_nodes": max(1, plan.strategy.world_size // 8), "devices_per_node": 8, "device": "h100-80g"},
        "workload": {
            "global_batch_size": plan.global_batch_size,
            "seq_length": sizes["seq-length"],
            "stack": "megatron-te",
            **kinds,
            **workload,
        },
    }
    return parse_job(document, Path("drawn"))


def draw_decoder_plan(sizes: dict[str, Any], rng: random.Random) -> Plan:
    """Layers cut anywhere or evenly, recompute by number or selective or none, ZeRO of all stages."""
    pp, vpp = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 1, 2, 3))
    vpp = vpp if pp > 1 else 1
    tp, cp, dp = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 4))
    has_experts = "num-experts" in sizes
    ep = rng.choice([size for size in (1, 2, 4) if dp * cp % size == 0]) if has_experts else 1
    zero = rng.choice((0, 1, 2, 3) if pp == 1 else (0, 1))
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=dp,
        mbs=rng.choice((1, 2)),
        cp=cp,
        ep=ep,
        etp=1 if has_experts and tp > 1 and rng.random() < 0.5 else 0,
        vpp=vpp,
        zero=zero,
        optimizer_offload=zero == 1 and rng.random() < 0.25,
        rank_order="tp-cp-ep-pp-dp" if not has_experts and rng.random() < 0.25 else DEFAULT_RANK_ORDER,
        cp_kind=rng.choice(("", "ring", "all_to_all", "all_gather")) if cp > 1 else "",
    )
    num_layers, num_virtual = sizes["num-layers"], pp * vpp
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_virtual - 1)), num_layers]
    layers = tuple(after - before for before, after in pairwise(cuts))
    kind = rng.choice(("even", "ends", "any", "any"))
    if kind == "even" and num_layers % num_virtual == 0:
        layers = (num_layers // num_virtual,) * num_virtual
    elif kind == "ends" and vpp == 1 and pp > 2:
        middle = num_layers // (pp + 1)
        first = rng.randint(1, num_layers - middle * (pp - 2) - 1)
        layers = (first, *[middle] * (pp - 2), num_layers - first - middle * (pp - 2))
    mode = rng.choice(("none", "some", "number", "selective"))
    recompute, modes = (0,) * num_virtual, {}
    if mode == "some":
        recompute = tuple(rng.randint(0, held) for held in layers)
    elif mode == "number":
        number = rng.randint(1, max(layers))
        recompute = tuple(min(number, held) for held in layers)
    elif mode == "selective":
        modes = {"text": {"selective": layers}}
    batch = strategy.dp * strategy.mbs * strategy.pp * rng.choice((1, 2, 4))
    return Plan(strategy, {"text": layers}, {"text": recompute}, batch, modes=modes)
