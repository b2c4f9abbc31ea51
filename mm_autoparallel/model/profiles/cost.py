"""BlockCost: what one block of a kind costs one device for one micro-batch, and where each figure came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mm_autoparallel.model.profiles.operators.coverage import Coverage

Source = Literal["measured", "interpolated", "traced", "analytic"]


@dataclass(frozen=True)
class BlockCost:
    """Per device and micro-batch, after tensor and context parallel sharding, their collectives inside the times.

    forward_ms, backward_input_ms, backward_weight_ms: zero where training does not ask for them.
    parameter_count: parameters this device holds (weights, gradient and optimizer bytes follow from dtype and ZeRO).
    frozen_count: those of them that do not train although the block does (beside adapters).
    expert_count: those of them that are routed experts, of which other ranks hold copies than of the rest.
    activation_bytes: kept from forward until backward, one micro-batch. checkpoint_bytes: kept instead when recomputed.
    transient_bytes: passing working set beyond what is kept (logits, dequantised copies, gathered sequences).
    output_bytes: handed to the next stage if the pipeline is cut after this block; its gradient has the same size.
    time_source, memory_source: where times and bytes came from.
    recompute_ms: what recomputing it adds to its backward, None where not measured. optimizer_ms: an optimizer step
    over all its parameters here, nothing sharded by ZeRO, None where not measured. arrangement: how the ranks that
    divided it stood when it was measured (ProfileEntry); empty where that is not said. error_fraction: standard error
    of measured times, of both passes together. split_extra_ms, kept_for_weight_bytes: as in ProfileEntry, None where
    not measured. coverage: of operators that an operator base was
    asked for; None without.
    """

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    parameter_count: float
    activation_bytes: float
    checkpoint_bytes: float
    transient_bytes: float
    output_bytes: float
    time_source: Source
    memory_source: Source
    recompute_ms: float | None = None
    optimizer_ms: float | None = None
    arrangement: str = ""
    expert_count: float = 0.0
    error_fraction: float = 0.0
    frozen_count: float = 0.0
    split_extra_ms: float | None = None
    kept_for_weight_bytes: float | None = None
    coverage: Coverage | None = None

    def mixed(self, other: BlockCost, fraction: float) -> BlockCost:
        """The mean of this block and `other`, of the same parameters and sources, where `fraction` of them are such."""

        def mean(own: float, others: float) -> float:
            return (1 - fraction) * own + fraction * others

        def mean_known(own: float | None, others: float | None) -> float | None:
            return None if own is None or others is None else mean(own, others)

        return replace(
            self,
            forward_ms=mean(self.forward_ms, other.forward_ms),
            backward_input_ms=mean(self.backward_input_ms, other.backward_input_ms),
            backward_weight_ms=mean(self.backward_weight_ms, other.backward_weight_ms),
            activation_bytes=mean(self.activation_bytes, other.activation_bytes),
            checkpoint_bytes=mean(self.checkpoint_bytes, other.checkpoint_bytes),
            transient_bytes=max(self.transient_bytes, other.transient_bytes),
            recompute_ms=mean_known(self.recompute_ms, other.recompute_ms),
            split_extra_ms=mean_known(self.split_extra_ms, other.split_extra_ms),
            kept_for_weight_bytes=mean_known(self.kept_for_weight_bytes, other.kept_for_weight_bytes),
        )

    def without_table(self, table: BlockCost) -> BlockCost:
        """A tied head's, without the table, which the embedding counts; a profile of the head may count it too."""
        own_count = self.parameter_count - table.parameter_count
        if own_count < 0 or not self.parameter_count:
            return self
        own_ms = self.optimizer_ms and self.optimizer_ms * own_count / self.parameter_count
        return replace(self, parameter_count=own_count, optimizer_ms=own_ms)

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_input_ms + self.backward_weight_ms

    @property
    def trained_count(self) -> float:
        """Parameters that train where the block does."""
        return self.parameter_count - self.frozen_count

    @property
    def trained_expert_count(self) -> float:
        """Those of them that are routed experts, which never have adapters."""
        return 0.0 if self.frozen_count else self.expert_count
