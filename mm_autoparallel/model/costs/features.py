"""Features: what encoders give the decoder, which blocks make them, and what of them crosses a cut."""

from __future__ import annotations

from collections.abc import Sequence

from mm_autoparallel.model.blocks.chain import Block, Chain, Projector, Traced
from mm_autoparallel.model.profiles.cost import BlockCost


def hands_on(block: Block) -> bool:
    """Whether what a block puts out stays as it is until the decoder takes it."""
    of = block.structure
    return (isinstance(of, Projector) and bool(of.layer_sizes)) or (isinstance(of, Traced) and of.projects)


def list_output_bytes(chain: Chain, costs: Sequence[BlockCost]) -> tuple[float, ...]:
    """What crosses a cut after each block: its output, and what encoders have made ready for the decoder so far."""
    ready_bytes, outputs = 0.0, []
    for block, cost in zip(chain.blocks, costs, strict=True):
        if block.modality == chain.modalities[-1]:
            outputs.append(cost.output_bytes)
        elif hands_on(block):
            ready_bytes += cost.output_bytes * block.count
            outputs.append(ready_bytes)
        else:
            outputs.append(ready_bytes + cost.output_bytes)
    return tuple(outputs)
