"""Ways to fill the stages of a placement that hold what is in flight, and some more where that is asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    MOST_HELD,
    MOST_IN_FLIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def rows_with_room(table: Table, row_ms: Floats, boundaries: Ints, period_ms: float) -> Ints:
    """[P] the table's rows of least bound that hold what is in flight where a micro-batch begins every period_ms and
    never waits; where a stage has none, the row that holds most. row_ms: [R] the bounds of options. boundaries: [P + 1]
    of a placement for each stage of which the table has rows.

    A stage's micro-batch is in flight from its forward through all stages behind and back to the end of its gradient
    of inputs, so there are as many as periods in that time; and held until its gradient of weights has run.
    """
    rows, turn_ms = [], 0.0
    for s in range(len(boundaries) - 2, -1, -1):
        stretch = s, boundaries[s], boundaries[s + 1]
        first, count = int(table.first[stretch]), int(table.count[stretch])
        of = table.figures[first : first + count]
        hops_ms = of[:, HOP_FORWARD_MS] + of[:, HOP_BACKWARD_MS] if s < len(boundaries) - 2 else np.zeros(count)
        passed_ms = of[:, FORWARD_MS] + hops_ms + turn_ms + of[:, INPUT_MS]
        fits = (passed_ms <= of[:, MOST_IN_FLIGHT] * period_ms) & (
            passed_ms + of[:, WEIGHT_MS] <= of[:, MOST_HELD] * period_ms
        )
        ms = np.where(fits, row_ms[table.option[first : first + count]], np.inf)
        best = int(np.argmin(ms)) if fits.any() else int(np.argmax(of[:, MOST_IN_FLIGHT]))
        rows.append(first + best)
        turn_ms = float(passed_ms[best])
    return np.array(rows[::-1], dtype=np.int64)
