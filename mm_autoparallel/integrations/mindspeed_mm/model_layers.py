"""The transformer layers of one part of a MindSpeed-MM model.json, by Megatron's TransformerConfig names."""

from __future__ import annotations

from typing import Any

from mm_autoparallel.model.job.layers import Experts, LatentAttention, Layers, Norm
from mm_autoparallel.model.readers.expert_groups import read_groups
from mm_autoparallel.model.readers.foreign import Section

NORMS: dict[str, Norm] = {"RMSNorm": "rms", "LayerNorm": "layer"}


def read_layers(part: Section, qk_norm: str, **more: Any) -> Layers:
    """The transformer layers of one part, with `more` fields that its family fixes."""
    hidden_size, num_heads = part.count("hidden_size"), part.count("num_attention_heads")
    if not part.has("kv_channels") and hidden_size % num_heads:
        raise part.refuse("num_attention_heads", f"it must divide hidden_size {hidden_size}, or kv_channels be given")
    latent = _read_latent(part) if part.flag("multi_latent_attention", False) else None
    num_kv_groups = num_heads
    if not latent and part.flag("group_query_attention", part.has("num_query_groups")):
        num_kv_groups = part.count("num_query_groups")
    if num_heads % num_kv_groups:
        raise part.refuse("num_query_groups", f"it must divide num_attention_heads {num_heads}")
    bias = part.flag("add_bias_linear", not part.flag("disable_bias_linear", False))
    fields: dict[str, Any] = {
        "num_layers": part.layers("num_layers"),
        "hidden_size": hidden_size,
        "ffn_size": part.count("ffn_hidden_size"),
        "num_heads": num_heads,
        "num_kv_groups": num_kv_groups,
        "head_dim": 0 if latent else part.count("kv_channels", hidden_size // num_heads),
        "norm": read_norm(part),
        "gated": part.flag("gated_linear_unit", False),
        "mlp_bias": bias,
        "qkv_bias": not latent and part.flag("add_qkv_bias", bias),
        "output_bias": bias,
        "qk_norm": qk_norm if part.flag("qk_layernorm", False) and not latent else None,
        "latent": latent,
        "experts": _read_experts(part),
    }
    return Layers(**(fields | more))


LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes of latent attention, as MindSpeed's flags call them; launch scripts have them, not model.json."""


def _read_latent(part: Section) -> LatentAttention:
    """Compressed vectors have norms where qk_layernorm asks for them; a query without a rank is not compressed."""
    query, key_value, plain, rotated, value = LATENT_SIZES
    return LatentAttention(
        q_lora_rank=part.number(query, 0),
        kv_lora_rank=part.count(key_value),
        qk_nope_head_dim=part.count(plain, 128),
        qk_rope_head_dim=part.count(rotated, 64),
        v_head_dim=part.count(value, 128),
        norms=part.flag("qk_layernorm", False),
    )


def read_norm(part: Section) -> Norm:
    """The norm of one part, by Megatron's name. Raises JobError where it is none that is known."""
    name = part.text("normalization", "LayerNorm")
    if name not in NORMS:
        raise part.refuse("normalization", f"one of {', '.join(NORMS)} is expected")
    return NORMS[name]


def _read_experts(part: Section) -> Experts | None:
    """Experts under the names of Megatron (moe_*) or of Hugging Face, which MindSpeed-MM takes too."""
    if not part.has("num_moe_experts"):
        return None
    num_layers = part.layers("num_layers")
    ffn_size = part.count("moe_ffn_hidden_size", part.count("moe_intermediate_size", part.count("ffn_hidden_size")))
    num_experts, top_k = part.count("num_moe_experts"), part.count("moe_router_topk", 2)
    if top_k > num_experts:
        raise part.refuse("moe_router_topk", f"it is at most num_moe_experts {num_experts}")
    num_dense = part.number("first_k_dense_replace", 0)
    if num_dense > num_layers:
        raise part.refuse("first_k_dense_replace", f"it is at most num_layers {num_layers}")
    pattern = part.content.get("moe_layer_freq")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(item not in (0, 1) for item in pattern):
            raise part.refuse("moe_layer_freq", f"a list of {num_layers} zeros and ones is expected, or a whole number")
        dense = [index for index, item in enumerate(pattern) if item == 0]
    else:
        every = part.count("moe_layer_freq", 1)
        dense = [index for index in range(num_layers) if index % every]
    max_groups, num_groups = read_groups(part, num_experts)
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=ffn_size,
        shared_ffn_size=part.number(
            "moe_shared_expert_intermediate_size", part.number("n_shared_experts", 0) * ffn_size
        ),
        dense_layers=tuple(sorted({*range(num_dense), *dense})),
        max_groups=max_groups,
        num_groups=num_groups,
    )
