"""A decoder from the arguments of Megatron-LM's pretrain_gpt.py, or of pretrain_bert.py, as a mapping.

Keys are the names of its flags, with dashes or underscores. Defaults and what follows from what are those of
megatron/training/arguments.py. Arguments that leave the model's sizes alone are none of our business; those that make a
model of another form are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mm_autoparallel.model.job.division_law import PADDED_TO, padded_vocab_size
from mm_autoparallel.model.job.layers import DeltaAttention, Experts, LatentAttention, Layers, Norm
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.readers.expert_groups import read_groups
from mm_autoparallel.model.readers.foreign import Section

_OTHER_FORMS = {
    "spec": "layers of a specification of one's own",
    "hybrid_override_pattern": "layers of several kinds",
    "hybrid_attention_ratio": "layers of several kinds",
    "is_hybrid_model": "layers of several kinds",
    "heterogeneous_layers_config_path": "layers of different sizes",
    "retro_add_retriever": "a retriever",
    "encoder_num_layers": "an encoder before the decoder",
    "decoder_num_layers": "an encoder before the decoder",
    "apply_residual_connection_post_layernorm": "residuals behind the norms",
    "window_size": "sliding windows",
    "use_kitchen": "products of another library",
    "linear_attention_type": "linear attention",
}
"""Arguments that, where they are set, make a model that no chain of these blocks is."""

_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokens of GPT-2 (Radford et al. 2019) and Llama 2 (arXiv:2307.09288); other tokenizers read them from a file."""

_NORMS: dict[str, Norm] = {"LayerNorm": "layer", "RMSNorm": "rms"}


def is_megatron_arguments(document: Mapping[str, Any]) -> bool:
    """True for a mapping that has the three sizes without which Megatron-LM builds nothing."""
    keys = {_plain(key) for key in document}
    return {"num_layers", "hidden_size", "num_attention_heads"} <= keys and "model_type" not in keys


def read_megatron_arguments(file: Section, bert: bool = False) -> Model:
    """The model that Megatron-LM builds from the arguments in `file`; `bert`: by pretrain_bert.py.

    Raises JobError naming the argument that is missing, mistyped, contradictory, or of a form that is not understood.
    """
    part = replace(file, content={_plain(key): _typed(value) for key, value in file.content.items()})
    for key, form in _OTHER_FORMS.items():
        if part.content.get(key) not in (None, False, 0):
            raise part.refuse(key, f"a model with {form} is not understood")
    layers = _read_layers(part)
    text = Decoder(
        vocab_size=_padded_vocabulary(part),
        layers=layers,
        tied=not part.flag("untie_embeddings_and_output_weights", False),
        num_positions=_read_positions(part),
        causal=not bert,
        masked=bert,
        num_mtp=part.number("mtp_num_layers", 0),
    )
    return Model(name="bert" if bert else "gpt", text=text)


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _typed(value: Any) -> Any:
    """A value as it would be parsed where it stands as text, as on a command line or in a table; nothing for empty."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return {"": None, "true": True, "false": False}.get(text.lower(), text)


def _read_layers(part: Section) -> Layers:
    width, num_heads = part.count("hidden_size"), part.count("num_attention_heads")
    latent = _read_latent(part) if part.flag("multi_latent_attention", False) else None
    grouped = part.flag("group_query_attention", False)
    if grouped and num_heads % part.count("num_query_groups", 1):
        raise part.refuse("num_query_groups", f"it must divide num_attention_heads {num_heads}")
    if not latent and not part.has("kv_channels") and width % num_heads:
        raise part.refuse("num_attention_heads", f"it must divide hidden_size {width}, or kv_channels be given")
    activations = [key for key in ("swiglu", "quick_geglu", "squared_relu") if part.flag(key, False)]
    if len(activations) > 1:
        raise part.refuse(activations[1], f"{activations[0]} is another activation; one of the two is expected")
    # arguments.py, validate_args: two thirds of four times the width, in whole 64s
    usual = int(4 * width * 2 / 3) // 64 * 64 if part.flag("swiglu", False) else 4 * width
    ffn_size = part.count("ffn_hidden_size", usual)
    norm = part.text("normalization", "LayerNorm")
    norm = next((known for known in _NORMS if known.lower() == norm.lower()), norm)  # Megatron-DeepSpeed: rmsnorm
    if norm not in _NORMS:
        raise part.refuse("normalization", f"one of {', '.join(_NORMS)} is expected")
    bias = part.flag("add_bias_linear", not part.flag("disable_bias_linear", False))
    normed = part.flag("qk_layernorm", False)
    return Layers(
        num_layers=part.layers("num_layers"),
        hidden_size=width,
        ffn_size=ffn_size,
        num_heads=num_heads,
        num_kv_groups=part.count("num_query_groups", 1) if grouped and not latent else 0,
        head_dim=0 if latent else part.number("kv_channels", 0),
        norm=_NORMS[norm],
        gated=activations in (["swiglu"], ["quick_geglu"]),
        mlp_bias=bias,
        qkv_bias=not latent and (bias or part.flag("add_qkv_bias", False)),
        output_bias=bias,
        qk_norm="head" if normed and not latent else None,
        rotary=_position_type(part) in ("rope", "yarn", "mrope"),
        latent=latent,
        delta=_read_delta(part) if part.number("full_attention_interval", 0) else None,
        output_gate=part.number("full_attention_interval", 0) > 0,
        experts=_read_experts(part, ffn_size),
    )


def _read_delta(part: Section) -> DeltaAttention:
    """MindSpeed-LLM's Qwen3-Next: every full_attention_interval-th layer attends in full, with a gate on its output."""
    num_layers, interval = part.layers("num_layers"), part.count("full_attention_interval")
    return DeltaAttention(
        num_key_heads=part.count("linear_num_key_heads"),
        num_value_heads=part.count("linear_num_value_heads"),
        key_head_dim=part.count("linear_key_head_dim"),
        value_head_dim=part.count("linear_value_head_dim"),
        conv_width=part.count("mamba_d_conv", 4),
        full_layers=tuple(range(interval - 1, num_layers, interval)),
    )


