"""Slices: how long a strategy is placed at its turn."""

from __future__ import annotations

import math

from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.planner.search.pipeline import Pipeline

#: A strategy gets this long at first, and SLICE_GROWTH times as long once all others have had their turn; the last ones
#: get all that is left. Assumed.
FIRST_SLICE_S, SLICE_GROWTH = 3.0, 3.0
#: Of it, with chunks or a free order: many such strategies, and good plans of each are found early. Assumed.
DEAR_SLICE_FRACTION = 0.3
MOST_PROBING = 1  # times that of a fill tried in between, which helps other levels and settles nothing. Assumed.
LAYOUTS_SLICE_FACTOR = 5.0  # where layers have layouts: what is cut off is listed again from nothing


def next_slice_s(pipeline: Pipeline) -> float:
    """Seconds of its next turn."""
    strategy = pipeline.strategies[0]
    first_s = FIRST_SLICE_S * (LAYOUTS_SLICE_FACTOR if strategy.layouts else 1.0)
    first_s *= DEAR_SLICE_FRACTION if pipeline.has_chunks or strategy.schedule == FREE else 1.0
    return first_s * SLICE_GROWTH ** min(pipeline.num_unfinished, MOST_PROBING if pipeline.is_probing else math.inf)
