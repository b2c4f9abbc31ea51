"""The operators of self-attention on one device: a key for each head or for groups of them, or compressed (latent).

Letters as in layers.py. Unfused attention keeps the scores' softmax, and under dropout a mask of one byte and
the masked softmax: 5·a·s²·b of Korthikanti et al. 2022 (arXiv:2205.05198, equation 1); `core_attn` among the recomputed
operators takes all of it away and runs attention forward once more (section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mm_autoparallel.model.blocks.chain import Attention, DeltaAttention, LatentAttention, Norm, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.delta import list_delta_attention
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    AttentionProduct,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    join_reruns,
    keep_norm,
    stream_norm,
)

_E = ELEMENT_BYTES

_SOFTMAX_BYTES = {"": (4 * _E, 5 * _E), "fused-softmax": (10.0, 16.0), "torch": (22.0, 30.0)}
"""Read and written of each score in forward and backward: by one kernel that scales, masks and takes the softmax, each
once; by Megatron-LM's fused kernel between the products' own reads and writes; by PyTorch's operators one by one."""
_KEPT_BESIDE_SOFTMAX = {"": 0.0, "fused-softmax": 3.0, "torch": 7.0}
"""Of each score, beside the bf16 softmax: bf16 scores and a mask of one byte; by PyTorch's operators one by one an fp32
softmax too. 5 and 9 bytes in all tell best which runs of Llama 13B and 30B fit (arXiv:2311.05610)."""
_MANY_RANKS = 4
"""Context parallel ranks from which on attention to gathered keys may take longer (split_attention_factor)."""
_ALIGNED_COUNT, _MISALIGNED_FACTOR = 8, 4.0
"""Half-precision products of heads whose size is no multiple of 8 miss the tensor cores (cuBLAS documentation, Tensor
Core usage); at best a quarter of the rate is then reached (assumed)."""


def count_pairs(attention: Attention | LatentAttention, tokens: TokenCounts) -> float:
    """Query-key pairs of one sample: a window w in each span of L tokens makes L·w, causal w²/2 less (w = L: half)."""
    length = tokens.layer_tokens / tokens.num_spans
    window = min(attention.span_tokens or length, length)
    pairs = length * window - (window * window / 2 if attention.causal else 0)
    return tokens.num_spans * pairs


