"""Hugging Face config.json: sizes of every family, defaults of the classes, what is wrong named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.integrations.huggingface.generic import is_generic
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.model_file import read_model

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


def test_both_forms_of_deepseek_vl2_agree() -> None:
    """But for eager code's router, which Megatron's form says nothing of, and freezing."""
    one = read_model(FOLDER / "deepseek_vl2.json")
    other = read_model(FOLDER.parent / "mindspeed_mm_families" / "deepseekvl2_27b.json")
    mine, theirs = one.encoders[0], other.encoders[0]
    assert (mine.freeze, theirs.freeze) == (True, False)
    assert mine == theirs.model_copy(update={"freeze": True})
    layers, experts = one.text.layers, one.text.layers.experts
    assert experts is not None
    experts = experts.model_copy(update={"fp32_router": False})
    assert layers.model_copy(update={"experts": experts}) == other.text.layers


def test_the_smallest_deepseek_vl2_attends_without_compressed_vectors() -> None:
    document = load("deepseek_vl2")
    document["language_config"] |= {"use_mla": False, "hidden_size": 1280, "num_attention_heads": 10}
    document["language_config"] |= {"num_key_value_heads": 10, "num_hidden_layers": 12}
    document["projector_config"]["n_embed"] = 1280
    layers = read(document).text.layers
    assert layers.latent is None
    assert (layers.num_heads, layers.num_kv_groups, layers.head_dim) == (10, 10, 128)


def test_kimi_vl_is_a_decoder_of_latent_attention_behind_a_native_tower() -> None:
    model = read(load("kimi_vl_a3b"))
    latent, experts, vision = model.text.layers.latent, model.text.layers.experts, model.encoders[0]
    assert latent is not None
    assert experts is not None
    assert (latent.q_lora_rank, latent.kv_lora_rank, model.text.tied) == (0, 512, False)
    assert (experts.num_experts, experts.shared_ffn_size, experts.dense_layers) == (64, 2816, (0,))
    assert vision.projector.layer_sizes == (4608, 4608, 2048)
    assert vision.layers == read(load("kimi_k25")).encoders[0].layers


@pytest.mark.parametrize(("groups", "found"), [((8, 4), 4), ((1, 1), 0), ((8, 8), 0), ((None, None), 4)])
def test_a_router_may_pick_out_of_few_groups_of_experts(groups: tuple[int | None, int | None], found: int) -> None:
    document = load("kimi_vl_a3b")
    document["text_config"] |= dict(zip(("n_group", "topk_group"), groups, strict=True))
    experts = read(document).text.layers.experts
    assert experts is not None
    assert experts.max_groups == found


@pytest.mark.parametrize(
    ("name", "tower", "generic"),
    [
        ("pixtral_12b", "pixtral", False),
        ("llava_1_5_7b", "clip_vision_model", False),
        ("llava_1_5_7b", "siglip_vision_model", True),
        ("llava_1_5_7b", 7, False),
    ],
)
def test_a_llava_with_a_tower_that_is_not_described_goes_by_its_class(name: str, tower: Any, generic: bool) -> None:
    document = load(name)
    document["vision_config"]["model_type"] = tower
    assert is_generic(document) == generic


@pytest.mark.parametrize("model_type", ["llava", "internvl", "mistral3"])
def test_a_text_that_is_not_described_goes_by_its_class(model_type: str) -> None:
    for text, generic in (("mistral", False), ("ministral3", True), ("gpt_oss", True), ("gemma2", True), (7, False)):
        assert is_generic({"model_type": model_type, "text_config": {"model_type": text}}) == generic
    assert not is_generic({"model_type": model_type})


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
        ("llava_1_5_7b", "vision_config.model_type", "siglip", "one of clip_vision_model, pixtral is expected"),
        ("qwen3_vl_30b_a3b", "text_config.num_experts_per_tok", 999, "at most num_experts 128"),
        ("deepseek_vl2", "vision_config.model_name", "deeplip_b_l", "one of siglip_so400m_patch14_384, "),
        ("deepseek_vl2", "vision_config.width", {"clip": 1024}, "a whole number, at least 1, is expected"),
        ("deepseek_vl2", "projector_config.projector_type", "linear", "downsample_mlp_gelu is expected"),
        ("deepseek_vl2", "projector_config.input_dim", 2048, "the vision encoder is 1152 wide"),
        ("deepseek_vl2", "projector_config.depth", 10**12, "it is at most 10,000"),
        ("kimi_vl_a3b", "text_config.model_type", "gemma", "one of llama, "),
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
