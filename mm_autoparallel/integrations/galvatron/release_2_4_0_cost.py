"""The cost model of Galvatron 2.4.0: seconds and MiB of a layer, and of embedding and head, under a strategy.

Source of every formula: module galvatron.core.search_engine.cost_model, hetu-galvatron 2.4.0. What differs from 2.4.1's
(`cost.py`): a rank's samples are counted in parts; strategies say which devices are neighbours; Ulysses exchanges
gradients over its data parallel ranks; tensor parallelism sends four all-gathers, timed by bandwidth where Ulysses is
not searched; gradients are exchanged beside half of the backward where DP is below 4. Its slips are kept, because its
search is compared by what it says:

- messages of the ends are as large as at the lowest degree, and their times are the line's, never the measured ones;
- with GPipe over several stages a device holds the activations of one micro-batch, at the lowest degree;
- with several stages the last one exchanges what the first holds, or with Ulysses the first what the last holds.
"""

from __future__ import annotations

import math
from functools import cache

from mm_autoparallel.integrations.galvatron.cost import CONTEXT_MIB, Batch, Training, besides, kept_share, longer
from mm_autoparallel.integrations.galvatron.hardware import Hardware
from mm_autoparallel.integrations.galvatron.profiles import ModelProfile
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost
from mm_autoparallel.integrations.galvatron.strategies import EndsStrategy, LayerStrategy

_MIB = 2**20
_S_PER_MS = 0.001


