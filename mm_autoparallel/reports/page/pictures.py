"""What a page draws of a plan beside its tasks: a map of its layout, and how its step spreads over drawn batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.over_batches import StepOverBatches
from mm_autoparallel.reports.page.report import Layout, Module, ModuleShare, Spread

MOST_REPLICAS = 16
"""Replicas of a module that are drawn; all others exchange features alike."""
_BINS, _SAME_FRACTION = 24, 1e-9
_MARKS = ("at_mean_ms", "mean_ms", "p95_ms", "p99_ms", "cvar95_ms")


def map_layout(estimate: Estimate, model: Model) -> Layout | None:
    """The layout of a plan, of several modules the first one's with the others'; None of the chain."""
    arrangement = estimate.plan.strategy.arrangement
    if arrangement is None:
        return None
    crossing = estimate.provenance["crossing"]
    found, begun = list[Layout](), 0
    for one in arrangement.each:
        told = crossing[one.encoder.name] if arrangement.others else crossing
        found.append(_map_one(estimate, model, one, told, begun))
        begun += one.num_stages_apart
    return found[0].model_copy(update={"others": tuple(found[1:])})


def share_modules(estimate: Estimate) -> tuple[ModuleShare, ...]:
    """What each encoder of a layout and its decoder take; nothing of the chain."""
    return tuple(
        ModuleShare(
            name=one.name,
            runs=one.layout,
            sizes=_list_sizes(one.sizes),
            work_ms=one.work_ms,
            held_bytes=one.held_bytes,
            kept_bytes=one.kept_bytes,
        )
        for one in estimate.modules
    )


def _list_sizes(module: ModuleLayout) -> dict[str, int]:
    return {name.upper(): getattr(module, name) for name in ("pp", "tp", "cp", "dp", "mbs")}


def _map_one(
    estimate: Estimate, model: Model, arrangement: Arrangement, crossing: Mapping[str, Any], begun: int
) -> Layout:
    """Of one module. begun: the stage that its own begin with, where they are apart."""
    own, whole = estimate.plan.strategy.of_decoder(), estimate.plan.strategy.arrangement
    assert whole is not None
    encoder = arrangement.encoder
    decoder = ModuleLayout("text", own.pp, own.tp, own.dp, own.mbs, own.cp, whole.decoder_offset)
    num_layers = {part.name: part.layers.num_layers for part in model.modalities}
    before, of_encoder = whole.num_stages_apart, sum(num_layers[part] for part in encoder.parts)
    modules = [
        _map_module(each, first, number)
        for each, first, number in (
            (encoder, begun if arrangement.apart else before, 0 if arrangement.is_cached else of_encoder),
            (decoder, before, num_layers["text"]),
        )
    ]
    return Layout(
        words=arrangement.words,
        encoder=modules[0],
        decoder=modules[1],
        pairs=tuple(
            (e, d)
            for e in range(len(modules[0].replicas))
            for d in range(len(modules[1].replicas))
            if e * decoder.dp < (d + 1) * encoder.dp and d * encoder.dp < (e + 1) * decoder.dp  # their samples overlap
        ),
        size_bytes=crossing["size_bytes"],
        forward_ms=crossing["forward_ms"],
        backward_ms=crossing["backward_ms"],
        blocks=crossing["blocks"],
        per="step" if arrangement.in_phases else "pass" if arrangement.in_bubbles else "micro_batch",
    )


def _map_module(module: ModuleLayout, first_stage: int, num_layers: int) -> Module:
    """Tensor and context parallel ranks stand side by side, replicas behind one another, then stages."""
    width = module.tp * module.cp
    firsts = [
        [module.rank_offset + (stage * module.dp + replica) * width for stage in range(module.pp)]
        for replica in range(min(module.dp, MOST_REPLICAS))
    ]
    return Module(
        name=module.name,
        first_stage=first_stage,
        sizes=_list_sizes(module),
        num_layers=num_layers,
        replicas=tuple(
            tuple(str(first) if width == 1 else f"{first}–{first + width - 1}" for first in stages) for stages in firsts
        ),
    )


def spread_steps(over: StepOverBatches | None) -> Spread | None:
    """Steps over drawn batches as a histogram; None where none were drawn."""
    if over is None:
        return None
    low, high = min(over.steps_ms), max(over.steps_ms)
    room_ms = 0.0 if high - low > _SAME_FRACTION * high else _SAME_FRACTION * high  # equal steps, but for rounding
    counts, edges = np.histogram(over.steps_ms, bins=_BINS, range=(low - room_ms, high + room_ms))
    told: Mapping[str, Any] = over.document()
    return Spread(
        words=over.words,
        low_ms=float(edges[0]),
        high_ms=float(edges[-1]),
        counts=tuple(counts.tolist()),
        marks_ms={name.removesuffix("_ms"): told[name] for name in _MARKS},
    )
