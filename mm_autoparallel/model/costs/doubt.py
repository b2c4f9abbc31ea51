"""What makes a step less sure than its calibration's interval says: each doubt adds in quadrature, in logarithms.

The figures of all precisions (profiles/assumed.py, MODERN) have an interval that holds where a run states what decides
its step. What it leaves open was worth so much between published runs of one layout that differed in it alone
(Megatron-Bridge's performance pages; assumed from them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mm_autoparallel.model.blocks.chain import Chain, DeltaAttention, Experts, TransformerLayer
from mm_autoparallel.model.job.stacks import StackFacts
from mm_autoparallel.model.profiles.assumed import DEVICES_WITH_ROWS
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.model.profiles.interval import Interval

_HOST_FRACTION = 0.35
"""Of what a host takes for a layer with experts: 8 to 14 ms for forward and backward, by stack."""
_LEAST_HOST_SHARE = 0.05
"""Of a step, from which on it is said to wait for its host."""


@dataclass(frozen=True)
class Doubt:
    """What is not known, in a few words, and how far a step may be off for it alone (nine times of ten)."""

    name: str
    fraction: float


UNSTATED = Doubt("facts not stated", 0.25)
_NO_ROWS = Doubt("no published step of the device", 0.15)
_NO_RATE = Doubt("an operator without a rate", 0.30)


def list_doubts(
    chain: Chain, facts: StackFacts, device_name: str, calibration: Calibration, host_share: float
) -> tuple[Doubt, ...]:
    """Of a step under figures of all precisions; under others their intervals say it all.

    host_share: of a step, what layers take that wait for their host; a calibration that was fitted to a stack's own
    rows knows its host.
    """
    if not calibration.figures.attention_forward_half_count:
        return ()
    layers = [block.structure for block in chain.blocks if isinstance(block.structure, TransformerLayer)]
    found: list[Doubt] = []
    if host_share >= _LEAST_HOST_SHARE and not calibration.calibrated:
        found.append(Doubt("layers wait for their host", _HOST_FRACTION * host_share))
    if any(isinstance(layer.mlp, Experts) for layer in layers) and not (facts.dispatcher and facts.graphs):
        found.append(UNSTATED)
    if device_name not in DEVICES_WITH_ROWS and not calibration.calibrated:
        found.append(_NO_ROWS)
    if any(isinstance(layer.attention, DeltaAttention) for layer in layers):
        found.append(_NO_RATE)
    return tuple(found)


def widen(interval: Interval, doubts: Sequence[Doubt]) -> Interval:
    """`interval` with each doubt added to both of its sides."""
    if not doubts:
        return interval
    added = sum(math.log1p(doubt.fraction) ** 2 for doubt in doubts)
    return Interval(
        low_factor=math.exp(-math.hypot(math.log(interval.low_factor), math.sqrt(added))),
        high_factor=math.exp(math.hypot(math.log(interval.high_factor), math.sqrt(added))),
        source=interval.source,
        widened_by=(*interval.widened_by, *(doubt.name for doubt in doubts)),
    )
