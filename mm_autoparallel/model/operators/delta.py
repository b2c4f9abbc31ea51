"""The operators of attention by a gated delta rule on one device (Yang et al. 2024, arXiv:2412.06464, section 3.3).

Each head keeps a matrix of key by value numbers as its memory, so that tokens cost the same however long the sequence.
Fused kernels go through it in chunks of tokens and keep of each chunk what MindSpeed-MM's keep (mindspeed_mm/fsdp/ops/
gdn: query, key, value, gate, strength and the chunk's matrix of pairs; memories of chunks are made once more in the
backward); all code runs one of these. Letters as in layers.py; k and v are the numbers of all keys and values.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import DeltaAttention, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    AttentionProduct,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    keep_norm,
)

_E = ELEMENT_BYTES
_CHUNK = 64
"""Tokens of a chunk (chunk_size of the kernels)."""


def list_delta_attention(
    layer: TransformerLayer, attention: DeltaAttention, tokens: TokenCounts, share: Share
) -> Operators:
    """Projections, convolution, delta rule and gated norm of one layer, without the norm before and the residual."""
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    heads = attention.num_value_heads / share.tp
    k = attention.num_key_heads * attention.key_head_dim / share.tp
    v = heads * attention.value_head_dim
    mixed, repeated = 2 * k + v, heads * attention.key_head_dim  # a key for each value head
    pairs, memory = _CHUNK * heads, heads * attention.key_head_dim * attention.value_head_dim
    # of each token with its chunk: key with key, what solves for it, key and value through that, query with key and
    # value; with the memory: read by key and by query, written
    chunk_flops = 2 * pairs * (3 * attention.key_head_dim + 2 * attention.value_head_dim + _CHUNK)
    forward_flops = n * (chunk_flops + 3 * 2 * memory)
    memories = _E * n * memory / _CHUNK
    heads_bytes = _E * n * (2 * repeated + v)
    return Operators(
        products=(
            MatrixProduct(n, h, mixed + v + 2 * heads, gathered_bytes=_E * n * h, precision=share.precision),
            MatrixProduct(n, v, h, summed_bytes=_E * n * h, precision=share.precision),
        ),
        # the backward makes the memories once more, and two products of each
        attention=AttentionProduct(
            forward_flops,
            3 * forward_flops,
            ring_bytes=0.0,
            dealt_bytes=_E * n * (mixed + 2 * heads + v) if share.exchanged_heads else 0.0,
        ),
        streams=(
            Stream("convolution over tokens", 2 * _E * n * mixed, 3 * _E * n * mixed),
            Stream("norms of query and key, repeated for every value", 2 * heads_bytes, 3 * heads_bytes),
            Stream("memories of chunks", 2 * memories, 4 * memories),
            Stream("gate of the output", 3 * _E * n * v, 5 * _E * n * v),
            Stream("norm of the output", 2 * _E * n * v, 3 * _E * n * v),
        ),
        saved=(
            Saved("query, key and value before the convolution", _E * n * mixed),
            Saved("query and key for every value head, and value", heads_bytes),
            Saved("fp32 gates and strengths before and after they are formed", (2 * _E + 3 * 4) * n * heads),
            Saved("matrix of pairs of each chunk", _E * n * pairs),
            *keep_norm("norm of the output", "rms", n * heads, attention.value_head_dim, share),
            Saved("gate of the output", _E * n * v),
            Saved("gated output, input of the last product", share.input_bytes * n * v, for_weight=True),
        ),
        forward_only=(Passing("query, key, value and memories of chunks", heads_bytes + memories),),
        with_backward=(
            Passing("memories of chunks and their gradients, gradients of heads", 2 * memories + heads_bytes),
        ),
    )
