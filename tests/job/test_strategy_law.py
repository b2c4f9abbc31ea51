"""The law of strategies: each rule, worded with its numbers, and what it must let pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.layers import Experts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_file import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"
MODELS = {
    name: read_model(FIXTURES / f"{name}.json")
    for name in ("qwen2vl_7b", "qwen2vl_72b", "internvl2_76b", "internvl2_8b")
}
EXPERTS = read_model(FIXTURES / "qwen3vl_dev_30b_a3b.json")
CLUSTER = Cluster(num_nodes=8, devices_per_node=16, device=DEVICES["ascend-910b-64g"])
WORKLOAD = Workload(global_batch_size=512, seq_length=8192)


def reason(
    model: str = "qwen2vl_72b", workload: Workload = WORKLOAD, cluster: Cluster = CLUSTER, **sizes: Any
) -> str | None:
    return unlawful_reason(
        MODELS[model], cluster, workload, Strategy(**({"pp": 1, "tp": 1, "dp": 1, "mbs": 1} | sizes))
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 8, "tp": 2, "dp": 4},
        {"pp": 16, "tp": 8},
        {"pp": 8, "tp": 4, "dp": 4, "vpp": 2, "mbs": 2},
        {"pp": 4, "tp": 4, "cp": 2, "dp": 4, "zero": 0},
        {"pp": 112, "tp": 1},
        {"pp": 8, "dp": 16, "schedule": "gpipe"},
        {"pp": 2, "tp": 2},
    ],
)
def test_lawful_strategies_pass(sizes: dict[str, Any]) -> None:
    assert reason(**sizes) is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 0}, "TP is 0; it must be at least 1"),
        ({"pp": 16, "tp": 4, "dp": 4}, "PP 16 x TP 4 x CP 1 x DP 4 needs 256 devices, and the cluster has 128"),
        ({"pp": 5, "tp": 4}, "20 devices are no whole nodes of 16"),
        ({"tp": 32}, "TP 32 is wider than the 16 devices"),
        ({"tp": 3, "pp": 16}, "TP 3 does not divide the 16 devices of a node"),
        ({"tp": 16}, "TP 16 does not divide the key and value groups of text, 8"),
        ({"pp": 128}, "PP 128 x VPP 1 = 128 chunks need a layer each, and the model has 112"),
        ({"pp": 64, "vpp": 2}, "PP 64 x VPP 2 = 128 chunks need a layer each"),
        ({"dp": 3}, "global_batch_size 512 is no multiple of DP 3 x MBS 1 = 3"),
        ({"dp": 2, "mbs": 512}, "global_batch_size 512 is no multiple of DP 2 x MBS 512 = 1024"),
        ({"cp": 3}, "seq_length 8192 is no multiple of 6, two pieces for each of CP 3"),
        ({"ep": 2}, "EP 2 needs experts"),
        ({"zero": 4}, "ZeRO 4 is not understood; known are 0, 1, 2, 3"),
        ({"schedule": "zigzag"}, "schedule 'zigzag' is not known; known are gpipe"),
        ({"schedule": "seq_1f1b_2"}, "schedule 'seq_1f1b_2' is not known"),
        ({"pp": 2, "vpp": 2, "schedule": "1f1b"}, "schedule 1f1b runs one chunk a stage, and VPP is 2"),
        ({"vpp": 2}, "VPP 2 needs more than one pipeline stage"),
        ({"pp": 16, "dp": 8, "mbs": 8, "vpp": 2}, "VPP 2 needs at least PP = 16 micro-batches, and there are 8"),
    ],
)
def test_each_rule_is_worded_with_its_numbers(sizes: dict[str, Any], words: str) -> None:
    found = reason(**sizes)
    assert found is not None
    assert found.startswith(words)


@pytest.mark.parametrize(
    ("stack", "schedule", "vpp", "words"),
    [
        ("megatron-te", "interleaved_1f1b", 2, None),
        ("megatron-te", "gpipe", 1, "schedule gpipe is none that workload.stack megatron-te runs; it runs 1f1b"),
        ("mindspeed", "interleaved_1f1b_low_memory", 2, "schedule interleaved_1f1b_low_memory is none"),
        ("megatron-deepspeed", "", 2, "schedule interleaved_1f1b is none that workload.stack megatron-deepspeed runs"),
        ("megatron-local", "interleaved_1f1b", 1, "schedule interleaved_1f1b runs several chunks a stage, and VPP is"),
        ("mindformers", "interleaved_1f1b_low_memory", 2, None),
        ("transformers", "gpipe", 1, None),
    ],
)
def test_a_framework_that_is_named_runs_its_own_schedules(
    stack: str, schedule: str, vpp: int, words: str | None
) -> None:
    workload = Workload(global_batch_size=512, seq_length=8192, stack=stack)  # type: ignore[arg-type]
    found = reason(workload=workload, pp=4, dp=4, vpp=vpp, schedule=schedule)
    assert found is None if words is None else found is not None and found.startswith(words)


def test_a_step_of_too_many_passes_is_refused_before_it_fills_the_memory() -> None:
    found = reason(workload=Workload(global_batch_size=10**15, seq_length=8192), pp=8)
    assert found is not None
    assert "makes 16,000,000,000,000,000 forwards and backwards a step; at most 20,000,000" in found


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ("qwen2vl_7b", 8, "TP 8 does not divide the attention heads of text, 28"),
        ("internvl2_76b", 2, "TP 2 does not divide the attention heads of vision, 25"),
        ("internvl2_8b", 2, "TP 2 does not divide the vocabulary, 92553; a model whose vocab_size is padded to 92554"),
    ],
)
def test_heads_groups_and_vocabulary_of_every_modality(model: str, tp: int, words: str) -> None:
    found = reason(model, tp=tp)
    assert found is not None
    assert found.startswith(words)


def test_experts_widths_count_and_unused_widths_do_not() -> None:
    strategy = Strategy(pp=1, tp=4, dp=1, mbs=1)
    layers = EXPERTS.text.layers
    assert unlawful_reason(EXPERTS, CLUSTER, WORKLOAD, strategy) is None
    for changes, words in (
        ({"ffn_size": 770}, "TP 4 does not divide the expert width of text, 770"),
        ({"shared_ffn_size": 2}, "TP 4 does not divide the shared expert width of text, 2"),
    ):
        experts = Experts(**(layers.experts.model_dump() | changes))  # type: ignore[union-attr]
        text = EXPERTS.text.model_copy(update={"layers": layers.model_copy(update={"experts": experts, "ffn_size": 1})})
        assert unlawful_reason(EXPERTS.model_copy(update={"text": text}), CLUSTER, WORKLOAD, strategy) == words


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "ep": 2}, None),
        ({"tp": 4, "dp": 2, "ep": 2}, None),
        ({"tp": 4, "dp": 2, "ep": 8, "etp": 1}, None),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 16, "etp": 1}, None),
        ({"dp": 6, "ep": 6}, "EP 6 does not divide the experts of text, 128"),
        ({"tp": 4, "dp": 2, "ep": 4}, "EP 4 x ETP 4 = 16 does not divide the 8 ranks of TP 4 x CP 1 x DP 2"),
        (
            {"tp": 4, "dp": 2, "etp": 2},
            "ETP 2 is not understood: experts are whole (1) or divided like all else (TP 4)",
        ),
    ],
)
def test_experts_are_dealt_to_whole_groups(sizes: dict[str, int], words: str | None) -> None:
    workload = Workload(global_batch_size=768, seq_length=8192)
    found = unlawful_reason(EXPERTS, CLUSTER, workload, Strategy(**({"pp": 1, "tp": 1, "mbs": 1} | sizes)))
    assert found is None if words is None else str(found).startswith(words)


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    workload = Workload(global_batch_size=8, seq_length=8192, sequence_parallel=False)
    assert unlawful_reason(EXPERTS, CLUSTER, workload, Strategy(pp=1, tp=1, dp=2, mbs=1)) is None
    assert unlawful_reason(EXPERTS, CLUSTER, workload, Strategy(pp=1, tp=2, dp=2, mbs=1)) == (
        "experts with TP 2 need sequence parallelism, and workload.sequence_parallel is false"
    )


def test_expert_parallel_ranks_are_those_of_the_other_groups() -> None:
    strategy = Strategy(pp=2, tp=4, dp=8, cp=2, ep=8, mbs=1)
    assert (strategy.world_size, strategy.expert_tp, strategy.expert_dp) == (128, 4, 2)
    assert Strategy(pp=1, tp=4, dp=8, ep=8, etp=1, mbs=1).expert_dp == 4


def test_sequence_is_shared_by_tensor_and_context_parallel() -> None:
    workload = Workload(global_batch_size=512, seq_length=8196)
    assert reason(workload=workload, tp=4) is None
    assert reason(workload=workload, tp=4, cp=2) == (
        "seq_length 8196 is no multiple of CP 2 x TP 4 = 8, which share each sequence"
    )
    alone = workload.model_copy(update={"sequence_parallel": False})
    assert reason(workload=alone, tp=4, cp=2) is None


def test_tensor_parallel_may_span_a_level_that_says_so() -> None:
    small = Cluster(num_nodes=8, devices_per_node=2, device=DEVICES["h100-80g"])
    assert "TP 4 is wider than the 2 devices" in str(reason(cluster=small, tp=4))
    wide = tuple(level.model_copy(update={"tensor_parallel": True}) for level in small.levels)
    assert reason(cluster=small.model_copy(update={"levels": wide}), tp=4) is None


def test_default_schedule_follows_the_chunks() -> None:
    assert Strategy(pp=2, tp=1, dp=1, mbs=1).schedule == "1f1b"
    assert Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2).schedule == "interleaved_1f1b"
    assert Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2, schedule="interleaved_1f1b_low_memory").schedule.endswith(
        "low_memory"
    )


SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32])


@given(pp=SIZES, tp=SIZES, cp=SIZES, dp=SIZES, mbs=SIZES, vpp=st.integers(1, 3), model=st.sampled_from(list(MODELS)))
def test_what_is_lawful_divides_evenly(pp: int, tp: int, cp: int, dp: int, mbs: int, vpp: int, model: str) -> None:
    strategy = Strategy(pp=pp, tp=tp, dp=dp, mbs=mbs, cp=cp, vpp=vpp)
    if unlawful_reason(MODELS[model], CLUSTER, WORKLOAD, strategy) is not None:
        return
    assert strategy.world_size <= CLUSTER.num_devices
    CLUSTER.resized(strategy.world_size)
    assert strategy.num_microbatches(512) * dp * mbs == 512
    assert CLUSTER.levels[0].num_devices % tp == 0
    for modality in MODELS[model].modalities:
        assert modality.layers.num_heads % tp == 0
        assert modality.layers.num_kv_groups % tp == 0
        assert modality.layers.ffn_size % tp == 0
    assert WORKLOAD.seq_length % (tp * cp) == 0


@given(data=st.data(), dp=st.sampled_from([1, 2, 4, 8]))
def test_a_lawful_strategy_stays_lawful_on_a_larger_cluster(data: st.DataObject, dp: int) -> None:
    tp, pp = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1, 2, 4, 8]))
    twice = CLUSTER.model_copy(update={"num_nodes": 16, "levels": ()})
    twice = Cluster(num_nodes=16, devices_per_node=16, device=CLUSTER.device)
    if reason(pp=pp, tp=tp, dp=dp) is None:
        assert reason(cluster=twice, pp=pp, tp=tp, dp=dp) is None
