"""Rows of Megatron-Bridge's performance pages: what they say arrives in job and plan, and steps are predicted."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.errors import TableError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import predict_uncalibrated

TABLE = Path(__file__).parents[1] / "fixtures" / "bridge_performance.csv"
WriteTable = Callable[..., Path]


@pytest.fixture(scope="module")
def cases() -> dict[str, MeasuredCase]:
    found, _ = read_table(TABLE)
    return {case.name: case for case in found}


@pytest.fixture
def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_a_layout_that_the_ranks_cannot_hold_is_refused() -> None:
    found, (refused,) = read_table(TABLE)
    assert len(found) == 13
    assert "EP 64 x ETP 1 = 64 does not divide the 32 ranks" in refused.reason


def test_deepseek(cases: dict[str, MeasuredCase]) -> None:
    case = cases["DeepSeekV3 pretrain, 256 GB300, mxfp8, 26.06.01"]
    text, workload, cluster = case.job.model.text, case.job.workload, case.job.cluster
    assert (text.num_mtp, text.layers.experts and text.layers.experts.max_groups) == (1, 4)
    assert text.layers.latent
    assert text.layers.experts
    assert text.layers.experts.dense_layers == (0, 1, 2)
    assert (cluster.devices_per_node, cluster.num_nodes, cluster.device.name) == (64, 4, "gb300-288g")
    assert case.plan.layers == {"text": (*(4,) * 15, 1)}
    assert (case.plan.strategy.ep, case.plan.strategy.etp, case.plan.strategy.dp) == (32, 1, 128)
    assert (workload.precision, workload.overlap_all_to_all) == ("mxfp8", "micro_batches")
    assert (workload.gradient_bytes, workload.optimizer_bytes) == (2.0, 8.0)
    facts = workload.facts
    assert facts
    assert (facts.graphs, facts.dispatcher, facts.grouped_activation) == ("full", "hybridep", True)
    assert facts.fp8_attention
    assert not facts.drops_tokens


def test_chunks_without_a_layout(cases: dict[str, MeasuredCase]) -> None:
    """61 layers, a module and the head over 8 chunks: 8 each, and the last holds the rest."""
    case = cases["DeepSeekV3 pretrain, 256 B300, mxfp8, 26.06"]
    assert case.plan.layers == {"text": (*(8,) * 7, 5)}
    assert case.job.workload.overlap_all_to_all == "shared_experts"
    assert case.job.workload.recompute_operators == ("mla_up_proj",)


def test_variants(cases: dict[str, MeasuredCase]) -> None:
    without = cases["DeepSeekV3 pretrain, 256 GB200, bf16, 25.11"]
    assert (without.job.model.text.num_mtp, without.job.workload.precision) == (0, "bf16")
    assert without.remarks
    assert "gbs" in without.remarks[0]
    drops = cases["DeepSeekV3 pretrain, 256 GB200, fp8_cs, 25.09"].job.workload.facts
    assert drops
    assert (drops.drops_tokens, drops.graphs) == (True, "partial")


def test_dense_rows(cases: dict[str, MeasuredCase]) -> None:
    sharded = cases["LLAMA3_70B pretrain, 64 GB300, fp8_cs, 26.04.01"]
    assert (sharded.plan.strategy.zero, sharded.plan.modes) == (3, {"text": {"offload": (20,)}})
    for name, overlap in (("mxfp8", "user_buffers"), ("nvfp4", "")):
        facts = cases[f"LLAMA3_70B pretrain, 64 GB200, {name}, 26.04.01"].job.workload.facts
        assert facts
        assert (facts.tp_overlap, facts.dispatcher) == (overlap, "")
    lora = cases["LLAMA3_70B lora, 8 GB300, fp8_cs, 26.06"].job.model
    assert lora.adapters
    assert lora.adapters.targets == ("qkv",)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("precision", "int4", "the precision 'int4' is not understood"),
        ("variant", "upside down", "the variant 'upside down' is not understood"),
        ("kind", "reward", "the kind 'reward' is not understood"),
        ("device", "GB400", "the device 'GB400' is not in the catalog"),
        ("dispatcher", "pigeon", "workload.facts.dispatcher"),
        ("fsdp", "16", "FSDP shards over 16 of 128 replicas"),
    ],
)
def test_rows_that_are_refused_name_the_fact(
    rows: list[dict[str, str]], write_table: WriteTable, column: str, value: str, reason: str
) -> None:
    found, refused = read_table(write_table([rows[1] | {column: value}]))
    assert not found
    assert reason in refused[0].reason


@pytest.mark.parametrize(
    ("layout", "finding"),
    [("Et*4|(t*4|)*13tmL", "lays 57 layers on 15 chunks"), ("t*61", "is no layout such as Et*4|(t*4|)*14tmL")],
)
def test_layouts_that_are_none(rows: list[dict[str, str]], write_table: WriteTable, layout: str, finding: str) -> None:
    with pytest.raises(TableError, match="pp_layout") as caught:
        read_table(write_table([rows[1] | {"pp_layout": layout}]))
    assert finding in str(caught.value)


def test_steps_of_the_fixture(cases: dict[str, MeasuredCase]) -> None:
    """With nothing fitted: recipes tell graphs, dispatcher and overlap, and rates are assumed."""
    errors = {
        case.name: prediction.step_ms / case.measured_ms - 1
        for case, prediction in predict_uncalibrated(list(cases.values()))
        if case.measured_ms
    }
    assert len(errors) == len(cases)
    recent = [abs(error) for name, error in errors.items() if not name.endswith(("25.09", "25.11"))]
    assert sum(recent) / len(recent) < 0.07
    assert max(map(abs, errors.values())) < 0.20


def test_graphs_that_nobody_knows_are_refused_alone(rows: list[dict[str, str]], write_table: WriteTable) -> None:
    found, (refused,) = read_table(write_table([rows[0], rows[0] | {"cuda_graph": "attn;whole"}]))
    assert len(found) == 1
    assert refused.reason.startswith("the CUDA graphs of 'whole' are not understood; none, full_iteration and parts")


def test_what_a_host_costs_where_half_of_a_layer_is_in_graphs() -> None:
    """Qwen3 30B-A3B in the same layout beside both processors: measured, GB200 gains nothing over B200, as its layers
    wait for Grace; where one graph holds the whole step it does.
    """
    published = Path(__file__).parents[2] / "examples" / "published_measurements" / "megatron_bridge_performance.csv"
    found = [case for case in read_table(published)[0] if case.content["model"] == "Qwen3_30B_a3B"]
    steps_ms = {case.row: (case.measured_ms or 1.0, told.step_ms) for case, told in predict_uncalibrated(found)}
    b200, gb200, whole = steps_ms[72], steps_ms[70], steps_ms[3]
    measured, told = (before / after for before, after in zip(b200, gb200, strict=True))
    assert measured == pytest.approx(0.99, abs=0.01)
    assert told == pytest.approx(measured, rel=0.05)
    assert gb200[1] / whole[1] == pytest.approx(gb200[0] / whole[0], rel=0.06)
