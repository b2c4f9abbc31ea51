"""Text models by name: their sizes, each with its source, as a job's inline `model`."""

from __future__ import annotations

from typing import Any

from mm_autoparallel.measurements.gpt import GPT_SEQ_LENGTH, PADDED_VOCAB_SIZE, gpt_model


def llama_model(
    num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, num_kv_groups: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    """A job's `model` for Llama's architecture (arXiv:2302.13971, section 2.2): RMS norms, a gated feed-forward, rotary
    positions, no biases. num_kv_groups 0: as many as heads. more: further keys of its layers.
    """
    layers = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "ffn_size": ffn_size,
        "num_heads": num_heads,
        "num_kv_groups": num_kv_groups,
        "norm": "rms",
    }
    return {"text": {"vocab_size": vocab_size, "layers": layers | more}}


def experts(
    num_experts: int, top_k: int, ffn_size: int, num_dense: int = 0, shared_ffn_size: int = 0
) -> dict[str, Any]:
    """The `experts` of a model's layers, the first `num_dense` of which have none."""
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "ffn_size": ffn_size,
        "shared_ffn_size": shared_ffn_size,
        "dense_layers": list(range(num_dense)),
    }


def latent(q_lora_rank: int) -> dict[str, int]:
    """The `latent` of a model's layers: latent attention with the widths that all DeepSeek models share."""
    return {
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


def _gpt(hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    return gpt_model("gpt", hidden_size, num_heads, num_layers, GPT_SEQ_LENGTH, PADDED_VOCAB_SIZE)


QWEN2_BIAS = {"qkv_bias": True}
QWEN3_HEADS = {"head_dim": 128, "qk_norm": "head"}

TEXT_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "megatron-22b": (_gpt(6144, 64, 48), "arXiv:2205.05198, table 3"),
    "gpt3-175b": (_gpt(12288, 96, 96), "arXiv:2205.05198, table 3"),
    "turing-530b": (_gpt(20480, 128, 105), "arXiv:2205.05198, table 3"),
    "megatron-1t": (_gpt(25600, 160, 128), "arXiv:2205.05198, table 3"),
    "llama2-7b": (llama_model(32, 4096, 11008, 32, 32, 32000), "arXiv:2307.09288"),
    "llama2-13b": (llama_model(40, 5120, 13824, 40, 40, 32000), "arXiv:2307.09288"),
    "llama2-70b": (llama_model(80, 8192, 28672, 64, 8, 32000), "arXiv:2307.09288"),
    "llama3-8b": (llama_model(32, 4096, 14336, 32, 8, 128256), "arXiv:2407.21783, table 3"),
    "llama3-70b": (llama_model(80, 8192, 28672, 64, 8, 128256), "arXiv:2407.21783, table 3"),
    "llama3-405b": (llama_model(126, 16384, 53248, 128, 8, 128256), "arXiv:2407.21783, table 3"),
    "qwen2-7b": (llama_model(28, 3584, 18944, 28, 4, 152064, **QWEN2_BIAS), "arXiv:2407.10671, table 1"),
    "qwen2-72b": (llama_model(80, 8192, 29568, 64, 8, 152064, **QWEN2_BIAS), "arXiv:2407.10671, table 1"),
    "qwen3-8b": (llama_model(36, 4096, 12288, 32, 8, 151936, **QWEN3_HEADS), "config.json of Qwen/Qwen3-8B"),
    "qwen3-32b": (llama_model(64, 5120, 25600, 64, 8, 151936, **QWEN3_HEADS), "config.json of Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (
        llama_model(48, 2048, 6144, 32, 4, 151936, experts=experts(128, 8, 768), **QWEN3_HEADS),
        "config.json of Qwen/Qwen3-30B-A3B",
    ),
    "qwen3-235b-a22b": (
        llama_model(94, 4096, 12288, 64, 4, 151936, experts=experts(128, 8, 1536), **QWEN3_HEADS),
        "config.json of Qwen/Qwen3-235B-A22B",
    ),
    "mixtral-8x7b": (
        llama_model(32, 4096, 14336, 32, 8, 32000, experts=experts(8, 2, 14336)),
        "arXiv:2401.04088, table 1",
    ),
    "mixtral-8x22b": (
        llama_model(56, 6144, 16384, 48, 8, 32768, experts=experts(8, 2, 16384)),
        "config.json of mistralai/Mixtral-8x22B-v0.1",
    ),
    "deepseek-v2": (
        llama_model(60, 5120, 12288, 128, 0, 102400, latent=latent(1536), experts=experts(160, 6, 1536, 1, 2 * 1536)),
        "arXiv:2405.04434, section 3.1.2",
    ),
    "deepseek-v2-lite": (
        llama_model(27, 2048, 10944, 16, 0, 102400, latent=latent(0), experts=experts(64, 6, 1408, 1, 2 * 1408)),
        "arXiv:2405.04434, appendix B",
    ),
    "deepseek-v3": (
        llama_model(61, 7168, 18432, 128, 0, 129280, latent=latent(1536), experts=experts(256, 8, 2048, 3, 2048)),
        "arXiv:2412.19437, section 4.2",
    ),
    "moonlight-16b": (
        llama_model(27, 2048, 11264, 16, 0, 163840, latent=latent(0), experts=experts(64, 6, 1408, 1, 2 * 1408)),
        "config.json of moonshotai/Moonlight-16B-A3B",
    ),
    "kimi-k2": (
        llama_model(61, 7168, 18432, 64, 0, 163840, latent=latent(1536), experts=experts(384, 8, 2048, 1, 2048)),
        "config.json of moonshotai/Kimi-K2-Instruct",
    ),
}
"""Name → a job's inline `model`, and where its sizes stand."""
