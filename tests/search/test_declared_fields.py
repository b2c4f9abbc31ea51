"""Whoever compares problems or strategies knows each of their fields: a new one fails here until it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from mm_autoparallel.model.costs.cost_model import OF_BLOCKS, CostModel
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_layout import LayerLayout
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.dominance import Dominance, declared
from mm_autoparallel.pipeline.footprint import Footprint
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.planner.search.space import describe_strategy, list_space, strategy_key


@pytest.mark.parametrize("kind", [Problem, ChainBlock, Mode, Footprint])
def test_every_field_of_a_problem_is_declared(kind: type[Any]) -> None:
    assert declared(kind).keys() == {field.name for field in fields(kind)}
    for name, said in declared(kind).items():
        units = ("ms", "bytes", "byte", "scale", "factor", "fraction")
        is_figure = name.rsplit("_", 1)[-1] in units or name == "footprint"
        is_figure &= name != "backward_weight_ms"  # less of it is more of the other part of a backward
        assert is_figure == (said is not Dominance.SAME), f"{kind.__name__}.{name} is declared {said.name}"


def test_a_field_without_a_declaration_is_refused() -> None:
    @dataclass(frozen=True)
    class More:
        name: Annotated[str, Dominance.SAME]
        forward_ms: float

    with pytest.raises(TypeError, match=r"More\.forward_ms declares no Dominance"):
        declared(More)


OTHER: dict[str, Any] = {
    "pp": 2,
    "tp": 2,
    "dp": 2,
    "mbs": 2,
    "cp": 2,
    "ep": 2,
    "vpp": 2,
    "zero": 3,
    "schedule": "gpipe",
    "etp": 1,
    "reshard": False,
    "shard": 2,
    "cp_kind": "ring",
    "optimizer_offload": True,
    "rank_order": "tp-cp-ep-pp-dp",
    "sequence_parallel": False,
    "dispatcher": "deepep",
    "graphs": "full",
    "overlap_all_to_all": "micro_batches",
    "precision": "fp8_blockwise",
    "tp_overlap": "mc2",
    "overlaps": Overlaps(overlap_p2p=False),
    "layouts": (LayerLayout(2, 2),),
    "arrangement": Arrangement("colocated", "phases", ModuleLayout("vision", 1, 1, 16, 1)),
}
"""Field of a strategy → another value than that of PLAIN."""

PLAIN = Strategy(pp=4, tp=4, dp=1, mbs=1, cp=4)


def test_the_order_and_the_words_of_strategies_know_every_field() -> None:
    # a job names one file of orders, so its strategies have the same ones or none
    assert OTHER.keys() | {"orders"} == {field.name for field in fields(Strategy)}
    for name, value in OTHER.items():
        other = replace(PLAIN, **{name: value})
        assert describe_strategy(other) != describe_strategy(PLAIN), name
        # within one space DP follows from the other sizes and the number of devices
        assert (strategy_key(other) != strategy_key(PLAIN)) == (name != "dp"), name


def jobs() -> Iterator[Job]:
    """One whose context parallelism is hierarchical, one with experts."""
    layers: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "ffn_size": 512, "num_heads": 8, "norm": "rms"}
    experts = {"num_experts": 8, "top_k": 2, "ffn_size": 128}
    search = {
        "ep": [1, 2, 4],
        "etp": [0, 1],
        "max_vpp": 2,
        "zero": [1, 2, 3],
        "reshard": [True, False],
        "shard": [0, 2],
    }
    for of_experts, more in (({}, {"context_parallel": "hierarchical"}), ({"experts": experts}, {})):
        yield parse_job(
            {
                "model": {"name": "m", "text": {"vocab_size": 512, "layers": layers | of_experts}},
                "cluster": {"num_nodes": 4, "devices_per_node": 4, "device": "h100-80g"},
                "workload": {"global_batch_size": 16, "seq_length": 64} | more,
                "search": (search if of_experts else {key: search[key] for key in ("max_vpp", "zero")})
                | {"sequence_parallel": [True, False], "rank_order": ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]},
            },
            Path("job.yaml"),
        )


@pytest.mark.slow
@pytest.mark.parametrize("job", [*jobs()], ids=["dense", "experts"])
def test_blocks_cost_what_they_would_if_no_other_strategy_had_been_asked_for(job: Job) -> None:
    """OF_BLOCKS lists the fields that a block's cost depends on; of all others none may change it."""
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    assert {field.name for field in fields(Strategy)} >= set(OF_BLOCKS)
    held = CostModel(job)
    for strategy in lawful:
        held.look_up(strategy)
    for strategy in lawful[:: max(1, len(lawful) // 60)]:
        assert CostModel(job).look_up(strategy) == held.look_up(strategy), describe_strategy(strategy)
