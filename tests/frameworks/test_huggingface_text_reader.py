"""config.json of models of text alone, or images: known totals, met exactly, and what such files can get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.layers import LatentAttention, Window
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section

LLAMA_3 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
LLAMA_3_70B = LLAMA_3 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B = {"num_hidden_layers": 48, "head_dim": 128}
DEEPSEEK_V2_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
MOONLIGHT = DEEPSEEK_V2_LITE | {"vocab_size": 163840, "intermediate_size": 11264}
PHI3_MINI = {"num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 2047}


def read(model_type: str, sizes: dict[str, Any]) -> Model:
    return read_huggingface(Section({"model_type": model_type} | sizes, Path("config.json")))


def latent_layer(width: int, heads: int, q_rank: int, norms: int) -> int:
    """DeepSeek-V2, arXiv:2405.04434, appendix C, with 128 + 64 numbers a query, 128 a value, and 512 compressed."""
    query = width * q_rank + q_rank + q_rank * heads * 192 if q_rank else width * heads * 192
    return query + width * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * width + norms * width


def deepseek(width: int, heads: int, q_rank: int, vocab: int, dense: tuple[int, int], moe: tuple[int, int, int]) -> int:
    """dense: layers and width of their feed-forward; moe: layers, experts with the shared ones, width of one."""
    num_dense, dense_width = dense
    num_moe, num_experts, expert_width = moe
    attention = (num_dense + num_moe) * latent_layer(width, heads, q_rank, norms=2)
    router = (num_experts - (1 if heads == 128 else 2)) * width
    experts = num_moe * (router + num_experts * 3 * width * expert_width)
    return 2 * vocab * width + width + attention + num_dense * 3 * width * dense_width + experts


@pytest.mark.parametrize(
    ("model_type", "sizes", "total"),
    [
        ("llama", {}, 6_738_415_616),
        ("llama", LLAMA_3, 8_030_261_248),
        ("llama", LLAMA_3_70B, 70_553_706_496),
        ("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, 7_241_732_096),
        ("mixtral", {}, 46_702_792_704),
        ("qwen2", QWEN2_7B, 7_615_616_512),
        ("qwen2_moe", {}, 14_315_784_192),
        ("qwen3", QWEN3_8B, 8_190_735_360),
        ("qwen3_moe", QWEN3_30B_A3B, 30_532_122_624),
        # counted by transformers 5.23.0 on Qwen3NextForCausalLM, whose defaults are the 80B model
        ("qwen3_next", {}, 79_674_391_296),
        ("qwen3_next", {"num_hidden_layers": 8, "mlp_only_layers": [1], "num_experts": 16}, 1_288_390_784),
        ("phi3", PHI3_MINI, 3_821_079_552),
        ("gpt2", {}, 124_439_808),
        ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
        ("deepseek_v2", DEEPSEEK_V2_LITE, deepseek(2048, 16, 0, 102400, (1, 10944), (26, 66, 1408))),
        ("deepseek_v2", DEEPSEEK_V2_LITE, 15_706_484_224),
        ("deepseek_v3", {}, deepseek(7168, 128, 1536, 129280, (3, 18432), (58, 257, 2048))),
        # the 58 x 256 numbers that balance the load are adjusted by rule and not trained
        ("deepseek_v3", {}, 671_026_419_200 - 58 * 256),
        ("deepseek_v3", MOONLIGHT, deepseek(2048, 16, 0, 163840, (1, 11264), (26, 66, 1408))),
    ],
)
def test_known_totals(model_type: str, sizes: dict[str, Any], total: int) -> None:
    """The totals of the model pages on huggingface.co; of DeepSeek's models also from the sizes of its papers."""
    assert count_chain_parameters(expand(read(model_type, sizes))) == total


def test_vit_classifies_images() -> None:
    """google/vit-base-patch16-224 with the thousand classes of ImageNet, and google/vit-large-patch16-224."""
    labels = {"id2label": {str(index): "a word" for index in range(1000)}}
    assert count_chain_parameters(expand(read("vit", labels))) == 86_567_656
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    assert count_chain_parameters(expand(read("vit", labels | large))) == 304_326_632
    assert read("vit", {}).text.images.num_outputs == 2  # type: ignore[union-attr]


