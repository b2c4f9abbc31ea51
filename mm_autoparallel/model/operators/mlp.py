"""The operators of a layer's second half on one device: a feed-forward, or experts and their router.

Letters as in layers.py. Routing is taken as balanced, every expert gets the same number of tokens (assumed),
unless Share.imbalance_factor says how many more the busiest rank's experts get: its time and memory are then told.
Where the stack's dispatcher is known, its passes over the copies of tokens are counted, and the router's over its
scores; else tokens are read and written once on their way in and once on their way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Experts, FeedForward
from mm_autoparallel.model.job.stacks import Dispatcher
from mm_autoparallel.model.operators.deepspeed_experts import deal_by_products
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    join_reruns,
)
from mm_autoparallel.model.profiles.collectives import ExpertGroups

_E = ELEMENT_BYTES

_PERMUTING_PASSES: Mapping[Dispatcher, float] = {"alltoall": 8.0, "deepep": 5.0, "hybridep": 4.0}
"""How often the copies of tokens are read or written in each pass beside the products, permuted, sent and summed:
alltoall permutes, sorts chunks of local experts, and both again on the way back; deepep permutes beside its kernels;
hybridep writes them in their experts' order (Megatron-LM, core/transformer/moe/token_dispatcher.py, fused_a2a.py).
Assumed, near what published steps ask for."""
_TILE_ROWS = 128
"""Rows of one expert are padded to whole tiles, which all experts of a call fill together (TransformerEngine's grouped
products; Megatron-LM, core/transformer/moe/experts.py)."""
_GRAPH_BUFFERS = 1.5
"""Room for copies of tokens, over that of balanced ones, where one graph records a step whose experts drop none: its
shapes hold whatever the router says (assumed)."""
_ROUTER_PASSES = 12.0
"""How often the router's fp32 scores of all experts are read or written in its forward, and twice as often in its
backward: softmax or sigmoid, bias, groups, largest ones, probabilities, map, loss of balance (core/transformer/moe/
moe_utils.py; assumed)."""


def list_mlp(mlp: FeedForward | Experts, n: float, h: int, share: Share) -> Operators:
    """The second half of one layer for `n` tokens of width `h`, without the norm before and the residual after.

    The input of a dense feed-forward's first product is not among `saved`.
    """
    if isinstance(mlp, Experts):
        operators = _list_experts(mlp, n, h, share)
        return _run_again(operators) if "moe" in share.recompute_operators else operators
    operators = _list_feed_forward(mlp, n, h, share.tp, share, shared_bytes=_E * n * h)
    if "mlp" in share.recompute_operators:
        return _run_again(operators)
    return _without_activation(operators) if "mlp_act" in share.recompute_operators else operators


def _run_again(operators: Operators) -> Operators:
    """The same, run once more in its backward: it keeps nothing, and its backward holds all that it kept."""
    restored_bytes = sum(saved.size_bytes for saved in operators.saved)
    return replace(
        operators,
        saved=(),
        with_backward=tuple(
            Passing(p.moment, p.size_bytes + restored_bytes, p.weight_bytes, p.gradient_bytes)
            for p in operators.with_backward
        ),
        rerun=join_reruns([operators]),
    )


def _list_feed_forward(
    mlp: FeedForward, n: float, h: int, tp: int, share: Share, shared_bytes: float, num_weights: int = 0
) -> Operators:
    """`shared_bytes`: input that the ranks share, and output that they sum. tp: ranks that share it. num_weights: of
    experts in one call (0: it is none).
    """
    grouped, num_weights = num_weights > 0, num_weights or 1
    tile_rows = _TILE_ROWS if grouped and share.facts.dispatcher else 0
    eager = share.eager
    f = mlp.ffn_size / tp
    first = 2 * f if mlp.gated else f
    activation, inner, kept = _E * n * f, _E * n * first, share.input_bytes * n * f
    saved = [
        Saved("first product's output, input of the activation", inner),
        Saved("activation, input of the second product", kept, for_weight=True),
    ]
    gradients, factor = activation + inner, 0.0
    keeps_gate = share.facts.keeps_copies or share.facts.keeps_gate
    if (eager and (mlp.gated or mlp.quick_gelu)) or (mlp.gated and keeps_gate):
        # the activated gate, which is multiplied with the other half; of x·sigmoid(1.702·x) the sigmoid
        factor = activation
        saved.append(Saved("factor of the activation", factor))
    elif eager and mlp.tanh_gelu:
        factor = 3 * activation
        saved.append(Saved("x/2, tanh, and 1 + tanh", factor))
    if factor:
        gradients = 3 * activation  # of a product and of both its factors
    return Operators(
        products=(
            MatrixProduct(
                n,
                h,
                first,
                num_weights,
                gathered_bytes=shared_bytes,
                num_linears=2 if mlp.gated else 1,
                tile_rows=tile_rows,
                precision=share.precision,
            ),
            MatrixProduct(
                n, f, h, num_weights, summed_bytes=shared_bytes, tile_rows=tile_rows, precision=share.precision
            ),
        ),
        streams=(_stream_activation(mlp, activation, inner, share, grouped),),
        saved=tuple(saved),
        forward_only=(Passing("feed-forward: both inner tensors", inner + activation),),
        with_backward=(
            # one weight gradient in bf16 lives until it is added to the fp32 gradient
            Passing("gradients of the activation and of the second weight", activation, 0.0, _E * num_weights * f * h),
            Passing("gradients of the activation and of the first product's output", gradients, -kept),
            # the first product's output is freed by now, its gradient has the same size
            Passing(
                "gradients of the input and of the first weight",
                _E * n * h - factor,
                -kept,
                _E * num_weights * first * h,
            ),
        ),
    )


def _stream_activation(mlp: FeedForward, activation: float, inner: float, share: Share, grouped: bool) -> Stream:
    """A fused kernel reads the first product's output and writes the activation; its backward reads both gradients'
    sources. Operators one by one read and write what lies between them too. grouped: of experts, where it may be part
    of both products, but for what its backward reads once more.
    """
    if grouped and share.facts.grouped_activation:
        return Stream("activation", 0.0, activation)
    if share.facts.elementwise == "fused":
        return Stream("activation", inner + activation, 2 * inner + activation)
    return Stream("activation", (5 if mlp.gated else 3) * activation, (9 if mlp.gated else 5) * activation, single=True)


def _list_experts(experts: Experts, n: float, h: int, share: Share) -> Operators:
    """Tokens are permuted to their experts and summed back (Megatron-LM, core/transformer/moe/token_dispatcher.py).

    Where every rank holds its slice of every expert the tokens are gathered before and summed after, once each; where
    experts are dealt to EP ranks each rank sends the copies of its own tokens there and back, and of a divided expert
    all ranks gather what was sent.
    """
    own, etp = n / share.sp, share.expert_tp
    # EP x ETP ranks bring their own tokens, each of which has top_k copies, and EP groups of experts get equal parts
    routed = own * share.expert_gather * experts.top_k
    if share.eager:
        own, routed = n, n * experts.top_k  # tokens are gathered before the router, which every rank runs on all
    routed *= share.imbalance_factor
    num_held = -(-experts.num_experts // share.ep)
    inner = _list_feed_forward(experts.expert, routed, h, etp, share, 0.0, num_held)
    if share.eager:
        # grouped_mm_experts_forward (transformers, integrations/moe.py): outputs are weighted by themselves; four
        # numbers of 8 bytes and the weight are kept of each copy
        weight_bytes = 4 if experts.fp32_router else _E
        unweighted = Saved(
            "experts' outputs before their weight, and indices", (_E * h + 4 * 8 + weight_bytes) * routed
        )
        inner = replace(inner, saved=(*inner.saved, unweighted))
        passing = -_E * h * routed  # what was weighted is freed by the time of its own gradients
    else:
        passing = _E * h * routed
    if "moe_act" in share.recompute_operators:
        inner = _without_activation(inner)
    elif not experts.expert.gated and not share.eager:
        # fused gated activations take the router's weight in, others are multiplied by it (moe/experts.py)
        unweighted = Saved("activation before the router's weight", inner.saved[1].size_bytes)
        inner = replace(inner, saved=(*inner.saved, unweighted))
    logits = own * experts.num_experts
    router = [Saved("router probabilities", 4 * logits)]
    if share.eager and experts.fp32_router:
        router.append(Saved("fp32 copy of the router's input", 4 * own * h, for_weight=True))
        router.append(Saved("fp32 copy of the router's weight", 4 * h * experts.num_experts))
    room_factor = _GRAPH_BUFFERS if share.facts.graphs == "full" and not share.facts.drops_tokens else 1.0
    inner, passing = _widen(inner, room_factor), room_factor * passing
    permuted, permuted_kept = room_factor * _E * routed * h, room_factor * share.input_bytes * routed * h
    moved_bytes = 2 * _E * (n + routed) * h if etp == share.tp else 2 * _E * (own + routed) * h
    gathered_bytes = _E * routed * h if etp > 1 else 0.0
    if share.ep == 1 and etp == share.tp:
        gathered_bytes = _E * n * h
    operators = Operators(
        products=(MatrixProduct(own, h, experts.num_experts), *inner.products),
        streams=(*_stream_tokens(routed * h, logits, moved_bytes, share), *inner.streams),
        saved=(
            *router,
            Saved("permuted input of the experts", permuted_kept, for_weight=True),
            *inner.saved,
        ),
        forward_only=tuple(Passing(p.moment, p.size_bytes + permuted) for p in inner.forward_only),
        with_backward=tuple(
            Passing(p.moment, p.size_bytes + passing, p.weight_bytes, p.gradient_bytes) for p in inner.with_backward
        ),
        exchanged_bytes=gathered_bytes,
        all_to_all_bytes=_E * own * experts.top_k * h * share.imbalance_factor if share.ep > 1 else 0.0,
        copies=experts.top_k,
        groups=ExpertGroups(experts.max_groups, experts.num_groups),
        rerun=inner.rerun,
    )
    if share.ep_kind == "deepspeed":
        # the gradient of a combining weight needs what it weighs
        outputs = Saved("experts' outputs before they are combined", _E * routed * h)
        operators = replace(operators, saved=(*operators.saved, outputs))
        if not share.token_rearrange:
            operators = deal_by_products(operators, own * share.expert_gather, routed, h)
    return _add_shared(operators, experts, n, h, share) if experts.shared else operators


def _widen(inner: Operators, room_factor: float) -> Operators:
    """`inner` with room for so many times as many tokens, however many are computed."""
    if room_factor == 1.0:
        return inner
    return replace(
        inner,
        saved=tuple(replace(one, size_bytes=room_factor * one.size_bytes) for one in inner.saved),
        forward_only=tuple(replace(one, size_bytes=room_factor * one.size_bytes) for one in inner.forward_only),
        with_backward=tuple(replace(one, size_bytes=room_factor * one.size_bytes) for one in inner.with_backward),
    )


def _stream_tokens(copied_count: float, score_count: float, moved_bytes: float, share: Share) -> tuple[Stream, ...]:
    """What brings `copied_count` numbers of tokens' copies to their experts and back, and picks these by scores."""
    dispatcher = share.facts.dispatcher
    if not dispatcher:
        return (Stream("permute and unpermute", moved_bytes, moved_bytes),)
    permuting, routing = _PERMUTING_PASSES[dispatcher] * _E * copied_count, _ROUTER_PASSES * 4 * score_count
    return (
        Stream("permute and unpermute", permuting, permuting),
        Stream("router's scores", routing, 2 * routing),
    )


