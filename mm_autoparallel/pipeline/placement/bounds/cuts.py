"""Cuts: all ways to cut a decoder's chain with encoders beside it, and what none of them goes below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import Look, least_step
from mm_autoparallel.pipeline.placement.bounds.kept_paths import Beside, can_take, least_rest, open_stretches
from mm_autoparallel.pipeline.placement.bounds.one_chunk import MAX_INTERVALS, OneChunk, least_loads, prepare
from mm_autoparallel.pipeline.placement.segments import Segments

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Those of a decoder with one chunk a stage, whose micro-batches are equal, whatever the order of encoders' passes.

    loads_ms, rest_ms: see `least_loads` and `least_rest`.
    """

    of: OneChunk
    loads_ms: Floats
    rest_ms: Floats

    @classmethod
    def of_segments(cls, segments: Segments, beside: Beside, look: Look) -> Cuts | None:
        """None where intervals are too many. Raises what `look` does."""
        if segments.problem.num_stages * (segments.num_segments + 1) ** 2 > MAX_INTERVALS:
            return None
        of = prepare(segments, 1.0, 1.0, beside)
        loads = least_loads(of, look)
        return cls(of, loads, least_rest(of, loads))

    def bound(self, floor_ms: float, look: Look) -> float:
        """A step, at least `floor_ms`, that none goes below; infinite where none fits. Raises what `look` does."""
        if np.isinf(self.rest_ms[0, 0]):
            return np.inf

        def is_possible(step_ms: float) -> bool:
            return can_take(self.of, self.loads_ms, self.rest_ms, step_ms)

        return least_step(floor_ms, is_possible, look).step_ms

    def lightest(self, step_ms: float) -> list[int] | None:
        """Boundaries in segments [P + 1] of the least work, of stages that `step_ms` leaves open; None where there are
        none."""
        is_open = open_stretches(self.of, self.loads_ms, self.rest_ms, step_ms)
        if is_open is None:
            return None
        loads = np.where(is_open, self.loads_ms, np.inf)
        least, through = np.where(np.arange(loads.shape[1]) == 0, 0.0, np.inf), []
        for of_stage in loads:
            total = least[:, None] + of_stage
            through.append(total.argmin(axis=0))
            least = total.min(axis=0)
        if np.isinf(least[-1]):
            return None
        boundaries = [loads.shape[1] - 1]
        for begins in reversed(through):
            boundaries.append(int(begins[boundaries[-1]]))
        return boundaries[::-1]
