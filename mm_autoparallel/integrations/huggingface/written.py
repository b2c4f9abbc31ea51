"""A decoder's sizes as the config.json of a class that transformers has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.layers import Experts, Layers
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import parse_foreign_model

_SAME_EITHER_WAY = {"joint_qkv", "fp32_router", "max_groups", "num_groups"}
"""How code lays out what has the same sizes."""


def write_config(model: Model, where: Path, num_positions: int) -> dict[str, Any]:
    """The content of a config.json of the sizes of `model`; num_positions: the longest sequence.

    It is read again and must give the model. Raises JobError, which calls the model's file `where`, naming what no
    class has.
    """
    layers = model.text.layers
    document = _describe_gpt2(model) if layers.norm == "layer" else _describe_llama_kind(model, num_positions)
    found, asked = _sizes(parse_foreign_model(document, where)), _sizes(model)
    lacking = [f"{key} {asked[key]}" for key in asked if found[key] != asked[key]]
    if model.encoders or lacking:
        lacking = lacking or ["encoders"]
        raise JobError(
            f"{where}: transformers has no class of its sizes, the nearest is {document['model_type']} without "
            f"{', '.join(lacking)}; give the model's own config.json"
        )
    return document


def _sizes(model: Model) -> dict[str, Any]:
    text = model.text.model_dump(exclude={"layers", "freeze"})
    layers = model.text.layers.model_dump(exclude=_SAME_EITHER_WAY)
    if layers["experts"]:
        layers["experts"] = {key: value for key, value in layers["experts"].items() if key not in _SAME_EITHER_WAY}
    return text | layers


def _describe_gpt2(model: Model) -> dict[str, Any]:
    text, layers = model.text, model.text.layers
    return {
        "model_type": "gpt2",
        "vocab_size": text.vocab_size,
        "n_positions": text.num_positions or 1,
        "n_embd": layers.hidden_size,
        "n_layer": layers.num_layers,
        "n_head": layers.num_heads,
        "n_inner": layers.ffn_size,
        "activation_function": "gelu_new" if layers.tanh_gelu else "gelu",
        "tie_word_embeddings": text.tied,
    }


def _describe_llama_kind(model: Model, num_positions: int) -> dict[str, Any]:
    layers = model.text.layers
    model_type, more = _choose_class(layers)
    return {
        "model_type": model_type,
        "vocab_size": model.text.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.ffn_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_groups,
        "max_position_embeddings": num_positions,
        "tie_word_embeddings": model.text.tied,
        **more,
    }


def _choose_class(layers: Layers) -> tuple[str, dict[str, Any]]:
    """The model type whose layers are nearest, and what of its config is not usual."""
    experts = layers.experts
    if layers.latent:
        latent = layers.latent.model_dump(exclude={"norms"})
        return "deepseek_v3", latent | {"q_lora_rank": latent["q_lora_rank"] or None} | _describe_routed(experts)
    head: dict[str, Any] = {"head_dim": layers.head_dim}
    biases = {"attention_bias": layers.output_bias, "mlp_bias": layers.mlp_bias}
    if experts is None:
        if layers.qk_norm:
            return "qwen3", head | {"attention_bias": layers.qkv_bias}
        if layers.qkv_bias and not layers.output_bias:
            return "qwen2", head
        return "llama", head | biases
    if layers.qk_norm:
        return "qwen3_moe", head | {"attention_bias": layers.qkv_bias} | _describe_scattered(experts)
    if experts.shared_gate:
        shared = {"shared_expert_intermediate_size": experts.shared_ffn_size}
        return "qwen2_moe", head | shared | _describe_scattered(experts)
    return "mixtral", head | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "intermediate_size": experts.ffn_size,
    }


def _describe_scattered(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_size,
        "mlp_only_layers": [*experts.dense_layers],
    }


def _describe_routed(experts: Experts | None) -> dict[str, Any]:
    """DeepSeek's, whose class has them always."""
    if experts is None:
        return {}
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_size,
        "n_shared_experts": experts.shared_ffn_size // experts.ffn_size or None,
        "first_k_dense_replace": len(experts.dense_layers),
        "n_group": 1,
        "topk_group": 1,
    }
