"""What eager Hugging Face layers keep, from sizes alone, against what autograd keeps of the real classes on CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mm_autoparallel.model.blocks.chain import Attention, Experts, FeedForward, TransformerLayer  # noqa: E402
from mm_autoparallel.model.blocks.tokens import TokenCounts  # noqa: E402
from mm_autoparallel.model.operators.layers import list_layer  # noqa: E402
from mm_autoparallel.model.operators.operators import Share  # noqa: E402
from mm_autoparallel.profilers.meter import KeptActivations  # noqa: E402

BATCH, LENGTH = 2, 96
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 128,
}


def config_of(name: str) -> Any:
    config = transformers.AutoConfig.for_model(name).get_text_config()
    for key, value in SIZES.items():
        setattr(config, key, value)
    config.layer_types = ["full_attention"]
    return config


def measure(layer: Any, trainable: bool, hidden: Any, outside: tuple[Any, ...], **inputs: Any) -> int:
    """Bytes kept by one forward, without tensors from `outside` that all layers share."""
    layer = layer.to(torch.bfloat16).train().requires_grad_(trainable)
    holder = torch.nn.Module()
    for index, tensor in enumerate(outside):
        holder.register_buffer(f"outside_{index}", tensor)
    with KeptActivations(layer, holder) as kept:
        out = layer(hidden, **inputs)
    assert out is not None
    return kept.kept_bytes


def text_layer(name: str, attention: str, trainable: bool) -> int:
    family = {"llama": "Llama", "qwen3": "Qwen3", "qwen2_vl": "Qwen2VL", "qwen3_moe": "Qwen3Moe"}[name]
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    config = config_of(name)
    if name == "qwen3_moe":
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size = 16, 4, 256
        config._experts_implementation = "grouped_mm"
    config._attn_implementation = attention
    hidden = torch.randn(BATCH, LENGTH, 512, dtype=torch.bfloat16, requires_grad=True) * 1.0
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    if name == "qwen2_vl":
        positions = positions.expand(3, BATCH, LENGTH)
    cos, sin = getattr(modeling, f"{family}RotaryEmbedding")(config)(hidden, positions)
    layer = getattr(modeling, f"{family}DecoderLayer")(config, 0)
    return measure(layer, trainable, hidden, (cos, sin), position_embeddings=(cos, sin), attention_mask=None)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize(
    ("name", "bias", "qk_norm"), [("llama", False, None), ("qwen2_vl", True, None), ("qwen3", False, "head")]
)
def test_text_layers(name: str, bias: bool, qk_norm: Any, trainable: bool) -> None:
    attention = Attention(4, 2, 128, qkv_bias=bias, qk_norm=qk_norm)
    layer = TransformerLayer(512, "rms", attention, FeedForward(1408))
    operators = list_layer(layer, TokenCounts(LENGTH, LENGTH, LENGTH, 1), Share(mbs=BATCH, eager=True))
    assert operators.kept_bytes(trainable) == text_layer(name, "sdpa", trainable)


def test_layers_with_experts() -> None:
    layer = TransformerLayer(512, "rms", Attention(4, 2, 128, qk_norm="head"), Experts(16, 4, FeedForward(256)))
    operators = list_layer(layer, TokenCounts(LENGTH, LENGTH, LENGTH, 1), Share(mbs=BATCH, eager=True))
    assert operators.kept_bytes(True) == pytest.approx(text_layer("qwen3_moe", "sdpa", True), rel=0.002)


def vision_inputs(num_images: int, head_dim: int) -> tuple[Any, Any, dict[str, Any]]:
    """Hidden states of packed images, the turns that all layers share, and the layer's other inputs."""
    hidden = torch.randn(BATCH * LENGTH, 512, dtype=torch.bfloat16, requires_grad=True) * 1.0
    turns = torch.randn(BATCH * LENGTH, head_dim)
    borders = torch.arange(num_images + 1, dtype=torch.int32) * (BATCH * LENGTH // num_images)
    outside = (turns.cos(), turns.sin())
    return hidden, outside, {"cu_seqlens": borders, "position_embeddings": outside}


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("num_images", [1, 4])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_layers(name: str, num_images: int, trainable: bool) -> None:
    config = transformers.AutoConfig.for_model(name).vision_config
    config.embed_dim = config.hidden_size = 512
    config.num_heads, config.mlp_ratio, config.intermediate_size = 8, 4, 1376
    config._attn_implementation = "sdpa"
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    block = getattr(modeling, {"qwen2_vl": "Qwen2VLVisionBlock", "qwen2_5_vl": "Qwen2_5_VLVisionBlock"}[name])(config)
    hidden, outside, inputs = vision_inputs(num_images, 64)
    measured = measure(block, trainable, hidden, outside, **inputs)
    attention = Attention(8, 8, 64, qkv_bias=True, output_bias=True, causal=False, packed=True)
    if name == "qwen2_vl":
        mlp, norm = FeedForward(2048, gated=False, bias=True, quick_gelu=True), "layer"
    else:
        mlp, norm = FeedForward(1376, bias=True), "rms"
    layer = TransformerLayer(512, norm, attention, mlp)  # type: ignore[arg-type]
    tokens = TokenCounts(LENGTH, LENGTH, LENGTH, num_spans=num_images)
    kept = list_layer(layer, tokens, Share(mbs=BATCH, eager=True)).kept_bytes(trainable)
    assert kept == pytest.approx(measured, rel=0.002)  # norms' statistics are bf16 on CPU


@pytest.mark.parametrize("trainable", [True, False])
def test_clip_layers(trainable: bool) -> None:
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    config = transformers.CLIPVisionConfig(hidden_size=512, intermediate_size=2048, num_attention_heads=8)
    config._attn_implementation = "sdpa"
    hidden = torch.randn(BATCH, LENGTH, 512, dtype=torch.bfloat16, requires_grad=True) * 1.0
    measured = measure(CLIPEncoderLayer(config), trainable, hidden, (), attention_mask=None)
    attention = Attention(8, 8, 64, qkv_bias=True, output_bias=True, causal=False, rotary=False)
    layer = TransformerLayer(512, "layer", attention, FeedForward(2048, gated=False, bias=True, quick_gelu=True))
    kept = list_layer(layer, TokenCounts(LENGTH, LENGTH, LENGTH, 1), Share(mbs=BATCH, eager=True)).kept_bytes(trainable)
    assert kept == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("trainable", [True, False])
def test_unfused_attention_of_text_layers(trainable: bool) -> None:
    layer = TransformerLayer(512, "rms", Attention(4, 2, 128), FeedForward(1408))
    share = Share(mbs=BATCH, eager=True, fused_attention=False)
    kept = list_layer(layer, TokenCounts(LENGTH, LENGTH, LENGTH, 1), share).kept_bytes(trainable)
    assert kept == text_layer("llama", "eager", trainable)
