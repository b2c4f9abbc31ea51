"""MC2 and user buffers as a choice: where a search takes them, where it leaves them, and who refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.operators.tensor_traffic import SLOWED_FACTOR, pipelined_ms
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space

LAYERS = {"num_layers": 4, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "norm": "rms"}


def job_of(
    stack: str = "mindspeed", device: Any = "ascend-910b-64g", limits: dict[str, Any] | None = None, **said: Any
) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": {"global_batch_size": 8, "seq_length": 4096, "stack": stack, **said},
        "search": {"pp": [1], "tp": [8], "cp": [1], "mbs": [1], "tp_overlap": ["none", "mc2"]} | (limits or {}),
    }
    return parse_job(document, Path("job.json"))


def test_a_pipeline_of_pieces_takes_the_longer_and_one_piece_of_the_shorter() -> None:
    assert pipelined_ms(10.0, 4.0, 4) == pytest.approx(10 * SLOWED_FACTOR + 1.0)
    assert pipelined_ms(2.0, 8.0, 4) == pytest.approx(8 + 2 * SLOWED_FACTOR / 4)


def test_slow_links_take_it_and_fast_ones_do_not() -> None:
    """Where little is to be hidden, products that are slower in pieces cost more."""
    assert search(job_of(), num_workers=1).plan.strategy.tp_overlap == "mc2"
    link = {"bandwidth_bytes_per_s": 1e14, "latency_ms": 1e-4}
    fast = {"based_on": "ascend-910b-64g", "name": "fast", "node_link": link, "network_link": link}
    assert search(job_of(device=fast), num_workers=1).plan.strategy.tp_overlap == ""
    slowed = {"based_on": "ascend-910b-64g", "slowdown_factors": {"tensor": 2.0}}
    assert search(job_of(device=slowed), num_workers=1).plan.strategy.tp_overlap == ""


def test_it_changes_products_beside_traffic_alone() -> None:
    job = job_of()
    plain, fused = (block_costs(job, Strategy(1, 8, 1, 1, tp_overlap=name)) for name in ("none", "mc2"))
    assert fused["text_layer"].forward_ms < plain["text_layer"].forward_ms
    assert fused["text_layer"].backward_weight_ms == plain["text_layer"].backward_weight_ms
    assert fused["text_layer"].activation_bytes == plain["text_layer"].activation_bytes
    stated = block_costs(job_of(facts={"tp_overlap": "mc2"}), Strategy(1, 8, 1, 1))
    assert stated == fused
    assert block_costs(job_of(), Strategy(1, 8, 1, 1)) == plain


def test_the_space_has_both_where_tensor_parallel_ranks_divide_sequences() -> None:
    job = job_of(limits={"tp": [1, 8]})
    found = {(e.strategy.tp, e.strategy.tp_overlap) for e in list_space(job) if e.reason is None}
    assert found == {(1, ""), (8, ""), (8, "mc2")}
    whole = job_of(sequence_parallel=False)
    reason = unlawful_reason(whole.model, whole.cluster, whole.workload, Strategy(1, 8, 1, 1, tp_overlap="mc2"))
    assert reason is not None
    assert "needs TP above 1 and sequence parallelism" in reason


def test_user_buffers_are_chosen_where_backwards_hide_too_little() -> None:
    """What they leave in the open is a fixed part; without them, gradients' sums hide behind products as far as these
    last."""
    both = {"tp": [1, 8], "tp_overlap": ["none", "user_buffers"]}
    slow = {"based_on": "h100-80g", "name": "slow", "node_link": {"bandwidth_bytes_per_s": 3e10, "latency_ms": 1e-3}}
    job = job_of("megatron-te", slow, both)
    found = {(e.strategy.tp, e.strategy.tp_overlap) for e in list_space(job) if e.reason is None}
    assert found == {(1, ""), (8, ""), (8, "user_buffers")}
    steps = {
        overlap: search(job_of("megatron-te", slow, {"tp_overlap": [overlap]}), num_workers=1).figures.step_ms
        for overlap in both["tp_overlap"]
    }
    assert steps["user_buffers"] < steps["none"]
    best = search(job_of("megatron-te", slow, both | {"tp": [8]}), num_workers=1)
    assert (best.plan.strategy.tp_overlap, best.figures.step_ms) == ("user_buffers", steps["user_buffers"])
    stated = job_of("megatron-te", slow, both, facts={"tp_overlap": "user_buffers"})
    assert block_costs(stated, Strategy(1, 8, 1, 1)) == block_costs(job, best.plan.strategy)
    assert {e.strategy.tp_overlap for e in list_space(stated)} == {"", "none"}
    whole = job_of("megatron-te", slow, both, sequence_parallel=False)
    reason = unlawful_reason(whole.model, whole.cluster, whole.workload, best.plan.strategy)
    assert reason is not None
    assert "tp_overlap is user_buffers, which needs TP above 1 and sequence parallelism" in reason


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"limits": {"tp_overlap": ["user_buffers"]}}, r"search\.tp_overlap: user_buffers, TransformerEngine's"),
        ({"stack": "megatron-te"}, r"search\.tp_overlap: mc2, MindSpeed's \(stack mindspeed or mindspeed-mm\)"),
        (
            {"fused_matmul_fraction": 0.5},
            r"search\.tp_overlap: workload\.fused_matmul_fraction says what products hide",
        ),
        ({"stack": "megatron-te", "facts": {"tp_overlap": "mc2"}}, "MindSpeed's"),
    ],
)
def test_elsewhere_it_is_refused_by_name(said: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        job_of(**said)
