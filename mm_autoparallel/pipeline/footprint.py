"""Footprint: what the bytes of a block consist of, where a model tells; a problem given as numbers has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from mm_autoparallel.pipeline.dominance import Dominance

SAME, LESS, FILL = Dominance.SAME, Dominance.LESS, Dominance.FILL


@dataclass(frozen=True)
class Footprint:
    """What a block's memory consists of, finer than a placement asks; weights, gradients and optimizer are its static.

    working_bytes: beyond what is kept, while its own backward runs (its forward, where it has none). held_once_bytes:
    name → bytes that its stage holds once, however many blocks ask for it: the largest that any of them asks.
    moment_bytes: the part of optimizer_bytes that the first step makes. host_bytes: on the host.
    """

    weight_bytes: Annotated[float, LESS]
    gradient_bytes: Annotated[float, LESS]
    optimizer_bytes: Annotated[float, LESS]
    working_bytes: Annotated[float, LESS]
    has_backward: Annotated[bool, SAME]
    held_once_bytes: Annotated[tuple[tuple[str, float], ...], LESS] = ()
    moment_bytes: Annotated[float, LESS] = 0.0
    host_bytes: Annotated[float, LESS] = 0.0

    @property
    def static_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Beside:
    """What a stage of a pipeline holds of blocks that are none of its chain's: a part that runs before and after it.

    kept_bytes: activations and outputs that lie there while the pipeline runs.
    """

    weight_bytes: Annotated[float, FILL]
    gradient_bytes: Annotated[float, FILL]
    optimizer_bytes: Annotated[float, FILL]
    kept_bytes: Annotated[float, FILL]

    @property
    def static_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def sum_held_once(footprints: Iterable[Footprint]) -> float:
    """Bytes that one stage with these blocks holds once: of each name the largest."""
    largest: dict[str, float] = {}
    for footprint in footprints:
        for name, size_bytes in footprint.held_once_bytes:
            largest[name] = max(largest.get(name, 0.0), size_bytes)
    return sum(largest.values())
