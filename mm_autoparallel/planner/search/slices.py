"""Slices: how long a strategy is placed at its turn, and all of them may still be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.rough import FRACTIONS, rough_fraction

#: A strategy gets this long at first, and SLICE_GROWTH times as long once all others have had their turn; the last ones
#: get all that is left. Assumed.
FIRST_SLICE_S, SLICE_GROWTH = 3.0, 3.0
#: Of it, with chunks or a free order: many such strategies, and good plans of each are found early. Assumed.
DEAR_SLICE_FRACTION = 0.3
MOST_PROBING = 1  # times that of a fill tried in between, which helps other levels and settles nothing. Assumed.
MOST_TRIMMING = 1  # times that of the search for an emptier plan, which bounds nothing either. Assumed.
PIECE_S = 6.0  # of a fill where bounds say no more. Assumed.
AGAIN_GROWTH = 2.0  # a fill that is placed again has so many times as long. Assumed.
LEVELS = 5.0  # once they may end roughly (search/rough.py), a level has such a part of what is left at once. Assumed.
PROCESSES_WORTH_S = 6.0  # of work that seems left start other processes, which load their solvers for two seconds
LAYOUTS_SLICE_FACTOR = 5.0  # where layers have layouts: what is cut off is listed again from nothing


def next_slice_s(pipeline: Pipeline) -> float:
    """Seconds of its next turn."""
    strategy = pipeline.strategies[0]
    first_s = FIRST_SLICE_S * (LAYOUTS_SLICE_FACTOR if strategy.layouts else 1.0)
    first_s *= DEAR_SLICE_FRACTION if pipeline.has_chunks or strategy.schedule == FREE else 1.0
    if pipeline.raising.is_on:
        return PIECE_S * AGAIN_GROWTH**pipeline.raising.num_placed
    most = MOST_PROBING if pipeline.is_probing else MOST_TRIMMING if pipeline.trimming.problem else math.inf
    most = 0 if pipeline.sounding.is_on else most  # good plans of a fill are found at once, or later turns find them
    return first_s * SLICE_GROWTH ** min(pipeline.num_unfinished, most)


def level_slice_s(slice_s: float, last_s: float, elapsed_s: float, left_s: float) -> float:
    """Seconds of the next turn of a level that would have slice_s, and had last_s before: no more than until less of it
    may do; and where some levels are still to come a part of what is left, but more than before, or it would end where
    it did.
    """
    marks_s = (begin * (elapsed_s + left_s) - elapsed_s for begin in FRACTIONS)
    until_s = min((each for each in marks_s if each > 0.0), default=math.inf)
    if rough_fraction(elapsed_s, left_s):
        until_s = min(until_s, max(left_s / LEVELS, SLICE_GROWTH * last_s))
    return min(slice_s, max(until_s, FIRST_SLICE_S))


def seems_long(pipelines: Sequence[Pipeline], still_open: Sequence[Pipeline]) -> bool:
    """Whether the open ones may take long enough to start other processes, by those of their kind that were placed; one
    alone gains nothing."""
    placeable = [p for p in still_open if p.is_refined and not p.is_waiting]
    left_s = 0.0
    for has_chunks in (False, True):
        placed = [p.solve_s for p in pipelines if p.has_chunks == has_chunks and p.num_slices]
        num_open = sum(p.has_chunks == has_chunks for p in placeable)
        left_s += num_open * sum(placed) / max(len(placed), 1)
    return (left_s if len(placeable) > 1 else 0.0) > PROCESSES_WORTH_S
