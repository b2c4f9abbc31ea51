"""Families: problems of one shape, and which of them cannot be better than another.

Where two problems differ in figures alone, and every time and every byte of one is at least the other's and every limit
at most, then each placement of it fits the other as well and takes no longer there: every time is a length in the
schedule's graph, and every byte is added. So what bounds the other bounds it too, and it need not be looked at.
"""

from __future__ import annotations

import hashlib
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.dominance import Dominance, declared
from mm_autoparallel.pipeline.problem import Problem

Floats = NDArray[np.float64]
Shape = tuple[object, ...]


class _Family:
    """Members by number; `rows` holds the figures of each, with room for more."""

    def __init__(self, num_figures: int) -> None:
        self.members: list[int] = []
        self.rows: Floats = np.empty((8, num_figures))

    def add(self, number: int, figures: Floats) -> None:
        if len(self.members) == len(self.rows):
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        self.rows[len(self.members)] = figures
        self.members.append(number)


class Families:
    """All problems seen so far, by shape. Their figures are kept, the problems are not."""

    def __init__(self) -> None:
        self._families: dict[Shape, _Family] = {}

    def add(self, number: int, shape: Shape, figures: Floats) -> tuple[list[int], list[int]]:
        """Those that `number` cannot beat, and those that cannot beat it; of equals, the one added first counts.

        shape, figures: as `figures_of` gives them.
        """
        family = self._families.setdefault(shape, _Family(len(figures)))
        known = family.rows[: len(family.members)]
        not_worse = np.all(known <= figures, axis=1)
        worse = np.all(known >= figures, axis=1) & ~not_worse
        above = [family.members[i] for i in np.flatnonzero(not_worse)]
        below = [family.members[i] for i in np.flatnonzero(worse)]
        family.add(number, figures)
        return above, below


def figures_of(problem: Problem, with_fill: bool = False) -> tuple[Shape, Floats]:
    """What must be equal for two problems to be compared, and the figures of which less is never worse.

    with_fill: with those that only a device's fill is counted from, which counts where plans are ranked by their chance
    to fit too.
    """
    shape: list[object] = []
    figures: list[float] = []
    without = frozenset() if problem.host_limit_bytes else frozenset({Dominance.LESS_ON_HOST})
    _gather(problem, without if with_fill else without | {Dominance.FILL}, shape, figures)
    return tuple(shape), np.array(figures, dtype=np.float64)


def content_key(shape: Shape, figures: Floats) -> str:
    """The same for two problems exactly if no figure that decides a placement differs."""
    return hashlib.sha256(repr(shape).encode() + figures.tobytes()).hexdigest()


def _gather(noun: Any, without: frozenset[Dominance], shape: list[object], figures: list[float]) -> None:
    """Append the figures, and the parts of the shape, of each field but some, nested ones included, in their order."""
    for name, sign in _compared(noun.__class__, without):
        value = getattr(noun, name)
        if _is_noun(value.__class__):
            shape.append(name)
            _gather(value, without, shape, figures)
        elif sign and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            shape.append(len(values))
            for item in values:
                if isinstance(item, tuple):  # (name, figure)
                    shape.append(item[0])
                    figures.append(item[1])
                else:
                    figures.append(sign * item)
        elif isinstance(value, tuple):
            shape.append(len(value))
            for item in value:
                if _is_noun(item.__class__):
                    _gather(item, without, shape, figures)
                else:
                    shape.append(item)
        else:
            shape.append(value)


@cache
def _compared(kind: Any, without: frozenset[Dominance]) -> tuple[tuple[str, float], ...]:
    """Fields that count, each with the sign that makes less of it no worse; 0 for what must be equal."""
    signs = {Dominance.SAME: 0.0, Dominance.MORE: -1.0}
    return tuple((name, signs.get(said, 1.0)) for name, said in declared(kind).items() if said not in without)


@cache
def _is_noun(kind: Any) -> bool:
    return is_dataclass(kind)
