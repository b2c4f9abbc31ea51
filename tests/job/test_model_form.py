"""The project's own form of a model: what it completes, what it refuses, freezing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.layers import Experts, Layers, Window
from mm_autoparallel.model.job.model import Decoder, Encoder, MelFrames, Model, Patches, Projector
from mm_autoparallel.model.readers.model_file import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"


def layers(**changes: Any) -> Layers:
    return Layers(**({"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"} | changes))


def encoder(name: str = "vision", **changes: Any) -> Encoder:
    fields = {
        "name": name,
        "stem": Patches(in_features=588),
        "layers": layers(),
        "projector": Projector(merge_tokens=4, layer_sizes=(256, 256, 64)),
    }
    return Encoder(**(fields | changes))


TEXT = Decoder(vocab_size=100, layers=layers())


def test_what_is_left_out_is_completed() -> None:
    made = layers()
    assert (made.num_kv_groups, made.head_dim) == (4, 16)
    assert layers(num_kv_groups=2, head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "hidden_size 64 is no multiple of num_heads 5"),
        ({"num_kv_groups": 3}, "num_heads 4 is no multiple of num_kv_groups 3"),
        ({"window": Window(num_tokens=4, full_layers=(4,))}, r"window.full_layers names layer 4 and layers are 0 to 3"),
        (
            {"experts": Experts(num_experts=4, top_k=2, ffn_size=8, dense_layers=(7,))},
            r"experts.dense_layers names layer 7",
        ),
        ({"num_layers": 0}, "greater than or equal to 1"),
        ({"norm": "batch"}, "'rms' or 'layer'"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        layers(**changes)


def test_more_experts_per_token_than_there_are() -> None:
    with pytest.raises(ValidationError, match="top_k 5 is more than num_experts 4"):
        Experts(num_experts=4, top_k=5, ffn_size=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"projector": Projector(merge_tokens=4, layer_sizes=(100, 64))}, r"must begin with 256 \(joined\) or 64"),
        ({"num_deepstack": 2}, "go together"),
        ({"deepstack": Projector(merge_tokens=4, layer_sizes=(256, 64))}, "go together"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        encoder(**changes)


def test_averaging_projectors_begin_with_one_token() -> None:
    assert encoder(projector=Projector(merge_tokens=2, layer_sizes=(64, 64))).projector.merge_tokens == 2


def test_a_projector_with_a_norm_says_how_wide() -> None:
    with pytest.raises(ValidationError, match="norm_size is needed"):
        Projector(norm="layer", layer_sizes=(64, 64))


@pytest.mark.parametrize(
    ("encoders", "words"),
    [
        ((encoder(), encoder()), "two modalities are called vision"),
        ((encoder("text"),), "two modalities are called text"),
        ((encoder("llm"),), "an encoder is called llm"),
        ((encoder(projector=Projector(layer_sizes=(64, 32))),), "ends with 32 and the text decoder is 64 wide"),
    ],
)
def test_modalities_that_do_not_fit_are_refused(encoders: tuple[Encoder, ...], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Model(encoders=encoders, text=TEXT)


def test_modalities_stand_in_the_order_data_flows() -> None:
    ears = encoder("ears", stem=MelFrames(num_mel_bins=80))
    model = Model(encoders=(encoder("eyes"), ears), text=TEXT)
    assert [modality.name for modality in model.modalities] == ["eyes", "ears", "text"]
    assert model.num_layers == 12


def test_parts_are_frozen_by_name() -> None:
    model = read_model(FIXTURES / "huggingface" / "qwen3_vl_30b_a3b.json")
    other = model.with_freeze({"vision": False, "vision_projector": True, "text": True})
    vision = other.encoders[0]
    assert vision.deepstack is not None
    assert (vision.freeze, vision.projector.freeze, vision.deepstack.freeze, other.text.freeze) == (
        False,
        True,
        True,
        True,
    )
    assert model.with_freeze({}) == model
    with pytest.raises(JobError, match=r"vison is no part .* mean \"vision\""):
        model.with_freeze({"vison": True})


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"layers": 3}')
    with pytest.raises(JobError, match="no model that is understood"):
        read_model(path)