def test_moonlight_has_16_billion() -> None:
    assert count_chain_parameters(expand(read("deepseek_v3", MOONLIGHT))) / 1e9 == pytest.approx(15.96, abs=0.01)


def test_a_query_that_is_not_compressed() -> None:
    """null is a size here, not one that was left out."""
    assert read("deepseek_v3", MOONLIGHT).text.layers.latent == LatentAttention(
        q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    found = read("deepseek_v3", {}).text.layers.latent
    assert found is not None
    assert found.q_lora_rank == 1536


def test_windows_count_where_they_are_used() -> None:
    assert read("mistral", {"sliding_window": 4096}).text.layers.window == Window(num_tokens=4096)
    assert read("mistral", {"sliding_window": None}).text.layers.window is None
    assert read("qwen2", QWEN2_7B).text.layers.window is None
    used = QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 2}
    assert read("qwen2", used).text.layers.window == Window(num_tokens=131072, full_layers=(0, 1))


_MIXED = ["sliding_attention", "full_attention"] * 16
_USED = {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("model_type", "sizes", "window"),
    [
        ("mistral", {}, Window(num_tokens=4096)),
        ("mixtral", {}, None),
        ("qwen2", _USED, Window(num_tokens=4096, full_layers=tuple(range(28)))),
        ("qwen2", _USED | {"sliding_window": None}, None),
        ("qwen2", _USED | {"max_window_layers": 32}, None),
        ("qwen3", _USED | {"layer_types": _MIXED}, Window(num_tokens=4096, full_layers=tuple(range(1, 32, 2)))),
        ("qwen2_moe", _USED | {"max_window_layers": 3}, Window(num_tokens=4096, full_layers=(1, *range(3, 24)))),
        ("qwen2_moe", {"sliding_window": 0}, None),  # as transformers 5 saves what is not used
        ("qwen3_moe", _USED | {"max_window_layers": 12}, Window(num_tokens=4096)),
    ],
)
def test_windows_lie_where_each_class_has_them(model_type: str, sizes: dict[str, Any], window: Window | None) -> None:
    """As configuration_*.py of transformers 5.24.0 says."""
    assert read(model_type, sizes).text.layers.window == window


def test_experts_go_by_the_name_that_the_file_has() -> None:
    """transformers 5 saves Qwen's as num_local_experts, and no num_experts."""
    for name in ("num_experts", "num_local_experts"):
        assert (experts := read("qwen3_moe", QWEN3_30B_A3B | {name: 160}).text.layers.experts)
        assert (experts.num_experts, experts.fp32_router) == (160, False)
    assert (experts := read("deepseek_v3", {"num_local_experts": 96, "n_group": 4}).text.layers.experts)
    assert (experts.num_experts, experts.fp32_router, experts.dense_layers) == (96, True, (0, 1, 2))


def test_groups_that_are_null_are_one_for_each_head() -> None:
    assert read("qwen2", QWEN2_7B | {"num_key_value_heads": None}).text.layers.num_kv_groups == 28
    assert read("mistral", {}).text.layers.num_kv_groups == 8


def test_gpt2_has_learned_positions_and_no_rotation() -> None:
    text = read("gpt2", {}).text
    assert (text.num_positions, text.layers.rotary, text.tied, text.layers.norm) == (1024, False, True, "layer")


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads is 5; it must divide num_attention_heads 32"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types is a list of 1; 32 of sliding",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it is at most num_local_experts 8"),
        ("deepseek_v2", {}, "num_experts_per_tok is missing"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; experts in every layer"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is true; compressing matrices with a bias"),
        ("vit", {"patch_size": 15}, "image_size is 224; a multiple of patch_size 15 is expected"),
        ("gpt2", {"n_head": 7}, "n_head is 7; it must divide the width 768"),
        ("lama", {}, 'model_type is "lama"; one of qwen2_vl'),
    ],
)
def test_what_is_wrong_is_named(model_type: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        read(model_type, sizes)
    assert f"model file config.json: {words}" in str(caught.value)
