"""How others deal the samples of a global batch, written from the descriptions of their rules, to be held against.

All give [replica][micro-batch] → samples. Where a rule knows no cap of tokens or leaves micro-batches unequal in
number, so does its dealing, which is to its advantage.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel import Sample, SampleCost

Dealing = list[list[list[int]]]


@dataclass(frozen=True)
class Batch:
    """A global batch to deal. cost: of a sample, as the balancer has it."""

    samples: Sequence[Sample]
    dp: int
    micro_batches: int
    token_cap: int
    cost: SampleCost

    @property
    def tokens(self) -> list[int]:
        return [sample.num_tokens() for sample in self.samples]

    @property
    def work_ms(self) -> list[float]:
        """Encoder and decoder of each sample together."""
        return [self.cost.encoder_ms(sample) + self.cost.decoder_ms(sample) for sample in self.samples]


def arrival_order(batch: Batch) -> Dealing:
    """As samples come, equally many to each micro-batch."""
    parts = np.array_split(np.arange(len(batch.samples)), batch.dp * batch.micro_batches)
    return _by_replica([part.tolist() for part in parts], batch.micro_batches)


def length_buckets(batch: Batch) -> Dealing:
    """MindSpeed-MM's BucketBatchSampler: samples of like length together, micro-batches in turn to the replicas."""
    order = np.argsort(batch.tokens, kind="stable")
    parts = [part.tolist() for part in np.array_split(order, batch.dp * batch.micro_batches)]
    return [parts[r :: batch.dp] for r in range(batch.dp)]


def megatron_dp_balanced(batch: Batch) -> Dealing:
    """Megatron-LM's dp_balanced packing: in original order up to the cap, packs in turn to the replicas, and packs are
    parted until all replicas have as many. It knows no cost."""
    packs: list[list[int]] = []
    held = 0
    for i, tokens in enumerate(batch.tokens):
        if not packs or held + tokens > batch.token_cap:
            packs.append([])
            held = 0
        packs[-1].append(i)
        held += tokens
    while len(packs) % batch.dp:
        at = max(range(len(packs)), key=lambda p: len(packs[p]))
        half = len(packs[at]) // 2
        packs[at : at + 1] = [packs[at][:half], packs[at][half:]]
    return [packs[r :: batch.dp] for r in range(batch.dp)]


def mindspeed_greedy(batch: Batch) -> Dealing:
    """MindSpeed-MM's post_global_balancing_greedy_without_pad: the images' squared lengths alone, longest first, each
    sample to the replica with least; there as they came, equally many to each micro-batch."""
    squares = [float(sum(patches**2 for patches in sample.patches)) for sample in batch.samples]
    room = -(-len(squares) // batch.dp)
    replicas: list[list[int]] = [[] for _ in range(batch.dp)]
    held = [0.0] * batch.dp
    for i in sorted(range(len(squares)), key=lambda i: (-squares[i], i)):
        r = min((r for r in range(batch.dp) if len(replicas[r]) < room), key=lambda r: (held[r], r))
        replicas[r].append(i)
        held[r] += squares[i]
    return [
        [part.tolist() for part in np.array_split(np.array(sorted(mine), dtype=int), batch.micro_batches)]
        for mine in replicas
    ]


def longest_first(batch: Batch) -> Dealing:
    """LPT (Graham 1969) of encoder and decoder together, into all micro-batches."""
    work_ms = batch.work_ms
    bins: list[list[int]] = [[] for _ in range(batch.dp * batch.micro_batches)]
    queue = [(0.0, b) for b in range(len(bins))]
    for i in sorted(range(len(work_ms)), key=lambda i: (-work_ms[i], i)):
        held_ms, b = heapq.heappop(queue)
        bins[b].append(i)
        heapq.heappush(queue, (held_ms + work_ms[i], b))
    return _by_replica(bins, batch.micro_batches)


def karmarkar_karp(batch: Batch) -> Dealing:
    """The largest differencing method (Karmarkar and Karp 1982) in as many sets as there are micro-batches, as verl and
    VeOmni divide by length; of encoder and decoder together."""
    count = batch.dp * batch.micro_batches
    queue: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, work_ms in enumerate(batch.work_ms):
        heapq.heappush(queue, (-work_ms, i, [(work_ms, [i])] + [(0.0, [])] * (count - 1)))
    number = len(queue)
    while len(queue) > 1:
        _, _, first = heapq.heappop(queue)
        _, _, second = heapq.heappop(queue)
        sums = [(a_ms + b_ms, a + b) for (a_ms, a), (b_ms, b) in zip(first, reversed(second), strict=True)]
        sums.sort(key=lambda part: -part[0])
        heapq.heappush(queue, (-(sums[0][0] - sums[-1][0]), number, sums))
        number += 1
    return _by_replica([held for _, held in queue[0][2]], batch.micro_batches)


def _by_replica(bins: list[list[int]], micro_batches: int) -> Dealing:
    return [bins[first : first + micro_batches] for first in range(0, len(bins), micro_batches)]


RULES: dict[str, Callable[[Batch], Dealing]] = {
    "arrival order": arrival_order,
    "length buckets": length_buckets,
    "Megatron dp_balanced": megatron_dp_balanced,
    "MindSpeed-MM greedy": mindspeed_greedy,
    "LPT": longest_first,
    "Karmarkar-Karp": karmarkar_karp,
}
