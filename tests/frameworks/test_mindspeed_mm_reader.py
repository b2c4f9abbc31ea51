"""MindSpeed-MM's model.json: every shipped file is read, and what is wrong in one is said by its own key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from edited import set_value

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindspeed_mm.model_reader import read_mindspeed_mm
from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.model_file import read_model

FILES = sorted((Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models").glob("*.json"))
FOLDER = FILES[0].parent


def read(name: str) -> Model:
    return read_model(FOLDER / f"{name}.json")


def encoder(name: str, index: int = 0) -> Encoder:
    return read(name).encoders[index]


def changed(name: str, key: str, value: Any) -> Section:
    """The file `name` with the value at the dotted `key` replaced, or removed where it is `...`."""
    document = json.loads((FOLDER / f"{name}.json").read_text())
    set_value(document, key, value)
    return Section(document, Path("model.json"))


def test_all_shipped_files_are_there() -> None:
    assert len(FILES) == 12


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_is_read(path: Path) -> None:
    document = json.loads(path.read_text())
    model = read_model(path)
    assert model.text.layers.num_layers == document["text_decoder"]["num_layers"]
    assert model.text.layers.hidden_size == model.encoders[0].projector.layer_sizes[-1]
    assert [e.name for e in model.encoders] == ["vision", "audio"][: 2 if "audio_encoder" in document else 1]
    vision = document["image_encoder"]["vision_encoder"]
    assert model.encoders[0].freeze == vision["freeze"]
    assert model.encoders[0].layers.ffn_size == vision["ffn_hidden_size"]


def test_qwen2vl_72b() -> None:
    model = read("qwen2vl_72b")
    text, vision = model.text.layers, model.encoders[0]
    assert (text.num_layers, text.num_heads, text.num_kv_groups, text.head_dim) == (80, 64, 8, 128)
    assert (text.gated, text.qkv_bias, text.output_bias, text.mlp_bias, text.norm) == (True, True, False, False, "rms")
    assert (model.text.tied, model.text.freeze, vision.freeze, vision.projector.freeze) == (False, False, True, True)
    assert (vision.layers.gated, vision.layers.qkv_bias, vision.layers.mlp_bias) == (False, True, True)
    assert vision.layers.norm == "layer"
    assert vision.layers.window is None
    assert (vision.projector.merge_tokens, vision.projector.layer_sizes) == (4, (5120, 5120, 8192))
    assert vision.stem.in_features == 3 * 2 * 14 * 14  # type: ignore[union-attr]
    assert read("qwen2vl_2b").text.tied


def test_qwen25vl_windows() -> None:
    window = encoder("qwen2.5vl_7b").layers.window
    assert window is not None
    assert (window.num_tokens, window.full_layers) == (64, (7, 15, 23, 31))


def test_internvl_class_token_positions_and_pixel_shuffle() -> None:
    small, large = encoder("internvl2_8b"), encoder("internvl2_76b")
    assert small.stem.num_positions == 1025
    assert small.projector.layer_sizes == (4096, 4096, 4096)
    assert small.projector.replicated
    assert not small.projector.freeze
    assert (small.layers.qkv_bias, small.layers.qk_norm, small.layers.norm) == (True, None, "layer")
    assert (large.layers.qkv_bias, large.layers.qk_norm, large.layers.norm) == (False, "hidden", "rms")
    assert (large.layers.output_bias, large.layers.layer_scale, large.layers.gated) == (True, True, False)
    assert not encoder("internvl2_8b_vpp").freeze


def test_omni_audio() -> None:
    audio = encoder("qwen2.5omni_7b", 1)
    assert audio.freeze
    assert audio.projector.freeze
    assert audio.media == "audios"
    assert audio.layers.window is not None
    assert audio.layers.window.num_tokens == 100
    assert (audio.projector.merge_tokens, audio.projector.layer_sizes) == (2, (1280, 3584))


def test_qwen3_experts() -> None:
    layers = read("qwen3vl_dev_30b_a3b").text.layers
    assert layers.experts is not None
    assert (layers.experts.num_experts, layers.experts.top_k, layers.experts.ffn_size) == (128, 8, 768)
    assert layers.experts.dense_layers == ()
    assert (layers.head_dim, layers.qk_norm) == (128, "head")


@pytest.mark.parametrize(
    ("key", "value", "dense"),
    [
        ("first_k_dense_replace", 3, (0, 1, 2)),
        ("moe_layer_freq", 2, tuple(range(1, 48, 2))),
        ("moe_layer_freq", [0] + [1] * 47, (0,)),
    ],
)
def test_dense_layers_before_and_between_experts(key: str, value: Any, dense: tuple[int, ...]) -> None:
    experts = read_mindspeed_mm(changed("qwen3vl_dev_30b_a3b", f"text_decoder.{key}", value)).text.layers.experts
    assert experts is not None
    assert experts.dense_layers == dense


def test_shared_experts() -> None:
    file = changed("qwen3vl_dev_30b_a3b", "text_decoder.n_shared_experts", 2)
    experts = read_mindspeed_mm(file).text.layers.experts
    assert experts is not None
    assert experts.shared_ffn_size == 2 * 768


@pytest.mark.parametrize(
    ("key", "frozen"),
    [
        ("image_encoder.vision_encoder.freeze", True),
        ("image_encoder.vision_projector.freeze", False),
        ("audio_encoder.audio_encoder.freeze", True),
    ],
)
def test_freezing_where_the_file_is_silent_is_as_in_the_trainer(key: str, frozen: bool) -> None:
    model = read_mindspeed_mm(changed("qwen2.5omni_7b", key, ...))
    vision, audio = model.encoders
    assert {
        "image_encoder.vision_encoder.freeze": vision.freeze,
        "image_encoder.vision_projector.freeze": vision.projector.freeze,
        "audio_encoder.audio_encoder.freeze": audio.freeze,
    }[key] == frozen


def test_a_language_model_alone() -> None:
    assert read_mindspeed_mm(changed("qwen2vl_7b", "image_encoder", None)).encoders == ()


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        (
            "qwen2vl_7b",
            "text_decoder.num_layers",
            ...,
            "text_decoder.num_layers is missing; a whole number, at least 1,",
        ),
        ("qwen2vl_7b", "text_decoder.num_layers", "28", 'text_decoder.num_layers is "28"; a whole number'),
        ("qwen2vl_7b", "text_decoder.num_layers", -1, "text_decoder.num_layers is -1"),
        ("qwen2vl_7b", "text_decoder.num_layers", 10**9, "text_decoder.num_layers is 1000000000; it is at most 10,000"),
        ("qwen2vl_7b", "text_decoder.num_layers", True, "text_decoder.num_layers is true"),
        ("qwen2vl_7b", "text_decoder.gated_linear_unit", "yes", 'gated_linear_unit is "yes"; true or false'),
        ("qwen2vl_7b", "text_decoder.normalization", "BatchNorm", "one of RMSNorm, LayerNorm"),
        (
            "qwen2vl_7b",
            "text_decoder.num_query_groups",
            5,
            "num_query_groups is 5; it must divide num_attention_heads 28",
        ),
        (
            "qwen2vl_7b",
            "text_decoder.num_attention_heads",
            27,
            "num_attention_heads is 27; it must divide hidden_size 3584",
        ),
        (
            "qwen2vl_7b",
            "text_decoder.multi_latent_attention",
            True,
            "text_decoder.kv_lora_rank is missing",
        ),
        ("qwen2vl_7b", "text_decoder.hidden_size", 3600, "it must divide hidden_size 3600"),
        ("qwen2vl_7b", "text_decoder", [], "text_decoder is a list of 0; a mapping"),
        ("qwen2vl_7b", "text_encoder", {}, "text_encoder is a mapping; only image_encoder"),
        ("qwen2vl_7b", "image_encoder.vision_encoder.model_id", "ViT", "one of qwen2vit, qwen2_5_vit, InternViT"),
        ("qwen2vl_7b", "image_encoder.vision_projector", ..., "image_encoder.vision_projector is missing; a mapping"),
        ("qwen2vl_7b", "image_encoder.vision_projector.model_id", "qformer", "one of lnmlp, mlp, InternVLMLP"),
        ("qwen2vl_7b", "image_encoder.vision_projector.input_size", 1000, "gives tokens of 1280"),
        ("qwen2vl_7b", "image_encoder.vision_projector.ffn_hidden_size", 5000, "4 joined tokens of 1280 make 5120"),
        ("qwen2.5vl_7b", "image_encoder.vision_encoder.window_attn_size", 14, "one merged token, 28 pixels"),
        ("qwen2.5vl_7b", "image_encoder.vision_encoder.fullatt_block_indexes", [7, 32], "layers are 0 to 31"),
        ("qwen2.5vl_7b", "image_encoder.vision_encoder.fullatt_block_indexes", ["7"], "a list of whole numbers"),
        ("internvl2_8b", "image_encoder.vision_encoder.image_size", 450, "a multiple of patch_size 14"),
        ("internvl2_8b", "image_encoder.vision_encoder.downsample_ratio", 2, "a number from 0.01 to 1"),
        ("internvl2_8b", "image_encoder.vision_projector.vit_hidden_size", 99, "the vision encoder is 1024 wide"),
        ("qwen3vl_dev_30b_a3b", "text_decoder.moe_router_topk", 200, "at most num_moe_experts 128"),
        ("qwen3vl_dev_30b_a3b", "text_decoder.first_k_dense_replace", 49, "at most num_layers 48"),
        ("qwen3vl_dev_30b_a3b", "text_decoder.moe_layer_freq", [1, 1], "a list of 48 zeros and ones"),
    ],
)
def test_what_is_wrong_is_named(name: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(JobError, match=r"^model file model\.json: ") as caught:
        read_mindspeed_mm(changed(name, key, value))
    assert words in str(caught.value)


def test_a_key_that_is_nearly_there_is_pointed_out() -> None:
    document = json.loads((FOLDER / "qwen2vl_7b.json").read_text())
    document["text_decoder"]["num_layer"] = document["text_decoder"].pop("num_layers")
    with pytest.raises(JobError, match=r'num_layers is missing \(there is "num_layer"\)'):
        read_mindspeed_mm(Section(document, Path("model.json")))


def test_parts_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    document = copy.deepcopy(json.loads((FOLDER / "qwen2vl_7b.json").read_text()))
    document["image_encoder"]["vision_projector"]["hidden_size"] = 4096
    path = tmp_path / "model.json"
    path.write_text(json.dumps(document))
    with pytest.raises(JobError, match=r"projector of vision ends with 4096 and the text decoder is 3584 wide"):
        read_model(path)
