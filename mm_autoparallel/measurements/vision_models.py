"""Models of images and text, and sounds, by name: towers and projectors beside text, each with its source."""

from __future__ import annotations

from typing import Any

from mm_autoparallel.measurements.text_models import (
    QWEN2_BIAS,
    QWEN3_HEADS,
    TEXT_MODELS,
    experts,
    latent,
    llama_model,
)


def _tower(num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, **more: Any) -> dict[str, Any]:
    """Layers of a vision transformer (arXiv:2010.11929): layer norms and biases, a feed-forward without a gate, heads
    of their own keys. more: further keys, or other values.
    """
    plain = {"norm": "layer", "gated": False, "mlp_bias": True, "qkv_bias": True, "output_bias": True}
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "ffn_size": ffn_size, "num_heads": num_heads}
    return sizes | plain | more


def _patches(in_features: int, **more: Any) -> dict[str, Any]:
    return {"type": "patches", "in_features": in_features} | more


def _joined(tower_size: int, text_size: int, **more: Any) -> dict[str, Any]:
    """A projector of four tokens into one and two matrices, the first as wide as four tokens. more: other values."""
    sizes = {"merge_tokens": 4, "layer_sizes": [4 * tower_size, 4 * tower_size, text_size]}
    return {"norm": "layer", "norm_size": tower_size} | sizes | more


def _beside(text: dict[str, Any], **encoder: Any) -> dict[str, Any]:
    """A job's `model` of a text model with a vision encoder."""
    return {"encoders": [{"name": "vision", **encoder}], **text}


def _text(name: str) -> dict[str, Any]:
    """That of a model that is known by its own name."""
    return TEXT_MODELS[name][0]


def _tied(text: dict[str, Any]) -> dict[str, Any]:
    return {"text": text["text"] | {"tied": True}}


def _qwen2(text: dict[str, Any]) -> dict[str, Any]:
    layers = _tower(32, 1280, 5120, 16, quick_gelu=True, packed=True)
    size = text["text"]["layers"]["hidden_size"]
    return _beside(text, stem=_patches(1176), layers=layers, projector=_joined(1280, size))


def _qwen25(ffn_size: int, text: dict[str, Any]) -> dict[str, Any]:
    window = {"num_tokens": 64, "full_layers": [7, 15, 23, 31]}
    layers = _tower(32, 1280, ffn_size, 16, norm="rms", gated=True, packed=True, window=window)
    size = text["text"]["layers"]["hidden_size"]
    return _beside(text, stem=_patches(1176), layers=layers, projector=_joined(1280, size, norm="rms"))


def _qwen3(num_layers: int, hidden_size: int, ffn_size: int, text: dict[str, Any]) -> dict[str, Any]:
    size = text["text"]["layers"]["hidden_size"]
    return _beside(
        text,
        stem=_patches(1536, bias=True, num_positions=2304),
        layers=_tower(num_layers, hidden_size, ffn_size, 16, packed=True),
        projector=_joined(hidden_size, size),
        deepstack=_joined(hidden_size, size, norm_size=4 * hidden_size),
        num_deepstack=3,
    )


def _omni(text: dict[str, Any]) -> dict[str, Any]:
    audio = _tower(32, 1280, 5120, 20, key_bias=False, rotary=False, window={"num_tokens": 100})
    projector = {"norm": "layer", "norm_size": 1280, "merge_tokens": 2, "layer_sizes": [1280, 3584]}
    encoder = {
        "name": "audio",
        "stem": {"type": "mel_frames", "num_mel_bins": 128},
        "layers": audio,
        "projector": projector | {"num_special_tokens": 2, "replicated": True, "freeze": True},
    }
    model = _qwen25(3420, text)
    return model | {"encoders": [*model["encoders"], encoder]}


def _kimi(text: dict[str, Any]) -> dict[str, Any]:
    layers = text["text"]["layers"]
    layers = layers | {"experts": layers["experts"] | {"fp32_router": True}}
    return _beside(
        {"text": text["text"] | {"layers": layers}},
        stem=_patches(588, bias=True, num_positions=4096),
        layers=_tower(27, 1152, 4304, 16, tanh_gelu=True, packed=True),
        final_norm="layer",
        projector=_joined(1152, layers["hidden_size"], replicated=True),
    )


