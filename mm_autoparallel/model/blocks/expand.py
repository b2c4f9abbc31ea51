"""expand: the model as one chain of blocks in the order data flows, each modality through its own function.

Encoders: a stem, layers, what follows them, and which of it sees gradients; an encoder depends on its own input alone,
so another that trains before it in the chain gives it no gradient. Text: the token embedding, which image and audio
tokens join, the layers, modules that predict one token more each, and the head with the loss; or images alone. Blocks
of a model that is known from traces are as they stand in its file (model/job/traced_model.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from mm_autoparallel.model.blocks.chain import (
    Adapters,
    AudioStem,
    Block,
    Chain,
    ImageHead,
    OutputHead,
    PatchEmbedding,
    PredictionModule,
    Projector,
    TokenEmbedding,
    Traced,
    TransformerLayer,
    structured,
)
from mm_autoparallel.model.blocks.layers import count_rotated, expand_layers, layer_structure
from mm_autoparallel.model.job.model import Decoder, Encoder, Images, Model, Patches
from mm_autoparallel.model.job.traced_model import TracedBlock, TracedDecoder, TracedEncoder, TracedModel


def expand(model: Model, whole_projectors: bool = False) -> Chain:
    """Encoders in the model's order, then text: `*_pre`, runs of equal layers, `*_post` of each.

    whole_projectors: every tensor parallel rank holds the whole of them, whatever the model says.
    """
    if isinstance(model, TracedModel):
        return Chain(tuple(_expand_traced(model)))
    encoders = [block for encoder in model.encoders for block in _expand_encoder(encoder)]
    # images that are packed have rotary positions of height and width, and so have their tokens among the text's
    own_positions = any(encoder.layers.packed for encoder in model.encoders)
    text = _expand_text(model.text, any(block.trainable for block in encoders), own_positions)
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


def _expand_encoder(encoder: Encoder) -> list[Block]:
    """`NAME_pre` on the stage of the first layer; the layers; the rest on the stage of the last layer.

    The rest is a final norm that is no part of the projector, the inner projectors (they read inner layers, but count
    as held and run beside the main one), and `NAME_post`, the projector.
    """
    name, trains = encoder.name, not encoder.freeze
    moves = trains or encoder.train_positions
    pre, stem = f"{name}_pre", _stem(encoder)
    first = Block(pre, pre, name, "pre", stem, 1, moves, propagates_gradient=False, attach="next")
    layers = expand_layers(name, encoder.layers, causal=False, trainable=trains, propagates_gradient=moves)
    post = []
    if encoder.final_norm:
        norm = Projector(encoder.final_norm, encoder.layers.hidden_size, merge_tokens=1, layer_sizes=())
        post.append(_post_block(f"{name}_norm", name, norm, trains, moves))
    if encoder.deepstack:
        inner, count = structured(Projector, encoder.deepstack), encoder.num_deepstack
        post.append(_post_block(f"{name}_deepstack", name, inner, not encoder.deepstack.freeze, moves, count))
    main = structured(Projector, encoder.projector)
    post.append(_post_block(f"{name}_post", name, main, not encoder.projector.freeze, moves))
    return [first, *layers, *post]


def _post_block(
    kind: str, modality: str, structure: Projector, trainable: bool, propagates_gradient: bool, count: int = 1
) -> Block:
    return Block(kind, kind, modality, "post", structure, count, trainable, propagates_gradient, attach="previous")


def _stem(encoder: Encoder) -> PatchEmbedding | AudioStem:
    """Patches become tokens by one matrix, mel frames by convolutions."""
    width = encoder.layers.hidden_size
    if isinstance(encoder.stem, Patches):
        return structured(PatchEmbedding, encoder.stem, hidden_size=width, rotary_dim=count_rotated(encoder.layers))
    return structured(AudioStem, encoder.stem, hidden_size=width)


def _expand_text(decoder: Decoder, encoders_train: bool, own_positions: bool = False) -> list[Block]:
    """`text_pre` on the stage of the first layer, the layers, `text_mtp` and `text_post` in the last stage.

    encoders_train: something that gives tokens to the decoder trains, so gradients go back through all of it even where
    the decoder itself is frozen. own_positions: samples differ in the positions of their tokens.
    """
    trains, width, norm = not decoder.freeze, decoder.layers.hidden_size, decoder.layers.norm
    reached = trains or encoders_train
    if decoder.images:
        return _expand_images(decoder, decoder.images)
    table = TokenEmbedding(
        decoder.vocab_size,
        width,
        decoder.num_positions,
        num_types=2 if decoder.masked else 0,
        rotary_dim=count_rotated(decoder.layers),
        own_positions=own_positions,
    )
    head = OutputHead(decoder.vocab_size, width, norm, tied=decoder.tied, masked=decoder.masked)
    layers = expand_layers("text", decoder.layers, decoder.causal, trainable=trains, propagates_gradient=reached)
    post = [Block("text_post", "text_post", "text", "post", head, 1, trains, reached, pinned="last")]
    if decoder.num_mtp:
        last = layer_structure(decoder.layers, decoder.layers.num_layers - 1, decoder.causal)
        module = PredictionModule(last, decoder.vocab_size, decoder.tied)
        count = decoder.num_mtp
        post.insert(0, Block("text_mtp", "text_mtp", "text", "post", module, count, trains, reached, pinned="last"))
    pre = Block("text_pre", "text_pre", "text", "pre", table, 1, trains, encoders_train, attach="next")
    return [pre, *layers, *post]


def _expand_images(decoder: Decoder, images: Images) -> list[Block]:
    """As text: patches become tokens, and the head gives classes or patches."""
    trains, width, patches = not decoder.freeze, decoder.layers.hidden_size, images.stem
    stem = structured(PatchEmbedding, patches, hidden_size=width, num_labels=images.num_labels)
    head = ImageHead(images.num_outputs, width, decoder.layers.norm, images.pooled, decoder.layers.modulated)
    return [
        Block("text_pre", "text_pre", "text", "pre", stem, 1, trains, propagates_gradient=False, attach="next"),
        *expand_layers("text", decoder.layers, causal=False, trainable=trains, propagates_gradient=trains),
        Block("text_post", "text_post", "text", "post", head, 1, trains, trains, pinned="last"),
    ]


def _expand_traced(model: TracedModel) -> list[Block]:
    """Encoders, then text; an encoder depends on its own input alone, text on all that trains before it."""
    blocks = [block for encoder in model.encoders for block in _expand_part(encoder, False)]
    return blocks + _expand_part(model.text, any(block.trainable for block in blocks))


def _expand_part(part: TracedEncoder | TracedDecoder, upstream: bool) -> list[Block]:
    again = Counter(block.kind for block in part.blocks if block.role == "layer")
    found: list[Block] = []
    reached, layer = upstream, 0
    for block in part.blocks:
        trains = _trains(part, block)
        is_text = isinstance(part, TracedDecoder)
        name = block.kind if again[block.kind] < 2 or block.role != "layer" else f"{block.kind}_{layer}"
        layer += block.count if block.role == "layer" else 0
        found.append(
            Block(
                name=name,
                kind=block.kind,
                modality=part.name,
                role=block.role,
                structure=_structure(part, block),
                count=block.count,
                trainable=trains,
                propagates_gradient=reached and block.trains_with != "nothing",
                attach=None if block.role == "layer" else "next" if block.role == "pre" else _post_attach(is_text),
                pinned="last" if is_text and block.role == "post" else None,
            )
        )
        reached = reached or trains
    return found


def _post_attach(is_text: bool) -> Literal["previous"] | None:
    return None if is_text else "previous"


def _trains(part: TracedEncoder | TracedDecoder, block: TracedBlock) -> bool:
    if block.trains_with == "nothing":
        return False
    if block.trains_with == "projector" and isinstance(part, TracedEncoder):
        return not part.projector_freeze
    return not part.freeze


def _structure(part: TracedEncoder | TracedDecoder, block: TracedBlock) -> Traced:
    ends_table = isinstance(part, TracedDecoder) and block.kind in ("text_pre", "text_post")
    return Traced(
        hidden_size=part.hidden_size,
        parameter_count=block.parameter_count,
        table_count=part.table_count if isinstance(part, TracedDecoder) and ends_table else 0,
        holds_table=block.role == "pre",
        projects=block.role == "post" and block.trains_with == "projector",
    )
