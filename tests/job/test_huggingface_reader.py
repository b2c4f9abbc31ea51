"""Hugging Face config.json: sizes of every family, defaults of the classes, what is wrong named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.job.foreign import Section
from mm_autoparallel.job.huggingface import read_huggingface
from mm_autoparallel.job.model import Model
from mm_autoparallel.job.model_file import read_model

FOLDER = Path(__file__).parents[1] / "fixtures" / "huggingface"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "parameters")


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


def read(document: dict[str, Any]) -> Model:
    return read_huggingface(Section(document, Path("config.json")))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_read_and_frozen_like_the_trainer_does(name: str) -> None:
    model = read_model(FOLDER / f"{name}.json")
    assert model.encoders[0].freeze
    assert not model.encoders[0].projector.freeze
    assert not model.text.freeze
    assert model.name == f"{load(name)['model_type']}-{name}"


@pytest.mark.parametrize(
    ("huggingface", "mindspeed_mm"),
    [
        ("qwen2_vl_2b", "qwen2vl_2b"),
        ("qwen2_vl_7b", "qwen2vl_7b"),
        ("qwen2_vl_72b", "qwen2vl_72b"),
        ("qwen2_5_vl_7b", "qwen2.5vl_7b"),
        ("internvl2_8b", "internvl2_8b"),
        ("internvl2_76b", "internvl2_76b"),
        ("qwen2_5_omni_7b", "qwen2.5omni_7b"),
    ],
)
def test_both_forms_of_a_model_agree(huggingface: str, mindspeed_mm: str) -> None:
    """Two readers, two sources, one model; but for the key bias that MindSpeed-MM keeps as zeros, and freezing."""
    one = read_model(FOLDER / f"{huggingface}.json")
    other = read_model(FOLDER.parent / "mindspeed_mm_models" / f"{mindspeed_mm}.json")
    for mine, theirs in zip(one.encoders, other.encoders, strict=True):
        assert mine.layers == theirs.layers.model_copy(update={"key_bias": mine.layers.key_bias})
        assert mine.stem == theirs.stem
        assert mine.projector == theirs.projector.model_copy(update={"freeze": mine.projector.freeze})
    assert one.text == other.text


def test_text_sizes_may_stand_under_text_config() -> None:
    old = load("qwen2_vl_7b")
    new = {key: old.pop(key) for key in ("model_type", "vision_config")} | {"text_config": old}
    assert read(new).text == read(load("qwen2_vl_7b")).text


def test_the_channels_key_has_two_names() -> None:
    document = load("qwen2_vl_7b")
    document["vision_config"]["in_channels"] = document["vision_config"].pop("in_chans")
    assert read(document).encoders == read(load("qwen2_vl_7b")).encoders


@pytest.mark.parametrize(
    ("document", "text", "vision"),
    [
        ({"model_type": "qwen2_vl"}, (80, 8192, 29568, 64, 8, 152064), (32, 1280, 5120, 16)),
        ({"model_type": "qwen2_5_omni_thinker"}, (28, 3584, 18944, 28, 4, 152064), (32, 3584, 3420, 16)),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            (32, 4096, 11008, 32, 32, 32000),
            (24, 1024, 4096, 16),
        ),
        (
            {"model_type": "internvl", "text_config": {"model_type": "qwen2"}},
            (32, 4096, 22016, 32, 32, 151936),
            (24, 1024, 4096, 16),
        ),
    ],
)
def test_missing_keys_take_the_defaults_of_the_class(
    document: dict[str, Any], text: tuple[int, ...], vision: tuple[int, ...]
) -> None:
    """transformers 5.23, configuration_*.py."""
    if document["model_type"] == "qwen2_vl":
        document |= {"vision_config": {"hidden_size": 8192}}
    model = read(document)
    layers = model.text.layers
    assert text == (
        layers.num_layers,
        layers.hidden_size,
        layers.ffn_size,
        layers.num_heads,
        layers.num_kv_groups,
        model.text.vocab_size,
    )
    inner = model.encoders[0].layers
    assert vision == (inner.num_layers, inner.hidden_size, inner.ffn_size, inner.num_heads)


def test_qwen3_experts_deepstack_and_positions() -> None:
    model = read(load("qwen3_vl_30b_a3b"))
    vision, experts = model.encoders[0], model.text.layers.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.ffn_size, experts.dense_layers) == (128, 8, 768, ())
    assert vision.num_deepstack == 3
    assert vision.deepstack is not None
    assert vision.deepstack.norm_size == 4 * vision.projector.norm_size
    assert vision.stem.num_positions == 2304


@pytest.mark.parametrize(
    ("change", "dense"),
    [({"mlp_only_layers": [0, 5]}, (0, 5)), ({"decoder_sparse_step": 2}, tuple(range(0, 48, 2)))],
)
def test_some_layers_have_no_experts(change: dict[str, Any], dense: tuple[int, ...]) -> None:
    document = load("qwen3_vl_30b_a3b")
    document["text_config"] |= change
    experts = read(document).text.layers.experts
    assert experts is not None
    assert experts.dense_layers == dense


@pytest.mark.parametrize(
    ("top", "inner", "tied"),
    [(None, None, False), (True, None, True), (None, True, True), (False, True, False)],
)
def test_tied_tables_are_looked_up_outside_then_inside(top: bool | None, inner: bool | None, tied: bool) -> None:
    document = load("llava_1_5_7b") | {"tie_word_embeddings": top}
    document["text_config"]["tie_word_embeddings"] = inner
    assert read(document).text.tied == tied


def test_audio_key_has_no_bias() -> None:
    audio = read(load("qwen2_5_omni_7b")).encoders[1]
    assert (audio.layers.qkv_bias, audio.layers.key_bias) == (True, False)


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen2_vl_7b", "model_type", "qwen2-vl", 'model_type is "qwen2-vl"; one of qwen2_vl, '),
        ("qwen2_vl_7b", "model_type", "bert", 'model_type is "bert"'),
        ("qwen2_vl_7b", "hidden_size", "3584", 'hidden_size is "3584"; a whole number'),
        ("qwen2_vl_7b", "hidden_size", 3585, "it must divide the width 3585"),
        ("qwen2_vl_7b", "num_key_value_heads", 3, "it must divide num_attention_heads 28"),
        ("qwen2_vl_7b", "vision_config.patch_size", [14, 16], "a pair of equal ones"),
        ("qwen2_vl_7b", "vision_config.num_heads", 7, "vision_config.num_heads is 7; it must divide the width 1280"),
        ("qwen2_vl_7b", "vision_config", 3, "vision_config is 3; a mapping"),
        ("qwen2_5_vl_7b", "vision_config.fullatt_block_indexes", [99], "layers are 0 to 31"),
        ("internvl2_8b", "vision_config.norm_type", "batch", "one of layer_norm, rms_norm"),
        ("internvl2_8b", "llm_config.model_type", "falcon", 'llm_config.model_type is "falcon"; one of llama'),
        ("llava_1_5_7b", "vision_config.model_type", "siglip", "clip_vision_model is expected"),
        ("qwen3_vl_30b_a3b", "text_config.num_experts_per_tok", 999, "at most num_experts 128"),
    ],
)
def test_what_is_wrong_is_named(name: str, key: str, value: Any, words: str) -> None:
    document = load(name)
    *path, last = key.split(".")
    part = document
    for step in path:
        part = part[step]
    part[last] = value
    with pytest.raises(JobError, match=r"^model file config\.json: ") as caught:
        read(document)
    assert words in str(caught.value)
