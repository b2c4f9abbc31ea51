"""What a config.json leaves out, says null of, or calls by another name is what its class in transformers makes of it.

Totals and windows are those of transformers 5.24, counted on its classes without memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.layers import Window
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.model.readers.model_file import parse_foreign_model

FOLDER = Path(__file__).parents[1] / "fixtures" / "huggingface"
SMALL = {
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 1024}
WIDE_VISION = {"vision_config": {"hidden_size": 8192}}
ALTERNATING = ["sliding_attention", "full_attention"] * 16


def read(model_type: str, sizes: dict[str, Any]) -> Model:
    return read_huggingface(Section({"model_type": model_type} | sizes, Path("config.json")))


def count(model: Model) -> int:
    return count_chain_parameters(expand(model))


def test_experts_count_under_the_name_that_saving_gives_them() -> None:
    """transformers 5 writes num_local_experts for what published files of Qwen3-VL call num_experts."""
    document = json.loads((FOLDER / "qwen3_vl_30b_a3b.json").read_text())
    published = read("qwen3_vl_moe", document)
    document["text_config"]["num_local_experts"] = document["text_config"].pop("num_experts")
    saved = read("qwen3_vl_moe", document)
    assert saved == published
    assert count(saved) == 31_070_754_032


@pytest.mark.parametrize(
    ("model_type", "sizes", "total"),
    [
        ("mixtral", {"num_experts": 16, "num_local_experts": 32}, 11_738_058_752),
        ("mixtral", {"num_local_experts": 32}, 23_012_610_048),
        ("qwen3_moe", {"num_local_experts": 16}, 2_050_267_136),
        ("qwen3_moe", {"num_local_experts": 16, "num_experts": 32}, 2_050_267_136),
        ("qwen3_moe", {"num_experts": 32}, 2_654_509_056),
        ("deepseek_v2", {"num_experts": 16}, 2_179_411_968),
        ("deepseek_v3", {"num_local_experts": 16}, 2_261_889_024),
    ],
)
def test_a_key_counts_under_each_name_that_its_class_knows(model_type: str, sizes: dict[str, Any], total: int) -> None:
    assert count(read(model_type, SMALL | sizes)) == total


@pytest.mark.parametrize(
    ("model_type", "sizes", "total"),
    [
        (
            "gpt2",
            {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 7},
            5_049_216,
        ),
        (
            "qwen2_vl",
            {
                "text_config": {"hidden_size": 4096, "num_hidden_layers": 2},
                "vision_config": {"hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 4},
            },
            2_155_634_944,
        ),
        (
            "qwen2_5_omni_thinker",
            {
                "audio_config": {
                    "num_hidden_layers": 3,
                    "hidden_size": 640,
                    "num_attention_heads": 10,
                    "intermediate_size": 999,
                }
            },
            10_711_193_013,
        ),
    ],
)
def test_sizes_of_layers_count_under_their_usual_names_too(model_type: str, sizes: dict[str, Any], total: int) -> None:
    assert count(read(model_type, sizes)) == total


def test_a_message_names_the_key_that_stands_in_the_file() -> None:
    with pytest.raises(JobError, match=r"num_local_experts is 0; a whole number, at least 1, is expected"):
        read("qwen3_moe", {"num_local_experts": 0})
    with pytest.raises(JobError, match=r"num_experts_per_tok is 8; it is at most num_local_experts 4"):
        read("qwen3_moe", {"num_local_experts": 4})


@pytest.mark.parametrize(
    ("model_type", "sizes", "window"),
    [
        ("mistral", {}, (4096, 0)),
        ("mistral", {"sliding_window": None}, None),
        ("mistral3", {"text_config": {"model_type": "mistral"}}, (4096, 0)),
        ("mistral3", {}, None),
        ("mixtral", {}, None),
        ("phi3", {"sliding_window": 2047}, (2047, 0)),
        ("llama", {"sliding_window": 4096}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 16}, (4096, 16)),
        ("qwen2", WINDOWED | {"num_hidden_layers": 24}, None),
        ("qwen2", WINDOWED | {"sliding_window": None}, None),
        ("qwen3", WINDOWED, (1024, 28)),
        ("qwen3", WINDOWED | {"layer_types": ALTERNATING}, (1024, 16)),
        ("qwen3", {"layer_types": ALTERNATING}, None),
        ("qwen2_moe", {"use_sliding_window": True}, (4096, 12)),
        ("qwen2_moe", WINDOWED | {"max_window_layers": 12}, (1024, 18)),
        ("qwen3_moe", WINDOWED | {"max_window_layers": 12}, (1024, 0)),
        ("qwen2_vl", WIDE_VISION | {"use_sliding_window": True}, None),
        ("qwen2_vl", WIDE_VISION | WINDOWED | {"max_window_layers": 40}, (1024, 40)),
        ("qwen2_5_omni_thinker", {"text_config": WINDOWED}, None),
        ("qwen2_5_omni_thinker", {"text_config": {"use_sliding_window": True, "max_window_layers": 14}}, (32768, 14)),
    ],
)
def test_windows_are_those_of_the_class(model_type: str, sizes: dict[str, Any], window: tuple[int, int] | None) -> None:
    """window: its tokens, and how many layers attend in full."""
    found = read(model_type, sizes).text.layers.window
    assert (found and (found.num_tokens, len(found.full_layers))) == window


def test_layer_types_say_which_layers_have_windows() -> None:
    listed = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    found = read("qwen3", WINDOWED | {"num_hidden_layers": 4, "layer_types": listed}).text.layers.window
    assert found == Window(num_tokens=1024, full_layers=(0, 3))
    found = read("qwen2_moe", WINDOWED | {"num_hidden_layers": 4, "max_window_layers": 3}).text.layers.window
    assert found == Window(num_tokens=1024, full_layers=(1, 3))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_window_layers": "x"}, 'max_window_layers is "x"; a whole number, at least 0, is expected'),
        ({"max_window_layers": -1}, "max_window_layers is -1; a whole number"),
        ({"layer_types": ["full_attention"]}, "32 of sliding_attention and full_attention are expected"),
        ({"layer_types": ["chunked_attention"] * 32}, "32 of sliding_attention and full_attention are expected"),
    ],
)
def test_what_says_where_windows_are_is_read_where_none_follows_too(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        read("qwen2", sizes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ({}, 23_340_272_640),
        ({"vision_config": {"model_type": "pixtral"}}, 23_340_456_960),
        ({"text_config": {"model_type": "mistral"}, "vision_config": {}}, 7_670_388_736),
    ],
)
def test_mistral3_has_sizes_of_its_own_where_a_part_is_missing(sizes: dict[str, Any], total: int) -> None:
    """Without text_config the class's decoder has the sizes of Mistral Small 3.1, with embeddings that are tied."""
    assert count(read("mistral3", sizes)) == total


