"""The operators of what stands before and after a modality's layers: embeddings, stems, projectors, the output head.

Letters as in layer_operators.py; v is the part of the vocabulary that one tensor-parallel rank holds. Stems are whole
on every rank; the scatter of their output into the sequence-parallel region is charged like a reduce-scatter.
"""

from __future__ import annotations

from itertools import pairwise

from mm_autoparallel.blocks.chain import (
    AudioStem,
    OutputHead,
    PatchEmbedding,
    Projector,
    Structure,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.blocks.tokens import TokenCounts
from mm_autoparallel.profiles.layer_operators import list_layer
from mm_autoparallel.profiles.operators import (
    ELEMENT_BYTES,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    norm_statistics_bytes,
    stream_norm,
)

_E = ELEMENT_BYTES


def list_operators(structure: Structure, tokens: TokenCounts, share: Share) -> Operators:
    """The operators of any block for one micro-batch of `tokens` per sample, on one device."""
    if isinstance(structure, TransformerLayer):
        return list_layer(structure, tokens, share)
    if isinstance(structure, TokenEmbedding):
        return _list_token_embedding(structure, tokens, share)
    if isinstance(structure, PatchEmbedding):
        return _list_patch_embedding(structure, tokens, share)
    if isinstance(structure, AudioStem):
        return _list_audio_stem(structure, tokens, share)
    if isinstance(structure, Projector):
        return _list_projector(structure, tokens, share)
    return _list_output_head(structure, tokens, share)


def _list_token_embedding(embedding: TokenEmbedding, tokens: TokenCounts, share: Share) -> Operators:
    n, h, v = share.rows(tokens.layer_tokens), embedding.hidden_size, embedding.vocab_size / share.tp
    whole, table_gradient = _E * n * h, _E * v * h
    return Operators(
        # a product of no flops: the sum of what each rank found in its part of the vocabulary
        products=(MatrixProduct(0.0, 0.0, 0.0, summed_bytes=whole),),
        # rows are read and written, then image and audio tokens are put in their places; where the table trains its
        # gradient is written whole, then added to the one that is accumulated
        streams=(Stream("look-up", 4 * whole, 2 * whole, 2 * table_gradient),),
        saved=(Saved("token numbers", 8 * n, for_weight=True),),
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
    if embedding.num_positions:
        streams.append(Stream("added positions", 2 * output, output))
    if embedding.norm:
        streams.append(stream_norm("norm", n * h))
        saved.append(Saved("norm input", output + norm_statistics_bytes(embedding.norm) * n))
    return Operators(
        products=(MatrixProduct(n, embedding.in_features, h, summed_bytes=output, entry=True),),
        streams=tuple(streams),
        saved=tuple(saved),
        forward_only=(Passing("pixels and tokens", pixels + output),),
        with_backward=(Passing("whole gradient", output, _E * embedding.in_features * h),),
        input_bytes=pixels,
        output_bytes=_E * share.rows(tokens.layer_tokens) * h / share.sp,
    )


def _list_audio_stem(stem: AudioStem, tokens: TokenCounts, share: Share) -> Operators:
    """Convolutions of kernel 3 as products over three neighbours, each followed by a GELU."""
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
    """Matrices alternate between column and row parallel; between two of them stands a GELU."""
    n, sizes = share.rows(tokens.output_tokens), projector.layer_sizes
    tp = 1 if projector.replicated else share.tp
    elements = n * sizes[0] if sizes else share.rows(tokens.layer_tokens) * projector.norm_size
    shared_bytes = _E * elements
    boundary = shared_bytes / share.sp
    streams, saved = [], []
    if projector.norm:
        statistics = norm_statistics_bytes(projector.norm) * elements / projector.norm_size / share.sp
        streams.append(stream_norm("norm", elements / share.sp))
        saved.append(Saved("norm input", boundary + statistics))
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
                summed_bytes=_E * n * outputs if not by_columns or last else 0.0,
                entry=index == 0,
            )
        )
        if not last:
            inner = _E * n * outputs / (tp if by_columns else share.sp)
            streams.append(Stream(f"activation {index + 1}", 2 * inner, 3 * inner))
            saved.append(Saved(f"input of activation {index + 1}", inner))
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
        input_bytes=boundary,
        output_bytes=output / share.sp,
    )


def _list_output_head(head: OutputHead, tokens: TokenCounts, share: Share) -> Operators:
    """Vocabulary-parallel cross-entropy: bf16 logits, and their fp32 softmax kept for the backward."""
    n, h, v = share.rows(tokens.output_tokens), head.hidden_size, head.vocab_size / share.tp
    boundary, whole, logits = _E * n * h / share.sp, _E * n * h, n * v
    gathered = whole if share.sp > 1 else 0.0
    statistics = norm_statistics_bytes(head.norm) * n / share.sp
    return Operators(
        products=(MatrixProduct(n, h, v, gathered_bytes=whole),),
        streams=(
            stream_norm("norm", n * h / share.sp),
            # forward: bf16 read, fp32 written; maximum read; exponential read and written; sum read.
            # backward: softmax read, gradient written, read again, bf16 gradient written
            Stream("cross-entropy", (2 + 4 + 4 + 8 + 4) * logits, (4 + 4 + 4 + 2) * logits),
        ),
        saved=(
            Saved("norm input", boundary + statistics),
            Saved("norm output, input of the vocabulary matrix", boundary, for_weight=True),
            Saved("fp32 softmax", 4 * logits),
        ),
        forward_only=(Passing("bf16 and fp32 logits", 6 * logits + gathered),),
        with_backward=(
            Passing("bf16 logits beside the fp32 softmax", 2 * logits + gathered),
            # the fp32 gradient stood in the softmax's place and is freed by now
            Passing(
                "bf16 gradients of logits, input and table", 2 * logits - 4 * logits + whole + gathered, _E * h * v
            ),
        ),
        input_bytes=boundary,
        output_bytes=0.0,
    )
