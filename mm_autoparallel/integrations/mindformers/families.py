"""What each config class of MindFormers builds, in the terms of a job's decoder.

Facts of classes are from their source: Llama, Baichuan, Qwen, InternLM, DeepSeek, Telechat, WizardCoder, iFlytekSpark,
YiZhao under research/, ChatGLM, GLM, GPT-2 under mindformers/models (1.0 to 1.6), and the model types of today's
`use_legacy: False` in mindformers/models/*/configuration_*.py with mindformers/parallel_core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.integrations.mindformers.model_section import ModelSection, first_key
from mm_autoparallel.model.readers.foreign import Section, sizes

_Described = tuple[dict[str, Any], dict[str, Any]]
"""Keys of a job's layers, and keys of its decoder beside them."""


@dataclass(frozen=True)
class Family:
    """read: the decoder of a section. defaults: of the class, for keys that YAMLs leave out. vocab: what its key is.

    repeats_groups: where tensor parallel ranks are more than groups of keys and values, each rank has one. whole_vocab:
    every rank keeps all of a vocabulary that they do not divide.
    """

    read: Callable[[ModelSection], _Described]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vocab: str = "vocab_size"
    repeats_groups: bool = False
    whole_vocab: bool = False


def _attention(sizes: Section, heads: str = "num_heads", groups: str = "n_kv_heads") -> dict[str, Any]:
    num_heads = sizes.count(heads)
    num_groups = sizes.count(groups, num_heads)
    if num_heads % num_groups:
        raise sizes.refuse(groups, f"it must divide {heads} {num_heads}")
    return {"hidden_size": sizes.count("hidden_size"), "num_heads": num_heads, "num_kv_groups": num_groups}


def _llama_ffn_size(sizes: Section) -> int:
    """Two thirds of four times the width, in whole multiples (mindformers/models/llama/llama_layer.py)."""
    if sizes.has("intermediate_size"):
        return sizes.count("intermediate_size")
    width = 4 * sizes.count("hidden_size")
    factor: Any = sizes.content.get("ffn_dim_multiplier")
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1e6:
            raise sizes.refuse("ffn_dim_multiplier", "a number above 0 is expected")
        width = int((factor + 0.01) * width)
    multiple = sizes.count("multiple_of", 256)
    return multiple * math.ceil(int(2 * width / 3) / multiple)


def _read_llama(model: ModelSection) -> _Described:
    """Baichuan 13B is one whose attention has ALiBi in place of rotation."""
    sizes = model.sizes
    return {
        **_attention(sizes),
        "ffn_size": _llama_ffn_size(sizes),
        "qkv_bias": sizes.flag("qkv_has_bias", False),
        "output_bias": sizes.flag("attn_proj_has_bias", False),
        "rotary": not model.arch.startswith("Baichuan13B"),
    }, {}


def _read_qwen(model: ModelSection) -> _Described:
    layers, outside = _read_llama(model)
    return {**layers, "qkv_bias": True}, outside


def _read_internlm(model: ModelSection) -> _Described:
    layers, outside = _read_llama(model)
    bias = model.sizes.flag("has_bias", True)
    return {**layers, "qkv_bias": bias, "output_bias": bias}, outside


def _read_telechat(model: ModelSection) -> _Described:
    """Of a feed-forward's biases Telechat2 has that of the last matrix alone; so few numbers do not count here."""
    sizes = model.sizes
    if sizes.count("layers_group", 1) > 1:
        raise sizes.refuse("layers_group", "layers that share the matrices of their attention are not planned")
    if sizes.count("embedding_size", 1) > 1 and sizes.text("net_name", "") != "telechat3_36b":
        raise sizes.refuse("embedding_size", "an embedding that is mapped to the width of layers is not planned")
    layers, outside = _read_llama(model)
    width: Any = sizes.content.get("ffn_dim_multiplier")
    if not sizes.has("intermediate_size") and isinstance(width, int) and width >= layers["num_heads"]:
        layers["ffn_size"] = width  # what research/telechat took it for, until 1.3
    return {**layers, "output_bias": sizes.flag(first_key(sizes, "out_proj_has_bias", "wo_has_bias"), True)}, outside


def _read_deepseek(model: ModelSection) -> _Described:
    sizes = model.sizes
    if sizes.flag("qkv_has_bias", False):
        raise sizes.refuse("qkv_has_bias", "compressing matrices with a bias are not planned")
    layers = {
        "hidden_size": sizes.count("hidden_size"),
        "ffn_size": _llama_ffn_size(sizes),
        "num_heads": sizes.count("num_heads"),
        "latent": _latent(sizes),
    }
    return layers, {}


