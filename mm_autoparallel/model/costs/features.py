"""Features: what encoders give the decoder, and which blocks make them."""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import Block, Projector, Traced


def hands_on(block: Block) -> bool:
    """Whether what a block puts out stays as it is until the decoder takes it."""
    of = block.structure
    return (isinstance(of, Projector) and bool(of.layer_sizes)) or (isinstance(of, Traced) and of.projects)
