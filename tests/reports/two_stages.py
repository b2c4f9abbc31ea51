"""A step that is small enough to be drawn by hand."""

from __future__ import annotations

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem
from mm_autoparallel.units import GIB

# Two stages of one layer: forward 1 ms, backward 2 ms, the first layer recomputed (1 ms more). Three micro-batches.
PROBLEM = Problem(
    num_stages=2,
    num_chunks=1,
    num_microbatches=3,
    schedule="1f1b",
    chain=(ChainBlock("layer", "text", 2, 1.0, 2.0, 2 * GIB, 1 * GIB, (Mode("recompute", 0.0, 1.0, 0.5 * GIB, 0.0),)),),
    memory_limit_bytes=(10.0 * GIB,) * 2,
    stage_static_bytes=(0.0, 0.0),
    stage_tail_ms=(0.0, 4.0),
    p2p_ms=(0.5,),
    p2p_ms_per_byte=(0.0,),
)
PLACEMENT = Placement(layers=((1,), (1,)), modes=(((1,),), ((0,),)))
