"""Groups of experts that a router picks from, by every framework's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.integrations.mindformers.model_job import build_job
from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
from mm_autoparallel.integrations.mindspeed_mm.model_layers import read_layers
from mm_autoparallel.model.job.layers import Experts
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.model_file import read_model

DEEPSEEK_V3: dict[str, Any] = {"model_type": "deepseek_v3", "num_hidden_layers": 4}
"""All else as its class has it by default: 8 groups, experts from 4 of them."""

DEEPSEEK_V2: dict[str, Any] = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}

MEGATRON: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "swiglu": True,
    "disable-bias-linear": True,
    "position-embedding-type": "rope",
    "vocab-size": 512,
    "num-experts": 16,
    "moe-ffn-hidden-size": 32,
}
DECODER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_moe_experts": 16,
    "moe_intermediate_size": 32,
}
FIXTURES = Path(__file__).parents[1] / "fixtures"
EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"


def groups(model: Model) -> tuple[int, int]:
    experts = model.text.layers.experts
    assert experts is not None
    return experts.max_groups, experts.num_groups


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (4, 8)),
        ({"n_group": 1, "topk_group": 1}, (0, 0)),
        ({"n_group": 16, "topk_group": 2}, (2, 16)),
        ({"n_group": 8, "topk_group": 8}, (0, 0)),
        (DEEPSEEK_V2, (0, 0)),
        (DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"}, (3, 8)),
    ],
)
def test_of_a_config_json(said: dict[str, Any], expected: tuple[int, int]) -> None:
    assert groups(read_huggingface(Section(DEEPSEEK_V3 | said, Path("config.json")))) == expected


def test_of_a_published_file() -> None:
    """Kimi K2.5 has one group of 384 experts."""
    assert groups(read_model(FIXTURES / "huggingface" / "kimi_k25.json")) == (0, 0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (0, 0)),
        ({"moe-router-num-groups": 8, "moe-router-group-topk": "4"}, (4, 8)),
        ({"moe-router-num-groups": 8}, (0, 0)),
        ({"moe-router-topk-limited-devices": 3}, (3, 0)),
    ],
)
def test_of_megatron(said: dict[str, Any], expected: tuple[int, int]) -> None:
    assert groups(read_megatron_arguments(Section(MEGATRON | said, Path("arguments")))) == expected


@pytest.mark.parametrize(
    "said", [{"n_group": 8, "topk_group": 4}, {"moe_router_num_groups": 8, "moe_router_group_topk": 4}]
)
def test_of_a_model_json(said: dict[str, Any]) -> None:
    layers = read_layers(Section(DECODER | said, Path("model.json")), qk_norm="head")
    assert layers.experts is not None
    assert (layers.experts.max_groups, layers.experts.num_groups) == (4, 8)


def test_of_mindformers(tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_deepseek3.yaml").read_text()
    path = tmp_path / "pretrain.yaml"
    path.write_text(text.replace("moe_config:\n", "moe_config:\n  n_group: 8\n  topk_group: 4\n"))
    assert groups(build_job(read_pretrain(path)).model) == (4, 8)  # type: ignore[arg-type]
    path.write_text(path.read_text().replace("n_group: 8", "n_group: 7"))
    assert groups(build_job(read_pretrain(path)).model) == (0, 0)  # type: ignore[arg-type]
    assert groups(build_job(read_pretrain(EXAMPLES / "pretrain_deepseek3.yaml")).model) == (0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"n_group": 7}, "n_group is 7; it must divide the 256 experts"),
        ({"topk_group": 9}, "topk_group is 9; it is at most n_group 8"),
        ({"n_group": "many"}, 'n_group is "many"; a whole number'),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as failure:
        read_huggingface(Section(DEEPSEEK_V3 | said, Path("config.json")))
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_groups": 3}, "num_groups 3 must divide num_experts 16"),
        ({"num_groups": 8, "max_groups": 9}, "max_groups 9 is more than num_groups 8"),
    ],
)
def test_groups_of_a_job_keep_the_law(said: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Experts(num_experts=16, top_k=2, ffn_size=32, **said)  # type: ignore[arg-type]
