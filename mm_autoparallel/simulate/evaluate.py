"""evaluate: the one place where a plan becomes figures. Planner, command line, hooks and tests all call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mm_autoparallel.costs.stage import build_problem, describe_provenance, find_interval
from mm_autoparallel.errors import PlanError
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import Strategy, unlawful_reason
from mm_autoparallel.plan import Figures, Plan
from mm_autoparallel.problem import Placement, Problem, placement_from_modalities, recomputed
from mm_autoparallel.profiles.calibration import Calibration, Interval
from mm_autoparallel.simulate.loads import overfull_stages
from mm_autoparallel.simulate.memory import StageMemory, list_first_step_bytes, list_stage_memory
from mm_autoparallel.simulate.step import Timeline, simulate
from mm_autoparallel.units import format_bytes


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a plan costs on its job.

    throughput_tokens_per_s: text tokens per second and device, over the devices the plan uses. peak_memory_bytes: per
    stage, what placement counts of a device: its allocator, what lies outside it, and what is left to its rounding and
    fragments. memory: the same by cause. fits: every peak is within memory_limit_bytes. interval: where a measured step
    is expected around step_ms, None where every block was measured. warnings: what to know before trusting it, a
    sentence each.
    """

    plan: Plan
    step_ms: float
    throughput_tokens_per_s: float
    peak_memory_bytes: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    memory_limit_bytes: float
    bubble_fraction: float
    fits: bool
    problem: Problem
    placement: Placement
    timeline: Timeline
    provenance: Mapping[str, Any]
    job_sha256: str
    warnings: tuple[str, ...]
    interval: Interval | None = None

    @property
    def peak_allocated_bytes(self) -> tuple[float, ...]:
        """Per stage, the most that its tensors and workspaces take: what torch.cuda.max_memory_allocated reports."""
        return tuple(stage.allocated_bytes for stage in self.memory)

    @property
    def first_step_allocated_bytes(self) -> tuple[float, ...]:
        """Per stage, the same up to the end of the very first step, whose forward and backward lack Adam's moments."""
        return list_first_step_bytes(self.problem, self.placement, self.memory)

    @property
    def step_ms_low(self) -> float | None:
        """The fastest step to expect; None where every block was measured."""
        return self.step_ms * self.interval.low_factor if self.interval else None

    @property
    def step_ms_high(self) -> float | None:
        """The slowest step to expect; None where every block was measured."""
        return self.step_ms * self.interval.high_factor if self.interval else None

    def figures(self, lower_bound_ms: float) -> Figures:
        """What the result file tells beside the plan; no plan of the searched space is below `lower_bound_ms`."""
        return Figures(
            step_ms=self.step_ms,
            throughput_tokens_per_s=self.throughput_tokens_per_s,
            lower_bound_ms=lower_bound_ms,
            gap_fraction=max(0.0, 1.0 - lower_bound_ms / self.step_ms),
            peak_memory_bytes=self.peak_memory_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
            bubble_fraction=self.bubble_fraction,
            provenance=self.provenance,
            job_sha256=self.job_sha256,
        )


def evaluate(job: Job, plan: Plan, calibration: Calibration | None = None) -> Estimate:
    """Simulate one step of `job` under `plan`, on the part of the cluster that the plan uses.

    calibration: what analytic times stand on, in place of what the job names or its device has.
    Memory limits are reported, not enforced. Raises PlanError where the plan's strategy is unlawful or its layers and
    recompute do not fit the model, naming stage and modality; ProfileError where a profile does not fit the job.
    """
    strategy = plan.strategy
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason is not None:
        raise PlanError(f"the plan does not fit job {job.path}: {reason}")
    used = job
    if strategy.world_size < job.cluster.num_devices:
        used = replace(job, cluster=job.cluster.resized(strategy.world_size))
    problem = build_problem(used, strategy, calibration)
    placement = placement_from_modalities(problem, plan.layers, plan.recompute)
    timeline = simulate(problem, placement)
    memory = list_stage_memory(problem, placement, timeline.graph, timeline.peak_memory_bytes)
    counted, needed = timeline.peak_memory_bytes, np.array([stage.total_bytes for stage in memory])
    peaks = np.where(needed > counted + 1.0, needed, counted)  # placement does not know of optimizer steps
    over = overfull_stages(problem, peaks)
    tokens = job.workload.global_batch_size * job.workload.seq_length
    return Estimate(
        plan=plan,
        step_ms=timeline.step_ms,
        throughput_tokens_per_s=tokens / (timeline.step_ms / 1e3) / strategy.world_size,
        peak_memory_bytes=tuple(float(peak) for peak in peaks),
        memory=memory,
        memory_limit_bytes=min(problem.memory_limit_bytes),
        bubble_fraction=timeline.bubble_fraction,
        fits=not over,
        problem=problem,
        placement=placement,
        timeline=timeline,
        provenance=describe_provenance(used, strategy, calibration),
        interval=find_interval(used, strategy, calibration),
        job_sha256=job.sha256,
        warnings=(
            *job.warnings,
            *plan.warnings,
            *(
                f"stage {stage} peaks at {format_bytes(peaks[stage])}, above its limit of "
                f"{format_bytes(problem.memory_limit_bytes[stage])}"
                for stage in over
            ),
        ),
    )


def plan_from_placement(problem: Problem, placement: Placement, strategy: Strategy, global_batch_size: int) -> Plan:
    """The plan whose placement under `strategy` is `placement`: the inverse of `placement_from_modalities`."""
    modalities = dict.fromkeys(block.modality for block in problem.chain)

    def per_stage(rows: tuple[tuple[int, ...], ...], modality: str) -> tuple[int, ...]:
        counted = [e for e, block in enumerate(problem.chain) if block.layer and block.modality == modality]
        return tuple(sum(row[e] for e in counted) for row in rows)

    again = recomputed(problem, placement)
    return Plan(
        strategy=strategy,
        layers={modality: per_stage(placement.layers, modality) for modality in modalities},
        recompute={modality: per_stage(again, modality) for modality in modalities},
        global_batch_size=global_batch_size,
    )
