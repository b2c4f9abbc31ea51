"""expand: the model as one chain of blocks in the order data flows, each modality through its own function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Adapters, Block, Chain, Projector, TransformerLayer
from mm_autoparallel.model.blocks.encoder import expand_encoder
from mm_autoparallel.model.blocks.text import expand_text
from mm_autoparallel.model.blocks.traced import expand_traced
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.traced_model import TracedModel


def expand(model: Model, whole_projectors: bool = False) -> Chain:
    """Encoders in the model's order, then text: `*_pre`, runs of equal layers, `*_post` of each.

    whole_projectors: every tensor parallel rank holds the whole of them, whatever the model says.
    """
    if isinstance(model, TracedModel):
        return Chain(tuple(expand_traced(model)))
    encoders = [block for encoder in model.encoders for block in expand_encoder(encoder)]
    # images that are packed have rotary positions of height and width, and so have their tokens among the text's
    own_positions = any(encoder.layers.packed for encoder in model.encoders)
    text = expand_text(model.text, any(block.trainable for block in encoders), own_positions)
    blocks = tuple(encoders + text)
    if model.adapters:
        blocks = tuple(_adapt(blocks, Adapters(**model.adapters.model_dump())))
    return Chain(tuple(_make_whole(block) for block in blocks) if whole_projectors else blocks)


def _adapt(blocks: Sequence[Block], adapters: Adapters) -> Iterator[Block]:
    """Layers that would train have adapters that do, and nothing else trains; gradients pass all behind the first.

    The input of the first text layer has a gradient too, which is Megatron's way where layers recompute.
    """
    passed: set[str] = set()  # modalities with adapters so far
    for block in blocks:
        if block.role == "layer" and block.trainable:
            assert isinstance(block.structure, TransformerLayer)
            passed.add(block.modality)
            yield replace(block, structure=replace(block.structure, adapters=adapters))
        else:
            reached = bool(passed) if block.modality == "text" else block.modality in passed
            yield replace(block, trainable=False, propagates_gradient=reached)


def _make_whole(block: Block) -> Block:
    if not isinstance(block.structure, Projector):
        return block
    return replace(block, structure=replace(block.structure, replicated=True))
