"""The operators of what stands before and after a modality's layers: embeddings, stems, projectors, heads.

Letters as in layers.py; v is the part of the vocabulary that one tensor-parallel rank holds. Stems are whole
on every rank; the scatter of their output into the sequence-parallel region is charged like a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mm_autoparallel.model.blocks.chain import (
    AudioStem,
    ImageHead,
    OutputHead,
    PatchEmbedding,
    PredictionModule,
    Projector,
    Structure,
    TokenEmbedding,
    Traced,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import NUM_WAVES
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.precision import of_prediction
from mm_autoparallel.model.operators.convolutions import add_convolutions, list_mel_convolutions
from mm_autoparallel.model.operators.head import list_head, list_output_head
from mm_autoparallel.model.operators.layers import list_layer
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    keep_norm,
    stream_norm,
)

_E = ELEMENT_BYTES


def list_operators(structure: Structure, tokens: TokenCounts, share: Share) -> Operators:
    """The operators of any block for one micro-batch of `tokens` per sample, on one device."""
    if isinstance(structure, TransformerLayer):
        return list_layer(structure, tokens, share)
    if isinstance(structure, Traced):
        return Operators()  # its figures are those of its traces alone
    if isinstance(structure, TokenEmbedding):
        return _list_token_embedding(structure, tokens, share)
    if isinstance(structure, PatchEmbedding):
        return _list_patch_embedding(structure, tokens, share)
    if isinstance(structure, AudioStem):
        return _list_audio_stem(structure, tokens, share)
    if isinstance(structure, Projector):
        operators = _list_projector(structure, tokens, share)
        return add_convolutions(operators, structure, tokens, share) if structure.convolutions else operators
    if isinstance(structure, ImageHead):
        return _list_image_head(structure, tokens, share)
    if isinstance(structure, PredictionModule):
        return _list_prediction_module(structure, tokens, share)
    return list_head(structure, tokens, share)


def _list_token_embedding(embedding: TokenEmbedding, tokens: TokenCounts, share: Share) -> Operators:
    n, h, v = share.rows(tokens.layer_tokens), embedding.hidden_size, embedding.vocab_size / share.tp
    whole, table_gradient = _E * n * h, _E * v * h
    # rows are read and written, then image and audio tokens are put in their places; where the table trains its
    # gradient is written whole, then added to the one that is accumulated
    streams = [Stream("look-up", 4 * whole, 2 * whole, 2 * table_gradient)]
    saved = [Saved("token numbers", 8 * n, for_weight=True)]
    if share.eager and embedding.rotary_dim:
        num_rows = n if embedding.own_positions else n / share.mbs
        saved.append(Saved("cosines and sines of all layers' rotations", 2 * _E * num_rows * embedding.rotary_dim))
    if embedding.num_types:
        streams.append(Stream("added token types", 2 * whole, 0.0, whole))
    if embedding.num_positions:
        # their gradient is a sum over samples
        streams.append(Stream("added positions", 2 * whole, 0.0, whole))
        if share.eager:
            saved.append(Saved("position numbers", 8 * n / share.mbs, for_weight=True))
    if share.hidden_dropout:
        mask_bytes = n * h / share.sp  # one byte a number
        moved_bytes = 2 * whole / share.sp + mask_bytes
        streams.append(Stream("dropout", moved_bytes, moved_bytes))
        saved.append(Saved("dropout mask", mask_bytes))
    return Operators(
        # a product of no flops: the sum of what each rank found in its part of the vocabulary
        products=(MatrixProduct(0.0, 0.0, 0.0, summed_bytes=whole),),
        streams=tuple(streams),
        saved=tuple(saved),
        forward_only=(Passing("output before it is summed", whole),),
        with_backward=(
            Passing("output before it is summed", whole),
            Passing("gathered gradient and gradient of the table", whole, table_gradient),
        ),
        input_bytes=8 * n,
        output_bytes=whole / share.sp,
    )


def _list_patch_embedding(embedding: PatchEmbedding, tokens: TokenCounts, share: Share) -> Operators:
    n, h = share.rows(tokens.input_tokens), embedding.hidden_size
    pixels, output = _E * n * embedding.in_features, _E * n * h
    streams, saved = [], [Saved("pixels", pixels, for_weight=True)]
    if share.eager and embedding.rotary_dim:
        saved.append(Saved("fp32 cosines and sines of all layers' rotations", 2 * 4 * n * embedding.rotary_dim))
    if embedding.num_positions:
        streams.append(Stream("added positions", 2 * output, output))
    if embedding.norm:
        streams.append(stream_norm("norm", n * h, embedding.norm, share))
        saved += keep_norm("norm", embedding.norm, n, h, share)
    products = [MatrixProduct(n, embedding.in_features, h, summed_bytes=output, entry=True)]
    if embedding.num_labels:
        # of one vector a sample: what it keeps is nothing beside tokens
        products += [MatrixProduct(share.mbs, NUM_WAVES, h, entry=True), MatrixProduct(share.mbs, h, h)]
    return Operators(
        products=tuple(products),
        streams=tuple(streams),
        saved=tuple(saved),
        forward_only=(Passing("pixels and tokens", pixels + output),),
        with_backward=(Passing("whole gradient", output, _E * embedding.in_features * h),),
        input_bytes=pixels,
        output_bytes=_E * share.rows(tokens.layer_tokens) * h / share.sp,
    )


def _list_audio_stem(stem: AudioStem, tokens: TokenCounts, share: Share) -> Operators:
    """Convolutions of kernel 3 as products over three neighbours, each followed by a GELU."""
    if stem.conv_channels:
        return list_mel_convolutions(stem, tokens, share)
    frames, n, h = share.rows(tokens.input_tokens), share.rows(tokens.layer_tokens), stem.hidden_size
    mel, first, second = _E * frames * stem.num_mel_bins, _E * frames * h, _E * n * h
    return Operators(
        products=(
            MatrixProduct(frames, 3 * stem.num_mel_bins, h, entry=True),
            MatrixProduct(n, 3 * h, h, summed_bytes=second),
        ),
        streams=(Stream("activations and positions", 2 * first + 4 * second, 3 * first + 4 * second),),
        saved=(
            Saved("mel frames", mel, for_weight=True),
            Saved("first convolution's output", first),
            Saved("its activation", first, for_weight=True),
            Saved("second convolution's output", second),
        ),
        forward_only=(Passing("both outputs of the first convolution", mel + 2 * first),),
        with_backward=(Passing("gradients", 2 * first + second, _E * 3 * h * h),),
        input_bytes=mel,
        output_bytes=second / share.sp,
    )


def _list_projector(projector: Projector, tokens: TokenCounts, share: Share) -> Operators:
    """Matrices alternate between column and row parallel; between two of them stands a GELU.

    transformers' are whole: tokens are joined before them, and every rank does the same with all of them.
    """
    n, sizes = share.rows(tokens.output_tokens), projector.layer_sizes
    sp = 1 if share.eager else share.sp
    tp = 1 if projector.replicated or share.eager else share.tp
    elements = n * sizes[0] if sizes else share.rows(tokens.layer_tokens) * projector.norm_size
    shared_bytes = _E * elements
    boundary = shared_bytes / sp
    streams: list[Stream] = []
    saved: list[Saved] = []
    if projector.norm:
        row_count = elements / projector.norm_size / sp
        streams.append(stream_norm("norm", elements / sp, projector.norm, share))
        saved += keep_norm("norm", projector.norm, row_count, projector.norm_size, share)
    products, inner = [], 0.0
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        by_columns, last = index % 2 == 0, index == len(sizes) - 2
        saved.append(Saved(f"input of matrix {index + 1}", inner or boundary, for_weight=True))
        products.append(
            MatrixProduct(
                n,
                inputs if by_columns else inputs / tp,
                outputs / tp if by_columns else outputs,
                gathered_bytes=shared_bytes if index == 0 else 0.0,
                # a last matrix by columns gathers its output, which moves as much as a sum scatters
                summed_bytes=_E * n * outputs if (not by_columns or last) and not share.eager else 0.0,
                entry=index == 0,
            )
        )
        if not last:
            inner = _E * n * outputs / (tp if by_columns else sp)
            streams.append(Stream(f"activation {index + 1}", 2 * inner, 3 * inner))
            saved.append(Saved(f"input of activation {index + 1}", inner))
    if projector.gated_ffn_size:
        # the activation between the matrices and it, then both its products
        inner, width = _E * n * sizes[-1] / sp, projector.gated_ffn_size / tp
        gated, activation = _E * n * 2 * width, _E * n * width
        products += [MatrixProduct(n, sizes[-1], 2 * width), MatrixProduct(n, width, sizes[-1])]
        streams.append(Stream("activations of the feed-forward", 2 * inner + gated + activation, 3 * inner + 2 * gated))
        saved += [
            Saved("input of the activation before the feed-forward", inner),
            Saved("input of the feed-forward", inner, for_weight=True),
            Saved("its first product's output", gated),
            Saved("its activation", activation, for_weight=True),
        ]
    if share.eager and not sizes:
        saved = []  # LLaVA's is CLIP's norm of the class token, whose output goes unused
    output = _E * n * sizes[-1] if sizes else shared_bytes
    largest_weight = max((_E * product.input_count * product.output_count for product in products), default=0.0)
    return Operators(
        products=tuple(products),
        streams=tuple(streams),
        saved=tuple(saved),
        forward_only=(Passing("whole input, inner tensors and whole output", shared_bytes + 2 * inner + output),),
        with_backward=(
            Passing(
                "whole gradients of input, inner tensors and output", shared_bytes + inner + output, largest_weight
            ),
        ),
        input_bytes=shared_bytes / share.sp,
        output_bytes=output / sp,
    )


def _list_image_head(head: ImageHead, tokens: TokenCounts, share: Share) -> Operators:
    """A norm of every token, and a matrix that is whole on every rank; its loss in fp32."""
    h, tokens_seen = head.hidden_size, share.rows(tokens.layer_tokens)
    n = share.mbs if head.pooled else tokens_seen
    boundary, outputs = _E * tokens_seen * h / share.sp, n * head.num_outputs
    row_count = tokens_seen / share.sp
    saved = [*keep_norm("norm", head.norm, row_count, h, share)]
    streams = [
        stream_norm("norm", row_count * h, head.norm, share),
        Stream("loss", (2 + 4 + 4) * outputs, (4 + 4 + 2) * outputs),
    ]
    if head.modulated:
        streams.append(Stream("modulation", 2 * boundary, 3 * boundary))
        saved.append(Saved("norm's output before its scale", boundary))
    # log-softmax; or the difference of prediction and target
    saved += [
        Saved("input of the matrix", _E * n * h / share.sp, for_weight=True),
        Saved("fp32 values of the loss", 4 * outputs),
    ]
    return Operators(
        products=(
            *((MatrixProduct(share.mbs, h, 2 * h),) if head.modulated else ()),
            MatrixProduct(n, h, head.num_outputs),
        ),
        streams=tuple(streams),
        saved=tuple(saved),
        forward_only=(Passing("whole input and outputs", boundary + 6 * outputs),),
        with_backward=(
            Passing("gradients of input and outputs", boundary + 6 * outputs, 0.0, _E * h * head.num_outputs),
        ),
        input_bytes=boundary,
        output_bytes=0.0,
    )


def _list_prediction_module(module: PredictionModule, tokens: TokenCounts, share: Share) -> Operators:
    """Megatron-LM, core/transformer/multi_token_prediction.py: the projection's output is gathered over its columns.

    The next tokens are looked up once more, in the table whose gradient is then written and added once more too, and
    what each rank found in its part of the vocabulary is summed.
    """
    share = replace(share, precision=of_prediction(share.precision))
    layer, n, h = module.layer, share.rows(tokens.layer_tokens), module.layer.hidden_size
    boundary, whole = _E * n * h / share.sp, _E * n * h
    table_gradient = _E * module.vocab_size / share.tp * h
    inside = list_layer(layer, tokens, share)
    head = list_output_head(OutputHead(module.vocab_size, h, layer.norm), tokens, share)
    joining = (
        stream_norm("norm of the hidden state", n * h / share.sp, layer.norm, share),
        stream_norm("norm of the next token's embedding", n * h / share.sp, layer.norm, share),
        Stream("look-up", 2 * whole, 2 * whole, 2 * table_gradient),
        Stream("join", 4 * boundary, 0.0),
    )
    kept = (
        *keep_norm("hidden state's and embedding's norm", layer.norm, 2 * n / share.sp, h, share),
        Saved("both norms' outputs, joined", 2 * share.input_bytes * n * h / share.sp, for_weight=True),
    )
    return Operators(
        products=(
            MatrixProduct(0.0, 0.0, 0.0, summed_bytes=whole),
            MatrixProduct(
                n, 2 * h, h / share.tp, gathered_bytes=2 * whole, summed_bytes=whole, precision=share.precision
            ),
            *inside.products,
            *head.products,
        ),
        attention=inside.attention,
        streams=(*joining, *inside.streams, *head.streams),
        saved=(*kept, *inside.saved, *head.saved),
        forward_only=(*inside.forward_only, *head.forward_only),
        with_backward=(*inside.with_backward, *head.with_backward),
        input_bytes=boundary,
        output_bytes=boundary,
        exchanged_bytes=inside.exchanged_bytes,
        all_to_all_bytes=inside.all_to_all_bytes,
        copies=inside.copies,
        groups=inside.groups,
        beside=inside.beside,
        rerun=inside.rerun,
    )
