"""Galvatron's figures of a whole plan: the step, and the memory of every stage by its rule of what stays free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.galvatron.configuration import Search
from mm_autoparallel.integrations.galvatron.cost import Batch, CostModel, Training
from mm_autoparallel.integrations.galvatron.hardware import Hardware
from mm_autoparallel.integrations.galvatron.mixes import Mixing, Resharding
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost
from mm_autoparallel.integrations.galvatron.strategies import DpType, LayerStrategy
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment

MIB_PER_GB, BYTES_PER_MIB, MS_PER_S = 1024, 2**20, 1000.0
RESERVE_FRACTION, RESERVED_ABOVE_GB = 0.2, 20
"""Upstream keeps a fifth of a device back, but only above 20 GB."""


@dataclass(frozen=True)
class Score:
    """A plan and upstream's figures of it. stage_mib: with buffer and context; limit_mib: without the reserve."""

    plan: Assignment
    step_s: float
    whole_step_s: float
    """The same with what upstream's formula leaves out: resharding where layers of a stage change their degree, and a
    slowest stage that is neither the first nor the last."""
    stage_mib: tuple[int, ...]
    limit_mib: int
    reserve_mib: int
    counts_parts: bool = False
    """Whether a rank's samples are counted in parts, as 2.4.0 does."""

    @property
    def counted_fraction(self) -> float:
        """Of a micro-batch's samples, those that are counted: whole ones of each rank, of the layer that has fewest."""
        if self.counts_parts:
            return 1.0
        each = self.plan.num_samples // self.plan.chunks
        return min(each // layer.dp * layer.dp for layer in self.plan.layers) / each

    @property
    def samples_per_s(self) -> float:
        """What upstream compares."""
        return self.plan.num_samples / self.step_s

    @property
    def remaining_mib(self) -> tuple[int, ...]:
        """Of each stage; negative where it does not fit."""
        return tuple(self.limit_mib - mib for mib in self.stage_mib)


@dataclass(frozen=True)
class Tally:
    """A plan with what each of its strategies costs. buffer_mib: of every stage besides."""

    plan: Assignment
    costs: Mapping[LayerStrategy, LayerCost]
    ends: EndsCost
    resharding: Resharding | None = None
    """By the order of `costs`; None: not counted."""
    buffer_mib: int = 0
    counts_parts: bool = False

    def score(self, limit_mib: int, reserve_mib: int) -> Score:
        """The plan's figures, on devices with these limits."""
        plan, costs = self.plan, [*self.costs.values()]
        counts, used, start = [], [mib + self.buffer_mib for mib in self.ends.stage_mib], 0
        for stage, held in enumerate(plan.division):
            layers = Counter(plan.layers[start : start + held])
            counts.append([layers[kind] for kind in self.costs])
            used[stage] += sum(cost.stage_mib[stage] * layers[kind] for kind, cost in self.costs.items())
            start += held
        plain = Mixing(costs, plan.division, plan.chunks).step_of(counts, self.ends)
        whole = Mixing(costs, plan.division, plan.chunks, 0, True, self.resharding).step_of(counts, self.ends)
        return Score(plan, plain, whole, tuple(used), limit_mib, reserve_mib, self.counts_parts)


@dataclass(frozen=True)
class Extensions:
    """What upstream does not count, or does not search. reserve_fraction: of a device, that stays free; None:
    upstream's rule. spread: by how many layers stages may differ from even ones. counts_every_stage: as the slowest, in
    what is kept small; counts_resharding: in it too. needs_whole_samples: leaves out data parallel sizes that a
    micro-batch is no multiple of, of which upstream counts the whole samples of a rank alone."""

    reserve_fraction: float | None = None
    spread: int = 0
    counts_every_stage: bool = False
    counts_resharding: bool = False
    needs_whole_samples: bool = False


UPSTREAM = Extensions()
"""All as upstream does."""


class Planner:
    """A configuration's cost model and memory rule."""

    def __init__(self, search: Search, extensions: Extensions = UPSTREAM) -> None:
        config = search.configuration
        self.search, self.config, self.extensions = search, config, extensions
        self.cost = CostModel(search.profile, search.hardware, training_of(search))
        self.num_devices = config.hardware_info.num_devices
        device_mib = config.hardware_info.memory_constraint * MIB_PER_GB
        self.reserve_mib = reserve_of(config.hardware_info.memory_constraint, extensions.reserve_fraction)
        self.limit_mib = device_mib - self.reserve_mib

    @property
    def default_dp_type(self) -> DpType:
        """Without ZeRO 3."""
        return self.config.parallelism_info.default_dp_type

    def buffer_mib(self, batch: Batch, pp: int, degree: int, is_ulysses: bool) -> int:
        """Of the buffer for gathered activations."""
        train = self.config.common_train_info
        if is_ulysses or not train.sequence_parallel or not train.global_memory_buffer:
            return 0
        return self.cost.buffer_mib(batch, self.num_devices // pp // degree)

    def score(self, plan: Assignment) -> Score:
        """Upstream's step and memory of any plan. Raises JobError where a profile lacks what it uses, PlanError where
        it is for other devices, or a data parallel rank has no sample of a micro-batch."""
        check_devices(plan, self.num_devices)
        for layer in (plan.ends, *plan.layers):
            if plan.num_samples // plan.chunks < layer.dp:
                raise PlanError(
                    f"a batch of {plan.num_samples} in {plan.chunks} micro-batches has no sample for each of "
                    f"{layer.dp} data parallel ranks"
                )
        batch, pp = Batch(plan.num_samples, plan.chunks), plan.ends.pp
        lowest = min_degree(self.num_devices, batch, pp)
        highest = max([lowest, plan.ends.degree, *(layer.degree for layer in plan.layers)])
        is_ulysses = plan.ends.tp == 1 and all(layer.tp == 1 for layer in plan.layers)
        kinds = [*dict.fromkeys(plan.layers)]
        costs = {kind: self.cost.layer(kind, batch) for kind in kinds}
        buffer_mib = self.buffer_mib(batch, pp, highest, is_ulysses)
        tally = Tally(plan, costs, self.cost.ends(plan.ends, batch), self.resharding(kinds, batch), buffer_mib)
        return tally.score(self.limit_mib, self.reserve_mib)

    def resharding(self, layers: Sequence[LayerStrategy], batch: Batch) -> Resharding:
        """As `reshard`."""
        training = self.cost.training
        sample_mib = training.seq_length * training.hidden_size * training.bytes_per_number / BYTES_PER_MIB
        return reshard(layers, batch, self.search.hardware, sample_mib, training.time_factor)


def reshard(
    layers: Sequence[LayerStrategy], batch: Batch, hardware: Hardware, sample_mib: float, time_factor: float = 1.0
) -> Resharding:
    """What a change of degree between two layers takes in a micro-batch: activations are gathered over the higher
    degree's devices in the forward, their gradients in the backward. sample_mib: activations of a sample.

    Upstream's search puts (G - 1)/G of the bytes of its local batch at the time of a MiB on neighbours, by 1e-7 where
    2^20 bytes are a MiB and 1e3 ms a second; its score leaves them out.
    """
    charges = {}
    for layer in layers:
        mib = batch.samples / batch.chunks / layer.dp * sample_mib
        ring_ms, degree = hardware.ring_ms(layer.degree, True), layer.degree
        charges[degree] = 2 * (degree - 1) / degree * mib * ring_ms * time_factor / MS_PER_S
    return Resharding(tuple(layer.degree for layer in layers), charges)


def training_of(search: Search) -> Training:
    """What a configuration says of training."""
    config = search.configuration
    return Training(
        search.num_layers,
        search.hidden_size,
        search.seq_length,
        config.parallelism_info.mixed_precision != "fp32",
        config.parallelism_info.async_grad_reduce,
        config.common_train_info.sequence_parallel,
        config.parallelism_info.pipeline_type,
        config.debug_info.debug_costmodel_coe,
    )


def check_devices(plan: Assignment, num_devices: int) -> None:
    """Raises PlanError where a plan is for other devices than a configuration."""
    if plan.num_devices != num_devices:
        raise PlanError(f"the strategy is for {plan.num_devices} devices, the configuration for {num_devices}")


def reserve_of(memory_gb: int, fraction: float | None, usual_fraction: float = RESERVE_FRACTION) -> int:
    """MiB that stay free on a device. fraction: None: the usual one above 20 GB, and nothing up to there."""
    if fraction is None:
        fraction = usual_fraction if memory_gb > RESERVED_ABOVE_GB else 0.0
    return int(memory_gb * MIB_PER_GB * fraction)


def min_degree(num_devices: int, batch: Batch, pp: int) -> int:
    """The lowest degree at which every data parallel rank has a sample of each micro-batch."""
    return max(1, num_devices // pp // max_dp(num_devices, batch, pp))


def max_dp(num_devices: int, batch: Batch, pp: int) -> int:
    """The highest data parallel size at which each rank has a sample of each micro-batch."""
    return max(1, min(batch.samples // batch.chunks, num_devices // pp))


def even_division(num_layers: int, pp: int) -> tuple[int, ...]:
    """Upstream's: the last stage takes what is over."""
    each = num_layers // pp
    return (each,) * (pp - 1) + (num_layers - each * (pp - 1),)
