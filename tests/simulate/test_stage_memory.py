"""What a stage holds at its fullest moment, against a replay of its schedule tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem, place_in_modes, recomputed
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.memory import list_stage_memory
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan


def make_job(workload: dict[str, Any] | None = None, freeze_vision: bool = True, **text: Any) -> Job:
    layers = {"num_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "num_heads": 16, "norm": "rms"}
    vision = {"num_layers": 4, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "norm": "layer", "gated": False}
    encoder = {
        "name": "vision",
        "stem": {"type": "patches", "in_features": 588},
        "layers": vision,
        "projector": {"merge_tokens": 4, "layer_sizes": [2048, 1024], "freeze": freeze_vision},
        "freeze": freeze_vision,
    }
    document = {
        "model": {"name": "m", "encoders": [encoder], "text": {"vocab_size": 32000, "layers": layers} | text},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 16, "seq_length": 2048, "image_tokens_per_sample": 512} | (workload or {}),
    }
    return parse_job(document, Path("job.yaml"))


def plan_of(vision: list[int], text: list[int], recompute: list[int], **sizes: Any) -> Plan:
    strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 1, "mbs": 1} | sizes))
    none = (0,) * len(vision)
    return Plan(
        strategy, {"vision": tuple(vision), "text": tuple(text)}, {"vision": none, "text": tuple(recompute)}, 16
    )


PLANS = {
    "one stage": plan_of([4], [8], [0]),
    "one stage, some recomputed": plan_of([4], [8], [3]),
    "one stage, all recomputed": plan_of([4], [8], [8]),
    "four stages": plan_of([4, 0, 0, 0], [1, 3, 2, 2], [0, 2, 0, 1], pp=4),
    "vision on two stages": plan_of([2, 2, 0, 0], [0, 2, 3, 3], [0, 0, 3, 0], pp=4),
    "all in flight": plan_of([4, 0], [3, 5], [1, 0], pp=2, schedule="gpipe"),
    "two chunks": plan_of([4, 0, 0, 0], [1, 2, 2, 3], [0, 1, 0, 2], pp=2, vpp=2),
    "four chunks": plan_of([3, 1] + [0] * 6, [0, 0, 1, 1, 1, 2, 2, 1], [0] * 5 + [2, 0, 1], pp=2, vpp=4),
}


def replay_peak(problem: Problem, placement: Placement, stage: int) -> float:
    """The most bytes that activations and working sets take: every tensor of every block kept and freed one by one."""
    order = find_schedule(problem.schedule, problem.num_chunks).order
    tasks = order(problem.num_stages, problem.num_chunks, problem.num_microbatches, stage)
    instances: dict[int, list[tuple[ChainBlock, Mode | None]]] = {}
    for chunk in range(problem.num_chunks):
        k = chunk * problem.num_stages + stage
        instances[chunk] = [
            (block, mode)
            for block, n, counts in zip(problem.chain, placement.layers[k], placement.modes[k], strict=True)
            for mode, count in ((*zip(block.modes, counts, strict=True), (None, n - sum(counts))))
            for _ in range(count)
        ]
    kept: dict[tuple[int, int, int], float] = {}
    peak = 0.0
    for kind, chunk, microbatch in tasks.tolist():
        blocks = list(enumerate(instances[chunk]))
        for index, (block, mode) in blocks if kind == FORWARD else reversed(blocks):
            assert block.footprint
            if kind == FORWARD:
                if not block.footprint.has_backward:
                    peak = max(peak, sum(kept.values()) + block.footprint.working_bytes)
                kept[chunk, microbatch, index] = mode.activation_bytes if mode else block.activation_bytes
                continue
            if block.footprint.has_backward:
                if mode:
                    kept[chunk, microbatch, index] = max(block.activation_bytes, kept[chunk, microbatch, index])
                peak = max(peak, sum(kept.values()) + block.footprint.working_bytes)
            del kept[chunk, microbatch, index]
    assert not kept
    return peak


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("freeze_vision", [True, False])
def test_the_fullest_moment_is_the_one_of_a_replay(plan: Plan, freeze_vision: bool) -> None:
    estimate = evaluate(make_job(freeze_vision=freeze_vision), plan)
    for stage, parts in enumerate(estimate.memory):
        found = parts.activation_bytes + parts.restored_bytes + parts.transient_bytes
        assert found == pytest.approx(replay_peak(estimate.problem, estimate.placement, stage), rel=1e-12)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_layers_in_other_modes_are_replayed_too(plan: Plan) -> None:
    """Two layers of every chunk that has them keep half, beside those that recompute."""
    estimate = evaluate(make_job(), plan)
    chain = tuple(
        replace(block, modes=(*block.modes, Mode("half", 0.1, 0.1, block.activation_bytes / 2)))
        if block.modes
        else block
        for block in estimate.problem.chain
    )
    problem = replace(estimate.problem, chain=chain)
    again = recomputed(estimate.problem, estimate.placement)
    half = [
        [min(2, n - r) if block.modes else 0 for block, n, r in zip(chain, layers, row, strict=True)]
        for layers, row in zip(estimate.placement.layers, again, strict=True)
    ]
    placement = place_in_modes(problem, estimate.placement.layers, {"recompute": again, "half": half})
    timeline = simulate(problem, placement)
    memory = list_stage_memory(problem, placement, timeline.graph, timeline.peak_memory_bytes)
    for stage, parts in enumerate(memory):
        found = parts.activation_bytes + parts.restored_bytes + parts.transient_bytes
        assert found == pytest.approx(replay_peak(problem, placement, stage), rel=1e-12)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("workload", [{}, {"stack": "mindspeed"}, {"stack": "transformers"}, {"gradient_fusion": True}])
def test_the_parts_add_up_to_the_peak(plan: Plan, workload: dict[str, Any]) -> None:
    if workload.get("stack") == "mindspeed":  # which runs no GPipe
        plan = replace(plan, strategy=replace(plan.strategy, schedule=""))
    estimate = evaluate(make_job(workload), plan)
    assert len(estimate.memory) == len(estimate.peak_allocated_bytes) == plan.strategy.pp
    for parts, peak, allocated in zip(
        estimate.memory, estimate.peak_memory_bytes, estimate.peak_allocated_bytes, strict=True
    ):
        assert sum(vars(parts).values()) == pytest.approx(peak, rel=1e-6)
        outside_bytes = parts.communicator_bytes + parts.context_bytes + parts.reserve_bytes
        assert allocated == pytest.approx(peak - outside_bytes, rel=1e-6)
        assert all(value >= 0 for value in vars(parts).values())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_placement_never_counts_less_than_a_stage_needs(plan: Plan) -> None:
    estimate = evaluate(make_job(), plan)
    counted = simulate(estimate.problem, estimate.placement).peak_memory_bytes
    for parts, peak in zip(estimate.memory, counted, strict=True):
        assert parts.total_bytes - parts.reserve_bytes <= peak * (1 + 1e-12)


def test_nothing_is_restored_where_nothing_is_recomputed() -> None:
    job = make_job({"cross_entropy": "fused", "seq_length": 4096}, vocab_size=1024)
    none, some = (evaluate(job, PLANS[name]).memory[0] for name in ("one stage", "one stage, all recomputed"))
    assert none.restored_bytes == 0.0
    assert some.restored_bytes > some.transient_bytes
    assert some.activation_bytes < none.activation_bytes / 3


def test_a_later_step_holds_what_the_first_one_makes() -> None:
    """Adam's moments, 8 bytes a parameter over DP, come after the first forward and backward."""
    estimate = evaluate(make_job({"seq_length": 8192}), PLANS["one stage"])
    parts = estimate.memory[0]
    at_work_bytes = parts.activation_bytes + parts.restored_bytes + parts.transient_bytes
    moments_bytes = parts.optimizer_bytes * 8 / 12
    assert moments_bytes < at_work_bytes
    assert estimate.first_step_allocated_bytes[0] == pytest.approx(parts.allocated_bytes - moments_bytes)