def list_attention(layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    """Projections and attention of one layer, without the norm before and the residual after.

    `with_backward` holds what passes during its own backward; the input of its first product is not among `saved`.
    """
    if isinstance(layer.attention, LatentAttention):
        return _list_latent_attention(layer, layer.attention, tokens, share)
    if isinstance(layer.attention, DeltaAttention):
        return list_delta_attention(layer, layer.attention, tokens, share)
    return _list_grouped_attention(layer, layer.attention, tokens, share)


def _list_grouped_attention(
    layer: TransformerLayer, attention: Attention, tokens: TokenCounts, share: Share
) -> Operators:
    n, h, d = share.rows(tokens.layer_tokens), layer.hidden_size, attention.head_dim
    a = attention.num_heads / share.tp
    g = max(attention.num_kv_groups / share.tp, 1.0)  # a group is repeated where there are fewer groups than ranks
    gates = a if attention.output_gate else 0.0
    dealt = share.dealt_groups(a, g)
    saved = [Saved("query, key and value", _E * n * (a + 2 * dealt) * d)]
    saved += [_attention_output(n * a * d, share)] if gates else _list_attention_output(n * a * d, share)
    if share.eager and attention.packed:
        # values are a part of what one matrix made, and of the images' outputs, each by itself, one tensor is made
        saved.append(Saved("query and key before rotation, beside the value", _E * n * (a + g) * d))
        if share.fused_attention:  # else the product's output is not kept but as joined
            saved.append(Saved("joined attention outputs", _E * n * a * d, for_weight=True))
    elif share.eager and attention.joint_qkv and attention.rotary:
        saved.append(Saved("query and key before rotation, beside the value", _E * n * (a + g) * d))
        if share.fused_attention:
            # queries are joined of what is rotated and what is not, so heads lie apart, and so do their outputs
            saved.append(Saved("attention outputs side by side", _E * n * a * d, for_weight=True))
    elif share.facts.keeps_joint and share.fused_attention:
        saved.append(Saved("query and key before rotation, beside the value", _E * n * (a + g) * d))
    if share.eager and not share.fused_attention:
        saved.append(Saved("keys and values, repeated for every head", 2 * _E * n * (a - dealt) * d))
    streams = []
    if share.facts.elementwise == "operators":
        # rotation and the copies that bring heads into the order of the kernel and back, one by one
        streams.append(Stream("rotary positions and reshaped heads", *(2 * (14 * _E * n * a * d,)), single=True))
    elif attention.rotary:  # queries and keys, there and back
        streams.append(Stream("rotary positions", 2 * _E * n * (a + g) * d, 2 * _E * n * (a + g) * d))
    if attention.qk_norm:
        row_count, width = (n * (a + g), d) if attention.qk_norm == "head" else (2 * n, (a + g) * d / 2)
        saved += keep_norm("query and key norm", layer.norm, row_count, width, share)
        streams.append(stream_norm("query and key norm", n * (a + g) * d, layer.norm, share))
    if gates:
        gated = n * gates * d
        saved.append(Saved("gate of the output, as it is and between 0 and 1", 2 * _E * gated))
        saved.append(Saved("gated output", share.input_bytes * gated, for_weight=True))
        streams.append(Stream("gate of the output", 5 * _E * gated, 8 * _E * gated))
    passing_bytes = 2 * _E * n * (a + 2 * g) * d
    if dealt > g:  # there from before heads are dealt until attention is done, beside what was made and what was got
        moved_bytes = 2 * _E * n * (g + dealt) * d
        streams.append(Stream("keys and values, repeated for every head", moved_bytes, moved_bytes))
        passing_bytes += 2 * _E * n * (2 * dealt - g) * d
    passing = Passing("query, key and value, before and after rotation", passing_bytes)
    core = _list_core(_Core(attention, a, d, d, _E * n * 2 * dealt * d), tokens, share)
    return Operators(
        products=(
            MatrixProduct(n, h, (a + gates + 2 * g) * d, gathered_bytes=_E * n * h, precision=share.precision),
            MatrixProduct(n, a * d, h, summed_bytes=_E * n * h, precision=share.precision),
        ),
        attention=core.attention,
        streams=(*streams, *core.streams),
        saved=(*saved, *core.saved),
        forward_only=(passing, *core.forward_only),
        # with flash attention it needs less than the feed-forward has freed by then
        with_backward=core.with_backward,
        rerun=core.rerun,
    )


def _list_latent_attention(
    layer: TransformerLayer, attention: LatentAttention, tokens: TokenCounts, share: Share
) -> Operators:
    """As Megatron-LM has it (core/transformer/multi_latent_attention.py): compressing matrices are whole on every rank

    and see its own part of the sequence; what they made is gathered before the up-projections. `mla_up_proj` among the
    recomputed operators keeps the compressed vectors and takes away their normed copies (the norms are part of the
    up-projections), queries, keys and values.
    """
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    a, own = attention.num_heads / share.tp, n / share.sp
    query_dim, value_dim = attention.nope_dim + attention.rope_dim, attention.value_dim
    q_rank, kv_rank, rope = attention.q_lora_rank, attention.kv_lora_rank, attention.rope_dim
    query, key_value = n * a * query_dim, n * a * (attention.nope_dim + value_dim)
    linear = partial(MatrixProduct, precision=share.precision)
    down = [linear(own, h, kv_rank + rope)]
    up = [linear(n, kv_rank, a * (attention.nope_dim + value_dim), gathered_bytes=_E * n * kv_rank)]
    norm = layer.norm if attention.norms else None
    saved, norms = _list_compressed("key and value", kv_rank, own, norm, share, extra=rope)
    if q_rank:
        down.append(linear(own, h, q_rank))
        up.append(linear(n, q_rank, a * query_dim, gathered_bytes=_E * n * q_rank))
        query_saved, query_norms = _list_compressed("query", q_rank, own, norm, share)
        saved, norms = saved + query_saved, norms + query_norms
    else:
        up.append(linear(n, h, a * query_dim, gathered_bytes=_E * n * h))
    heads_bytes = _E * n * a * (2 * query_dim + value_dim)
    # queries and keys are joined of a part without and a part with rotation, values are copied out of their joint
    moved_bytes = 2 * _E * (query + 2 * key_value)
    joining = Stream("rotary positions and joined heads", moved_bytes, moved_bytes)
    if share.facts.joined_heads:  # queries are rotated in place, keys and values read once and written once
        moved_bytes = _E * (2 * query + key_value)
        joining = Stream("rotary positions and joined heads", moved_bytes, 1.5 * moved_bytes)
    core = _list_core(_Core(attention, a, query_dim, value_dim, _E * n * a * (query_dim + value_dim)), tokens, share)
    reruns, with_backward = [core.rerun], core.with_backward
    if "mla_up_proj" in share.recompute_operators:
        reruns.append(Operators(products=tuple(up), streams=(*norms, joining)))
        saved = [part for part in saved if not part.for_weight] if norms else saved
        with_backward = tuple(Passing(p.moment, p.size_bytes + heads_bytes) for p in with_backward)
        with_backward += (Passing("query, key and value once more, and their gradients", 2 * heads_bytes),)
    else:
        saved.append(Saved("query, key and value", heads_bytes))
        if share.eager:  # values are a part of what one matrix made
            saved.append(Saved("keys without rotation, beside the value", _E * n * a * attention.nope_dim))
    return Operators(
        products=(*down, *up, linear(n, a * value_dim, h, summed_bytes=_E * n * h)),
        attention=core.attention,
        streams=(*norms, joining, *core.streams),
        saved=(*saved, *_list_attention_output(n * a * value_dim, share), *core.saved),
        forward_only=(
            Passing("query, key and value, before and after they are joined", _E * (query + key_value) + heads_bytes),
            *core.forward_only,
        ),
        with_backward=with_backward,
        rerun=join_reruns(reruns),
    )


def _list_compressed(
    name: str, rank: int, row_count: float, norm: Norm | None, share: Share, extra: int = 0
) -> tuple[list[Saved], list[Stream]]:
    """A compressed vector, kept together with `extra` numbers that were computed beside it, and its norm."""
    if norm is None:
        return [Saved(f"compressed {name}", _E * row_count * (rank + extra), for_weight=True)], []
    return (
        [
            *keep_norm(f"compressed {name}'s norm", norm, row_count, rank, share),
            # eager code keeps neither the vector, but its fp32 copy, nor what lies in one tensor with it
            Saved(f"numbers beside the compressed {name}", 0.0 if share.eager else _E * row_count * extra),
            Saved(f"compressed {name} after its norm", share.input_bytes * row_count * rank, for_weight=True),
        ],
        [stream_norm(f"norm of the compressed {name}", row_count * rank, norm, share)],
    )


def _attention_output(element_count: float, share: Share) -> Saved:
    """Kept by attention and as the input of the next product: one tensor, unless heads are dealt back in between, or
    an operator by itself brings them out of the kernel's order.

    Unfused attention does not keep what it gives.
    """
    copied = share.facts.keeps_copies and share.fused_attention
    size_bytes = (2 if share.exchanged_heads or copied else 1) * _E * element_count
    return Saved("attention output", size_bytes, for_weight=not share.fused_attention)


def _list_attention_output(element_count: float, share: Share) -> list[Saved]:
    """The same, and the low copy that the output's product keeps of it; alone, where attention keeps none."""
    kept = _attention_output(element_count, share)
    if not share.low:
        return [kept]
    low = Saved("attention output in low precision", share.input_bytes * element_count, for_weight=True)
    return [low] if kept.for_weight else [kept, low]


@dataclass(frozen=True)
class _Core:
    """Attention without its projections: `head_count` heads of this rank, sizes of a head's query and value.

    key_value_bytes: keys and values of this rank's tokens.
    """

    attention: Attention | LatentAttention
    head_count: float
    query_count: int
    value_count: int
    key_value_bytes: float


def _list_core(core: _Core, tokens: TokenCounts, share: Share) -> Operators:
    """What lies between queries, keys and values and the attention output."""
    attention, a = core.attention, core.head_count
    saved: tuple[Saved, ...]
    streams: tuple[Stream, ...] = ()
    passing: tuple[Passing, ...] = ()
    if share.fused_attention:
        # two products forward, five backward (Dao 2023, arXiv:2307.08691, section 3.1): three of them over the size of
        # a query, two over that of a value
        pairs = share.mbs * count_pairs(attention, tokens) / share.cp
        forward_flops = 2 * pairs * a * (core.query_count + core.value_count)
        backward_flops = 2 * pairs * a * (3 * core.query_count + 2 * core.value_count)
        saved = (Saved("softmax statistics", share.statistics_bytes * share.rows(tokens.layer_tokens) * a),)
    else:
        # whole score matrices, masked half included; softmax reads and writes what the products write and read
        scores = share.mbs * tokens.layer_tokens * tokens.span_tokens * a / share.cp
        forward_flops = 2 * scores * (core.query_count + core.value_count)
        backward_flops = 2 * forward_flops
        if core.query_count % _ALIGNED_COUNT:
            forward_flops, backward_flops = _MISALIGNED_FACTOR * forward_flops, _MISALIGNED_FACTOR * backward_flops
        saved = (Saved("softmax output", _E * scores),)
        beside_bytes = _KEPT_BESIDE_SOFTMAX[share.facts.attention]
        if beside_bytes:
            saved += (Saved("scores, mask and copies beside the softmax", beside_bytes * scores),)
        if share.eager:  # so do all families that are read here but GPT-2, whose softmax is bf16
            saved += (Saved("softmax in fp32", 4 * scores),)
        forward_bytes, backward_bytes = _SOFTMAX_BYTES[share.facts.attention]
        streams = (Stream("softmax", forward_bytes * scores, backward_bytes * scores),)
        each_bytes = 4 if share.facts.attention == "torch" else _E  # an fp32 softmax has fp32 gradients
        passing = (Passing("two score matrices, or the gradients of two", 2 * each_bytes * scores),)
        if share.attention_dropout:
            saved += (Saved("dropout mask of the scores", scores), Saved("softmax output after dropout", _E * scores))
            moved_bytes = (2 * _E + 1) * scores
            streams += (Stream("dropout of the scores", moved_bytes, moved_bytes),)
    reach = min(attention.span_tokens or tokens.span_tokens, tokens.span_tokens)
    # keys travel unless whole images or windows lie with one rank, or with those that deal heads among themselves
    whole = attention.causal and attention.span_tokens is None  # every sample of a sequence is divided among them all
    travels = share.passing_ranks > 1 and (whole or reach > tokens.layer_tokens / share.passing_ranks)
    gathers = travels and share.gathered_keys
    backward_passing = passing
    if gathers:
        others_bytes = (share.cp - 1) * core.key_value_bytes
        passing += (Passing("keys and values of other ranks", others_bytes),)
        backward_passing += (Passing("keys and values of other ranks, and their gradients", 2 * others_bytes),)
    own_bytes = _E * share.rows(tokens.layer_tokens) * a * (core.query_count + core.value_count)
    product = AttentionProduct(
        forward_flops,
        backward_flops,
        ring_bytes=core.key_value_bytes if travels and not share.gathered_keys else 0.0,
        fused=share.fused_attention,
        kernel=share.facts.attention,
        dealt_bytes=own_bytes + core.key_value_bytes if share.exchanged_heads else 0.0,
        key_count=reach / share.passing_ranks if travels else reach,
        gathered_bytes=share.cp * core.key_value_bytes if gathers else 0.0,
        time_factor=share.facts.split_attention_factor if gathers and share.cp >= _MANY_RANKS else 1.0,
        query_size=core.query_count,
        value_size=core.value_count,
        low=share.low and share.facts.fp8_attention,
    )
    if "core_attn" not in share.recompute_operators:
        return Operators(
            attention=product, streams=streams, saved=saved, forward_only=passing, with_backward=backward_passing
        )
    restored_bytes = sum(part.size_bytes for part in saved)
    return Operators(
        attention=product,
        streams=streams,
        forward_only=passing,
        with_backward=tuple(Passing(p.moment, p.size_bytes + restored_bytes) for p in backward_passing),
        rerun=Operators(attention=product, streams=streams),
    )
