"""Plans drawn at random, for tests of what is written of them."""

from __future__ import annotations

import random

from mm_autoparallel.job.model import Model
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.plan import Plan


def draw_plan(model: Model, strategy: Strategy, batch: int, rng: random.Random) -> Plan:
    """A chain of layers cut anywhere, audio where text begins, any recompute."""
    num_virtual = strategy.pp * strategy.vpp
    chained = [m for m in model.modalities if m.name != "audio"]
    total = sum(m.layers.num_layers for m in chained)
    cuts = [0, *sorted(rng.sample(range(1, total), num_virtual - 1)), total]
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
