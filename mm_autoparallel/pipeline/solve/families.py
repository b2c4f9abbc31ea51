"""Families: problems of one shape, and which of them cannot be better than another.

Where two problems differ in figures alone, and every time and every byte of one is at least the other's and every limit
at most, then each placement of it fits the other as well and takes no longer there: every time is a length in the
schedule's graph, and every byte is added. So what bounds the other bounds it too, and it need not be looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import is_dataclass
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
    without = () if problem.host_limit_bytes else (Dominance.LESS_ON_HOST,)
    for is_figure, value in _walk(problem, without if with_fill else (*without, Dominance.FILL)):
        if is_figure:
            figures.append(value)
        else:
            shape.append(value)
    return tuple(shape), np.array(figures, dtype=np.float64)


def content_key(shape: Shape, figures: Floats) -> str:
    """The same for two problems exactly if no figure that decides a placement differs."""
    return hashlib.sha256(repr(shape).encode() + figures.tobytes()).hexdigest()


def _walk(noun: Any, without: tuple[Dominance, ...]) -> Iterator[tuple[bool, Any]]:
    """(True, figure) or (False, part of the shape) of each field but some, nested ones included, in their order."""
    kind: Any = type(noun)
    for name, dominance in declared(kind).items():
        if dominance in without:
            continue
        value = getattr(noun, name)
        if dominance is not Dominance.SAME and value is not None and not is_dataclass(value):
            values = value if isinstance(value, tuple) else (value,)
            yield False, len(values)
            sign = -1.0 if dominance is Dominance.MORE else 1.0
            for item in values:
                if isinstance(item, tuple):  # (name, figure)
                    yield from ((False, item[0]), (True, item[1]))
                else:
                    yield True, sign * item
        elif is_dataclass(value):
            yield False, name
            yield from _walk(value, without)
        elif isinstance(value, tuple):
            yield False, len(value)
            for item in value:
                yield from _walk(item, without) if is_dataclass(item) else [(False, item)]
        else:
            yield False, value
