"""Prices: what a tree over parts of layers leaves behind, so that anybody can bound its placements again.

Any prices make a bound (Lagrange): the mean of some paths, less the price of all room, with every block where it is
cheapest. How good it is depends on the prices, whether it holds does not, so nobody need trust who found them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut

Proof = Literal["cuts", "tree", "mixtures", "prices", "orders", "none"]
"""What a bound was shown by: paths and a solver, a search, means of paths, prices; nothing."""


@dataclass(frozen=True, eq=False)
class Prices:
    """Of one linear program; what is not named has none.

    path_fraction: path → its weight in the mean, in all 1. moved_count: pass, of [2·K·C] → how much of the mean's count
    of it is for what it moves to or from the host, not for what it computes. memory_ms: state of a stage's memory → ms
    a byte; the rows of `TaskGraph.in_flight` of all stages, one after another, then as many again of their hosts.
    layers_ms: by virtual stage, of layers of any kind; stages_ms, virtual_stages_ms: of the main block's counts, by
    stage and virtual stage; ms for one, above 0 where there must not be fewer and below 0 where there must not be more.
    """

    path_fraction: dict[int, float]
    moved_count: dict[int, float]
    memory_ms: dict[int, float]
    layers_ms: dict[int, float]
    stages_ms: dict[int, float]
    virtual_stages_ms: dict[int, float]


@dataclass(frozen=True)
class Division:
    """A part made of two others: stage `at`, or virtual stage, holds fewer than `least` of the main block, or not."""

    of_virtual_stage: bool
    at: int
    least: int
    fewer: int
    more: int


@dataclass(frozen=True, eq=False)
class PriceProof:
    """parts: all placements first, then parts of them: divided further, bounded by those of `prices`, or None where
    nothing is known (no placement below the bound has such counts). main: the chain block whose counts divide. cuts:
    the paths."""

    main: int
    cuts: tuple[Cut, ...]
    prices: tuple[Prices, ...]
    parts: tuple[Division | int | None, ...]
