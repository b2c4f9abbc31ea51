"""What tensor parallel ranks and stages divide of a model: heads, widths, experts, the vocabulary, layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import Workload

#: Of --make-vocab-size-divisible-by, where Megatron-LM is told no other.
PADDED_TO = 128


def padded_vocab_size(num_tokens: int, tp: int, divisible_by: int = PADDED_TO) -> int:
    """A vocabulary as Megatron-LM pads it: to a multiple of 128 per tensor parallel rank (training/tokenizer)."""
    step = divisible_by * tp
    return -(-num_tokens // step) * step


def divides(layers: Layers, tp: int) -> bool:
    """Whether `tp` ranks can share such layers: heads, groups of keys and values, and the feed-forward."""
    return not any(size % tp for _, size in _list_sizes(layers))


def replicates(modality: str, layers: Layers, workload: Workload, tp: int) -> bool:
    """Whether these layers are whole on each of `tp` ranks: those of a tower that they cannot share."""
    return workload.replicate_towers and modality != "text" and not divides(layers, tp)


def _list_sizes(layers: Layers) -> list[tuple[str, int]]:
    """What tensor parallel ranks must divide, but for the width of routed experts."""
    sizes = [("attention heads", layers.num_heads), ("key and value groups", layers.num_kv_groups)]
    if layers.delta:  # whose value heads are a multiple of these
        sizes.append(("delta rule's key heads", layers.delta.num_key_heads))
    if layers.experts is None or layers.experts.dense_layers:
        sizes.append(("feed-forward width", layers.ffn_size))
    if layers.experts:
        sizes.append(("shared expert width", layers.experts.shared_ffn_size))
    return sizes


def vocabulary_remarks(model: Model, workload: Workload, sizes: Collection[int], has_own_sizes: bool) -> list[str]:
    """A sentence where of these tensor parallel sizes some divide all of the model but its vocabulary. has_own_sizes:
    encoders may have other sizes than the decoder."""
    if isinstance(model, TracedModel):
        return []
    size, parts = model.text.vocab_size, ["text"] if has_own_sizes else [each.name for each in model.modalities]
    strategies = (Strategy(pp=1, tp=tp, dp=1, mbs=1) for tp in sizes if tp > 1 and size % tp)
    left_out = [each.tp for each in strategies if not any(division_reasons(model, workload, each, parts))]
    if not left_out:
        return []
    return [
        f"the vocabulary, {size}, alone keeps TP {', '.join(map(str, left_out))} out of the search; if the framework "
        f"pads it, as Megatron-LM does to a multiple of {PADDED_TO} times TP, state that as vocab_size: "
        f"{padded_vocab_size(size, max(left_out))}"
    ]


def division_reasons(
    model: Model, workload: Workload, strategy: Strategy, parts: Collection[str] = ()
) -> Iterator[str]:
    """What `strategy` does not divide. parts: modalities that it is of (empty: the whole model)."""
    tp = strategy.tp
    if isinstance(model, TracedModel):
        for name, size in (("TP", tp), ("CP", strategy.cp), ("EP", strategy.ep)):
            if size > 1:
                yield f"{name} {size} divides layers, and {model.name} is known from traces of whole ones alone"
    for modality in () if isinstance(model, TracedModel) else model.modalities:
        if parts and modality.name not in parts:
            continue
        layers = modality.layers
        if replicates(modality.name, layers, workload, tp):
            continue
        experts = layers.experts
        for name, size in _list_sizes(layers):
            if size % tp:
                yield f"TP {tp} does not divide the {name} of {modality.name}, {size}"
        if experts and experts.ffn_size % strategy.expert_tp:
            part = f"TP {tp}" if strategy.expert_tp == tp else f"ETP {strategy.expert_tp}"
            yield f"{part} does not divide the expert width of {modality.name}, {experts.ffn_size}"
        if layers.delta and workload.stack == "mindspeed" and (tp > 1 or strategy.cp > 1):
            yield (  # mindspeed_llm/tasks/models/transformer/qwen3_next_gated_deltanet_attention.py
                f"TP {tp} and CP {strategy.cp}: MindSpeed-LLM's layers with a delta rule run with 1 of each"
            )
    if parts:
        return
    if model.text.vocab_size % tp and not isinstance(model, TracedModel):
        yield (
            f"TP {tp} does not divide the vocabulary, {model.text.vocab_size}; a model whose vocab_size is padded to "
            f"{-(-model.text.vocab_size // tp) * tp} would do"
        )
    num_chunks = strategy.pp * strategy.vpp
    if num_chunks > model.num_layers:
        chunks = f"PP {strategy.pp} x VPP {strategy.vpp} = {num_chunks} chunks"
        yield f"{chunks} need a layer each, and the model has {model.num_layers}"
