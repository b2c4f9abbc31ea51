"""The cost model of Galvatron for Paddle: seconds and MiB of a layer, and of embedding and head, under a strategy.

Source of every formula: paddlenlp/experimental/galvatron/cost_model of FeixLiu/paddle-galvatron at b0bdd07. Parameters
are in 2 bytes, and a device keeps nine times them (parameters, their gradients in 4 bytes, masters and moments), seven
with one accumulation step. Three slips of it change figures; `is_as_is` keeps them:

- the half again that checkpointing adds to tensor parallel messages is worked out and dropped;
- with Ulysses over several stages, the first one exchanges half of its ends' gradients;
- messages of the ends are looked up where groups stand, so that the line is always taken in place of what was measured.

A hop between stages is counted once for 24 layers, whatever the model has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from mm_autoparallel.integrations.galvatron.cost import Batch, besides, longer
from mm_autoparallel.integrations.galvatron.hardware import Hardware
from mm_autoparallel.integrations.galvatron.profiles import ModelProfile
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost
from mm_autoparallel.integrations.galvatron.strategies import EndsStrategy, FlaggedEnds, LayerStrategy

_MIB = 2**20
_S_PER_MS = 0.001
_HOP_LAYERS = 24
_STATES = 9
"""Times the parameters, with several accumulation steps."""


@dataclass(frozen=True)
class PaddleTraining:
    """What is trained and how, the same for every layer. uses_sequence_parallel: `sp_space` is `tp+sp`."""

    hidden_size: int
    seq_length: int
    is_mixed: bool
    uses_sequence_parallel: bool
    is_as_is: bool

    @property
    def bytes_per_number(self) -> int:
        """Of activations."""
        return 2 if self.is_mixed else 4


class PaddleCostModel:
    """Figures of layers and ends, each worked out once. Degrees stand in `sp` where a layer uses Ulysses."""

    def __init__(self, profile: ModelProfile, hardware: Hardware, training: PaddleTraining) -> None:
        self.profile, self.hardware, self.training = profile, hardware, training
        self.layer = cache(self._layer)
        self.ends = cache(self._ends)

    def message_mib(self, local: int) -> float:
        """Activations of so many samples."""
        training = self.training
        return local * training.seq_length * training.hidden_size * training.bytes_per_number / _MIB

    # --------------------------------------------------------------------------------------------------------- layers

    def _layer(self, strategy: LayerStrategy, batch: Batch) -> LayerCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        compute_s, synced_s = self._layer_s(strategy, batch)
        mib = tuple(math.ceil(self.layer_mib(strategy, batch, stage)) for stage in range(strategy.pp))
        return LayerCost(compute_s, synced_s, mib)

    def _layer_s(self, strategy: LayerStrategy, batch: Batch) -> tuple[float, float]:
        profile, hardware = self.profile, self.hardware
        local, degree, sharded = batch.local(strategy.dp), strategy.degree, strategy.sharded
        forward_ms = profile.layer_ms.at(local / degree)
        backward_ms = forward_ms * (3 if strategy.checkpoint else 2)
        gradients_mib = 2 * (sharded - 1) / sharded * profile.parameter_mib / strategy.tp
        ring_ms = hardware.ring_ms(sharded, True)
        moved_ms = self._moved_ms(strategy, local)
        sums_ms = []
        for exchanged_mib in (0.0, gradients_mib):
            if strategy.dp == 1:
                ms = backward_ms
            elif degree > 1 and degree >= degree * strategy.dp // 2:  # beside half of the backward alone
                ms = backward_ms / 2 + besides(exchanged_mib, ring_ms, backward_ms / 2, hardware.overlap_factor)
            else:
                ms = besides(exchanged_mib, ring_ms, backward_ms, hardware.overlap_factor)
            ms += forward_ms + moved_ms
            if strategy.dp_type == "zero3":
                ms += gradients_mib / 2 * ring_ms
            if strategy.pp > 1:
                ms += strategy.pp * 2 * self.message_mib(local) * hardware.hop_ms(strategy.pp) / _HOP_LAYERS
            sums_ms.append(ms * _S_PER_MS)
        return sums_ms[0], sums_ms[1]

    def _moved_ms(self, strategy: LayerStrategy, local: int) -> float:
        """Of activations between the devices of one sample."""
        degree, again = strategy.degree, 1.5 if strategy.checkpoint else 1.0
        if degree == 1:
            return 0.0
        mib = self.message_mib(local)
        if self.training.uses_sequence_parallel:
            measured = self.hardware.gather_ms if strategy.tp > 1 else self.hardware.exchange_ms
            return 4 * again * measured(degree, mib)
        if self.training.is_as_is:
            again = 1.0
        return 2 * (degree - 1) / degree * mib * 4 * again * self.hardware.ring_ms(degree, True)

    def layer_mib(self, strategy: LayerStrategy, batch: Batch, stage: int) -> float:
        """Of one layer on a stage, before it is rounded up."""
        states = self.profile.parameter_mib / strategy.tp * (7 if batch.chunks == 1 else _STATES)
        states *= _kept_share(strategy.dp_type, strategy.sharded, batch)
        whole = batch.samples // strategy.dp
        each = math.ceil(whole / batch.chunks)
        held = min(whole, each * min(strategy.pp - stage, batch.chunks))
        if strategy.checkpoint:
            return states + self.profile.checkpoint_mib * held / strategy.degree
        return states + self.profile.activation(strategy.degree) * held

    # ----------------------------------------------------------------------------------------------------------- ends

    def _ends(self, strategy: FlaggedEnds, batch: Batch) -> EndsCost:
        """Raises JobError where a profile lacks what the strategy needs."""
        mib = tuple(math.ceil(each) for each in self.ends_mib(strategy, batch))
        return EndsCost(self._ends_s(strategy, batch), mib)

    def _ends_s(self, strategy: FlaggedEnds, batch: Batch) -> tuple[float, ...]:
        hardware, training = self.hardware, self.training
        sharded, local = strategy.sharded, batch.local(strategy.dp)
        forward_ms = self.profile.ends_ms.at(local / strategy.degree)
        share_ms = hardware.ring_ms(sharded, True) * (sharded - 1) / sharded
        moved_ms = self._ends_moved_ms(strategy, local)
        stages = [0.0] * strategy.pp
        is_alone = strategy.pp == 1
        for stage, ends in self.profile.ends_of(strategy.pp):
            own_ms = forward_ms if is_alone else forward_ms / 2
            whole_mib = 2 * ends.states(strategy.tp) / _STATES
            if training.is_as_is and strategy.is_ulysses and not is_alone and stage == 0:
                whole_mib /= 2
            gathered_ms = 0.5 * whole_mib * share_ms if strategy.dp_type == "zero3" else 0.0
            ms = longer(gathered_ms, own_ms, hardware.overlap_factor)
            ms += longer(gathered_ms, own_ms * 2, hardware.overlap_factor)
            stages[stage] = _S_PER_MS * (ms + moved_ms * (2 if is_alone else 1))
        return tuple(stages)

    def _ends_moved_ms(self, strategy: EndsStrategy, local: int) -> float:
        if strategy.tp == 1:
            return 0.0
        mib = self.message_mib(local)
        if not self.training.uses_sequence_parallel:
            return (strategy.tp - 1) / strategy.tp * mib * self.hardware.ring_ms(strategy.tp, True)
        if self.training.is_as_is:
            return self.hardware.gather_line(strategy.tp).at(mib)
        return self.hardware.gather_ms(strategy.tp, mib)

    def ends_mib(self, strategy: EndsStrategy, batch: Batch) -> tuple[float, ...]:
        """By stage, before it is rounded up; counted as with ZeRO 3, whatever the strategy says."""
        local = batch.samples // strategy.dp // batch.chunks
        stages = [0.0] * strategy.pp
        states = _kept_share("zero3", strategy.sharded, batch) * (7 / _STATES if batch.chunks == 1 else 1.0)
        for stage, ends in self.profile.ends_of(strategy.pp):
            held = local * (strategy.pp if strategy.pp > 1 and stage == 0 else 1)
            stages[stage] = ends.states(strategy.tp) * states + ends.activation(strategy.degree) * held
        return tuple(stages)


def _kept_share(dp_type: str, sharded: int, batch: Batch) -> float:
    """What ZeRO leaves of model states on a device, as a share."""
    if dp_type == "zero3":
        return 1 / sharded if batch.chunks == 1 else 2 / 9 + 7 / 9 / sharded
    if dp_type == "zero2":
        return 1 / 7 + 6 / 7 / sharded if batch.chunks == 1 else 1 / 3 + 2 / 3 / sharded
    return 1.0
