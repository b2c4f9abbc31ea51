"""Auto Tuning's space and profile runs, held against what upstream's own code lists (tests/fixtures/auto_tuning)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.auto_tuning.cut import cut_job, cut_plan
from mm_autoparallel.integrations.auto_tuning.flags import FAMILIES, without_flags
from mm_autoparallel.integrations.auto_tuning.framework import FRAMEWORK
from mm_autoparallel.integrations.auto_tuning.profile_runs import list_profile_runs
from mm_autoparallel.integrations.auto_tuning.recommended import Recommended, format_recommended
from mm_autoparallel.integrations.auto_tuning.space import Configuration, Network, laws_of, list_configurations
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.space import list_entries

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "auto_tuning" / "space.json").read_text()
)
NETWORKS = {"llama2-7b": Network(32, 8192, 32), "mixtral-8x7b": Network(32, 32768, 64, num_experts=8)}
DEVICES = {"Ascend910B1": 16, "Ascend910_9391": 32}


@pytest.mark.parametrize("case", CASES)
def test_the_space_is_upstreams(case: str) -> None:
    device, ranks, model = case.split()[:3]
    known = CASES[case]
    found = list(list_configurations(NETWORKS[model], int(ranks), laws_of(device)))
    assert len(found) == len({*found}) == known["configs"]
    assert len({one.sizes for one in found}) == known["distinct(tp,cp,pp,dp)"]
    tp, cp, pp, dp, ep, chunk_layers, mbs = known["first"]
    assert found[0] == Configuration(tp, cp, pp, dp, ep, chunk_layers, mbs, zero=0)


@pytest.mark.parametrize("case", [case for case, known in CASES.items() if "profiling" in known])
def test_the_profile_runs_are_upstreams(case: str) -> None:
    device, _, model = case.split()[:3]
    network = NETWORKS[model]
    runs = list_profile_runs(laws_of(device), DEVICES[device], network.seq_length, network.num_experts > 1)
    assert [run.name for run in runs] == CASES[case]["profiling"]


def test_short_sequences_are_not_divided_in_profile_runs() -> None:
    names = [run.name for run in list_profile_runs(laws_of("Ascend910B1"), 16, 4096, has_experts=False)]
    assert [name for name in names if "_1cp_" not in name] == [
        "auto_tuning_profiling_4tp_2dp_1pp_2cp_1mbs_4096seq",
        "auto_tuning_profiling_8tp_1dp_1pp_2cp_1mbs_4096seq",
    ]


def test_what_has_no_laws_is_named() -> None:
    with pytest.raises(JobError, match="this one is h200-141g"):
        laws_of("h200-141g")
    with pytest.raises(JobError, match="multiple of four devices, and here are 6"):
        list_profile_runs(laws_of("Ascend910B1"), 6, 8192, has_experts=False)


def test_the_block_reads_back() -> None:
    plan = Plan(Strategy(2, 4, 2, 1, vpp=2, zero=1), {"text": (2, 2, 2, 2)}, {"text": (1, 0, 2, 0)}, 8)
    block = format_recommended([Recommended(plan, 12.3456, 3 * 2**20), Recommended(plan, 13.0, 2**20, trained_ms=14.0)])
    title, *parts = re.split(r"<==========Top #(\d) config==========>\n", block)
    assert title == "The recommended configs are:\n"
    assert parts[::2] == ["1", "2"]
    values = [dict(re.findall(r"^(?=.{70})(\S.{29})(\S+(?: \S+)*) *$", part, re.MULTILINE)) for part in parts[1::2]]
    read = [{name.strip(): value for name, value in one.items()} for one in values]
    assert read[0] == {
        "Data Parallel Size": "2",
        "Tensor Parallel Size": "4",
        "Pipeline Parallel Size": "2",
        "Virtual Pipeline Size": "2",
        "Context Parallel Size": "1",
        "Expert Parallel Size": "1",
        "ZeRO1": "True",
        "MC2": "False",
        "Token Rearrange": "False",
        "Micro Batch Size": "1",
        "Recompute layer": "3",
        "Performance": "12.346 ms",
        "Memory": "3.0 MB",
    }
    assert read[1]["Trained Performance"] == "14.000 ms"


def test_what_is_registered_are_the_families() -> None:
    assert tuple(one.switch for one in FAMILIES) == FRAMEWORK.switches


def test_what_is_left_of_a_command_trains() -> None:
    words = "--auto_tuning --seq-length 8 --auto-tuning-ranks=16 --auto-settings-type mixed --prof-file f --lr 1"
    assert without_flags(tuple(words.split())) == ("--seq-length", "8", "--lr", "1")


def test_a_plan_for_the_devices_at_hand_is_not_cut() -> None:
    plan = Plan(Strategy(2, 1, 2, 1), {"text": (2, 2)}, {"text": (0, 1)}, 8)
    assert cut_plan(plan, 4) is plan


def test_a_plan_for_more_devices_keeps_what_divides_a_layer() -> None:
    plan = Plan(Strategy(4, 2, 8, 2, ep=4, vpp=2, zero=1), {"text": (1,) * 8}, {"text": (1,) + (0,) * 7}, 64)
    cut = cut_plan(plan, 4)
    assert cut is not None
    assert cut.strategy == Strategy(1, 2, 2, 1, ep=2, zero=1)
    assert (cut.layers, cut.recompute, cut.global_batch_size) == ({"text": (2,)}, {"text": (2,)}, 4)
    assert cut_plan(plan, 1) is None


def test_the_job_of_a_cut_has_that_strategy_alone() -> None:
    layers = {
        "num_layers": 8,
        "hidden_size": 64,
        "ffn_size": 128,
        "num_heads": 4,
        "norm": "rms",
        "gated": True,
        "experts": {"num_experts": 4, "top_k": 2, "ffn_size": 128, "dense_layers": [0, 5]},
    }
    job = {
        "model": {"name": "gpt", "text": {"vocab_size": 256, "layers": layers}},
        "cluster": {"num_nodes": 8, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 64, "seq_length": 32},
        "search": {"cp": None, "zero": [0, 1], "max_vpp": 4},
    }
    plan = cut_plan(Plan(Strategy(2, 2, 16, 2), {"text": (4, 4)}, {"text": (0, 0)}, 64), 4)
    assert plan is not None
    cut = parse_job(cut_job(job, plan, 1, 4), Path("cut"))
    assert [(entry.strategy, entry.reason) for entry in list_entries(cut)] == [(plan.strategy, None)]
    assert cut.model.text.layers.num_layers == 4
    assert cut.model.text.layers.experts.dense_layers == (0,)
