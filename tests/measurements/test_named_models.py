"""Models by name: parameters as their papers count them, names in any spelling, depth cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.measurements.models import cut_layers, find_model
from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import parse_inline_model, read_model

CONFIGS = Path(__file__).parents[1] / "fixtures" / "huggingface"


def replace_name(model: Model) -> Model:
    return model.model_copy(update={"name": "same"})


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 175),
        ("turing-530b", 530),
        ("llama2-7b", 6.7),
        ("llama3-8b", 8.0),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405),
        ("qwen2-72b", 72.7),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v2", 236),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v3", 671),
        ("moonlight-16b", 16),
        ("kimi-k2", 1026),
        ("qwen2.5-vl-3b", 3.75),
        ("qwen2.5-vl-32b", 33.5),
        ("qwen2.5-vl-72b", 73.4),
        ("qwen3-vl-2b", 2.13),
        ("qwen3-vl-4b", 4.44),
        ("qwen3-vl-8b", 8.77),
        ("qwen3-vl-32b", 33.4),
        ("qwen3-vl-235b-a22b", 236),
        ("internvl2-26b", 25.5),
        ("internvl3-14b", 15.1),
        ("internvl3-38b", 38.4),
        ("internvl3-78b", 78.4),
        ("llava-1.5-13b", 13.35),
    ],
)
def test_parameters_are_those_that_the_name_promises(name: str, billions: float) -> None:
    model = parse_inline_model(find_model(name), Path("job.yaml"))
    assert count_chain_parameters(expand(model)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["LLaMA3_70B", "llama-3-70b", "Llama3.1-70B", "Meta-Llama-3-70B-Instruct"])
def test_case_punctuation_and_further_training_say_nothing(name: str) -> None:
    assert find_model(name)["name"] == "llama3-70b"


def test_names_of_hubs() -> None:
    found = {name: find_model(name)["name"] for name in ("Qwen3-30B-A3B-Instruct-2507", "llava-1.5-7b-hf")}
    assert list(found.values()) == ["qwen3-30b-a3b", "llava-1.5-7b"]
    assert find_model("Mixtral-8x7B-Instruct-v0.1")["name"] == "mixtral-8x7b"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen2-vl-2b", "qwen2_vl_2b"),
        ("qwen2-vl-7b", "qwen2_vl_7b"),
        ("qwen2-vl-72b", "qwen2_vl_72b"),
        ("qwen2.5-vl-7b", "qwen2_5_vl_7b"),
        ("qwen3-vl-30b-a3b", "qwen3_vl_30b_a3b"),
        ("internvl2-8b", "internvl2_8b"),
        ("internvl2-76b", "internvl2_76b"),
        ("internvl3-8b", "internvl3_8b_native"),
        ("llava-1.5-7b", "llava_1_5_7b"),
        ("pixtral-12b", "pixtral_12b"),
        ("kimi-vl-a3b", "kimi_vl_a3b"),
        ("deepseek-vl2", "deepseek_vl2"),
        ("qwen2.5-omni-7b", "qwen2_5_omni_7b"),
        ("kimi-k2.5", "kimi_k25"),
    ],
)
def test_a_name_is_the_model_of_its_config(name: str, file: str) -> None:
    named = parse_inline_model(find_model(name), Path("job.yaml"))
    read = read_model(CONFIGS / f"{file}.json")
    assert replace_name(named) == replace_name(read)


def test_an_unknown_name_comes_with_the_known_ones() -> None:
    with pytest.raises(Unrepresentable, match=r"'llama3-71b' is not known .did you mean \"llama3-70b\".*known are"):
        find_model("llama3-71b")


def test_a_model_cut_to_its_first_layers_keeps_its_dense_ones() -> None:
    cut = find_model("deepseek-v3", 2)["text"]["layers"]
    assert (cut["num_layers"], cut["experts"]["dense_layers"]) == (2, [0, 1])
    assert find_model("deepseek-v3")["text"]["layers"]["num_layers"] == 61  # what was cut is a copy
    assert cut_layers(find_model("llama3-8b"), None) == find_model("llama3-8b")
