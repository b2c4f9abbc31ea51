"""The on-line form of the balancer: replicas tell each other what they read, agree without a word, and swap samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from mm_autoparallel.samples.sample import Sample

if TYPE_CHECKING:
    from mm_autoparallel.planner.balancer import BatchBalancer

Payload = TypeVar("Payload")


class Exchange(Protocol[Payload]):
    """How replicas meet. rank: this one's number, below the balancer's dp; size: how many there are."""

    rank: int
    size: int

    def gather(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples that every replica gives, by rank."""
        ...

    def swap(self, outgoing: Sequence[Sequence[Payload]], incoming: Sequence[int]) -> list[list[Payload]]:
        """Send outgoing[r] to each replica r, and return what each has sent; incoming: how many that is, by rank."""
        ...


def balanced_stream(
    balancer: BatchBalancer, iterator: Iterable[Sequence[tuple[Sample, Payload]]], exchange: Exchange[Payload]
) -> Iterator[list[Payload]]:
    """See `BatchBalancer.wrap`."""
    for part in iterator:
        gathered = exchange.gather([sample for sample, _ in part])
        ranks = balancer.assign([sample for of_rank in gathered for sample in of_rank]).ranks
        owner = [rank for rank, of_rank in enumerate(gathered) for _ in of_rank]
        first = owner.index(exchange.rank) if exchange.rank in owner else 0
        wanted = [[i for micro_batch in replica for i in micro_batch] for replica in ranks]
        outgoing = [[part[i - first][1] for i in of if owner[i] == exchange.rank] for of in wanted]
        mine = wanted[exchange.rank]
        incoming = [sum(owner[i] == rank for i in mine) for rank in range(exchange.size)]
        arrived = [iter(payloads) for payloads in exchange.swap(outgoing, incoming)]
        held = {i: next(arrived[owner[i]]) for i in mine}
        for micro_batch in ranks[exchange.rank]:
            yield [held.pop(i) for i in micro_batch]
