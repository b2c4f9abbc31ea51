"""How the generic route finds what a class wants to be given: real classes of transformers, small."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.profiles.traced import read_trace  # noqa: E402
from mm_autoparallel.profilers.huggingface_classes import build_class  # noqa: E402
from mm_autoparallel.profilers.trace import routes  # noqa: E402
from mm_autoparallel.profilers.trace.anatomy import find_anatomy  # noqa: E402
from mm_autoparallel.profilers.trace.lists import find_lists  # noqa: E402
from mm_autoparallel.profilers.trace.samples import Entry, entry_of, image_batches, made  # noqa: E402
from mm_autoparallel.profilers.trace.undescribed import Undescribed  # noqa: E402

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "fuyu": {"text_config": {**TEXT, "model_type": "persimmon"}, "patch_size": 10},
    "chameleon": {
        **TEXT,
        "vocabulary_map": {"<image>": 3, "IMGIMGAAZ": 4},
        "vq_config": {"base_channels": 32, "embed_dim": 32, "latent_channels": 32, "resolution": 64},
    },
    "muse_glimmer": {
        "text_config": TEXT,
        "vision_config": {**VISION, "patch_size": 4, "patch_temporal": 2},
        "out_hidden_size": 128,
        "projector_hidden_size": 48,
    },
    "molmo2": {
        "text_config": {**TEXT, "additional_vocab_size": 8},
        "vision_config": {
            **VISION,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "image_size": [20, 20],
            "patch_size": 4,
            "num_position_embeddings": 25,
        },
        "adapter_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "intermediate_size": 48,
            "text_hidden_size": 64,
            "vision_feature_layer": [-1, -2],
        },
    },
    "inkling_mm_model": {
        "text_config": {**TEXT, "num_hidden_layers": 4},
        "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": 64},
        "vision_config": {"patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "text_hidden_size": 64},
    },
}

BY_DAY = ("chameleon", "fuyu", "muse_glimmer")


def document_of(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **DOCUMENTS[model_type]}


@cache
def take_apart(model_type: str) -> Undescribed:
    workload = Workload(global_batch_size=4, seq_length=64, implementation="transformers")
    return Undescribed(document_of(model_type), Path("config.json"), workload, model_type, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(DOCUMENTS)],
)
def test_images_run_and_blocks_hold_every_parameter_once(model_type: str) -> None:
    found = take_apart(model_type)
    assert not [remark for remark in found.model.remarks if "cannot be run" in remark]
    blocks = [block for part in found.model.parts for block in part.blocks]
    assert sum(block.count * block.parameter_count for block in blocks) == found.count_real_parameters()
    assert "images" in {encoder.kind for encoder in found.model.encoders}


def test_an_encoder_without_layers_is_one_block(tmp_path: Path) -> None:
    """One matrix from pixels to text, and the tokenizer of images whose convolutions are called past their lists."""
    matrix = take_apart("fuyu").model
    assert matrix.remarks == ("its images pass no list of layers, so vision is one block, in one stage",)
    counts = {block.role: block.parameter_count for block in matrix.encoders[0].blocks}
    assert counts == {"pre": 0, "layer": 3 * 10 * 10 * 64 + 64, "post": 0}

    found = take_apart("chameleon")
    assert found.model.tokens_per_image == 16
    (block,) = [block for block in found.model.encoders[0].blocks if block.role == "layer"]
    assert block.what == "the whole of model.vqmodel"
    workload = Workload(global_batch_size=4, seq_length=64, image_tokens_per_sample=16, implementation="transformers")
    path = found.write_traces(tmp_path, 1, workload, "a test", recompute=True)
    entries = {entry.kind: entry for entry in read_trace(path).entries}
    assert entries["vision_post"].flops("forward", "matrix_product") > 0  # frozen, so its work counts there
    assert entries["vision_layer"].parameter_count == block.parameter_count


def test_a_tower_that_its_class_gives_no_way_to_run_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text alone runs; that what the config describes beside it does not must not go unsaid."""
    live, _ = build_class(document_of("fuyu"), Path("config.json"), torch.bfloat16, "sdpa")
    config: Any = live.config
    config.vision_config = config.text_config
    monkeypatch.setattr(routes, "_find_method", lambda *_: None)
    remarks = find_anatomy(live, torch.bfloat16).remarks
    assert remarks == ("its images cannot be run: its class offers no way",)


def test_sounds_given_as_codes_run() -> None:
    model = take_apart("inkling_mm_model").model
    assert {encoder.name: encoder.kind for encoder in model.encoders} == {"vision": "images", "audio": "audios"}


def test_how_wide_a_patch_is_is_learned_from_the_matrix_that_refused_it() -> None:
    """The config calls the frames of a patch by a name of its own: twice the features that its other sizes make."""
    live, _ = build_class(document_of("muse_glimmer"), Path("config.json"), torch.bfloat16, "sdpa")
    with pytest.raises(Exception, match="48") as failure:
        live.model.vision_tower.patch_embedder.patch_embedding(torch.ones(4, 48, dtype=torch.bfloat16))
    assert entry_of(failure.value) == Entry(features=96)
    config: Any = live.config
    (first, *_) = image_batches(config, 1, 1, 4, torch.bfloat16, Entry(features=96))
    assert made(first)["pixel_values"].shape == (16, 96)


def test_samples_of_a_wrong_form_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running all layers is for classes whose layers need one another: no help where none was reached."""
    live, _ = build_class(document_of("fuyu"), Path("config.json"), torch.bfloat16, "sdpa")
    tried: list[bool] = []
    plain = routes.run_cut_forward

    def count(*args: Any, **kwargs: Any) -> Any:
        tried.append(kwargs.get("frugal", True))
        return plain(*args, **kwargs)

    def wrong() -> Any:
        return live(input_ids=torch.ones(1, 4))

    monkeypatch.setattr(routes, "run_cut_forward", count)
    lists = find_lists(live)
    with pytest.raises(RuntimeError):
        routes.run_route(live, lists, dict.fromkeys(lists, "text"), wrong, False)
    assert tried == [True]
