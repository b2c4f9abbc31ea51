"""Shaving: what time windows (`propagate`) do not refute at once, they often refute with one window cut.

Where no order lets a forward end in the first half of its window, it ends in the other half, and likewise from the end
(Carlier and Pinson 1994; Martin and Shmoys 1996). All windows are narrowed by each such cut, and where one is empty in
the end, every order takes at least the goal. Forwards of the stages with most work are cut first, those in the middle
of a step before others: there memory makes an order wait, and the first and last ones hardly can.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import FORWARD, NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.propagate import narrow, open_windows
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Parts of a window that are cut, one after the other; windows below such a part of the goal are not.
HALF, QUARTER, LEAST_FRACTION = 0.5, 0.25, 1e-6


class Shaving:
    """The windows of a pipeline with `figures` [P, NUM_FIGURES] below goal_ms, narrowed by and by.

    is_refuted: no order lies within them. is_done: no cut narrows them any more.
    """

    def __init__(self, num_microbatches: int, figures: Floats, goal_ms: float) -> None:
        self._problem = num_microbatches, figures, goal_ms
        self.earliest, self.latest, self._compared = open_windows(*self._problem)
        self.is_refuted = bool(narrow(*self._problem, self.earliest, self.latest, self._compared))
        stages = np.argsort(-figures[:, :NUM_KINDS].sum(axis=1), kind="stable")
        middle = np.argsort(np.abs(np.arange(num_microbatches) - num_microbatches // 2), kind="stable")
        self._forwards = np.array([(s, m) for s in stages for m in middle if figures[s, FORWARD] > 0.0])
        self.is_done = self.is_refuted or not len(self._forwards)
        self._at, self._unmoved = 0, 0

    def go_on(self) -> int:
        """Cut the next forward; how many cuts were tried."""
        stage, microbatch = self._forwards[self._at].tolist()
        windows = self.earliest, self.latest, self._compared
        num_tried, moved, self.is_refuted = cut_forward(*self._problem, stage, microbatch, *windows)
        self._unmoved = 0 if moved else self._unmoved + 1
        self._at = (self._at + 1) % len(self._forwards)
        self.is_done = self.is_refuted or self._unmoved == len(self._forwards)
        return int(num_tried)


@kernel
def cut_forward(
    num_microbatches: int,
    figures: Floats,
    goal_ms: float,
    stage: int,
    microbatch: int,
    earliest: Floats,
    latest: Floats,
    compared: Floats,
) -> tuple[int, bool, bool]:
    """Cut one forward's window at both ends while that is refuted, and narrow all windows by it: how many cuts were
    tried, whether one was refuted, and whether a window is empty now."""
    duration, tried, moved = figures[stage, FORWARD], 0, False
    for at_end in (False, True):
        for part in (HALF, QUARTER):
            while True:
                begin, end = earliest[stage, FORWARD, microbatch], latest[stage, FORWARD, microbatch]
                cut_ms = part * (end - begin - duration)
                if cut_ms < LEAST_FRACTION * goal_ms:
                    break
                first, last = earliest.copy(), latest.copy()
                if at_end:
                    first[stage, FORWARD, microbatch] = end - duration - cut_ms
                else:
                    last[stage, FORWARD, microbatch] = begin + duration + cut_ms
                tried += 1
                if not narrow(num_microbatches, figures, goal_ms, first, last, compared.copy()):
                    break
                moved = True
                if at_end:
                    latest[stage, FORWARD, microbatch] = end - cut_ms
                else:
                    earliest[stage, FORWARD, microbatch] = begin + cut_ms
                if narrow(num_microbatches, figures, goal_ms, earliest, latest, compared):
                    return tried, True, True
    return tried, moved, False