def _add_shared(routed: Operators, experts: Experts, n: float, h: int, share: Share) -> Operators:
    assert experts.shared
    shared = _list_feed_forward(experts.shared, n, h, share.tp, share, shared_bytes=_E * n * h)
    if "mlp_act" in share.recompute_operators and "shared_experts" not in share.recompute_operators:
        shared = _without_activation(shared)
    if experts.shared_gate:
        own = n if share.eager else n / share.sp
        gate = Stream("gate of the shared expert", 2 * _E * own * h, 3 * _E * own * h)
        kept = Saved("shared expert's output before its gate", _E * own * h)
        product = MatrixProduct(own, h, 1)
        shared = replace(
            shared,
            products=(*shared.products, product),
            streams=(*shared.streams, gate),
            saved=(*shared.saved, kept),
        )
    if "shared_experts" in share.recompute_operators:
        shared = _run_again(shared)
    elif share.low:  # its first product keeps a low copy of what the router keeps as it is
        low_bytes = share.input_bytes * n * h / share.sp
        kept = Saved("input of the shared expert in low precision", low_bytes, for_weight=True)
        shared = replace(shared, saved=(*shared.saved, kept))
    beside = replace(shared, saved=(), forward_only=(), with_backward=(), rerun=None)
    freed = sum_kept(shared) if share.eager else (0.0, 0.0)  # eager code runs it last, so its backward first
    return replace(
        routed,
        products=routed.products + shared.products,
        streams=routed.streams + shared.streams,
        saved=routed.saved + shared.saved,
        forward_only=routed.forward_only + shared.forward_only,
        with_backward=(
            *(
                Passing(p.moment, p.size_bytes - freed[0], p.weight_bytes - freed[1], p.gradient_bytes)
                for p in routed.with_backward
            ),
            *shared.with_backward,
        ),
        beside=beside,
        rerun=join_reruns([routed.rerun, shared.rerun]),
    )


def sum_kept(operators: Operators) -> tuple[float, float]:
    """Bytes kept for gradients of inputs, and beside them for those of weights."""
    kept_bytes = operators.kept_bytes(trainable=False)
    return kept_bytes, operators.kept_bytes(trainable=True) - kept_bytes


def _without_activation(inner: Operators) -> Operators:
    """The same, its activation computed once more in the backward, from the first product's output."""
    kept, *activations = inner.saved
    activation_bytes = sum(saved.size_bytes for saved in activations)
    stream = inner.streams[0]
    return replace(
        inner,
        saved=(kept,),
        with_backward=tuple(
            Passing(p.moment, p.size_bytes + activation_bytes, p.weight_bytes, p.gradient_bytes)
            for p in inner.with_backward
        ),
        rerun=Operators(streams=(stream,)),
    )