def _read_latent(part: Section) -> LatentAttention:
    """Defaults: MLATransformerConfig. Compressed vectors have norms where qk_layernorm asks for them."""
    return LatentAttention(
        q_lora_rank=part.number("q_lora_rank", 0),
        kv_lora_rank=part.count("kv_lora_rank", 32),
        qk_nope_head_dim=part.count("qk_head_dim", 128),
        qk_rope_head_dim=part.count("qk_pos_emb_head_dim", 64),
        v_head_dim=part.count("v_head_dim", 128),
        norms=part.flag("qk_layernorm", False),
    )


def _read_experts(part: Section, ffn_size: int) -> Experts | None:
    if not part.has("num_experts"):
        return None
    if part.flag("add_bias_linear", not part.flag("disable_bias_linear", False)) and part.flag(
        "moe_grouped_gemm", False
    ):
        raise part.refuse("moe_grouped_gemm", "grouped products know no biases: give disable_bias_linear")
    shared = part.number("moe_shared_expert_intermediate_size", 0)
    num_experts, top_k = part.count("num_experts"), part.count("moe_router_topk", 2)
    if top_k > num_experts:
        raise part.refuse("moe_router_topk", f"it is at most num_experts {num_experts}")
    max_groups, num_groups = read_groups(part, num_experts)
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=part.count("moe_ffn_hidden_size", ffn_size),
        shared_ffn_size=shared,
        shared_gate=shared > 0 and part.flag("moe_shared_expert_gate", False),
        dense_layers=_dense_layers(part),
        max_groups=max_groups,
        num_groups=num_groups,
    )


def _dense_layers(part: Section) -> tuple[int, ...]:
    """moe_layer_freq: every Nth layer from the first on, or a list of 0 and 1, or its product form `([0]*1+[1]*26)`."""
    num_layers = part.layers("num_layers")
    value = part.content.get("moe_layer_freq")
    if isinstance(value, str):
        value = _pattern(part, value)
    if isinstance(value, (list, tuple)):
        if len(value) != num_layers or any(entry not in (0, 1) for entry in value):
            raise part.refuse("moe_layer_freq", f"{num_layers} numbers 0 or 1, one a layer, are expected")
        return tuple(index for index, entry in enumerate(value) if not entry)
    step = part.count("moe_layer_freq", 1)
    return tuple(index for index in range(num_layers) if index % step)


def _pattern(part: Section, text: str) -> list[int]:
    """Sums and products of lists of 0 and 1; nothing else is evaluated."""
    text = re.sub(r"\s", "", text)
    whole = re.fullmatch(r"\(([^()]*)\)(?:\*(\d{1,4}))?", text)
    pattern: list[int] = []
    for term in (whole[1] if whole else text).split("+"):
        found = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", term)
        if not found:
            raise part.refuse("moe_layer_freq", "a whole number, or lists like ([0]*1+[1]*26), are expected")
        pattern += [int(entry) for entry in found[1].split(",")] * int(found[2] or 1)
    return pattern * int(whole[2] or 1) if whole else pattern


def _position_type(part: Section) -> str:
    if part.flag("use_rotary_position_embeddings", False):
        return "rope"
    if part.flag("no_position_embedding", False) and not part.has("position_embedding_type"):
        return "none"
    return part.text("position_embedding_type", "learned_absolute")


def _read_positions(part: Section) -> int:
    kind = _position_type(part)
    if kind not in ("learned_absolute", "rope", "yarn", "mrope", "none"):
        raise part.refuse("position_embedding_type", "one of learned_absolute, rope, yarn, mrope, none is expected")
    if kind != "learned_absolute":
        return 0
    seq_length = part.number("seq_length", 0)
    num_positions = part.count("max_position_embeddings", seq_length or None)
    if num_positions < seq_length:
        raise part.refuse("max_position_embeddings", f"it must be at least seq_length {seq_length}")
    return num_positions


def _padded_vocabulary(part: Section) -> int:
    """What tensor parallel ranks hold equal parts of (megatron/training/tokenizer, _vocab_size_with_padding)."""
    if part.has("padded_vocab_size"):
        return part.count("padded_vocab_size")
    divisible_by = part.count("make_vocab_size_divisible_by", PADDED_TO)
    return padded_vocab_size(_count_tokens(part), part.count("tensor_model_parallel_size", 1), divisible_by)


def _count_tokens(part: Section) -> int:
    tokenizer = part.text("tokenizer_type", "")
    if part.has("vocab_size"):
        # its end of document (megatron/training/tokenizer)
        return part.count("vocab_size") + (1 if tokenizer == "NullTokenizer" else 0)
    if tokenizer not in _TOKENIZERS:
        known = ", ".join(_TOKENIZERS)
        raise part.refuse("vocab_size", f"a whole number is expected, or a tokenizer_type that says it: {known}")
    return _TOKENIZERS[tokenizer]
