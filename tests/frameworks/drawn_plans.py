"""Plans drawn at random, for tests of what is written of them."""

from __future__ import annotations

import random
from dataclasses import replace

from mm_autoparallel.model.job.mindspeed_mm_law import list_whole
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.plan import Plan

MINDSPEED_MM = Workload(global_batch_size=1, seq_length=1, stack="mindspeed-mm")


def draw_plan(model: Model, strategy: Strategy, batch: int, rng: random.Random) -> Plan:
    """A chain of layers cut anywhere, audio where text begins, any recompute.

    A tower lies on one virtual stage where MindSpeed-MM asks for that; a packed one under TP may be spread instead,
    without sequence parallel.
    """
    num_virtual = strategy.pp * strategy.vpp
    chained = [m for m in model.modalities if m.name != "audio"]
    total = sum(m.layers.num_layers for m in chained)
    least = 1
    if strategy.tp > 1 and rng.random() < 0.5:
        strategy = replace(strategy, sequence_parallel=model.text.layers.experts is not None)
    if any(whole.modality == "vision" for whole in list_whole(model, MINDSPEED_MM, strategy)):
        least = min(model.encoders[0].layers.num_layers, total - num_virtual)
    cuts = [0, *sorted(rng.sample(range(least, total), num_virtual - 1)), total]
    layers, start = {}, 0
    for modality in model.modalities:
        end = start + modality.layers.num_layers * (modality.name != "audio")
        layers[modality.name] = tuple(max(0, min(end, cuts[k + 1]) - max(start, cuts[k])) for k in range(num_virtual))
        start = end
    if "audio" in layers:
        joins = next(k for k, count in enumerate(layers["text"]) if count)
        number = next(m.layers.num_layers for m in model.modalities if m.name == "audio")
        layers["audio"] = tuple(number * (k == joins) for k in range(num_virtual))
    recompute = {name: tuple(rng.randint(0, count) for count in counts) for name, counts in layers.items()}
    return Plan(strategy, layers, recompute, batch)
