"""Tidy: of placements that are equally fast, one that runs no layer in a mode without need.

A mode can be free (traffic that its link hides, recompute on a stage that waits anyway), so the solvers may use more of
it than memory asks for.
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.loads import find_misfits, peak_bytes, peak_host_bytes, sum_loads
from mm_autoparallel.pipeline.simulate.step import simulate

#: Steps this close are equal: sums of the same times in another order.
EQUAL_FRACTION = 1e-12


def drop_needless_modes(segments: Segments, placement: Placement) -> Placement:
    """`placement`, which fits its memory, with as few layers in modes as fit it, where that is no slower: of each
    virtual stage the modes that compute most first, then those that move bytes.
    """
    problem = segments.problem
    boundaries, lanes = segments.boundaries(placement)

    def fits() -> bool:
        loads = sum_loads(problem, segments.placement(boundaries, lanes))
        return not find_misfits(problem, peak_bytes(problem, loads), peak_host_bytes(problem, loads))

    extra_ms = segments.extra_forward_ms[:, -1] + segments.extra_backward_ms[:, -1]
    order = np.lexsort((segments.host_bytes[:, -1], -extra_ms)).tolist()
    for row in lanes:
        for lane in order:
            low, high = 0, row[lane]  # the least count that fits: fewer layers in a mode hold no less
            while low < high:
                row[lane] = (low + high) // 2
                low, high = (low, row[lane]) if fits() else (row[lane] + 1, high)
            row[lane] = high
    tidied = segments.placement(boundaries, lanes)
    as_fast = simulate(problem, tidied).step_ms <= simulate(problem, placement).step_ms * (1.0 + EQUAL_FRACTION)
    return tidied if as_fast and fits() else placement
