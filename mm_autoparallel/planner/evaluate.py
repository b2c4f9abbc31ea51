"""evaluate: the one place where a plan becomes figures. Planner, command line, hooks and tests all call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import count_communicator_kinds
from mm_autoparallel.model.costs.kinds import StageDevices
from mm_autoparallel.model.costs.memory import sharded_over
from mm_autoparallel.model.costs.scales import UNSCALED, CostScales
from mm_autoparallel.model.costs.stage import build_problem, describe_provenance, find_interval
from mm_autoparallel.model.costs.topology import stage_memory_bytes
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.mindspeed_mm_law import describe_gradients, placement_reasons
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.profiles.interval import Interval
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import RECOMPUTE, Placement, Problem, counts_in_mode
from mm_autoparallel.pipeline.simulate.loads import overfull_hosts, overfull_stages
from mm_autoparallel.pipeline.simulate.memory import (
    StageMemory,
    list_first_step_bytes,
    list_shelved_bytes,
    list_stage_memory,
)
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate
from mm_autoparallel.planner.batch_steps import BatchSteps, prepare_steps
from mm_autoparallel.planner.by_module import ModuleShare, share_by_module
from mm_autoparallel.planner.cached_features import describe_cached
from mm_autoparallel.planner.chance_to_fit import device_peak_bytes, most_likely_to_fail, oom_probability
from mm_autoparallel.planner.drawn_batches import draw_batches
from mm_autoparallel.planner.over_batches import (
    Floats,
    StepOverBatches,
    describe_longest,
    step_over_batches,
)
from mm_autoparallel.planner.plan import Figures, Plan, plan_document
from mm_autoparallel.records import LARGEST_MS
from mm_autoparallel.units import format_bytes


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a plan costs on its job.

    throughput_tokens_per_s: text tokens per second and device, over the devices the plan uses. peak_memory_bytes: per
    stage, what placement counts of a device: its allocator, what lies outside it, and what is left to its rounding and
    fragments. memory: the same by cause. host_bytes: per stage, the most that lies on the host for each device: what
    offloaded layers keep, and optimizer states. fits: every peak is within its limit, on device and host, which is what
    `memory_fraction` allows; oom_probability is the chance. device_memory_bytes: per stage, all of a device.
    modules: of a layout, what encoders and decoder each take; nothing of the chain, or under scales.
    interval: where a measured step is expected around step_ms, None where every block was measured. replica_step_ms:
    where slow devices lie in different stages of different replicas, the step of the slowest replica by itself, which
    step_ms is then a bound of; None where the two are the same, or replicas are too many to be played. warnings: what
    to know before trusting it, a sentence each. sampled: the costs of its job, where that says what samples are like.
    """

    plan: Plan
    step_ms: float
    throughput_tokens_per_s: float
    peak_memory_bytes: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    host_bytes: tuple[float, ...]
    memory_limit_bytes: float
    device_memory_bytes: tuple[int, ...]
    bubble_fraction: float
    fits: bool
    problem: Problem
    placement: Placement
    timeline: Timeline
    provenance: Mapping[str, Any]
    job_sha256: str
    warnings: tuple[str, ...]
    modules: tuple[ModuleShare, ...] = ()
    interval: Interval | None = None
    replica_step_ms: float | None = None
    sampled: CostModel | None = None

    @cached_property
    def over_batches(self) -> StepOverBatches | None:
        """The step over drawn batches; None where the job does not say what samples are like."""
        if self.sampled is None:
            return None
        return step_over_batches(draw_batches(self.sampled), self.batch_steps)

    @cached_property
    def batch_steps(self) -> BatchSteps:
        """Its steps under drawn batches. Only where the job says what samples are like."""
        assert self.sampled is not None
        return prepare_steps(self.sampled, self.problem, self.placement, self.plan.strategy)

    @cached_property
    def device_peak_bytes(self) -> tuple[float, ...]:
        """Per stage, what it takes of its device with the allocator's fragments (planner/chance_to_fit.py)."""
        shelved = list_shelved_bytes(self.problem, self.placement, self.timeline.graph)
        num_kinds = count_communicator_kinds(self.plan.strategy)
        return tuple(device_peak_bytes(*of_stage, num_kinds) for of_stage in zip(self.memory, shelved, strict=True))

    @property
    def fullest_stage(self) -> int:
        """The stage that fills its device most."""
        return most_likely_to_fail(self.device_peak_bytes, self.device_memory_bytes)

    @property
    def oom_probability(self) -> float:
        """The chance to run out of memory on a device: that of the fullest stage, since what makes one stage take more
        than was counted makes all take more."""
        stage = self.fullest_stage
        return oom_probability(self.device_peak_bytes[stage], self.device_memory_bytes[stage])

    @property
    def peak_allocated_bytes(self) -> tuple[float, ...]:
        """Per stage, the most that its tensors and workspaces take: what torch.cuda.max_memory_allocated reports."""
        return tuple(stage.allocated_bytes for stage in self.memory)

    @property
    def first_step_allocated_bytes(self) -> tuple[float, ...]:
        """Per stage, the same up to the end of the very first step, whose forward and backward lack Adam's moments."""
        strategy = self.plan.strategy
        num_shards = sharded_over(strategy) if strategy.zero == 1 else 1
        return list_first_step_bytes(self.problem, self.placement, self.memory, num_shards)

    @property
    def resting_allocated_bytes(self) -> tuple[float, ...]:
        """Per stage, what is allocated between two steps: what Megatron-LM's report_memory calls `allocated`."""
        return tuple(stage.resting_bytes for stage in self.memory)

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
            host_bytes=self.host_bytes,
            host_limit_bytes=min(self.problem.host_limit_bytes, default=math.inf),
            step_over_batches=self.over_batches.document() if self.over_batches else {},
        )

    def plan_document(self) -> dict[str, Any]:
        """The result file of the plan where nobody searched: its bound is 0."""
        return plan_document(self.plan, self.figures(lower_bound_ms=0.0))