def _latent(sizes: Section, norms: bool = True) -> dict[str, Any]:
    return {
        "q_lora_rank": sizes.number("q_lora_rank", 0),
        "kv_lora_rank": sizes.count("kv_lora_rank"),
        "qk_nope_head_dim": sizes.count(first_key(sizes, "qk_nope_head_dim", "qk_head_dim"), 128),
        "qk_rope_head_dim": sizes.count(first_key(sizes, "qk_rope_head_dim", "qk_pos_emb_head_dim"), 64),
        "v_head_dim": sizes.count("v_head_dim", 128),
        "norms": norms,
    }


def _read_chatglm(model: ModelSection) -> _Described:
    sizes = model.sizes
    attention = _attention(sizes, "num_attention_heads", "multi_query_group_num")
    if not sizes.flag("multi_query_attention", True):
        attention["num_kv_groups"] = attention["num_heads"]
    bias = sizes.flag("add_bias_linear", False)
    return {
        **attention,
        "ffn_size": sizes.count("ffn_hidden_size"),
        "head_dim": sizes.count("kv_channels"),
        "norm": "rms" if sizes.flag("rmsnorm", True) else "layer",
        "mlp_bias": bias,
        "qkv_bias": bias or sizes.flag("add_qkv_bias", True),
        "output_bias": bias,
    }, {}


_GPT_LAYER = {"norm": "layer", "gated": False, "mlp_bias": True, "qkv_bias": True, "output_bias": True}


def _read_gpt2(model: ModelSection) -> _Described:
    sizes = model.sizes
    layers = {
        **_GPT_LAYER,
        **_attention(sizes, groups="num_heads"),
        "ffn_size": sizes.count("expand_ratio", 4) * sizes.count("hidden_size"),
        "rotary": False,
    }
    return layers, {"num_positions": sizes.count("max_position_embeddings", sizes.count("seq_length")), "tied": True}


def _read_wizardcoder(model: ModelSection) -> _Described:
    """GPT-BigCode: one key and value for all heads."""
    layers, _ = _read_gpt2(model)
    return {**layers, "num_kv_groups": 1}, {"num_positions": model.sizes.count("n_position", 8192), "tied": True}


