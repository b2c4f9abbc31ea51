"""What is searched for a script of MindSpeed-MM's, by its model and its own flags; and what its checkout can count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindspeed_mm.checkout import (
    counts_chunks,
    divides_any_attention,
    find_package,
    tells_parts,
)
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.search_space import SearchSpace, list_limits

MODELS = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"


def space(model: str, *arguments: str, max_vpp: int | None = None) -> SearchSpace:
    path = MODELS / f"{model}.json"
    return list_limits(arguments, json.loads(path.read_text()), read_model_json(path), max_vpp)


def told(found: SearchSpace, what: str) -> bool:
    return any(line.startswith(what) for line in found.told)


def test_what_a_plain_script_is_given() -> None:
    found = space("qwen2.5vl_7b", "--micro-batch-size", "1", "--use-distributed-optimizer")
    assert found.limits == {
        "zero": (1,),
        "mbs": (1, 2, 4, 8),
        "sequence_parallel": (True, False),
        "cp": (1,),
        "max_vpp": 1,
    }
    assert found.workload == {}
    assert [line.split(" (")[0] for line in found.told] == ["MBS other than 1, 2, 4, 8", "CP above 1", "VPP above 1"]


def test_the_sizes_of_the_script_itself() -> None:
    found = space("qwen2vl_7b", "--micro-batch-size=16", "--virtual-pipeline-model-parallel-size", "3")
    assert (found.limits["mbs"], found.limits["max_vpp"], found.limits["zero"]) == ((1, 2, 4, 8, 16), 3, (0,))
    assert not told(found, "VPP")
    assert space("qwen2vl_7b", max_vpp=2).limits["max_vpp"] == 2
    stalls = space("qwen2vl_7b", "--no-overlap-p2p-communication", max_vpp=2)
    assert stalls.limits["max_vpp"] == 1
    assert told(stalls, "VPP above 1 (without overlap")
    with pytest.raises(JobError, match="--micro-batch-size is many; a whole number"):
        space("qwen2vl_7b", "--micro-batch-size", "many")


def test_experts() -> None:
    """128 experts: all sizes that divide them, and stages where their tokens may change in number."""
    found = space("qwen3vl_dev_30b_a3b", "--moe-token-dispatcher-type", "alltoall")
    assert found.limits["ep"] == (1, 2, 4, 8, 16, 32, 64, 128)
    assert "pp" not in found.limits
    assert "sequence_parallel" not in found.limits  # experts under TP need it
    default = space("qwen3vl_dev_30b_a3b")
    assert default.limits["pp"] == (1,)
    assert told(default, "PP above 1 (Megatron refuses the token dispatcher allgather")


LOCAL = ("--transformer-impl", "local")


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo", *LOCAL], (1, 2, 4)),
        (["--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo"], (1,)),
        (["--context-parallel-size", "2", "--context-parallel-algo", "megatron_cp_algo"], (1,)),
        (["--context-parallel-size", "2"], (1,)),
        (["--context-parallel-size", "1", "--context-parallel-algo", "ulysses_cp_algo", *LOCAL], (1,)),
    ],
)
def test_context_parallel_by_heads(arguments: list[str], sizes: tuple[int, ...]) -> None:
    """Vision has 16 heads and text 28, of which each rank has whole ones."""
    found = space("qwen2.5vl_7b", *arguments)
    assert found.limits["cp"] == sizes
    workload: dict[str, Any] = {} if sizes == (1,) else {"context_parallel": "all_to_all"}
    assert found.workload == workload


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("previous_layer = sum(self.config.pipeline_num_layers[:pp_rank])", False),
        ("before = sum(self.config.pipeline_num_layers[0][:pp_rank])", True),
        (None, False),
    ],
)
def test_what_a_checkout_can_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, counts: bool
) -> None:
    package = tmp_path / "mindspeed_mm"
    block = package / "models" / "vision" / "vision_encoders" / "vision_transformer_block.py"
    block.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is read and not imported')\n")
    if source:
        block.write_text(f"{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_package() == package
    assert counts_chunks(find_package()) is counts


def test_without_a_checkout_it_is_taken_for_an_older_one() -> None:
    assert not counts_chunks(None)
    assert tells_parts(None)
    assert not divides_any_attention(None)


def test_how_a_checkout_tells_its_parts_and_divides_attention(tmp_path: Path) -> None:
    parts = tmp_path / "utils" / "transformer_model_config.py"
    context = tmp_path / "features_manager" / "context_parallel" / "context_parallel_feature.py"
    for file in (parts, context):
        file.parent.mkdir(parents=True)
        file.write_text("config_dict = config.to_dict()\n")
    assert not tells_parts(tmp_path)
    assert divides_any_attention(tmp_path)
    parts.write_text("global_args = get_args()\n")
    context.write_text("use_te = args.transformer_impl == 'transformer_engine'\n")
    assert tells_parts(tmp_path)
    assert not divides_any_attention(tmp_path)
