"""The text part of a Hugging Face config.json, and models that are nothing else.

Llama, Mistral, Phi-3, Qwen2 to 3.5, Mixtral, Qwen2-MoE to 3.5-MoE, Qwen3-Next, DeepSeek-V2 and -V3 (Moonlight), GPT-2.
What a class of transformers builds counts: modules that predict further tokens (num_nextn_predict_layers) are no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mm_autoparallel.integrations.huggingface.defaults import GPT2, GPT2_ALIASES, TEXT_ALIASES, TEXT_DEFAULTS
from mm_autoparallel.model.job.layers import DeltaAttention, Experts, LatentAttention, Layers, Window
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.readers.expert_groups import read_groups
from mm_autoparallel.model.readers.foreign import Section


def text_section(file: Section, model_type: str, whole: Mapping[str, Any] | None = None) -> Section:
    """The text sizes: under text_config, or at the top of the file as older ones have them.

    whole: what a class puts in where text_config is missing as a whole; such a class looks for no sizes at the top.
    """
    if file.has("text_config"):
        part = file.section("text_config", {})
        return as_text(part, part.text("model_type", model_type))
    if whole is None:
        return as_text(file, model_type)
    part = as_text(file.section("text_config", {}), model_type)
    return replace(part, defaults={**part.defaults, **whole})


def as_text(part: Section, model_type: str | None = None) -> Section:
    """`part` with what the class of its type (or `model_type`) puts in, and by which other names that knows its sizes.

    Raises JobError where the type is none that is known.
    """
    model_type = model_type or part.text("model_type", "")
    if model_type not in TEXT_DEFAULTS:
        raise part.refuse("model_type", f"one of {', '.join(TEXT_DEFAULTS)} is expected")
    defaults = {"model_type": model_type} | TEXT_DEFAULTS[model_type]
    return replace(part, defaults=defaults, aliases=TEXT_ALIASES.get(model_type, {}))


def is_tied(file: Section, text_key: str, default: bool) -> bool:
    """tie_word_embeddings of the file, else of its text part, else of the class."""
    if file.has("tie_word_embeddings") or not text_key:
        return file.flag("tie_word_embeddings", default)
    return file.section(text_key, {}).flag("tie_word_embeddings", default)


def count_heads(part: Section, key: str, width: int) -> int:
    """The number of heads at `key`, which divides `width`."""
    num_heads = part.count(key)
    if width % num_heads:
        raise part.refuse(key, f"it must divide the width {width}")
    return num_heads


USUAL = ("num_hidden_layers", "intermediate_size", "num_attention_heads")
OF_QWEN = ("depth", "intermediate_size", "num_heads")
OF_WHISPER = ("encoder_layers", "encoder_ffn_dim", "encoder_attention_heads")
"""What configs call the number of layers, the feed-forward's width and the number of heads: most, the vision of Qwen's
models, and audio that follows Whisper."""


def read_sizes(part: Section, width: int, names: tuple[str, str, str] = USUAL) -> dict[str, Any]:
    """Number and sizes of the `width` wide layers of `part`, as Layers takes them. names: what the file calls them."""
    num_layers, ffn_size, num_heads = names
    return {
        "num_layers": part.layers(num_layers),
        "hidden_size": width,
        "ffn_size": part.count(ffn_size),
        "num_heads": count_heads(part, num_heads, width),
    }


def read_text(part: Section, tied: bool) -> Decoder:
    """A decoder of the Llama kind: RMS norms, gated feed-forward; families differ in biases, head norms, experts."""
    model_type = part.defaults["model_type"]
    width = part.count("hidden_size")
    num_heads = part.count("num_attention_heads")
    latent = _read_latent(part) if part.has("kv_lora_rank") else None
    if not latent and not part.has("head_dim") and model_type != "glm4v_moe_text":  # whose own 96 do not divide 4096
        count_heads(part, "num_attention_heads", width)
    one_each = latent or part.is_null("num_key_value_heads")
    num_kv_groups = num_heads if one_each else part.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_groups:
        raise part.refuse("num_key_value_heads", f"it must divide num_attention_heads {num_heads}")
    attention_bias = part.flag("bias" if model_type == "internlm2" else "attention_bias", False)
    qwen2 = model_type.startswith("qwen2")
    layers = Layers(
        num_layers=part.layers("num_hidden_layers"),
        hidden_size=width,
        ffn_size=part.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_groups=num_kv_groups,
        head_dim=0 if latent else part.count("head_dim", width // num_heads),
        norm="rms",
        mlp_bias=part.flag("mlp_bias", False),
        qkv_bias=not latent and (qwen2 or attention_bias),
        output_bias=attention_bias and not qwen2,
        qk_norm="head" if model_type.startswith("qwen3") else None,
        joint_qkv=model_type == "phi3",
        latent=latent,
        delta=_read_delta(part) if part.has("linear_num_key_heads") else None,
        output_gate=model_type.startswith(("qwen3_5", "qwen3_next")),
        window=_read_window(part),
        experts=_read_experts(part),
    )
    return Decoder(vocab_size=part.count("vocab_size"), layers=layers, tied=tied)


def _read_latent(part: Section) -> LatentAttention:
    """A q_lora_rank of null is no default that was left out: the query is not compressed."""
    if part.flag("attention_bias", False):
        raise part.refuse("attention_bias", "compressing matrices with a bias are not understood")
    return LatentAttention(
        q_lora_rank=0 if part.is_null("q_lora_rank") else part.number("q_lora_rank", 0),
        kv_lora_rank=part.count("kv_lora_rank"),
        qk_nope_head_dim=part.count("qk_nope_head_dim"),
        qk_rope_head_dim=part.count("qk_rope_head_dim"),
        v_head_dim=part.count("v_head_dim"),
    )


def _read_delta(part: Section) -> DeltaAttention:
    """layer_types says which layers attend in full; a file without it has every full_attention_interval-th one so."""
    full_layers = _full_layers(part, "linear_attention")
    if full_layers is None:
        interval = part.count("full_attention_interval")
        full_layers = tuple(range(interval - 1, part.layers("num_hidden_layers"), interval))
    return DeltaAttention(
        num_key_heads=part.count("linear_num_key_heads"),
        num_value_heads=part.count("linear_num_value_heads"),
        key_head_dim=part.count("linear_key_head_dim"),
        value_head_dim=part.count("linear_value_head_dim"),
        conv_width=part.count("linear_conv_kernel_dim"),
        full_layers=full_layers,
    )


def _full_layers(part: Section, other: str) -> tuple[int, ...] | None:
    """The layers that layer_types calls full_attention; the rest are to be `other`. None where it is missing."""
    listed, num_layers = part.content.get("layer_types"), part.layers("num_hidden_layers")
    if listed is None:
        return None
    known = (other, "full_attention")
    if not isinstance(listed, list) or len(listed) != num_layers or any(name not in known for name in listed):
        raise part.refuse("layer_types", f"{num_layers} of {' and '.join(known)} are expected")
    return tuple(index for index, name in enumerate(listed) if name == "full_attention")


def _read_window(part: Section) -> Window | None:
    """sliding_window, where the class knows windows and null does not stand there; Qwen's counts only where

    use_sliding_window says so.
    """
    if "sliding_window" not in part.defaults:
        return None
    full_layers = _layers_without_window(part)
    used = part.flag("use_sliding_window", False) if "use_sliding_window" in part.defaults else True
    if not used or part.is_null("sliding_window") or not part.has("sliding_window"):
        return None
    if len(full_layers) == part.layers("num_hidden_layers"):
        return None
    return Window(num_tokens=part.count("sliding_window"), full_layers=full_layers)


def _layers_without_window(part: Section) -> tuple[int, ...]:
    """Those before max_window_layers, where layer_types does not name them; of Qwen2-MoE each second of those, and all

    behind. None of a class without max_window_layers.
    """
    if "max_window_layers" not in part.defaults:
        return ()
    num_layers, bound = part.layers("num_hidden_layers"), part.number("max_window_layers", 0)
    listed = _full_layers(part, "sliding_attention")
    if listed is not None:
        return listed
    if part.defaults["model_type"] == "qwen2_moe":
        return tuple(index for index in range(num_layers) if index % 2 or index >= bound)
    return tuple(range(min(bound, num_layers)))


def _read_experts(part: Section) -> Experts | None:
    """The names differ: n_routed_experts (DeepSeek), num_experts (Qwen), num_local_experts (Mixtral)."""
    if part.has("n_routed_experts"):
        return _experts(part, "n_routed_experts", _first_dense(part))
    key = next((key for key in ("num_experts", "num_local_experts") if part.has(key)), None)
    return _experts(part, key, _scattered_dense(part)) if key else None


def _experts(part: Section, key: str, dense_layers: tuple[int, ...]) -> Experts:
    num_experts = part.count(key)
    if part.count("num_experts_per_tok") > num_experts:
        raise part.refuse("num_experts_per_tok", f"it is at most {part.name(key)} {num_experts}")
    width = part.count("moe_intermediate_size", part.count("intermediate_size"))
    shared = part.number("shared_expert_intermediate_size", 0)
    max_groups, num_groups = read_groups(part, num_experts)
    return Experts(
        num_experts=num_experts,
        top_k=part.count("num_experts_per_tok"),
        ffn_size=width,
        shared_ffn_size=shared or part.number("n_shared_experts", 0) * width,
        shared_gate=shared > 0,
        fp32_router=key == "n_routed_experts",
        dense_layers=dense_layers,
        max_groups=max_groups,
        num_groups=num_groups,
    )


def _scattered_dense(part: Section) -> tuple[int, ...]:
    """A layer has experts unless mlp_only_layers names it or decoder_sparse_step passes over it."""
    step, only_dense = part.count("decoder_sparse_step", 1), part.indices("mlp_only_layers")
    num_layers = part.layers("num_hidden_layers")
    return tuple(index for index in range(num_layers) if index in only_dense or (index + 1) % step)


def _first_dense(part: Section) -> tuple[int, ...]:
    if part.count("moe_layer_freq", 1) != 1:
        raise part.refuse("moe_layer_freq", "experts in every layer behind the first dense ones, 1, is expected")
    return tuple(range(min(part.number("first_k_dense_replace", 0), part.layers("num_hidden_layers"))))


def _read_llama_kind(file: Section) -> Model:
    part = as_text(file)
    return Model(text=read_text(part, tied=part.flag("tie_word_embeddings", False)))


def _read_gpt2(file: Section) -> Model:
    part = replace(file, defaults=GPT2, aliases=GPT2_ALIASES)
    if part.flag("add_cross_attention", False):
        raise part.refuse("add_cross_attention", "a decoder by itself, without attention to an encoder, is expected")
    width = part.count("n_embd")
    layers = Layers(
        num_layers=part.layers("n_layer"),
        hidden_size=width,
        ffn_size=part.count("n_inner", 4 * width),
        num_heads=count_heads(part, "n_head", width),
        norm="layer",
        gated=False,
        mlp_bias=True,
        qkv_bias=True,
        output_bias=True,
        rotary=False,
        tanh_gelu=part.text("activation_function", "gelu_new") == "gelu_new",
        joint_qkv=True,
    )
    text = Decoder(
        vocab_size=part.count("vocab_size"),
        layers=layers,
        tied=part.flag("tie_word_embeddings", True),
        num_positions=part.count("n_positions"),
    )
    return Model(text=text)


_LLAMA_KIND = (
    *("llama", "mistral", "phi3", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3"),
)
TEXT_FAMILIES: dict[str, Callable[[Section], Model]] = {
    **dict.fromkeys(_LLAMA_KIND, _read_llama_kind),
    "gpt2": _read_gpt2,
}
"""Models of text alone: model_type → reader."""