def _intern(layers: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    tower_size, size = layers["hidden_size"], text["text"]["layers"]["hidden_size"]
    projector = {"norm": "layer", "norm_size": 4 * tower_size, "merge_tokens": 4, "replicated": True}
    return _beside(
        text,
        stem=_patches(588, bias=True, num_positions=1025, class_token=True),
        layers=layers | {"layer_scale": True, "rotary": False},
        projector=projector | {"layer_sizes": [4 * tower_size, size, size]},
    )


def _llava(text: dict[str, Any]) -> dict[str, Any]:
    size = text["text"]["layers"]["hidden_size"]
    return _beside(
        text,
        stem=_patches(588, num_positions=577, class_token=True, norm="layer"),
        layers=_tower(24, 1024, 4096, 16, rotary=False, quick_gelu=True),
        final_norm="layer",
        projector={"layer_sizes": [1024, size, size], "replicated": True},
    )


_INTERN_300M = _tower(24, 1024, 4096, 16)
_INTERN_6B = _tower(45, 3200, 12800, 25, norm="rms", qkv_bias=False, qk_norm="hidden")

_QWEN2_2B = _tied(llama_model(28, 1536, 8960, 12, 2, 151936, **QWEN2_BIAS))
_QWEN2_7B = _text("qwen2-7b")
_QWEN2_72B = _text("qwen2-72b")
_QWEN25_3B = _tied(llama_model(36, 2048, 11008, 16, 2, 151936, **QWEN2_BIAS))
_QWEN25_32B = llama_model(64, 5120, 27648, 40, 8, 152064, **QWEN2_BIAS)
_QWEN3_2B = _tied(llama_model(28, 2048, 6144, 16, 8, 151936, **QWEN3_HEADS))
_QWEN3_4B = _tied(llama_model(36, 2560, 9728, 32, 8, 151936, **QWEN3_HEADS))
_QWEN3_8B = _text("qwen3-8b")
_QWEN3_32B = _text("qwen3-32b")
_QWEN3_30B = _text("qwen3-30b-a3b")
_QWEN3_235B = _text("qwen3-235b-a22b")
_INTERN3_8B = llama_model(28, 3584, 18944, 28, 4, 151674, **QWEN2_BIAS)
_INTERN3_14B = llama_model(48, 5120, 13824, 40, 8, 151674, **QWEN2_BIAS)
_INTERN3_38B = llama_model(64, 5120, 27648, 40, 8, 151674, **QWEN2_BIAS)
_INTERN3_78B = llama_model(80, 8192, 29568, 64, 8, 151674, **QWEN2_BIAS)

VISION_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2-vl-2b": (_qwen2(_QWEN2_2B), "config.json of Qwen/Qwen2-VL-2B-Instruct"),
    "qwen2-vl-7b": (_qwen2(_QWEN2_7B), "config.json of Qwen/Qwen2-VL-7B-Instruct"),
    "qwen2-vl-72b": (_qwen2(_QWEN2_72B), "config.json of Qwen/Qwen2-VL-72B-Instruct"),
    "qwen2.5-vl-3b": (_qwen25(3420, _QWEN25_3B), "config.json of Qwen/Qwen2.5-VL-3B-Instruct"),
    "qwen2.5-vl-7b": (_qwen25(3420, _QWEN2_7B), "config.json of Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen2.5-vl-32b": (_qwen25(3456, _QWEN25_32B), "config.json of Qwen/Qwen2.5-VL-32B-Instruct"),
    "qwen2.5-vl-72b": (_qwen25(3456, _QWEN2_72B), "config.json of Qwen/Qwen2.5-VL-72B-Instruct"),
    "qwen3-vl-2b": (_qwen3(24, 1024, 4096, _QWEN3_2B), "config.json of Qwen/Qwen3-VL-2B-Instruct"),
    "qwen3-vl-4b": (_qwen3(24, 1024, 4096, _QWEN3_4B), "config.json of Qwen/Qwen3-VL-4B-Instruct"),
    "qwen3-vl-8b": (_qwen3(27, 1152, 4304, _QWEN3_8B), "config.json of Qwen/Qwen3-VL-8B-Instruct"),
    "qwen3-vl-32b": (_qwen3(27, 1152, 4304, _QWEN3_32B), "config.json of Qwen/Qwen3-VL-32B-Instruct"),
    "qwen3-vl-30b-a3b": (_qwen3(27, 1152, 4304, _QWEN3_30B), "config.json of Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen3-vl-235b-a22b": (_qwen3(27, 1152, 4304, _QWEN3_235B), "config.json of Qwen/Qwen3-VL-235B-A22B-Instruct"),
    "internvl2-8b": (
        _intern(_INTERN_300M, llama_model(32, 4096, 14336, 32, 8, 92553)),
        "config.json of OpenGVLab/InternVL2-8B",
    ),
    "internvl2-26b": (
        _intern(_INTERN_6B, llama_model(48, 6144, 16384, 48, 8, 92553)),
        "config.json of OpenGVLab/InternVL2-26B",
    ),
    "internvl2-76b": (
        _intern(_INTERN_6B, llama_model(80, 8192, 28672, 64, 8, 128265)),
        "config.json of OpenGVLab/InternVL2-Llama3-76B",
    ),
    "internvl3-8b": (_intern(_INTERN_300M, _INTERN3_8B), "config.json of OpenGVLab/InternVL3-8B"),
    "internvl3-14b": (_intern(_INTERN_300M, _INTERN3_14B), "config.json of OpenGVLab/InternVL3-14B"),
    "internvl3-38b": (_intern(_INTERN_6B, _INTERN3_38B), "config.json of OpenGVLab/InternVL3-38B"),
    "internvl3-78b": (_intern(_INTERN_6B, _INTERN3_78B), "config.json of OpenGVLab/InternVL3-78B"),
    "llava-1.5-7b": (_llava(llama_model(32, 4096, 11008, 32, 32, 32064)), "config.json of llava-hf/llava-1.5-7b-hf"),
    "llava-1.5-13b": (_llava(llama_model(40, 5120, 13824, 40, 40, 32064)), "config.json of llava-hf/llava-1.5-13b-hf"),
    "pixtral-12b": (
        _beside(
            llama_model(40, 5120, 14336, 32, 8, 131072, head_dim=128),
            stem=_patches(768, norm="rms"),
            layers=llama_model(24, 1024, 4096, 16, 0, 0, packed=True)["text"]["layers"],
            projector={"layer_sizes": [1024, 5120, 5120], "replicated": True},
        ),
        "config.json of mistral-community/pixtral-12b",
    ),
    "qwen2.5-omni-7b": (_omni(_QWEN2_7B), "config.json of Qwen/Qwen2.5-Omni-7B, without its talker"),
    "kimi-vl-a3b": (_kimi(_text("moonlight-16b")), "config.json of moonshotai/Kimi-VL-A3B-Instruct"),
    "kimi-k2.5": (_kimi(_text("kimi-k2")), "config.json of moonshotai/Kimi-K2.5"),
    "deepseek-vl2": (
        _beside(
            llama_model(
                *(30, 2560, 12288, 32, 0, 129280),
                latent=latent(0),
                experts=experts(72, 6, 1536, 1, 2 * 1536) | {"fp32_router": True},
            ),
            stem=_patches(588, bias=True, num_positions=729),
            layers=_tower(27, 1152, 4304, 16, rotary=False, joint_qkv=True),
            final_norm="layer",
            projector={"merge_tokens": 4, "layer_sizes": [4608, 2560, 2560]}
            | {"num_special_tokens": 2, "replicated": True},
        ),
        "config.json of deepseek-ai/deepseek-vl2",
    ),
}
"""Name → a job's inline `model`, and where its sizes stand."""