class TestOptimizerStep:
    """With samples this short its working tensors outweigh the activations."""

    def peak(self, stack: str, **sizes: int) -> tuple[Estimate, float]:
        estimate = evaluate(
            make_job({"seq_length": 16, "image_tokens_per_sample": 4, "stack": stack}), plan_of([4], [8], [0], **sizes)
        )
        parts = estimate.memory[0]
        return estimate, parts.transient_bytes if not parts.activation_bytes else 0.0

    def test_megatrons_works_in_place(self) -> None:
        estimate, at_step_bytes = self.peak("megatron-te")
        assert at_step_bytes == 0.0
        assert estimate.memory[0].activation_bytes > 0

    def test_mindspeeds_takes_one_fp32_tensor_of_the_largest_weight(self) -> None:
        assert self.peak("mindspeed")[1] == 4 * 32000 * 1024

    def test_of_a_sharded_weight_at_most_the_shard(self) -> None:
        parameters = self.peak("mindspeed")[0].memory[0].optimizer_bytes / 12
        assert parameters / 8 < 32000 * 1024
        assert self.peak("mindspeed", dp=8)[1] == pytest.approx(4 * parameters / 8)

    def test_pytorchs_takes_the_roots_of_all_second_moments(self) -> None:
        estimate, at_step_bytes = self.peak("transformers")
        assert at_step_bytes == pytest.approx(estimate.memory[0].optimizer_bytes / 3)


def test_numbers_alone_have_no_causes() -> None:
    estimate = evaluate(make_job(), PLANS["one stage"])
    bare = replace(estimate.problem, chain=tuple(replace(block, footprint=None) for block in estimate.problem.chain))
    timeline = simulate(bare, estimate.placement)
    with pytest.raises(ValueError, match="no causes"):
        list_stage_memory(bare, estimate.placement, timeline.graph, timeline.peak_memory_bytes)