def evaluate(job: Job | CostModel, plan: Plan, scales: CostScales = UNSCALED) -> Estimate:
    """Simulate one step of `job` under `plan`, on the part of the cluster that the plan uses.

    job: or its costs, which who evaluates several plans holds. scales: what the times of single cost sources are
    multiplied by.
    Layers run in the plan's modes, in those too that the job's search leaves out. Memory limits are reported, not
    enforced. Raises PlanError where the plan's strategy is unlawful or its layers and modes do not fit the model,
    naming stage and modality, or a step is above LARGEST_MS; ProfileError where a profile does not fit the job.
    """
    known, strategy = CostModel.of(job), plan.strategy
    job = known.job
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason is not None:
        raise PlanError(f"the plan does not fit job {job.path}: {reason}")
    for reason in placement_reasons(job.model, job.workload, strategy, plan.layers):
        raise PlanError(f"the plan does not fit job {job.path}: {reason}")
    used = known.used_by(strategy, plan.modes_used)
    problem = build_problem(used, strategy, scales)
    placement = placement_from_modalities(problem, plan.layers, plan.recompute, plan.modes)
    placement = replace(placement, orders=plan.orders)
    timeline = simulate(problem, placement)
    if timeline.step_ms > LARGEST_MS:
        raise PlanError(
            f"a step of job {job.path} would take {timeline.step_ms:.3g} ms, {timeline.step_ms / LARGEST_MS:.3g} times "
            "thirty thousand years; look for a slip in its sizes, its batch or its rates"
        )
    memory = list_stage_memory(problem, placement, timeline.graph, timeline.peak_memory_bytes)
    peaks = timeline.peak_memory_bytes
    over, over_host = overfull_stages(problem, peaks), overfull_hosts(problem, timeline.peak_host_bytes)
    host_bytes = tuple(float(peak) for peak in timeline.peak_host_bytes)
    replica_step_ms = _find_replica_step_ms(problem, placement, used.devices_of(strategy))
    tokens = job.workload.global_batch_size * job.workload.seq_length
    return Estimate(
        plan=plan,
        step_ms=timeline.step_ms,
        throughput_tokens_per_s=tokens / (timeline.step_ms / 1e3) / strategy.world_size,
        peak_memory_bytes=tuple(float(peak) for peak in peaks),
        memory=memory,
        host_bytes=host_bytes,
        memory_limit_bytes=min(problem.memory_limit_bytes),
        device_memory_bytes=stage_memory_bytes(used.job.cluster, strategy),
        bubble_fraction=timeline.bubble_fraction,
        fits=not over and not over_host,
        problem=problem,
        placement=placement,
        timeline=timeline,
        provenance=describe_provenance(used, strategy),
        modules=share_by_module(used, strategy, problem, placement, timeline.graph) if scales is UNSCALED else (),
        interval=find_interval(used, strategy),
        replica_step_ms=replica_step_ms,
        job_sha256=job.sha256,
        sampled=used if job.samples is not None else None,
        warnings=(
            *job.warnings,
            *plan.warnings,
            *filter(None, [describe_gradients(job.model, job.workload, strategy)]),
            *(
                f"stage {stage} peaks at {format_bytes(peaks[stage])}, above its limit of "
                f"{format_bytes(problem.memory_limit_bytes[stage])}"
                for stage in over
            ),
            *(
                f"stage {stage} keeps {format_bytes(host_bytes[stage])} on its host for each of its devices, above its "
                f"limit of {format_bytes(problem.host_limit_bytes[stage])}"
                for stage in over_host
            ),
            *describe_cached(known, strategy, timeline.step_ms),
            *filter(None, [_describe_longest(known, problem, placement, strategy, peaks)]),
            *([_describe_host(host_bytes)] if any(host_bytes) and not problem.host_limit_bytes else []),
            *(
                [
                    "slow devices lie in different stages of different replicas: the step told is a bound, as if one "
                    f"replica held them all, and the slowest replica by itself takes {replica_step_ms:.2f} ms"
                ]
                if replica_step_ms is not None
                else []
            ),
        ),
    )


