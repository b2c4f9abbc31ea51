"""Parameters in closed form: known totals are met exactly, and shards add up to the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.blocks.chain import (
    Attention,
    AudioStem,
    Experts,
    FeedForward,
    OutputHead,
    PatchEmbedding,
    Projector,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters, count_parameters
from mm_autoparallel.model.readers.model_file import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
KNOWN: dict[str, dict[str, int]] = json.loads((FIXTURES / "huggingface" / "parameters.json").read_text())


def parts(path: Path) -> dict[str, int]:
    """Parameters by modality, projectors apart, each block counted as often as it stands in the chain."""
    found: dict[str, int] = {}
    for block in expand(read_model(path)).blocks:
        projector = block.name in ("vision_post", "vision_deepstack")
        part = "vision_projector" if projector else block.modality
        found[part] = found.get(part, 0) + block.count * count_parameters(block.structure)
    return found


@pytest.mark.parametrize("name", list(KNOWN))
def test_parts_of_published_models_are_met_exactly(name: str) -> None:
    assert parts(FIXTURES / "huggingface" / f"{name}.json") == KNOWN[name]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("qwen2vl_2b", 2_208_985_600),
        ("qwen2vl_7b", 8_291_375_616),
        ("qwen2vl_72b", 73_405_560_320),
        ("qwen2.5vl_7b", 8_292_166_656),
        ("qwen2.5vl_72b", 73_410_777_344),
        ("internvl2_2b", 2_205_754_368),
        ("internvl2_8b", 8_075_365_376),
        ("internvl2_76b", 76_262_358_400),
        # 32 keys' biases of 1280 that MindSpeed-MM holds as zeros
        ("qwen2.5omni_7b", 8_931_813_888 + 32 * 1280),
    ],
)
def test_totals_of_models_that_mindspeed_mm_ships(name: str, total: int) -> None:
    """The totals of the model pages on huggingface.co."""
    assert count_chain_parameters(expand(read_model(FIXTURES / "mindspeed_mm_models" / f"{name}.json"))) == total


def test_parameters_that_train() -> None:
    chain = expand(read_model(FIXTURES / "mindspeed_mm_models" / "qwen2vl_72b.json"))
    assert count_chain_parameters(chain, trainable_only=True) == KNOWN["qwen2_vl_72b"]["text"]


LAYER = TransformerLayer(
    hidden_size=64,
    norm="rms",
    attention=Attention(num_heads=8, num_kv_groups=4, head_dim=16, qkv_bias=True),
    mlp=FeedForward(ffn_size=96, gated=True),
)


def test_one_layer_by_hand() -> None:
    query, key = 8 * 16, 4 * 16
    whole = 64 * (query + 2 * key) + (query + 2 * key) + query * 64 + 3 * 64 * 96 + 2 * 64
    assert count_parameters(LAYER) == whole
    assert count_parameters(LAYER, tp=4) == (whole - 2 * 64) // 4 + 2 * 64


def with_attention(**changes: Any) -> TransformerLayer:
    fields = {"num_heads": 8, "num_kv_groups": 4, "head_dim": 16} | changes
    return TransformerLayer(64, "layer", Attention(**fields), FeedForward(96, gated=False, bias=True))


@pytest.mark.parametrize(
    ("changes", "more", "more_on_four"),
    [
        ({}, 0, 0),
        ({"qkv_bias": True}, 256, 64),
        ({"qkv_bias": True, "key_bias": False}, 192, 48),
        ({"output_bias": True}, 64, 64),
        ({"qk_norm": "head"}, 2 * 2 * 16, 2 * 2 * 16),
        ({"qk_norm": "hidden"}, 2 * (128 + 64), 2 * (32 + 16)),
    ],
)
def test_biases_and_norms_of_attention(changes: dict[str, Any], more: int, more_on_four: int) -> None:
    assert count_parameters(with_attention(**changes)) - count_parameters(with_attention()) == more
    assert count_parameters(with_attention(**changes), 4) - count_parameters(with_attention(), 4) == more_on_four


@pytest.mark.parametrize(
    ("mlp", "whole", "on_four"),
    [
        (FeedForward(96, gated=True), 3 * 64 * 96, 3 * 64 * 24),
        (FeedForward(96, gated=True, bias=True), 3 * 64 * 96 + 2 * 96 + 64, 3 * 64 * 24 + 2 * 24 + 64),
        (FeedForward(96, gated=False, bias=True), 2 * 64 * 96 + 96 + 64, 2 * 64 * 24 + 24 + 64),
        (
            Experts(8, 2, FeedForward(32), shared=FeedForward(96)),
            8 * 64 + 8 * 3 * 64 * 32 + 3 * 64 * 96,
            8 * 64 + 8 * 3 * 64 * 8 + 3 * 64 * 24,
        ),
    ],
)
def test_feed_forwards_and_experts(mlp: FeedForward | Experts, whole: int, on_four: int) -> None:
    def mlp_only(tp: int) -> int:
        none = TransformerLayer(64, "rms", LAYER.attention, FeedForward(0))
        return count_parameters(TransformerLayer(64, "rms", LAYER.attention, mlp), tp) - count_parameters(none, tp)

    assert mlp_only(1) == whole
    assert mlp_only(4) == on_four


@pytest.mark.parametrize(
    ("structure", "whole", "on_four"),
    [
        (PatchEmbedding(588, 64), 588 * 64, 588 * 64),
        (
            PatchEmbedding(588, 64, bias=True, num_positions=17, class_token=True, norm="layer"),
            588 * 64 + 64 * (1 + 17 + 1 + 2),
            588 * 64 + 64 * 21,
        ),
        (AudioStem(80, 64), 3 * 80 * 64 + 64 + 3 * 64 * 64 + 64, 3 * 80 * 64 + 64 + 3 * 64 * 64 + 64),
        (AudioStem(80, 64, num_positions=5), 3 * (80 + 64) * 64 + 7 * 64, 3 * (80 + 64) * 64 + 7 * 64),
        (TokenEmbedding(1000, 64), 64_000, 16_000),
        (TokenEmbedding(1001, 64), 64_064, 251 * 64),
        (OutputHead(1000, 64, "rms"), 64_064, 16_064),
        (OutputHead(1000, 64, "layer", tied=True), 128, 128),
        (Projector("layer", 64, 4, (256, 128, 32)), 128 + 257 * 128 + 128 * 32 + 32, 128 + 257 * 32 + 32 * 32 + 32),
        (Projector(None, 0, 1, (64, 32)), 64 * 32 + 32, 64 * 8 + 8),
        (Projector(None, 0, 1, (64, 32), bias=False, num_special_tokens=2), 64 * 32 + 64, 64 * 8 + 64),
        (Projector(None, 0, 1, (64, 32), replicated=True), 64 * 32 + 32, 64 * 32 + 32),
        (Projector("layer", 64, 1, ()), 128, 128),
    ],
)  # fmt: skip
def test_other_blocks_by_hand(structure: Any, whole: int, on_four: int) -> None:
    assert count_parameters(structure) == whole
    assert count_parameters(structure, tp=4) == on_four


@pytest.mark.parametrize("name", ["qwen2vl_72b", "qwen2.5vl_72b", "qwen3vl_dev_30b_a3b", "qwen2.5omni_7b"])
@given(tp=st.sampled_from([1, 2, 4]))
def test_shards_hold_at_least_their_share_and_at_most_the_whole(name: str, tp: int) -> None:
    for block in expand(read_model(FIXTURES / "mindspeed_mm_models" / f"{name}.json")).blocks:
        whole, shard = count_parameters(block.structure), count_parameters(block.structure, tp)
        assert whole / tp <= shard <= whole
