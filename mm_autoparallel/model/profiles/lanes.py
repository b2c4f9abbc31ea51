"""Lanes: how far traffic and the computation beside it slow each other down, by what the traffic is for.

While both run, each takes `slowdown factor` times as long as alone. So a of the one and b of the other, begun at once,
take max(a, b) + (factor − 1) · min(a, b): with 1 the longer hides the shorter whole, with 2 they take as long as one
after the other, and above 2 longer, so that a search leaves such an overlap. What the longer hides of the shorter is
the part 2 − factor, the `hidden_fraction` of profiles and calibrations (Galvatron's overlap_coe is the factor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.profiles.figures import Figures
from mm_autoparallel.model.profiles.network import NetworkProfile, Overlap


@dataclass(frozen=True)
class Slowdown:
    """Of one lane. source: `measured`, as the device says, or where a calibration's figure is from."""

    factor: float
    source: str

    @property
    def hidden_fraction(self) -> float:
        """The part of the shorter that the longer hides; below 0 where both at once take longer than in turn."""
        return 2.0 - self.factor


ASSUMED = Slowdown(1.0, "assumed")
"""Of traffic that nobody measured: it slows nothing."""


@dataclass(frozen=True)
class Lanes:
    """Of one job. data: gradients and weights of replicas; shards: those that ZeRO 2 and 3 move in every micro-batch.
    tensor: of tensor parallel ranks beside whole products; pieces: the same beside products that are cut for it.
    context: keys and values on their ring. experts: tokens on their way to experts and back.
    """

    data: Slowdown = ASSUMED
    shards: Slowdown = ASSUMED
    tensor: Slowdown = ASSUMED
    pieces: Slowdown = ASSUMED
    context: Slowdown = ASSUMED
    experts: Slowdown = ASSUMED


UNMEASURED = Lanes()
TRAFFIC = {
    "data": "traffic of replicas",
    "tensor": "traffic of tensor parallel ranks",
    "context": "keys and values that go round",
    "experts": "tokens on their way to experts",
}
"""What traffic of a lane is, in words."""


def find_lanes(
    device: Device, figures: Figures, sources: Mapping[str, str], network: NetworkProfile | None, inner: str
) -> Lanes:
    """What was measured, else what the device says, else what its calibration has. sources: of `figures`. inner: the
    name of the innermost level, of tensor parallel ranks.

    A stack that sums one after the other (hidden_fraction 0) does so however little both would slow each other down.
    """
    overlaps = network.overlaps if network else ()
    in_node = [one for one in overlaps if one.level == inner]
    data = _known(_widest(overlaps, "all_reduce"), device, "data")
    tensor = _known(_widest(in_node or overlaps, "all_reduce"), device, "tensor")
    experts = _known(_widest(overlaps, "all_to_all"), device, "experts")
    of_stack = Slowdown(2.0 - figures.hidden_fraction, sources.get("hidden_fraction", "assumed"))
    of_shards = Slowdown(2.0 - figures.shard_hidden_fraction, sources.get("shard_hidden_fraction", "assumed"))
    return Lanes(
        data=data or ASSUMED,
        shards=data or of_shards,
        tensor=(tensor or of_stack) if figures.hidden_fraction else of_stack,
        pieces=tensor or ASSUMED,
        context=tensor or of_stack,
        experts=experts or of_stack,
    )


def _widest(overlaps: tuple[Overlap, ...] | list[Overlap], operation: str) -> Overlap | None:
    """Of several measurements that of this operation, else of any, among most ranks."""
    asked = [one for one in overlaps if one.operation == operation] or overlaps
    return max(asked, key=lambda one: one.num_ranks, default=None)


def _known(measured: Overlap | None, device: Device, lane: Literal["data", "tensor", "experts"]) -> Slowdown | None:
    if measured:
        return Slowdown(2.0 - measured.hidden_fraction, "measured")
    stated = device.slowdown_factors.get(lane)
    return None if stated is None else Slowdown(stated, device.sources.get("slowdown_factors", "job file"))