def _read_glm(model: ModelSection) -> _Described:
    sizes = model.sizes
    width, num_heads = sizes.count("hidden_size"), sizes.count("num_heads")
    gated = sizes.text("activation_func", "GELU") == "GEGLU"
    layers = {
        **_GPT_LAYER,
        **_attention(sizes, groups="num_heads"),
        "ffn_size": sizes.count("inner_hidden_size", 4 * width),
        "gated": gated,
        "head_dim": sizes.count("hidden_size_per_attention_head", width // num_heads),
    }
    return layers, {"tied": True}


def _read_iflytekspark(model: ModelSection) -> _Described:
    """ffn_hidden_size is that of gate and value together."""
    sizes = model.sizes
    width = sizes.count("ffn_hidden_size")
    if width % 2:
        raise sizes.refuse("ffn_hidden_size", "an even number is expected: gate and value have half of it each")
    return {
        **_GPT_LAYER,
        **_attention(sizes, groups="num_heads"),
        "gated": True,
        "ffn_size": width // 2,
    }, {"tied": True}


def _read_mcore(model: ModelSection) -> _Described:
    sizes = model.sizes
    width = sizes.count("hidden_size")
    heads = first_key(sizes, "num_attention_heads")
    qk_norm = sizes.flag("qk_layernorm", False)
    bias = sizes.flag("add_bias_linear", False)
    layers: dict[str, Any] = {
        "hidden_size": width,
        "ffn_size": sizes.count(first_key(sizes, "intermediate_size", "ffn_hidden_size"), 4 * width),
        "num_heads": sizes.count(heads),
        "norm": "layer" if sizes.text("normalization", "RMSNorm") == "LayerNorm" else "rms",
        "gated": sizes.flag("gated_linear_unit", True),
        "mlp_bias": bias,
        "output_bias": bias,
    }
    if sizes.flag("multi_latent_attention", False):
        layers["latent"] = _latent(sizes, qk_norm)
    else:
        layers |= _attention(sizes, heads, first_key(sizes, "num_key_value_heads", "num_query_groups"))
        layers["head_dim"] = sizes.count(first_key(sizes, "head_dim", "kv_channels"), width // layers["num_heads"])
        layers["qkv_bias"] = bias or sizes.flag(first_key(sizes, "attention_bias", "add_qkv_bias"), False)
        layers["qk_norm"] = "head" if qk_norm or model.family.startswith("qwen3") else None
    return layers, {}


def refuse_unknown_structure(sizes: Section) -> None:
    """Raise JobError where a key of today's models asks for layers that are not planned."""
    variant = sizes.text("experimental_attention_variant", "mla")
    if variant != "mla":
        raise sizes.refuse(
            "experimental_attention_variant", "an indexer that chooses the tokens of attention is not planned"
        )
    if sizes.flag("enable_hyper_connections", False):
        raise sizes.refuse("enable_hyper_connections", "several residual streams between layers are not planned")


_LLAMA = {"param_init_type": "float16", "compute_dtype": "float16"}
_GLM = _LLAMA | {"kv_channels": 128, "multi_query_group_num": 2}

LLAMA = "LlamaConfig"

LEGACY: dict[str, Family] = {
    LLAMA: Family(_read_llama, _LLAMA),
    "DeepseekV3Config": Family(_read_deepseek, _LLAMA),
    "DeepseekV2Config": Family(_read_deepseek, _LLAMA | {"kv_lora_rank": 512, "q_lora_rank": 1536}),
    "QwenConfig": Family(_read_qwen, _LLAMA),
    "InternLMConfig": Family(_read_internlm, _LLAMA),
    "InternLM2Config": Family(_read_llama, _LLAMA | {"n_kv_heads": 8, "intermediate_size": 14336}),
    "TelechatConfig": Family(_read_telechat, _LLAMA),
    "ChatGLM2Config": Family(_read_chatglm, _GLM, "padded_vocab_size", repeats_groups=True),
    "YiZhaoConfig": Family(_read_chatglm, _GLM, "padded_vocab_size", repeats_groups=True),
    "GLMConfig": Family(_read_glm, _LLAMA),
    "GPT2Config": Family(_read_gpt2, _LLAMA | {"param_init_type": "float32"}, whole_vocab=True),
    "WizardCoderConfig": Family(_read_wizardcoder, _LLAMA, repeats_groups=True, whole_vocab=True),
    "IFlytekSparkConfig": Family(_read_iflytekspark, {"compute_type": "float16"}),
}
"""`model_config.type` of the classes that are read."""

_MCORE = {
    "seq_length": 4096,
    "params_dtype": "float32",
    "compute_dtype": "bfloat16",
    "use_flash_attention": True,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
}
_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_EXPERTS = "num_experts_per_tok moe_intermediate_size"
_LATENT = sizes(
    "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim", 512, 1536, 64, 128, 128
) | sizes("num_nextn_predict_layers n_shared_experts first_k_dense_replace", 1, 1, 3, multi_latent_attention=True)
MCORE: dict[str, Mapping[str, Any]] = {
    "deepseek_v3": _MCORE
    | _LATENT
    | sizes(_SIZES, 129280, 7168, 18432, 61, 128)
    | sizes(_EXPERTS, 8, 2048, n_routed_experts=256),
    "qwen3": _MCORE | sizes(_SIZES, 151936, 4096, 22016, 32, 32, 32, 128),
    "qwen3_moe": _MCORE | sizes(_SIZES, 151936, 2048, 6144, 24, 32, 4) | sizes(_EXPERTS, 8, 768, num_experts=128),
    "telechat3": _MCORE | sizes(_SIZES, 131072, 4096, 22016, 32, 32, 32, 128),
    "telechat3_moe": _MCORE
    | _LATENT
    | sizes(_SIZES, 131072, 2560, 7680, 4, 32)
    | sizes(_EXPERTS, 8, 1536, n_routed_experts=192),
}
"""`model_type` of those that MindFormers trains, with the defaults of its classes."""

MCORE_FAMILY = Family(_read_mcore)

_BEFORE_TEXT = "a vision model before its text model, which takes a share of the first stage"
REFUSED = {
    "Blip2Config": "a vision model and a Q-Former that attends to what it gives (cross attention)",
    "CLIPConfig": "two encoders side by side, which no pipeline divides",
    "CogVLM2Config": _BEFORE_TEXT,
    "CPMBeeConfig": "a learned bias of relative positions, and layers without attention or feed-forward (mask_modules)",
    "LlavaNextConfig": _BEFORE_TEXT,
    "MllamaConfig": "decoder layers that attend to what a vision model gives (cross_attention_layers)",
    "QwenVLConfig": _BEFORE_TEXT + ", and a resampler between them",
    "WhisperConfig": "an audio encoder that every decoder layer attends to (cross attention)",
    "deepseek_v4": "several residual streams between layers (hyper connections)",
}
"""What these have that is no list of decoder layers behind each other."""


def why_refused(family: str) -> str:
    """The structure of a known class that is not planned, in words; nothing for one that is not known."""
    return f"it has {REFUSED[family]}, which is not planned" if family in REFUSED else ""
