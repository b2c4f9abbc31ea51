"""Layout: how the devices of a stage share one layer, where layers of one stage may share them in several ways.

A stage has a number of devices and takes a number of samples in one micro-batch; a layout divides both among tensor
parallel, context parallel and data parallel ranks, and says how these hold weights. A mode (pipeline/problem.py) may
name a layout other than its block's own. Activations then change hands between two layers of different layouts, and
where a virtual stage begins and ends: hops between stages are in the blocks' own layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mm_autoparallel.pipeline.dominance import Dominance
from mm_autoparallel.pipeline.footprint import Footprint

SAME, LESS, FILL = Dominance.SAME, Dominance.LESS, Dominance.FILL


@dataclass(frozen=True)
class Layout:
    """What one layer takes in another layout than its block's own, for the stage's same micro-batch, on one device.

    Its figures stand in place of the block's of these names (problem.ChainBlock); activation_bytes is what a layer
    keeps that neither recomputes nor offloads.
    """

    name: Annotated[str, SAME]
    forward_ms: Annotated[float, LESS]
    backward_ms: Annotated[float, LESS]
    static_bytes: Annotated[float, LESS] = 0.0
    activation_bytes: Annotated[float, LESS] = 0.0
    transient_bytes: Annotated[float, LESS] = 0.0
    tail_ms: Annotated[float, LESS] = 0.0
    step_bytes: Annotated[float, LESS] = 0.0
    step_once_bytes: Annotated[float, LESS] = 0.0
    step_shard_bytes: Annotated[float | None, LESS] = None
    footprint: Annotated[Footprint | None, FILL] = None


@dataclass(frozen=True)
class Reshard:
    """What it takes a micro-batch to go from one layout to another between two layers, "" being the block's own.

    forward_ms: of its activations, before the layer in `target`; backward_ms: of their gradients, on the way back.
    """

    source: Annotated[str, SAME]
    target: Annotated[str, SAME]
    forward_ms: Annotated[float, LESS]
    backward_ms: Annotated[float, LESS]