def _describe_longest(
    known: CostModel, problem: Problem, placement: Placement, strategy: Strategy, peaks: Floats
) -> str | None:
    if known.job.samples is None:
        return None
    return describe_longest(draw_batches(known), problem, placement, strategy, peaks)


def _describe_host(host_bytes: tuple[float, ...]) -> str:
    most = max(host_bytes)
    return (
        f"stage {host_bytes.index(most)} keeps {format_bytes(most)} on its host for each of its devices, the most of "
        "all stages, and nothing here knows how much a host has; cluster.host_memory_bytes would limit it"
    )


MAX_REPLICAS = 16
"""Replicas that are played one by one; assumed: some seconds where one step of a large plan takes a tenth of one."""


def _find_replica_step_ms(problem: Problem, placement: Placement, devices: StageDevices) -> float | None:
    """The step of the slowest replica by itself, None where it is the problem's own or replicas are too many.

    Replicas meet once a step, in the tails of their stages, so the step is the longest of their own.
    """
    rows = devices.replica_factors
    if not 1 < len(rows) <= MAX_REPLICAS:
        return None
    return max(simulate(replace(problem, stage_time_factor=row), placement).step_ms for row in rows)


def plan_from_placement(problem: Problem, placement: Placement, strategy: Strategy, global_batch_size: int) -> Plan:
    """The plan whose placement under `strategy` is `placement`: the inverse of `placement_from_modalities`."""
    modalities = dict.fromkeys(block.modality for block in problem.chain if block.modality not in strategy.away)

    def per_stage(rows: tuple[tuple[int, ...], ...], modality: str) -> tuple[int, ...]:
        counted = [e for e, block in enumerate(problem.chain) if block.layer and block.modality == modality]
        return tuple(sum(row[e] for e in counted) for row in rows)

    names = dict.fromkeys(mode.name for block in problem.chain for mode in block.modes)
    in_mode = {name: counts_in_mode(problem, placement, name) for name in (RECOMPUTE, *names)}
    modes: dict[str, dict[str, tuple[int, ...]]] = {}
    for modality, name in product(modalities, names):
        counts = per_stage(in_mode[name], modality)
        if name != RECOMPUTE and any(counts):
            modes.setdefault(modality, {})[name] = counts
    return Plan(
        strategy=strategy,
        layers={modality: per_stage(placement.layers, modality) for modality in modalities},
        recompute={modality: per_stage(in_mode[RECOMPUTE], modality) for modality in modalities},
        global_batch_size=global_batch_size,
        modes=modes,
        orders=placement.orders,
    )