class CostModel:
    """Figures of layers and ends, each worked out once. looks_up: whether messages are looked up among measured ones,
    which is so where Ulysses is searched; else they take what a ring of their devices takes."""

    def __init__(self, profile: ModelProfile, hardware: Hardware, training: Training, looks_up: bool) -> None:
        self.profile, self.hardware, self.training, self.looks_up = profile, hardware, training, looks_up
        self.layer = cache(self._layer)
        self.ends = cache(self._ends)
        self.sample_mib = training.seq_length * training.hidden_size * training.bytes_per_number / _MIB

    def buffer_mib(self, batch: Batch, devices: int, highest: int) -> int:
        """MiB of the buffer that all layers gather activations into; devices: of a stage."""
        numbers = micro_samples(batch, devices) / batch.lowest * highest
        numbers *= self.training.hidden_size * self.training.seq_length
        return int(numbers * 4 / _MIB / 2)  # 2 bytes a number, in fp32 too: it asks whether the name is empty

    # --------------------------------------------------------------------------------------------------------- layers

    def _layer(self, strategy: LayerStrategy, batch: Batch) -> LayerCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        compute_s, synced_s = self._layer_s(strategy, batch)
        mib = tuple(math.ceil(self.layer_mib(strategy, batch, stage)) for stage in range(strategy.pp))
        return LayerCost(compute_s, synced_s, mib)

    def _layer_s(self, strategy: LayerStrategy, batch: Batch) -> tuple[float, float]:
        hardware, training = self.hardware, self.training
        dp, degree = strategy.dp, strategy.degree
        local = batch.samples / batch.chunks / dp
        forward_ms = self.profile.layer_ms.at(local / degree)
        backward_ms = forward_ms * (3 if strategy.checkpoint else 2)
        gradients_mib = 2 * (dp - 1) / dp * (self.profile.parameter_mib / strategy.tp)
        if training.is_mixed:
            gradients_mib /= 2
        is_split = strategy.tp > 1 and dp > 1
        ring_ms = hardware.ring_ms(strategy.sharded, strategy.strided or not is_split)
        beside_ms = backward_ms / 2 if degree > 1 and degree >= degree * dp // 2 else backward_ms
        rest_ms = forward_ms + backward_ms - beside_ms + self._moved_ms(strategy, local)
        if strategy.dp_type == "zero3":
            rest_ms += gradients_mib / 2 * ring_ms
        if strategy.pp > 1:  # counted once for all layers, and dealt to them
            rest_ms += strategy.pp * 2 * local * self.sample_mib * hardware.hop_ms(strategy.pp) / training.num_layers
        sums_ms = [
            rest_ms + (beside_ms if dp == 1 else besides(exchanged_mib, ring_ms, beside_ms, hardware.overlap_factor))
            for exchanged_mib in (0.0, gradients_mib)
        ]
        return sums_ms[0] * _S_PER_MS * training.time_factor, sums_ms[1] * _S_PER_MS * training.time_factor

    def _moved_ms(self, strategy: LayerStrategy, local: float) -> float:
        """Of activations between the devices of one sample."""
        degree, again = strategy.degree, 1.5 if strategy.checkpoint else 1.0
        if degree == 1:
            return 0.0
        mib = local * self.sample_mib
        if self.looks_up:
            measured = self.hardware.gather_ms if strategy.tp > 1 else self.hardware.exchange_ms
            return 4 * again * measured(degree, mib)
        ring_ms = self.hardware.ring_ms(degree, strategy.dp == 1 or not strategy.strided)
        return 2 * (degree - 1) / degree * mib * 4 * again * ring_ms

    def layer_mib(self, strategy: LayerStrategy, batch: Batch, stage: int) -> float:
        """Of one layer on a stage, before it is rounded up."""
        profile = self.profile
        states = 4 * profile.parameter_mib / strategy.tp
        states *= kept_share(strategy.dp_type, strategy.sharded, batch.chunks, self.training)
        held = self._held(strategy, batch, stage)
        if not strategy.checkpoint:
            return states + profile.activation(strategy.degree) * held
        return states + profile.checkpoint_mib * held / (strategy.degree if self.training.is_sequence_parallel else 1)

    def _held(self, strategy: LayerStrategy, batch: Batch, stage: int) -> float:
        """Samples of a rank that a stage holds activations of."""
        devices = strategy.degree * strategy.dp
        each, whole = micro_samples(batch, devices), rank_samples(batch, devices)
        if strategy.pp > 1 and self.training.pipeline_type == "gpipe":
            return each
        return min(whole, each * min(strategy.pp - stage, batch.chunks)) / whole * (batch.samples / strategy.dp)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _ends(self, strategy: EndsStrategy, batch: Batch) -> EndsCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        mib = tuple(math.ceil(each) for each in self.ends_mib(strategy, batch))
        return EndsCost(self._ends_s(strategy, batch), mib)

    def _ends_s(self, strategy: EndsStrategy, batch: Batch) -> tuple[float, ...]:
        hardware, profile = self.hardware, self.profile
        sharded, is_alone = strategy.sharded, strategy.pp == 1
        each = micro_samples(batch, strategy.degree * strategy.dp)
        forward_ms = profile.ends_ms.at(each / batch.lowest) / (1 if is_alone else 2)
        share_ms = hardware.ring_ms(sharded, strategy.tp == 1 or strategy.dp == 1) * (sharded - 1) / sharded
        holder = profile.alone if is_alone else profile.last if strategy.uses_ulysses else profile.first
        gathered_ms = 0.0
        if strategy.dp_type == "zero3":
            gathered_ms = 0.5 * (holder.states(strategy.tp) / 4 * share_ms)  # in the forward, and in the backward
        ms = longer(gathered_ms, forward_ms, hardware.overlap_factor)
        ms += longer(gathered_ms, forward_ms * 2, hardware.overlap_factor)
        ms += self._ends_moved_ms(strategy, each) * (2 if is_alone else 1)
        stages = [0.0] * strategy.pp
        stages[0] = stages[-1] = ms * _S_PER_MS
        return tuple(stages)

    def _ends_moved_ms(self, strategy: EndsStrategy, each: int) -> float:
        tp = strategy.tp
        if tp == 1:
            return 0.0
        if self.looks_up:
            return self.hardware.gather_line(tp).at(each * self.sample_mib)
        return (tp - 1) / tp * each * self.sample_mib * self.hardware.ring_ms(tp, strategy.dp == 1)

    def ends_mib(self, strategy: EndsStrategy, batch: Batch) -> tuple[float, ...]:
        """By stage, what the framework takes included, before it is rounded up."""
        local = batch.samples / strategy.dp / batch.chunks
        share = kept_share(strategy.dp_type, strategy.sharded, batch.chunks, self.training)
        stages = [float(CONTEXT_MIB)] * strategy.pp
        for stage, ends in self.profile.ends_of(strategy.pp):
            is_deep = strategy.pp > 1 and stage == 0 and self.training.pipeline_type == "pipedream_flush"
            held = local * (strategy.pp if is_deep else 1)
            stages[stage] += ends.states(strategy.tp) * share + ends.activation(strategy.degree) * held
        return tuple(stages)


def rank_samples(batch: Batch, devices: int) -> int:
    """Samples of a step on one rank at the lowest degree; devices: of a stage."""
    return batch.samples // (devices // batch.lowest)


def micro_samples(batch: Batch, devices: int) -> int:
    """Those of its largest micro-batch."""
    return math.ceil(rank_samples(batch, devices) / batch.chunks)