def test_glm4v_moe_cuts_the_width_of_a_head_down() -> None:
    assert read("glm4v_moe", {}).text.layers.head_dim == 42
    assert count(read("glm4v_moe", {})) == 104_372_866_880


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("qwen2_vl", WIDE_VISION), ("qwen2_5_omni_thinker", {}), ("glm4v", {}), ("mistral", {}), ("qwen3", {})],
)
def test_null_heads_of_keys_are_one_each(model_type: str, sizes: dict[str, Any]) -> None:
    layers = read(model_type, sizes | {"num_key_value_heads": None}).text.layers
    assert layers.num_kv_groups == layers.num_heads


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"model_type": "kimi_vl", "text_config": {}, "vision_config": {"merge_kernel_size": [0, 2]}},
            "vision_config.merge_kernel_size is a list of 2; two whole numbers, at least 1, are expected",
        ),
        (
            {"model_type": "kimi_vl", "text_config": {}, "vision_config": {"merge_kernel_size": []}},
            "vision_config.merge_kernel_size is a list of 0; two whole numbers, at least 1, are expected",
        ),
        (
            {"model_type": "vit", "num_channels": 10**15},
            "sizes of Patches: in_features is 256000000000000000; it must be at most 1,000,000,000,000,000 (the file's "
            "largest number is num_channels 1,000,000,000,000,000)",
        ),
        (
            {"model_type": "qwen2_vl", "vision_config": {"hidden_size": 8192, "mlp_ratio": 10**15}},
            "sizes of Layers: ffn_size is 1280000000000000000; it must be at most 1,000,000,000,000,000 (the file's "
            "largest number is vision_config.mlp_ratio 1,000,000,000,000,000)",
        ),
        (
            {"model_type": "deepseek_v3", "n_shared_experts": 10**15},
            "sizes of Experts: shared_ffn_size is 2048000000000000000; it must be at most",
        ),
    ],
)
def test_what_sizes_make_that_cannot_be_is_named(document: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_foreign_model(document, Path("config.json"))
    assert str(caught.value).startswith(f"model file config.json: {words}")


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"talker_config": None}, None),
        ({"talker_config": {}, "token2wav_config": {}, "enable_audio_output": False}, None),
        ({"talker_config": {}}, "its talker (talker_config) is left out; the thinker alone is planned"),
        (
            {"talker_config": {}, "token2wav_config": {}},
            "its talker (talker_config) and its vocoder (token2wav_config) are left out; the thinker alone is planned",
        ),
    ],
)
def test_a_job_says_that_a_talker_is_left_out(
    tmp_path: Path, more: dict[str, Any], words: str | None, beside: bool
) -> None:
    document = json.loads((FOLDER / "qwen2_5_omni_7b.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(document))
    job = {
        "model": "config.json" if beside else document,
        "cluster": {"device": "h200-141g", "num_nodes": 1, "devices_per_node": 8},
        "workload": {"global_batch_size": 8, "seq_length": 1024},
    }
    said = [warning for warning in parse_job(job, tmp_path / "job.json").warnings if "left out" in warning]
    where = f"model file {tmp_path / 'config.json'}" if beside else f"job file {tmp_path / 'job.json'}: model"
    assert [warning.startswith(f"{where}: {words}") for warning in said] == ([True] if words else [])


def test_a_decoder_that_attends_to_an_encoder_is_refused() -> None:
    assert read("gpt2", {"add_cross_attention": False}) == read("gpt2", {})
    with pytest.raises(JobError, match="add_cross_attention is true; a decoder by itself"):
        read("gpt2", {"add_cross_attention": True})
