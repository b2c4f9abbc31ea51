"""The operators of 2-d convolutions of kernel 3 and stride 2: stems of audio, and projectors that merge by them.

A convolution is a product over nine neighbours for each place that it leaves. Nothing of it is divided among tensor
parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mm_autoparallel.model.blocks.chain import AudioStem, Projector
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
)

_E = ELEMENT_BYTES
_NEIGHBOURS = 9


def list_mel_convolutions(stem: AudioStem, tokens: TokenCounts, share: Share) -> Operators:
    """Three convolutions over frames and bins, each followed by a GELU, then a matrix and positions.

    transformers, Qwen3OmniMoeAudioEncoder.forward; frames that fill up the last chunk are left out.
    """
    frames, n, h = share.rows(tokens.input_tokens), share.rows(tokens.layer_tokens), stem.hidden_size
    channels, output = stem.conv_channels, _E * n * h
    mel = _E * frames * stem.num_mel_bins
    places = [frames / 2**k * -(-stem.num_mel_bins // 2**k) for k in (1, 2, 3)]
    inner = [_E * count * channels for count in places]
    products = [
        MatrixProduct(places[0], _NEIGHBOURS, channels, entry=True),
        *(MatrixProduct(count, _NEIGHBOURS * channels, channels) for count in places[1:]),
        MatrixProduct(n, channels * stem.num_conv_bins, h, summed_bytes=output),
    ]
    saved = [Saved("mel frames", mel, for_weight=True)]
    for number, size_bytes in enumerate(inner, 1):
        saved.append(Saved(f"convolution {number}'s output", size_bytes))
        saved.append(Saved(f"its activation {number}", size_bytes, for_weight=True))
    return Operators(
        products=tuple(products),
        streams=(Stream("activations and positions", 2 * sum(inner) + 2 * output, 3 * sum(inner) + output),),
        saved=tuple(saved),
        forward_only=(Passing("both outputs of the first convolution", mel + 2 * inner[0]),),
        with_backward=(Passing("gradients", 2 * inner[0], _E * channels * max(_NEIGHBOURS * channels, h)),),
        input_bytes=mel,
        output_bytes=output / share.sp,
    )


def add_convolutions(operators: Operators, projector: Projector, tokens: TokenCounts, share: Share) -> Operators:
    """`operators` of a projector's matrices with those of the convolutions before them."""
    n, widths = share.rows(tokens.output_tokens), projector.convolutions
    places = [n * 4**k for k in range(len(widths) - 1, -1, -1)]
    sizes = [_E * count * width for count, width in zip(places, widths, strict=True)]
    products = [
        MatrixProduct(count, _NEIGHBOURS * inner, outer, entry=index == 0)
        for index, (count, (inner, outer)) in enumerate(zip(places[1:], pairwise(widths), strict=True))
    ]
    saved = [
        Saved(f"input of convolution {number}", size, for_weight=True) for number, size in enumerate(sizes[:-1], 1)
    ]
    largest_weight = max(_E * product.input_count * product.output_count for product in products)
    return replace(
        operators,
        products=(*products, *(replace(product, entry=False) for product in operators.products)),
        saved=(*saved, *operators.saved),
        forward_only=(*operators.forward_only, Passing("the first convolution's input and output", sum(sizes[:2]))),
        with_backward=(
            *operators.with_backward,
            Passing("gradients of the first convolution's input and output", sum(sizes[:2]), largest_weight),
        ),
        input_bytes=sizes[0] / share.sp,
    )
