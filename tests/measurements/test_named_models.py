"""Models by name: parameters as their papers count them, names in any spelling, depth cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.measurements.models import cut_layers, find_model
from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.readers.model_file import parse_inline_model


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
    ],
)
def test_parameters_are_those_that_the_name_promises(name: str, billions: float) -> None:
    model = parse_inline_model(find_model(name), Path("job.yaml"))
    assert count_chain_parameters(expand(model)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["LLaMA3_70B", "llama-3-70b", "Llama3.1-70B"])
def test_case_and_punctuation_of_a_name_say_nothing(name: str) -> None:
    assert find_model(name)["name"] == "llama3-70b"


def test_an_unknown_name_comes_with_the_known_ones() -> None:
    with pytest.raises(Unrepresentable, match=r"'llama3-71b' is not known .did you mean \"llama3-70b\".*known are"):
        find_model("llama3-71b")


def test_a_model_cut_to_its_first_layers_keeps_its_dense_ones() -> None:
    cut = find_model("deepseek-v3", 2)["text"]["layers"]
    assert (cut["num_layers"], cut["experts"]["dense_layers"]) == (2, [0, 1])
    assert find_model("deepseek-v3")["text"]["layers"]["num_layers"] == 61  # what was cut is a copy
    assert cut_layers(find_model("llama3-8b"), None) == find_model("llama3-8b")
