"""What a layer in a graph of MindFormers keeps less where `select_recompute` names some of its operators.

A pattern is a path of names, `\\.` between them, each a regular expression for a cell of the layer or, last, for a cell
or an operator (MindFormers, mindformers/models/utils.py, set_pattern_recompute). A cell that matches runs again but for
the operator that gives its output (MindSpore, Cell.recompute: "all the primitives in the cell except the outputs"); an
operator that matches runs again itself. What it gives is then not kept. `select_comm_recompute` names operators whose
output is gathered by ranks again. Cells are called as DeepSeek-V3's and Llama's are (research/deepseek3,
mindformers/models/llama).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mm_autoparallel.model.blocks.chain import Experts, LatentAttention, TransformerLayer
from mm_autoparallel.model.operators.operators import MatrixProduct, Operators, Saved, Share, Stream, join_reruns

PATH_DOT = r"\."
"""Between the names of a pattern."""

_Path = tuple[str, ...]


@dataclass(frozen=True)
class _Kept:
    """A kept tensor: the name of its Saved, the operator that gives it, and the parts of the layer that run again for
    it. inner: so many of the path's first names are cells whose output it is not. factor: its part of that Saved.
    occurrence: its number among those of this name. gathered: the exchange after that operator gives it.
    """

    name: str
    path: _Path
    inner: int
    again: tuple[str, ...]
    factor: float = 1.0
    occurrence: int = 0
    gathered: bool = False


def rerun_selected(operators: Operators, layer: TransformerLayer, share: Share) -> Operators:
    """`operators` of one layer, less what the patterns of `share` free and with what runs again for it."""
    if not share.rerun_patterns and not share.exchange_patterns:
        return operators
    freed = [
        kept
        for kept in _kept_tensors(layer)
        if _is_freed(kept, share.exchange_patterns if kept.gathered else share.rerun_patterns)
    ]
    shares: dict[tuple[str, int], float] = {}
    for kept in freed:
        shares[kept.name, kept.occurrence] = shares.get((kept.name, kept.occurrence), 0.0) + kept.factor
    saved, gathered_bytes, seen = [], 0.0, dict[str, int]()
    for tensor in operators.saved:
        occurrence = seen.get(tensor.name, 0)
        seen[tensor.name] = occurrence + 1
        freed_bytes = min(1.0, shares.get((tensor.name, occurrence), 0.0)) * tensor.size_bytes
        if any(kept.gathered and kept.name == tensor.name for kept in freed):
            gathered_bytes += freed_bytes
        saved.append(Saved(tensor.name, tensor.size_bytes - freed_bytes, tensor.for_weight))
    exchange = Operators(products=(MatrixProduct(0.0, 0.0, 0.0, gathered_bytes=gathered_bytes),))
    parts = _parts_of(operators, layer)
    again = [parts[part] for part in dict.fromkeys(part for kept in freed for part in kept.again) if part in parts]
    return replace(
        operators,
        saved=tuple(saved),
        rerun=join_reruns([operators.rerun, *again, exchange if gathered_bytes else None]),
    )


def frees_nothing(patterns: Iterable[str], layers: Iterable[TransformerLayer], gathered: bool) -> list[str]:
    """Those of `patterns` for which no tensor that `layers` are known to keep is freed. gathered: of exchanges."""
    kept = [tensor for layer in layers for tensor in _kept_tensors(layer) if tensor.gathered == gathered]
    return [pattern for pattern in patterns if not any(_is_freed(tensor, (pattern,)) for tensor in kept)]


def _is_freed(kept: _Kept, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        parts = pattern.split(PATH_DOT)
        if len(parts) > len(kept.path) or not all(map(_matches, parts, kept.path)):
            continue
        if len(parts) == len(kept.path) or (len(parts) <= kept.inner and not kept.gathered):
            return True
    return False


def _matches(part: str, name: str) -> bool:
    return re.fullmatch(part, name) is not None


def _kept_tensors(layer: TransformerLayer) -> Iterator[_Kept]:
    for number, cell in ((1, "attention_norm"), (2, "ffn_norm")):
        # the fp32 copy goes, the bf16 input that it stood in for stays
        yield _Kept(f"fp32 in place of bf16 input of norm {number}", (cell, "cast"), 1, ())
        what = "input of query, key and value" if number == 1 else "input of the feed-forward"
        yield _Kept(f"norm {number} output, {what}", (cell, "rcast"), 0, (f"norm {number}",))
    yield from _kept_by_attention(layer)
    if not isinstance(layer.mlp, Experts):
        yield from _kept_by_feed_forward(("feed_forward",), "", 0)
        yield _Kept("gathered input of the feed-forward", ("ffn_norm", "norm"), 0, (), gathered=True)
        return
    routed: _Path = ("feed_forward", "routed_experts") if layer.mlp.shared else ("feed_forward",)
    depth = len(routed)
    yield from _kept_by_feed_forward((*routed, "ffn"), "", 0)
    if layer.mlp.shared:
        yield from _kept_by_feed_forward(("feed_forward", "shared_experts"), "shared ", 1)
    yield _Kept("router probabilities", (*routed, "router", "softmax"), depth + 1, ("router",))
    yield _Kept("permuted input of the experts", (*routed, "gather"), depth, ("dispatch",))
    again = ("dispatch", "first product", "activation", "second product", "combine")
    yield _Kept("experts' outputs before their weight", (*routed, "ffn", "w2", "matmul"), depth, again)


def _kept_by_attention(layer: TransformerLayer) -> Iterator[_Kept]:
    kernel = ("attention", "flash_attention", "flash_attention")
    yield _Kept("attention output", kernel, 1, ("attention",))
    yield _Kept("softmax statistics", kernel, 1, ("attention",))
    # what is joined of two tensors would need these in its place: only the whole cell frees it
    yield _Kept("query, key and value", ("attention", "joined", "heads"), 1, ("up", "attention streams"))
    if not isinstance(layer.attention, LatentAttention):
        return
    for name, down, norm in (("query", "q2l_proj", "lq_norm"), ("key and value", "kv2l_latent_kv", "lkv_norm")):
        yield _Kept(f"compressed {name}'s norm input", ("attention", down, "matmul"), 1, ("down",))
        again = ("attention streams",)
        yield _Kept(f"compressed {name} after its norm", ("attention", norm, "rcast"), 1, again)
    yield _Kept("numbers beside the compressed key and value", ("attention", "kv2l_k_pe", "matmul"), 1, ("down",))
    for part, norm in ((layer.attention.q_lora_rank, "lq_norm"), (layer.attention.kv_lora_rank, "lkv_norm")):
        width = layer.attention.q_lora_rank + layer.attention.kv_lora_rank + layer.attention.rope_dim
        yield _Kept(
            "gathered compressed vectors", ("attention", norm, "norm"), 1, (), factor=part / width, gathered=True
        )
    yield _Kept("gathered compressed vectors", ("attention", "joined", "heads"), 1, ())


def _kept_by_feed_forward(cell: _Path, prefix: str, occurrence: int) -> Iterator[_Kept]:
    first, depth = (f"{prefix}first product",), len(cell)
    product = "first product's output, input of the activation"
    yield _Kept(product, (*cell, "w1", "matmul"), depth + 1, first, 0.5, occurrence)
    yield _Kept(product, (*cell, "w3", "matmul"), depth, first, 0.5, occurrence)
    activation = (f"{prefix}activation",)
    gate = (*cell, "w1", "activation", "silu")
    yield _Kept("activated gate", gate, depth, activation, occurrence=occurrence)
    name = "activation, input of the second product"
    yield _Kept(name, (*cell, "mul"), depth, activation, occurrence=occurrence)


def _parts_of(operators: Operators, layer: TransformerLayer) -> dict[str, Operators]:
    """The layer's operators by what _Kept calls them (layers.py lists them in this order)."""
    latent = isinstance(layer.attention, LatentAttention)
    has_query_rank = isinstance(layer.attention, LatentAttention) and layer.attention.q_lora_rank > 0
    sizes = [("down", (2 if has_query_rank else 1) if latent else 0), ("up", 2 if latent else 1), ("out", 1)]
    if isinstance(layer.mlp, Experts):
        sizes += [("router", 1), ("first product", 1), ("second product", 1)]
        sizes += [("shared first product", 1)] if layer.mlp.shared else []
    else:
        sizes += [("first product", 1)]
    begins = [sum(size for _, size in sizes[:index]) for index in range(len(sizes) + 1)]
    parts = {
        name: Operators(products=operators.products[begin:end])
        for (name, _), (begin, end) in zip(sizes, pairwise(begins), strict=True)
    }
    parts["attention"] = Operators(attention=operators.attention)
    activations = [stream for stream in operators.streams if stream.name == "activation"]
    for name, stream in zip(("activation", "shared activation"), activations, strict=False):
        parts[name] = Operators(streams=(stream,))
    for name in ("norm 1", "norm 2"):
        parts[name] = Operators(streams=_named(operators.streams, (name,)))
    others = ("norm 1", "norm 2", "residuals", "activation", "permute and unpermute")
    parts["attention streams"] = Operators(streams=tuple(s for s in operators.streams if s.name not in others))
    exchange_bytes = operators.all_to_all_bytes / 2, operators.exchanged_bytes / 2
    moved = _named(operators.streams, ("permute and unpermute",))
    for name in ("dispatch", "combine"):
        half = tuple(Stream(s.name, s.forward_bytes / 2, s.backward_bytes / 2) for s in moved)
        parts[name] = Operators(streams=half, all_to_all_bytes=exchange_bytes[0], exchanged_bytes=exchange_bytes[1])
    return parts


def _named(streams: Sequence[Stream], names: Sequence[str]) -> tuple[Stream, ...]:
    return tuple(stream for stream in streams if stream.name in names)
