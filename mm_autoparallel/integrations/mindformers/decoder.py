"""The decoder that a YAML trains: its counts of layers, its sizes in a job's terms, and how its numbers are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mm_autoparallel.integrations.mindformers import families
from mm_autoparallel.integrations.mindformers.model_section import ModelSection, first_key
from mm_autoparallel.model.readers.expert_groups import read_groups
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.validation import nearest

_DTYPES = {
    "float32": 4.0,
    "fp32": 4.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "fp16": 2.0,
}
"""Bytes of a number."""


@dataclass(frozen=True)
class LayerCounts:
    """num_layers: of the decoder. num_dense: before the first with experts. counted_mtp: multi-token prediction modules

    that `offset` counts as layers (DeepseekV3Config). last_mtp: those that stand behind the last layer and in no list.
    """

    num_layers: int
    num_dense: int
    has_experts: bool
    counted_mtp: int
    last_mtp: int


def count_layers(model: ModelSection) -> LayerCounts:
    """Raises JobError where the class is none that is known, or a count is missing or mistyped."""
    part = _with_defaults(model)
    sizes = part.sizes
    num_layers = sizes.layers(layers_key(part))
    has_experts = part.experts.number(_experts_key(part), 0) > 1
    num_dense = _count_dense(part, num_layers) if has_experts else 0
    mtp = sizes.number(first_key(sizes, "num_nextn_predict_layers", "mtp_num_layers", "mtp_depth"), 0)
    counted = 0 if part.is_mcore else mtp
    return LayerCounts(num_layers, num_dense, has_experts, counted, mtp - counted)


def layers_key(model: ModelSection) -> str:
    """What the model's number of layers is called."""
    return first_key(model.sizes, "num_hidden_layers", "num_layers") if model.is_mcore else "num_layers"


def describe_decoder(model: ModelSection, num_layers: int, num_dense: int, num_mtp: int, tp: int) -> dict[str, Any]:
    """The decoder as a job's `model.text` says it, with these counts, for `tp` tensor parallel ranks.

    Raises JobError naming the key that is wrong.
    """
    part = _with_defaults(model)
    family = families.MCORE_FAMILY if part.is_mcore else families.LEGACY[model.family]
    layers, outside = family.read(part)
    layers = {"num_layers": num_layers, "norm": "rms", **layers}
    if family.repeats_groups and tp > layers["num_kv_groups"] and tp % layers["num_kv_groups"] == 0:
        layers["num_kv_groups"] = tp
    vocab_size = part.sizes.count(family.vocab)
    if family.whole_vocab and vocab_size % tp:
        vocab_size *= tp
    if part.experts.number(_experts_key(part), 0) > 1:
        layers["experts"] = _describe_experts(part, layers["ffn_size"], num_dense)
    return {
        "vocab_size": vocab_size,
        "layers": layers,
        "num_mtp": num_mtp,
        "tied": part.sizes.flag("tie_word_embeddings", False),
        **outside,
    }


def sequence_length(model: ModelSection) -> int:
    """Tokens of a sample."""
    return _with_defaults(model).sizes.count("seq_length")


def has_flash_attention(model: ModelSection) -> bool:
    """Whether attention keeps no scores."""
    return _with_defaults(model).sizes.flag("use_flash_attention", False)


def has_no_mask(model: ModelSection) -> bool:
    """Whether attention needs no mask of its own length: a compressed one, or none (Llama's ring attention)."""
    sizes = _with_defaults(model).sizes
    if any(sizes.flag(key, False) for key in ("use_attn_mask_compression", "use_eod_attn_mask_compression")):
        return True
    return model.family == families.LLAMA and sizes.flag("use_ring_attention", False)


def bytes_of_numbers(model: ModelSection) -> tuple[float, float]:
    """Of a parameter as it is kept, and as it is computed with."""
    sizes = _with_defaults(model).sizes
    kept = first_key(sizes, "params_dtype" if model.is_mcore else "param_init_type", "compute_type")
    return _bytes(sizes, kept), _bytes(sizes, first_key(sizes, "compute_dtype", "compute_type"))


def _bytes(sizes: Section, key: str) -> float:
    name = sizes.text(key, "float16")
    if name not in _DTYPES:
        raise sizes.refuse(key, f"one of {', '.join(_DTYPES)} is expected")
    return _DTYPES[name]


def _experts_key(model: ModelSection) -> str:
    names = ("n_routed_experts", "num_experts", "num_moe_experts") if model.is_mcore else ("expert_num",)
    return first_key(model.experts, *names)


def _count_dense(model: ModelSection, num_layers: int) -> int:
    dense = model.experts.number("first_k_dense_replace", 0)
    if dense > num_layers:
        raise model.experts.refuse("first_k_dense_replace", f"the model has num_layers: {num_layers}")
    if not model.is_mcore or dense:
        return dense
    pattern: Any = model.experts.content.get("moe_layer_freq", 1)
    if pattern == 1:
        return 0
    if isinstance(pattern, list) and len(pattern) == num_layers:
        dense = pattern.count(0)
        if pattern == [0] * dense + [1] * (num_layers - dense):
            return dense
    raise model.experts.refuse(
        "moe_layer_freq", "dense layers before all layers with experts are understood; scattered ones are not"
    )


def _describe_experts(model: ModelSection, ffn_size: int, num_dense: int) -> dict[str, Any]:
    experts = model.experts
    width = experts.count(first_key(experts, "moe_intermediate_size", "moe_ffn_hidden_size"), ffn_size)
    if model.is_mcore:
        shared = experts.number(first_key(experts, "n_shared_experts", "shared_expert_num"), 0) * width
        shared = experts.number("moe_shared_expert_intermediate_size", shared)
        top_k = experts.count(first_key(experts, "num_experts_per_tok", "moe_router_topk"), 2)
    else:
        shared = experts.number("shared_expert_num", 0) * width
        top_k = experts.count("num_experts_chosen", 1)
    num_experts = experts.count(_experts_key(model))
    if top_k > num_experts:
        key = first_key(experts, "num_experts_per_tok", "moe_router_topk", "num_experts_chosen")
        raise experts.refuse(key, f"it is at most {_experts_key(model)} {num_experts}")
    # files cut to few experts keep the groups of the whole model
    max_groups, num_groups = read_groups(experts, num_experts, uneven=True)
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "ffn_size": width,
        "shared_ffn_size": shared,
        "shared_gate": shared > 0 and experts.flag("use_shared_expert_gating", False),
        "dense_layers": list(range(num_dense)),
        "max_groups": max_groups,
        "num_groups": num_groups,
    }


def _with_defaults(model: ModelSection) -> ModelSection:
    if model.is_mcore:
        if model.family not in families.MCORE:
            hint = nearest(model.family, list(families.MCORE)) + families.why_refused(model.family)
            raise model.sizes.refuse("model_type", f"read are {', '.join(families.MCORE)}{hint}")
        sizes = replace(model.sizes, defaults=families.MCORE[model.family])
        families.refuse_unknown_structure(sizes)
        return replace(model, sizes=sizes, experts=sizes)
    if model.family not in families.LEGACY:
        raise model.sizes.refuse("type", families.why_refused(model.family) or f"read are {', '.join(families.LEGACY)}")
    return replace(model, sizes=replace(model.sizes, defaults=families.LEGACY[model.family].defaults))
