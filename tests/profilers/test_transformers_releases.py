"""A config.json in the keys of one release of transformers, read by another.

older_torch.py beside the hooks' tests runs the profilers' tests with older releases.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tracing_jobs  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.profilers.shard import fake_mesh  # noqa: E402
from mm_autoparallel.profilers.tensor_shard import shard_layer  # noqa: E402
from mm_autoparallel.profilers.transformers_releases import check_attention, older_keys, read_config  # noqa: E402


class Flat:
    """Asks for Qwen2-VL's keys as transformers 4.45 does."""

    def __init__(self, hidden_size: int = 8, vision_config: Any = None, rope_theta: float = 1.0, **_: Any) -> None:
        pass


class Nested:
    """As 4.57 does; image_seq_length is LLaVA's."""

    def __init__(self, text_config: Any = None, vision_config: Any = None, image_seq_length: int = 576) -> None:
        pass


def test_sizes_of_text_lie_where_older_classes_look() -> None:
    document = copy.deepcopy(tracing_jobs.DOCUMENTS["qwen2_vl"])
    told = older_keys(document, Flat)
    assert "text_config" not in told
    assert (told["model_type"], told["hidden_size"], told["rope_theta"]) == ("qwen2_vl", 64, 1e4)
    assert told["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 3, 3]}
    assert told["tie_word_embeddings"] is False


def test_parts_keep_their_own_keys() -> None:
    document = copy.deepcopy(tracing_jobs.DOCUMENTS["qwen2_vl"]) | {"tie_word_embeddings": True}
    text = older_keys(document, Nested)["text_config"]
    assert "rope_parameters" not in text
    assert (text["rope_theta"], text["tie_word_embeddings"]) == (1e4, True)
    plain = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}
    assert older_keys(plain, Nested)["text_config"] == {"rope_theta": 5e5}


def test_the_tokens_of_an_image_are_counted() -> None:
    told = older_keys(copy.deepcopy(tracing_jobs.DOCUMENTS["llava"]), Nested)
    assert told["image_seq_length"] == 16
    assert older_keys({"image_seq_length": 9, "vision_config": {}}, Nested)["image_seq_length"] == 9


def test_angles_by_kind_of_layer_cannot_be_told() -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="before transformers 5 all layers turn by the same angles"):
        older_keys({"rope_parameters": rope}, Flat)


def test_the_installed_release_reads_both() -> None:
    """What was written by hand in the keys of 4 gives the same as the same file in those of 5."""
    new = tracing_jobs.DOCUMENTS["qwen2_vl"]
    text = {key: value for key, value in new["text_config"].items() if key not in ("rope_parameters", "model_type")}
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    old = {**{k: v for k, v in new.items() if k != "text_config"}, **text, "rope_theta": 1e4, "rope_scaling": scaling}
    sizes = [read_config(document).get_text_config().to_dict() for document in (new, old)]
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert sizes[0][key] == sizes[1][key] == new["text_config"][key]


def test_a_model_type_of_no_release_is_said() -> None:
    with pytest.raises(ValueError, match="has no model type 'nosuch'; install a release that has it"):
        read_config({"model_type": "nosuch"})


def test_a_layer_whose_half_would_stay_whole_is_refused() -> None:
    """Mixtral's experts are no `mlp` in transformers 4."""
    layer = torch.nn.ModuleDict({"block_sparse_moe": torch.nn.Linear(4, 4)})
    with fake_mesh(2, "cpu") as mesh, pytest.raises(ProfileError, match="has no part `mlp`"):
        shard_layer(layer, mesh)


def test_fused_attention_that_is_not_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_torch_sdpa_available", lambda: False, raising=False)
    check_attention("eager")
    with pytest.raises(ProfileError, match=r"takes no fused attention from PyTorch .*workload\.attention: unfused"):
        check_attention("sdpa")
