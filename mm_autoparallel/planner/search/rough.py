"""Rough: how close to the best levels of memory end as time runs out.

Chances to run out of memory make a pipeline many levels (search/caution.py). What a level shows leaves out what is
fuller, and the further below the best that may end, the more it leaves out. Where that ends a search before its limit,
what was left out so and is further below the best than the first of these fractions is looked at once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mm_autoparallel.planner.search.level import Level

if TYPE_CHECKING:
    from mm_autoparallel.planner.search.agenda import Agenda

#: Once such a part of the time limit is gone, levels end this close to the best. Assumed.
FRACTIONS = {0.4: 0.004, 0.7: 0.006, 0.9: 0.008}
#: No further from it than the first, before a level had so many turns. Assumed.
MOST_SLICES = 2


class LeftOut(NamedTuple):
    """A pipeline's level as it was before it ended roughly: these are the pipeline's then."""

    fill_fraction: float
    within_ms: float
    elsewhere_ms: float


class Roughness:
    """Of one search. most: how rough it may still be."""

    def __init__(self) -> None:
        self.most = max(FRACTIONS.values())

    def fraction(self, elapsed_s: float, left_s: float) -> float:
        """As rough_fraction, no more than it may be."""
        return min(self.most, rough_fraction(elapsed_s, left_s))

    def begin_again(self, agenda: Agenda, cutoff_ms: float) -> bool:
        """Open what may hold what is further below the cutoff than the first of these fractions, and be no rougher than
        that from now on; whether there was any. Once in a search."""
        least = min(FRACTIONS.values())
        worth_ms = (1.0 - least) * cutoff_ms if self.most > least else 0.0
        rough = [p for p in agenda.pipelines if p.left_out and not (p.infeasible or p.twin) and p.bound_ms < worth_ms]
        for pipeline in rough:
            assert pipeline.left_out is not None
            pipeline.floors.raise_to(pipeline.level.fill_fraction, pipeline.within_ms)
            fill, pipeline.within_ms, pipeline.elsewhere_ms = pipeline.left_out
            pipeline.level = Level(fill, known_cuts=pipeline.level.list_cuts())
            pipeline.left_out, pipeline.cutoff_ms = None, None
            agenda.push(pipeline)
        self.most = least if rough else self.most
        return bool(rough)


def rough_fraction(elapsed_s: float, left_s: float) -> float:
    """How close below the best may be left out what no one bound rules out; left_s: until the time limit."""
    part = elapsed_s / (elapsed_s + left_s)
    return max((fraction for begin, fraction in FRACTIONS.items() if part > begin), default=0.0)


def of_level(fraction: float, num_slices: int) -> float:
    """The same of a level that had so many turns: one that gets on may still end closer."""
    return fraction if num_slices >= MOST_SLICES else min(fraction, min(FRACTIONS.values()))
