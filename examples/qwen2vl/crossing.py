"""Crossing: features of an encoder that has ranks and replicas of its own, on their way to the decoder's, and back.

A micro-batch of all replicas (in phases the whole batch) is cut into equal runs of samples over the encoder's replicas,
and into others over the decoder's. Each pair of replicas whose runs overlap exchanges what both have: M:N resharding.
Every tensor parallel rank of a replica needs it whole, and takes it from one of the other side's, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Route = tuple[int, slice]
"""A rank, and the rows that are sent to it or taken from it."""


@dataclass(frozen=True)
class Features:
    """What one sample's images become. rows: image tokens, each `width` numbers of type `dtype`."""

    rows: int
    width: int
    dtype: torch.dtype
    device: torch.device


class Crossing:
    """This rank's part of the exchange; every rank makes one.

    encoders, decoders: (replicas, tensor parallel ranks), the ranks of the encoder's last stage and of the decoder's
    first. num_samples: of one micro-batch of all replicas.
    """

    def __init__(self, encoders: Tensor, decoders: Tensor, num_samples: int, features: Features) -> None:
        self._features, me = features, dist.get_rank()
        forward = _routes(encoders.tolist(), decoders.tolist(), num_samples, features.rows)
        backward = _routes(decoders.tolist(), encoders.tolist(), num_samples, features.rows)
        self._ways = [_Way(each, me, dist.new_group()) for each in (forward, backward)]  # lanes cannot block each other
        # The decoder's replicas average their gradients, and so do the encoder's, which are others in number.
        self._scale_fraction = len(encoders) / len(decoders)

    def forward(self, features: Tensor | None) -> Tensor | None:
        """Send this rank's features; those that it takes, None where it takes none."""
        return self._ways[0].exchange(features, self._features)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """The same of gradients, the other way. They come scaled as the encoder's replicas average them."""
        arrived = self._ways[1].exchange(gradient, self._features)
        return None if arrived is None else arrived.mul_(self._scale_fraction)

    def arrive(self) -> Tensor:
        """A decoder's next features, whose gradient returns by itself."""

        def take() -> Tensor:
            features = self.forward(None)
            assert features is not None, "this rank takes no features"
            return features

        return arrive(take, self.backward)

    def depart(self, features: Tensor) -> Tensor:
        """Send features from an encoder on ranks of its own: a loss of 0 whose backward waits for their gradient."""
        return _Depart.apply(features, self)

    def finish(self) -> None:
        """Return when all that was sent has left."""
        for way in self._ways:
            way.finish()


def arrive(take: Callable[[], Tensor], give: Callable[[Tensor], Any]) -> Tensor:
    """What `take` returns, as a tensor whose gradient is given to `give`."""
    return _Arrive.apply(torch.empty((), requires_grad=True), take, give)


def _routes(sources: list[list[int]], targets: list[list[int]], num_samples: int, rows: int) -> list[tuple[Any, ...]]:
    """(from, its rows, to, its rows) of every message; sources, targets: [replica][tensor parallel rank]."""
    sent, taken = num_samples // len(sources), num_samples // len(targets)
    routes = []
    for i, senders in enumerate(sources):
        for j, takers in enumerate(targets):
            first, end = max(i * sent, j * taken), min((i + 1) * sent, (j + 1) * taken)
            if first < end:
                out, into = (slice((first - k) * rows, (end - k) * rows) for k in (i * sent, j * taken))
                routes += [(senders[t % len(senders)], out, taker, into) for t, taker in enumerate(takers)]
    return routes


class _Way:
    """One direction of the exchange, as this rank sees it."""

    def __init__(self, routes: Sequence[tuple[Any, ...]], me: int, lane: dist.ProcessGroup) -> None:
        self._lane = lane
        self._sends: list[Route] = [(to, out) for source, out, to, _ in routes if source == me != to]
        self._takes: list[Route] = [(source, into) for source, _, to, into in routes if to == me != source]
        self._kept = [(out, into) for source, out, to, into in routes if source == to == me]
        self._num_rows = max((into.stop for _, _, to, into in routes if to == me), default=0)
        self._leaving: list[tuple[dist.Work, Any]] = []

    def exchange(self, values: Tensor | None, features: Features) -> Tensor | None:
        """Send and take all of one micro-batch. Who sends alone does not wait, and goes on with the next."""
        arrived = None
        if self._num_rows:
            arrived = torch.empty(self._num_rows, features.width, dtype=features.dtype, device=features.device)
        sent = [(peer, values[rows].contiguous()) for peer, rows in self._sends] if values is not None else []
        taken = [(peer, arrived[rows]) for peer, rows in self._takes] if arrived is not None else []
        moves = [dist.P2POp(dist.irecv, part, peer, self._lane) for peer, part in taken]
        moves += [dist.P2POp(dist.isend, part, peer, self._lane) for peer, part in sent]
        for work in dist.batch_isend_irecv(moves) if moves else []:
            if taken:
                work.wait()
            else:
                self._leaving.append((work, sent))
        for out, into in self._kept if values is not None and arrived is not None else []:
            arrived[into] = values[out]
        return arrived

    def finish(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


class _Arrive(torch.autograd.Function):
    """Takes features forward, and gives their gradient backward. Its first input is a number that needs a gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, take: Callable[[], Tensor], give: Callable[[Tensor], Any]) -> Tensor:
        ctx.give = give
        return take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.give(gradient)
        return None, None, None


class _Depart(torch.autograd.Function):
    """Sends features forward, and takes their gradient backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        crossing.forward(features)
        return features.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.crossing.backward(None), None
