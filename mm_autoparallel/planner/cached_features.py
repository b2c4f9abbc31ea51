"""Cached features: what reading them asks of storage, as a sentence of a plan that has such a layout."""

from __future__ import annotations

from collections.abc import Iterator

from mm_autoparallel.model.costs.away import handed_on_bytes
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.units import format_bytes


def describe_cached(known: CostModel, strategy: Strategy, step_ms: float) -> Iterator[str]:
    """Of each module whose features are read. step_ms: with whatever reading takes hidden behind the step."""
    batch = known.job.workload.global_batch_size
    for one in strategy.arrangement.each if strategy.arrangement else ():
        if one.is_cached:
            sample_bytes = handed_on_bytes(known, strategy.with_only(one)) / strategy.mbs
            each_s = format_bytes(batch * sample_bytes / step_ms * 1e3)
            yield (
                f"features of {' and '.join(one.encoder.parts)} are read in every step, {format_bytes(sample_bytes)} a "
                f"sample: storage must give {each_s} a second to all {strategy.of_decoder().dp} replicas together, or "
                f"the step waits; those of a thousand samples take {format_bytes(1e3 * sample_bytes)}, and every epoch "
                "must show the encoder the same inputs, not augmented ones"
            )
