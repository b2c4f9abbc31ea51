"""Real classes of transformers that no reader knows, small, taken apart and traced: structure, kinds, parameters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.traced_model import TracedModel  # noqa: E402
from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.profiles.traced import TracedEntry, read_trace  # noqa: E402
from mm_autoparallel.profilers.trace.undescribed import Undescribed  # noqa: E402

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 6,
    "num_heads": 4,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [1, 3, 4],
    "num_position_embeddings": 64,
}
PIXELS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "stablelm": TEXT,
    "granitemoe": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": TEXT
    | {
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_5": {
        "text_config": {**TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
        "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": []},
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 16, **QWEN_ROPE},
        "vision_config": QWEN3_VISION,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **QWEN_ROPE},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 4,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [3],
            "window_size": 56,
        },
    },
    "vipllava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**PIXELS, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7},
        "vision_feature_layers": [-2, -3],
    },
    "mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": 0},
        "vision_config": {
            **PIXELS,
            "image_size": 28,
            "patch_size": 14,
            "attention_heads": 4,
            "num_global_layers": 2,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
        },
    },
}


@cache
def take_apart(model_type: str, **freeze: bool) -> Undescribed:
    workload = Workload(global_batch_size=4, seq_length=64, implementation="transformers")
    document = {"model_type": model_type, **DOCUMENTS[model_type]}
    return Undescribed(document, Path("config.json"), workload, model_type, freeze)


def trace(found: Undescribed, folder: Path, mbs: int = 1, **sizes: int) -> dict[str, TracedEntry]:
    """kind → its entry."""
    workload = Workload(global_batch_size=4, implementation="transformers", **{"seq_length": 64, **sizes})
    path = found.write_traces(folder, mbs, workload, "a test", recompute=True)
    return {entry.kind: entry for entry in read_trace(path).entries}


AT_NIGHT = ("qwen2_5_vl", "vipllava")


def layers(model: TracedModel, name: str) -> list[tuple[str, int]]:
    """(kind, count) of each run of layers of a part."""
    part = next(part for part in model.parts if part.name == name)
    return [(block.kind, block.count) for block in part.blocks if block.role == "layer"]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in sorted(DOCUMENTS)],
)
def found(request: pytest.FixtureRequest) -> Undescribed:
    return take_apart(request.param)


def test_blocks_hold_every_parameter_of_the_class_once(found: Undescribed) -> None:
    blocks = [block for part in found.model.parts for block in part.blocks]
    assert sum(block.count * block.parameter_count for block in blocks) == found.count_real_parameters()
    idle = sum(block.parameter_count for block in blocks if block.trains_with == "nothing")
    assert idle < 0.2 * found.count_real_parameters()
    assert not found.model.remarks


@pytest.mark.slow
def test_text_is_traced_as_its_sizes_say(tmp_path: Path) -> None:
    found = take_apart("stablelm")
    assert layers(found.model, "text") == [("text_layer", 4)]
    one, two = (trace(found, tmp_path, mbs)["text_layer"] for mbs in (1, 2))
    # query and output are square, key and value half as wide, three matrices in the feed-forward
    weights = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    assert one.flops("forward", "matrix_product") == 2 * 64 * weights
    assert two.flops("forward", "matrix_product") == 2 * 2 * 64 * weights
    assert two.activation_bytes == 2 * one.activation_bytes
    assert one.output_bytes == 64 * 64 * 2


def test_a_list_that_is_no_layers_belongs_to_the_ends() -> None:
    """Mergers of inner layers' outputs give another width than they take."""
    model = take_apart("qwen3_vl").model
    assert layers(model, "vision") == [("vision_layer", 6)]
    counts = {block.kind: block.parameter_count for block in model.encoders[0].blocks}
    matrices = 128 * 128 + 128 + 128 * 64 + 64
    assert counts["vision_post"] + counts["vision_norm"] == 4 * matrices + 3 * 2 * 128 + 2 * 32


@pytest.mark.slow
def test_layers_of_equal_parameters_and_other_work_are_two_kinds(tmp_path: Path) -> None:
    assert layers(take_apart("gemma3_text").model, "text") == [("text_layer_1", 3), ("text_layer_2", 1)]
    vision = take_apart("qwen2_5_vl")
    assert layers(vision.model, "vision") == [("vision_layer_1", 3), ("vision_layer_2", 1)]
    entries = trace(vision, tmp_path, image_tokens_per_sample=16)
    window, full = (entries[f"vision_layer_{kind}"].flops("forward", "attention") for kind in (1, 2))
    assert full == 4 * window  # 64 patches, in four windows of 16
    linear = take_apart("qwen3_5").model
    assert [count for _, count in layers(linear, "text")] == [1, 1, 1, 1]
    assert len({kind for kind, _ in layers(linear, "text")}) == 2


def test_tied_tables_count_once_and_fused_experts_are_part_of_their_layer() -> None:
    tied = take_apart("gemma3_text").model.text
    assert tied.tied
    assert tied.table_count == 160 * 64
    assert next(block for block in tied.blocks if block.kind == "text_post").parameter_count == 64
    experts = next(block for block in take_apart("granitemoe").model.text.blocks if block.role == "layer")
    assert experts.parameter_count > 4 * 3 * 64 * 96


@pytest.mark.slow
def test_layers_that_only_images_call_are_found_with_images(tmp_path: Path) -> None:
    found = take_apart("mllama")
    assert [count for _, count in layers(found.model, "text")] == [1, 1, 1, 1, 1]
    assert len({kind for kind, _ in layers(found.model, "text")}) == 2
    assert {encoder.name for encoder in found.model.encoders} == {"vision", "vision_2"}
    assert "text_layer_2" in trace(found, tmp_path, image_tokens_per_sample=4)
    with pytest.raises(ProfileError, match=r"workload.image_tokens_per_sample is 0, and .* beside images alone"):
        trace(found, tmp_path / "none")


def test_images_of_one_size_say_how_many_tokens_they_become(tmp_path: Path) -> None:
    found = take_apart("vipllava")
    assert found.model.tokens_per_image == 16
    with pytest.raises(ProfileError, match=r"become 16 tokens of text; give image_tokens_per_sample as images_per"):
        trace(found, tmp_path, image_tokens_per_sample=20)
    assert trace(found, tmp_path, image_tokens_per_sample=32, images_per_sample=2)["vision_layer"].spans == 2
    assert take_apart("qwen3_vl").model.tokens_per_image == 0  # as many as one wants


@pytest.mark.slow
def test_what_is_frozen_keeps_nothing(tmp_path: Path) -> None:
    frozen = trace(take_apart("vipllava"), tmp_path / "frozen", image_tokens_per_sample=16)
    trained = trace(take_apart("vipllava", vision=False), tmp_path / "trained", image_tokens_per_sample=16)
    assert frozen["vision_layer"].activation_bytes == 0
    assert frozen["vision_post"].activation_bytes > 0
    assert trained["vision_layer"].activation_bytes > 0
    assert trained["vision_layer"].flops("backward_weight", "matrix_product") > 0


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"model_type": "no_such_type", "auto_map": {"AutoModel": "code.Model"}}, "its auto_map names code of its own"),
        ({"model_type": "aya_vision"}, "builds no AyaVisionForConditionalGeneration from it"),
        ({"model_type": "stablelm", "hidden_size": "wide"}, "builds no StableLmForCausalLM from it"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        Undescribed(document, Path("config.json"), Workload(global_batch_size=1, seq_length=64), "x", {})
