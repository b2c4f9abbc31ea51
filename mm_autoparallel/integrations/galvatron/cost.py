"""Upstream's cost model: seconds and MiB of a layer, and of embedding and head, under a strategy.

Source of every formula: galvatron/core/cost_model at cea12ff (2.4.1). What it leaves out stays out: resharding between
layers of different degrees, and the exchange of gradients over Ulysses' devices where there is no data parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mm_autoparallel.integrations.galvatron.hardware import Hardware
from mm_autoparallel.integrations.galvatron.profiles import ModelProfile
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost
from mm_autoparallel.integrations.galvatron.strategies import DpType, EndsStrategy, LayerStrategy

PipelineType = Literal["gpipe", "pipedream_flush"]
_MIB = 2**20
_S_PER_MS = 0.001
CONTEXT_MIB = 1024
"""What Galvatron counts for torch and its context on every device."""
_KEPT = 0.003
"""What a sharded part keeps whole, as a share."""


@dataclass(frozen=True)
class Training:
    """What is trained and how, the same for every layer."""

    num_layers: int
    hidden_size: int
    seq_length: int
    is_mixed: bool
    """Whether numbers are of 2 bytes."""
    is_async: bool
    """Whether gradients are exchanged after the last micro-batch only."""
    is_sequence_parallel: bool
    pipeline_type: PipelineType
    time_factor: float = 1.0
    """debug_costmodel_coe: of times of layers."""

    @property
    def bytes_per_number(self) -> int:
        """Of activations and gradients."""
        return 2 if self.is_mixed else 4


@dataclass(frozen=True)
class Batch:
    """Samples of a step, and the micro-batches that they are cut into."""

    samples: int
    chunks: int
    lowest: int = 1
    """The lowest degree that a plan may have, by which 2.4.0 rounds samples; nothing else depends on it."""

    def local(self, dp: int) -> int:
        """Samples of a micro-batch on one data parallel rank."""
        return self.samples // self.chunks // dp


class CostModel:
    """Figures of layers and ends, each worked out once."""

    def __init__(self, profile: ModelProfile, hardware: Hardware, training: Training) -> None:
        self.profile, self.hardware, self.training = profile, hardware, training
        self.layer = cache(self._layer)
        self.ends = cache(self._ends)

    def buffer_mib(self, batch: Batch, dp: int) -> int:
        """MiB of the buffer that all layers gather activations into, at the lowest data parallel size."""
        training = self.training
        numbers = batch.samples / batch.chunks / dp * training.hidden_size * training.seq_length
        return int(numbers * 4 / _MIB / 2)  # 2 bytes a number, in fp32 too: upstream asks whether the name is empty

    # --------------------------------------------------------------------------------------------------------- layers

    def _layer(self, strategy: LayerStrategy, batch: Batch) -> LayerCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        compute_s, synced_s = self._layer_s(strategy, batch)
        mib = tuple(math.ceil(self.layer_mib(strategy, batch, stage)) for stage in range(strategy.pp))
        return LayerCost(compute_s, synced_s, mib)

    def _layer_s(self, strategy: LayerStrategy, batch: Batch) -> tuple[float, float]:
        profile, hardware, training = self.profile, self.hardware, self.training
        local, degree, sharded = batch.local(strategy.dp), strategy.degree, strategy.sharded
        forward_ms = profile.layer_ms.at(local / degree)
        backward_ms = forward_ms * (3 if strategy.checkpoint else 2)
        gradients_mib = 2 * (sharded - 1) * (profile.parameter_mib / strategy.tp / sharded)
        if training.is_mixed:
            gradients_mib /= 2
        ring_ms = hardware.ring_ms(sharded, strategy.tp == 1)
        message_mib = local * training.seq_length * training.hidden_size * training.bytes_per_number / _MIB
        moved_ms = 0.0
        if degree > 1:
            again = 1.5 if strategy.checkpoint else 1.0
            if strategy.tp == 1:
                moved_ms = 4 * again * hardware.exchange_ms(degree, message_mib)
            else:
                moved_ms = 6 * again * hardware.gather_ms(degree, message_mib)
        sums_ms = []
        for exchanged_mib in (0.0, gradients_mib):
            ms = (
                backward_ms
                if strategy.dp == 1
                else besides(exchanged_mib, ring_ms, backward_ms, hardware.overlap_factor)
            )
            ms += forward_ms + moved_ms
            if strategy.dp_type == "zero3":
                ms += gradients_mib / 2 * ring_ms
            if strategy.pp > 1:  # counted once for all layers, and dealt to them
                ms += strategy.pp * 2 * message_mib * hardware.hop_ms(strategy.pp) / training.num_layers
            sums_ms.append(ms * _S_PER_MS * training.time_factor)
        return sums_ms[0], sums_ms[1]

    def layer_mib(self, strategy: LayerStrategy, batch: Batch, stage: int) -> float:
        """Of one layer on a stage, before it is rounded up."""
        profile = self.profile
        share = kept_share(strategy.dp_type, strategy.sharded, batch.chunks, self.training)
        states = 4 * profile.parameter_mib / strategy.tp * share
        held = batch.local(strategy.dp) * self._in_flight(strategy.pp, batch, stage)
        if not strategy.checkpoint:
            return states + profile.activation(strategy.degree) * held
        is_divided = strategy.sp > 1 or (strategy.tp > 1 and self.training.is_sequence_parallel)
        return states + profile.checkpoint_mib * held / (strategy.degree if is_divided else 1)

    def _in_flight(self, pp: int, batch: Batch, stage: int) -> int:
        """Micro-batches that a stage holds activations of."""
        if pp == 1:
            return 1
        return batch.chunks if self.training.pipeline_type == "gpipe" else pp - stage

    # ----------------------------------------------------------------------------------------------------------- ends

    def _ends(self, strategy: EndsStrategy, batch: Batch) -> EndsCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        mib = tuple(math.ceil(each) for each in self.ends_mib(strategy, batch))
        return EndsCost(self._ends_s(strategy, batch), mib)

    def _ends_s(self, strategy: EndsStrategy, batch: Batch) -> tuple[float, ...]:
        hardware, training = self.hardware, self.training
        local, sharded, overlap = batch.local(strategy.dp), strategy.sharded, hardware.overlap_factor
        forward_ms = self.profile.ends_ms.at(local / strategy.degree)
        share_ms = hardware.ring_ms(sharded, strategy.tp == 1) * (sharded - 1) / sharded
        moved_ms = 0.0
        if strategy.tp > 1:
            message_mib = local * training.seq_length * training.hidden_size * training.bytes_per_number / _MIB
            moved_ms = hardware.gather_ms(strategy.tp, message_mib)
        stages = [0.0] * strategy.pp
        is_alone = strategy.pp == 1
        for stage, ends in self.profile.ends_of(strategy.pp):
            own_ms = forward_ms if is_alone else forward_ms / 2
            whole_ms = ends.states(strategy.tp) / 4 * (0.5 if training.is_mixed else 1.0) * share_ms
            gathered_ms = 0.5 * whole_ms if strategy.dp_type == "zero3" else 0.0  # in the forward, and in the backward
            ms = longer(gathered_ms, own_ms, overlap) + longer(gathered_ms, own_ms * 2, overlap)
            stages[stage] = _S_PER_MS * (ms + moved_ms * (2 if is_alone else 1))
        return tuple(stages)

    def ends_mib(self, strategy: EndsStrategy, batch: Batch) -> tuple[float, ...]:
        """By stage, what the framework takes included, before it is rounded up."""
        local = batch.local(strategy.dp)
        share = kept_share(strategy.dp_type, strategy.sharded, batch.chunks, self.training)
        stages = [float(CONTEXT_MIB)] * strategy.pp
        for stage, ends in self.profile.ends_of(strategy.pp):
            held = local * self._in_flight(strategy.pp, batch, stage)
            stages[stage] = ends.states(strategy.tp) * share + ends.activation(strategy.degree) * held + CONTEXT_MIB
        return tuple(stages)


def besides(exchanged_mib: float, ring_ms: float, backward_ms: float, overlap_factor: float) -> float:
    """ms of a backward and an exchange beside each other: both are slower while both run. ring_ms: of a MiB."""
    exchange_ms, computing_ms = exchanged_mib * ring_ms * overlap_factor, backward_ms * overlap_factor
    if exchange_ms > computing_ms:
        return computing_ms + (exchange_ms - computing_ms) / overlap_factor
    return exchange_ms + backward_ms - exchange_ms / overlap_factor


def longer(exchange_ms: float, computing_ms: float, overlap_factor: float) -> float:
    """ms of a computation beside an exchange: it alone is slower while both run."""
    slowed_ms = computing_ms * overlap_factor
    return exchange_ms + (slowed_ms - exchange_ms) / overlap_factor if slowed_ms > exchange_ms else exchange_ms


def kept_share(dp_type: DpType, sharded: int, chunks: int, training: Training) -> float:
    """What ZeRO leaves of model states on a device, as a share. sharded: devices that it shards over."""
    if dp_type == "ddp":
        return 1.0
    share = 1 / sharded + _KEPT
    parts = 8 if training.is_mixed else 4  # of states, in numbers of 2 or of 4 bytes
    once = chunks == 1
    if dp_type == "zero3":
        if once:
            return share
        if training.is_async:
            return (parts - 1) / parts * share + 1 / parts
        return share * 5 / 4
    if not once and training.is_async:
        return (parts - 2) / parts * share + 2 / parts
    share = (parts - 1) / parts * share + 1 / parts
    return share * 5 / 4 if training.is_mixed and not once else share
