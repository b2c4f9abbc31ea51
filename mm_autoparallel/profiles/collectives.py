"""How long a collective takes in a group of ranks that may cross several levels of the network.

Ring algorithms (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"):
an all-gather or reduce-scatter of `size_bytes` (the full tensor) among n ranks moves (n-1)/n · size_bytes past every
rank; an all-reduce is one of each. Latency is that of a short collective, once for every level the group crosses:
that is how the levels state it.

Across levels the slowest one decides: of a group with m ranks inside each node every rank drives its own link, so that
the node's m links share what leaves it, and the rings together run at min(inner, m · outer bandwidth). That is what
NCCL's parallel rings do (NCCL tests, doc/PERFORMANCE.md, "bus bandwidth").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mm_autoparallel.job.cluster import Level


@dataclass(frozen=True)
class Group:
    """A communicator of `num_ranks`. bandwidth_bytes_per_s: of its rings together, past each rank.

    hop_bandwidth_bytes_per_s: of the slowest link between two neighbours alone.
    """

    num_ranks: int
    bandwidth_bytes_per_s: float
    hop_bandwidth_bytes_per_s: float
    latency_ms: float

    def all_gather_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of the gathered tensor. A reduce-scatter of a tensor of that size takes the same."""
        if self.num_ranks == 1 or size_bytes == 0:
            return 0.0
        moved_bytes = size_bytes * (self.num_ranks - 1) / self.num_ranks
        return moved_bytes / self.bandwidth_bytes_per_s * 1e3 + self.latency_ms

    reduce_scatter_ms = all_gather_ms

    def all_reduce_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of the tensor that every rank holds before and after."""
        return self.reduce_scatter_ms(size_bytes) + self.all_gather_ms(size_bytes)

    def pass_on_ms(self, size_bytes: float) -> float:
        """Every rank passes `size_bytes` of its own to the next: one step of ring attention."""
        if self.num_ranks == 1 or size_bytes == 0:
            return 0.0
        return size_bytes / self.hop_bandwidth_bytes_per_s * 1e3 + self.latency_ms


ALONE = Group(1, float("inf"), float("inf"), 0.0)
"""A rank by itself: nothing is communicated."""


def form_group(levels: Sequence[Level], num_ranks: int, stride: int, network_fraction: float) -> Group:
    """The communicator of `num_ranks` ranks that stand `stride` apart, at `network_fraction` of the links' bandwidth.

    `levels`: innermost first, the last one spanning the cluster. Groups that do not divide a level evenly are taken at
    their worst: as many ranks inside as any of them surely has.
    """
    if num_ranks == 1:
        return ALONE
    ring_bytes_per_s = link_bytes_per_s = float("inf")
    latency_ms = 0.0
    inside = 1  # ranks of the group within one group of the level below: each drives its own link
    for level in levels:
        within = max(inside, math.gcd(level.num_devices, num_ranks * stride) // stride)
        if level is levels[-1]:
            within = num_ranks
        if within == inside:
            continue
        num_peers = math.ceil(within / inside)
        ring_bytes_per_s = min(ring_bytes_per_s, inside * level.group_bandwidth_bytes_per_s(num_peers))
        link_bytes_per_s = min(link_bytes_per_s, level.group_bandwidth_bytes_per_s(2))
        latency_ms += level.latency_ms
        inside = within
    return Group(num_ranks, ring_bytes_per_s * network_fraction, link_bytes_per_s * network_fraction, latency_ms)
