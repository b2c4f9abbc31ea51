"""What one pass of a block computes, in either direction or in the parts of a backward: Problem's rule of times, once
for whoever writes rows of it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import ChainBlock, Mode

Way = Literal["forward", "backward", "input", "weight"]
"""Of a pass: forward, whole backward, or the gradient of inputs or of weights alone."""

Counts = NDArray[np.integer[Any]] | NDArray[np.floating[Any]]
"""[C] passes of each class of micro-batches."""


def block_ms(way: Way, block: ChainBlock) -> float:
    """Of one block in no mode."""
    if way == "forward":
        return block.forward_ms
    if way == "weight":
        return block.backward_weight_ms + block.split_extra_ms
    return block.backward_ms - (block.backward_weight_ms if way == "input" else 0.0)


def extra_ms(way: Way, mode: Mode) -> float:
    """What a block in `mode` takes beyond that; recompute goes before the gradient of inputs."""
    if way == "weight":
        return 0.0
    return mode.extra_forward_ms if way == "forward" else mode.extra_backward_ms
