"""Peaks of allocated bytes that others measured, from the configuration alone; each cause is needed to meet them.

Rows of github MooreThreads/SimuMax@4dcaae51, docs/b200/b200_release_v1.2_summary.json (Llama 3 70B with 12 layers on
B200; MiB of the fullest rank of each stage), and of github NVIDIA/Megatron-LM@d98e8a64, tests/functional_tests/
test_cases, golden values of A100 (bytes of the last rank).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.units import MIB

B200_WORKLOAD = {
    "cross_entropy": "fused",
    "gradient_fusion": True,
    "context_parallel": "all_to_all",
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}


def estimate_b200(
    sizes: dict[str, Any], seq_length: int = 4096, device: str = "b200-192g", **workload: Any
) -> Estimate:
    strategy = replace(Strategy(pp=1, tp=1, dp=1, mbs=1), **sizes)
    vocab_size = -(-128256 // (128 * strategy.tp)) * 128 * strategy.tp
    layers = {"num_layers": 12, "hidden_size": 8192, "ffn_size": 28672, "num_heads": 64, "num_kv_groups": 8}
    batch = 4 * strategy.dp
    document = {
        "model": {"name": "llama3-70b", "text": {"vocab_size": vocab_size, "layers": layers | {"norm": "rms"}}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": B200_WORKLOAD | {"global_batch_size": batch, "seq_length": seq_length} | workload,
    }
    per_stage, none = (12 // strategy.pp,) * strategy.pp, (0,) * strategy.pp
    plan = Plan(strategy, {"text": per_stage}, {"text": none}, batch)
    return evaluate(parse_job(document, Path("row.yaml")), plan)


def errors(estimate: Estimate, measured_mib: tuple[float, ...]) -> list[float]:
    return [
        peak / MIB / measured - 1 for peak, measured in zip(estimate.peak_allocated_bytes, measured_mib, strict=True)
    ]


B200 = [
    ({"tp": 1, "pp": 2, "dp": 4}, 4096, (68149.2, 64479.5)),
    ({"tp": 2, "dp": 4}, 4096, (62136.3,)),
    ({"tp": 4, "dp": 2}, 4096, (40009.8,)),
    ({"tp": 8}, 4096, (28965.4,)),
    ({"tp": 2, "cp": 4}, 32768, (70070.5,)),
    ({"tp": 1, "cp": 8}, 131072, (151538.4,)),
]


@pytest.mark.parametrize(("sizes", "seq_length", "measured_mib"), B200)
def test_b200_rows_to_a_quarter_of_a_percent(
    sizes: dict[str, Any], seq_length: int, measured_mib: tuple[float, ...]
) -> None:
    assert max(map(abs, errors(estimate_b200(sizes, seq_length), measured_mib))) < 0.0025


@pytest.mark.parametrize(
    ("row", "changed", "missing_percent"),
    [
        (3, {"gradient_fusion": False}, -0.4),  # dummy gradients
        (3, {"cross_entropy": "unfused"}, 0.5),
        (4, {"context_parallel": "ring"}, -0.9),  # the second copy of attention's output
        (5, {"context_parallel": "ring"}, -1.8),
        (3, {"device": "a100-80g"}, -0.1),  # workspaces from Hopper on
        (3, {"sequence_parallel": False}, 3.0),
    ],
)
def test_without_one_cause_a_row_is_missed(row: int, changed: dict[str, Any], missing_percent: float) -> None:
    sizes, seq_length, measured_mib = B200[row]
    whole = errors(estimate_b200(sizes, seq_length), measured_mib)[0]
    without = errors(estimate_b200(sizes, seq_length, **changed), measured_mib)[0]
    assert 100 * (without - whole) / missing_percent > 1


def estimate_ci(
    strategy: Strategy, recompute: bool = False, local: bool = False, device: str = "a100-80g", **text: Any
) -> Estimate:
    """12 layers of width 512, 1024 tokens, micro-batches of 4, dropout, unfused attention, deterministic."""
    layers = {"num_layers": 12, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "norm": "layer", "gated": False}
    biases = {"mlp_bias": True, "qkv_bias": True, "output_bias": True, "rotary": False}
    vocab_size = -(-50257 // (128 * strategy.tp)) * 128 * strategy.tp
    document = {
        "model": {
            "name": "gpt3",
            "text": {"vocab_size": vocab_size, "tied": True, "num_positions": 1024, "layers": layers | biases} | text,
        },
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": {
            "global_batch_size": 32,
            "seq_length": 1024,
            "sequence_parallel": False,
            "attention": "unfused",
            "hidden_dropout": True,
            "attention_dropout": True,
            "deterministic": True,
            "stack": "megatron-local" if local else "megatron-te",
        },
    }
    num_chunks = strategy.pp * strategy.vpp
    per_chunk = (12 // num_chunks,) * num_chunks
    plan = Plan(strategy, {"text": per_chunk}, {"text": per_chunk if recompute else (0,) * num_chunks}, 32)
    return evaluate(parse_job(document, Path("row.yaml")), plan)


def ci_strategy(pp: int = 1, dp: int = 8, vpp: int = 1, zero: int = 0) -> Strategy:
    return Strategy(pp=pp, tp=1, dp=dp, mbs=4, vpp=vpp, zero=zero)


CI: dict[str, tuple[Strategy, dict[str, Any], int]] = {
    "te_tp1_pp1_dist_optimizer": (ci_strategy(zero=1), {}, 4673069568),
    "te_tp1_pp1_uniform_full_recompute": (ci_strategy(), {"recompute": True}, 2534070272),
    "te_tp1_pp4_vp1": (ci_strategy(pp=4, dp=2, vpp=3), {}, 4119164928),
    "te_tp1_pp4_untie_embeddings_and_outputs": (ci_strategy(pp=4, dp=2), {"tied": False}, 2683661312),
    "tp1_pp1_dist_optimizer": (ci_strategy(zero=1), {"local": True}, 4735983616),
    "tp1_pp4": (ci_strategy(pp=4, dp=2), {"local": True}, 2746575872),
}


@pytest.mark.parametrize(("strategy", "changed", "measured_bytes"), CI.values(), ids=CI)
def test_megatrons_own_rows_to_six_tenths_of_a_percent(
    strategy: Strategy, changed: dict[str, Any], measured_bytes: int
) -> None:
    assert abs(estimate_ci(strategy, **changed).peak_allocated_bytes[-1] / measured_bytes - 1) < 0.006


@pytest.mark.parametrize("name", ["te_tp1_pp1_dist_optimizer", "tp1_pp1_dist_optimizer"])
def test_one_stage_is_met_to_a_few_hundred_kilobytes(name: str) -> None:
    """Weights, masks, scores, logits, workspaces, the score buffer and the batch itself: nothing is left over."""
    strategy, changed, measured_bytes = CI[name]
    assert abs(estimate_ci(strategy, **changed).peak_allocated_bytes[0] - measured_bytes) < 300e3


def test_larger_workspaces_are_all_that_sets_h100_apart() -> None:
    """The same case takes 4702430720 bytes on H100 and on GB200, 28 MiB and 1 KiB above A100."""
    strategy, _, measured_bytes = CI["te_tp1_pp1_dist_optimizer"]
    a100, h100 = (estimate_ci(strategy, device=device).memory[0] for device in ("a100-80g", "h100-80g"))
    assert h100.allocated_bytes - a100.allocated_bytes == 4702430720 - measured_bytes
