"""The operators of one transformer layer, dense or with experts, on one device.

Letters as in Korthikanti et al. 2022: n tokens of this device, h hidden size, t tensor parallel; a and g are the query
heads and key/value groups of this rank, d the head size, f the width of the feed-forward, e bytes per number.
"""

from __future__ import annotations

from mm_autoparallel.blocks.chain import Attention, Experts, FeedForward, TransformerLayer
from mm_autoparallel.blocks.tokens import TokenCounts
from mm_autoparallel.profiles.operators import (
    ELEMENT_BYTES,
    AttentionProduct,
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


def list_layer(layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    """The operators of `layer` for one micro-batch of `tokens` per sample."""
    return _join(layer, tokens, share, _list_attention(layer, tokens, share), _list_mlp(layer, tokens, share))


def count_pairs(attention: Attention, tokens: TokenCounts) -> float:
    """Query-key pairs of one sample: a window w in each span of L tokens makes L·w, causal w²/2 less (w = L: half)."""
    length = tokens.layer_tokens / tokens.num_spans
    window = min(attention.span_tokens or length, length)
    pairs = length * window - (window * window / 2 if attention.causal else 0)
    return tokens.num_spans * pairs


def _join(
    layer: TransformerLayer, tokens: TokenCounts, share: Share, attention: Operators, mlp: Operators
) -> Operators:
    """Norms and residuals around both halves. The backward begins with the feed-forward, when all is still kept."""
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    boundary = _E * n * h / share.sp
    statistics = norm_statistics_bytes(layer.norm) * n / share.sp
    elements = n * h / share.sp
    streams = [
        stream_norm("norm 1", elements),
        stream_norm("norm 2", elements),
        # forward: branch + stream → stream; backward: the branch's gradient is added to the stream's
        Stream("residuals", 2 * 3 * boundary, 2 * 3 * boundary),
    ]
    saved = [
        Saved("norm 1 input", boundary + statistics),
        Saved("norm 1 output, input of query, key and value", boundary, for_weight=True),
        Saved("norm 2 input", boundary + statistics),
        Saved("norm 2 output, input of the feed-forward", boundary, for_weight=True),
    ]
    if layer.layer_scale:
        streams.append(Stream("layer scales", 2 * 2 * boundary, 2 * 3 * boundary))
        saved.append(Saved("branch outputs before their scale", 2 * boundary, for_weight=True))
    gathered = _E * n * h if share.sp > 1 else 0.0
    return Operators(
        products=attention.products + mlp.products,
        attention=attention.attention,
        streams=(*streams, *attention.streams, *mlp.streams),
        saved=(*saved, *attention.saved, *mlp.saved),
        forward_only=tuple(
            # the layer's input, the stream between its halves, and what the half itself holds
            Passing(p.moment, p.size_bytes + 2 * boundary + gathered)
            for p in (*attention.forward_only, *mlp.forward_only)
        ),
        with_backward=(
            Passing("forward: gathered input and output before it is summed", gathered + _E * n * h),
            # the gradient of the residual stream lives through all of it
            *(
                Passing(p.moment, p.size_bytes + boundary + gathered, p.weight_bytes)
                for p in (*mlp.with_backward, *attention.with_backward)
            ),
        ),
        input_bytes=boundary,
        output_bytes=boundary,
        exchanged_bytes=mlp.exchanged_bytes,
    )


def _list_attention(layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    attention = layer.attention
    n, h, d = share.rows(tokens.layer_tokens), layer.hidden_size, attention.head_dim
    a = attention.num_heads / share.tp
    g = max(attention.num_kv_groups / share.tp, 1.0)  # a group is repeated where there are fewer groups than ranks
    pairs = share.mbs * count_pairs(attention, tokens) / share.cp
    heads = [Saved("query, key and value", _E * n * (a + 2 * g) * d), Saved("attention output", _E * n * a * d)]
    # rotation of queries and keys, there and back
    streams = [Stream("rotary positions", 2 * _E * n * (a + g) * d, 2 * _E * n * (a + g) * d)]
    if attention.qk_norm:
        normed = n * (a + g) if attention.qk_norm == "head" else 2 * n
        heads.append(Saved("query and key before their norm", _E * n * (a + g) * d + 4 * normed))
        streams.append(stream_norm("query and key norm", n * (a + g) * d))
    passing = [Passing("query, key and value, before and after rotation", 2 * _E * n * (a + 2 * g) * d)]
    if share.fused_attention:
        # two products forward, five backward (Dao 2023, arXiv:2307.08691, section 3.1)
        forward_flops = 4 * pairs * a * d
        backward_flops = 2.5 * forward_flops
        heads.append(Saved("softmax statistics", share.statistics_bytes * n * a))
    else:
        # whole score matrices, masked half included; softmax reads and writes what the products write and read
        scores = share.mbs * tokens.layer_tokens * tokens.span_tokens * a / share.cp
        forward_flops, backward_flops = 4 * scores * d, 8 * scores * d
        heads.append(Saved("softmax output", _E * scores))
        streams.append(Stream("softmax", 4 * _E * scores, 5 * _E * scores))
        passing.append(Passing("two score matrices, or the gradients of two", 2 * _E * scores))
    reach = min(attention.span_tokens or tokens.span_tokens, tokens.span_tokens)
    stays = share.cp == 1 or reach <= tokens.layer_tokens / share.cp  # whole images or windows lie on one rank
    return Operators(
        products=(
            MatrixProduct(n, h, (a + 2 * g) * d, gathered_bytes=_E * n * h),
            MatrixProduct(n, a * d, h, summed_bytes=_E * n * h),
        ),
        attention=AttentionProduct(forward_flops, backward_flops, 0.0 if stays else 2 * _E * n * g * d),
        streams=tuple(streams),
        saved=tuple(heads),
        forward_only=tuple(passing),
        # with flash attention it needs less than the feed-forward has freed by then
        with_backward=tuple(passing[1:]),
    )


def _list_mlp(layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    if isinstance(layer.mlp, FeedForward):
        return _list_feed_forward(layer.mlp, n, h, share.tp, shared_bytes=_E * n * h)
    return _list_experts(layer.mlp, n, h, share)


def _list_feed_forward(
    mlp: FeedForward, n: float, h: int, tp: int, shared_bytes: float, num_weights: int = 1
) -> Operators:
    """`shared_bytes`: input that the ranks share, and output that they sum."""
    f = mlp.ffn_size / tp
    first = 2 * f if mlp.gated else f
    activation, inner = _E * n * f, _E * n * first
    return Operators(
        products=(
            MatrixProduct(n, h, first, num_weights, gathered_bytes=shared_bytes),
            MatrixProduct(n, f, h, num_weights, summed_bytes=shared_bytes),
        ),
        # forward reads the first product's output and writes the activation; backward reads both gradients' sources
        streams=(Stream("activation", inner + activation, 2 * inner + activation),),
        saved=(
            Saved("first product's output, input of the activation", inner),
            Saved("activation, input of the second product", activation, for_weight=True),
        ),
        forward_only=(Passing("feed-forward: both inner tensors", inner + activation),),
        with_backward=(
            # one weight gradient in bf16 lives until it is added to the fp32 gradient
            Passing("gradients of the activation and of the second weight", activation, _E * num_weights * f * h),
            Passing("gradients of the activation and of the first product's output", activation + inner, -activation),
            # the first product's output is freed by now, its gradient has the same size
            Passing(
                "gradients of the input and of the first weight", _E * n * h, _E * num_weights * first * h - activation
            ),
        ),
    )


def _list_experts(experts: Experts, n: float, h: int, share: Share) -> Operators:
    """Every rank holds its slice of every expert; tokens are gathered, permuted to their experts, and summed back."""
    routed = n * experts.top_k
    inner = _list_feed_forward(experts.expert, routed, h, share.tp, 0.0, experts.num_experts)
    logits = n / share.sp * experts.num_experts
    products = (MatrixProduct(n / share.sp, h, experts.num_experts), *inner.products)
    saved = (
        Saved("router probabilities", 4 * logits),
        Saved("permuted input of the experts", _E * routed * h, for_weight=True),
        *inner.saved,
    )
    streams = (Stream("permute and unpermute", 2 * _E * (n + routed) * h, 2 * _E * (n + routed) * h), *inner.streams)
    with_backward = tuple(
        Passing(p.moment, p.size_bytes + _E * routed * h, p.weight_bytes) for p in inner.with_backward
    )
    forward_only = tuple(Passing(p.moment, p.size_bytes + _E * routed * h) for p in inner.forward_only)
    if experts.shared:
        shared = _list_feed_forward(experts.shared, n, h, share.tp, shared_bytes=_E * n * h)
        products, streams, saved = products + shared.products, streams + shared.streams, saved + shared.saved
        with_backward, forward_only = with_backward + shared.with_backward, forward_only + shared.forward_only
    return Operators(
        products=products,
        streams=streams,
        saved=saved,
        forward_only=forward_only,
        with_backward=with_backward,
        exchanged_bytes=_E * n * h,
    )
