"""The operators of one transformer layer, dense or with experts, on one device.

Letters as in Korthikanti et al. 2022: n tokens of this device, h hidden size, t tensor parallel; a and g are the query
heads and key/value groups of this rank, d the head size, f the width of the feed-forward, e bytes per number.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Experts, LatentAttention, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.adapters import add_adapters
from mm_autoparallel.model.operators.attention import list_attention
from mm_autoparallel.model.operators.mindformers_operators import add_kept_by_graph
from mm_autoparallel.model.operators.mindformers_recompute import rerun_selected
from mm_autoparallel.model.operators.mlp import list_mlp, sum_kept
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
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
from mm_autoparallel.model.operators.second_products import rerun_second_products

_E = ELEMENT_BYTES


def list_layer(layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    """The operators of `layer` for one micro-batch of `tokens` per sample.

    Norms and residuals stand around both halves. The backward begins with the feed-forward, when all is still kept.
    """
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    attention, mlp = list_attention(layer, tokens, share), list_mlp(layer.mlp, n, h, share)
    boundary, elements = _E * n * h / share.sp, n * h / share.sp
    streams, saved, norms_again = _list_norms(layer, n, share)
    # forward: branch + stream → stream; backward: the branch's gradient is added to the stream's
    streams.append(Stream("residuals", 2 * 3 * boundary, 2 * 3 * boundary))
    if share.hidden_dropout:
        # forward writes the mask in passing; backward reads it and a gradient, and writes one
        streams.append(Stream("dropout of both branches", 2 * elements, 2 * (2 * _E + 1) * elements))
        saved.append(Saved("dropout masks of both branches", 2 * elements))
    products = attention.products + mlp.products
    if layer.modulated:
        # both norms' outputs and both branches are multiplied with what the condition made of each sample
        products = (MatrixProduct(share.mbs, h, 6 * h), *products)
        streams.append(Stream("modulation", 4 * 2 * boundary, 4 * 3 * boundary))
        saved.append(Saved("norms' outputs before their scale and branches before their gate", 4 * boundary))
    if layer.post_norms:
        streams.append(stream_norm("norms of both branches", 2 * elements, layer.norm, share))
        saved += keep_norm("norms of both branches", layer.norm, 2 * n / share.sp, h, share)
    if layer.layer_scale:
        streams.append(Stream("layer scales", 2 * 2 * boundary, 2 * 3 * boundary))
        saved.append(Saved("branch outputs before their scale", 2 * boundary, for_weight=True))
    gathered = _E * n * h if share.sp > 1 else 0.0
    # who keeps the gathered input has it; the gathered gradient of the output is gone after the second product
    gathered_again = 0.0 if _keeps_gathered(share) else gathered
    # the backward begins with the mask of the second branch, and eager code frees it then
    freed = elements if share.eager and share.hidden_dropout else 0.0
    operators = Operators(
        products=products,
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
                Passing(
                    p.moment,
                    p.size_bytes + boundary - freed + (gathered if index == 0 else gathered_again),
                    p.weight_bytes,
                    p.gradient_bytes,
                )
                for index, p in enumerate((*mlp.with_backward, *_after(mlp, attention, share)))
            ),
        ),
        input_bytes=boundary,
        output_bytes=boundary,
        exchanged_bytes=mlp.exchanged_bytes,
        all_to_all_bytes=mlp.all_to_all_bytes,
        copies=mlp.copies,
        groups=mlp.groups,
        beside=mlp.beside,
        rerun=join_reruns([norms_again, attention.rerun, mlp.rerun]),
    )
    if "second_products" in share.recompute_operators:
        operators = rerun_second_products(operators, layer, n, share)
    if layer.adapters:
        return add_adapters(operators, layer, layer.adapters, n, share)
    if not share.graph:
        return operators
    return rerun_selected(add_kept_by_graph(operators, layer, tokens, share), layer, share)


def _after(mlp: Operators, attention: Operators, share: Share) -> tuple[Passing, ...]:
    """What attention's backward holds, where it gathers keys less what the feed-forward has freed by then."""
    if not share.gathered_keys:
        return attention.with_backward
    freed_bytes, freed_for_weights = sum_kept(mlp)
    return tuple(
        replace(p, size_bytes=p.size_bytes - freed_bytes, weight_bytes=p.weight_bytes - freed_for_weights)
        for p in attention.with_backward
    )


def _keeps_gathered(share: Share) -> bool:
    """Whether what matrices get is kept as it was gathered."""
    return share.eager or share.facts.gathers == "norm"


def _list_norms(layer: TransformerLayer, n: float, share: Share) -> tuple[list[Stream], list[Saved], Operators | None]:
    """Both norms: streams, what is kept of their inputs and outputs, and what of them runs once more.

    `layernorm` among the recomputed operators takes away the outputs of norms by themselves; a norm that is part of a
    feed-forward's first matrix runs once more with it. Eager code and norms that gather keep outputs as they were
    gathered, where Megatron gathers each rank's part once more.
    """
    elements = n * layer.hidden_size / share.sp
    streams = [stream_norm(name, elements, layer.norm, share) for name in ("norm 1", "norm 2")]
    saved = [
        *keep_norm("norm 1", layer.norm, n / share.sp, layer.hidden_size, share),
        *keep_norm("norm 2", layer.norm, n / share.sp, layer.hidden_size, share),
    ]
    output_count = n * layer.hidden_size / (1 if _keeps_gathered(share) else share.sp)
    latent, has_experts = isinstance(layer.attention, LatentAttention), isinstance(layer.mlp, Experts)
    again = []
    for stream, alone, names, each_bytes, what in (
        # two compressing matrices keep a low copy each; a router keeps its input as it is
        (
            streams[0],
            latent,
            (),
            (2 if latent and share.low else 1) * share.input_bytes,
            "norm 1 output, input of query, key and value",
        ),
        (
            streams[1],
            has_experts,
            ("mlp",),
            _E if has_experts else share.input_bytes,
            "norm 2 output, input of the feed-forward",
        ),
    ):
        part_of_product = share.fused_norms and not alone
        reasons = names if part_of_product else ("layernorm",)
        if any(reason in share.recompute_operators for reason in reasons):
            again.append(stream)
        else:
            saved.append(Saved(what, each_bytes * output_count, for_weight=True))
    return streams, saved, Operators(streams=tuple(again)) if again else None
