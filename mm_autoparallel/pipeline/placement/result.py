"""PlacementResult: what is known of a problem once `place` ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.placement.relaxation.duals import PriceProof, Proof
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.step import Timeline

#: A gap this small counts as none: what quantised times allow (formats: `optimal` is a gap of at most 1e-5).
OPTIMAL_GAP_FRACTION = 1e-5

Status = Literal["optimal", "feasible", "infeasible", "dominated", "unknown"]


class Known(NamedTuple):
    """What is known of a problem before it is placed. cuts: paths of its graph; lower_ms: no placement takes less.
    seed: free orders are looked for by other draws than with another one."""

    cuts: Sequence[Cut] = ()
    lower_ms: float = 0.0
    seed: int = 0


NOTHING_KNOWN = Known()


@dataclass(frozen=True, eq=False)
class PlacementResult:
    """What is known of a problem.

    status: optimal (gap at most 1e-5, of a free order 1e-6), feasible (stopped early), infeasible (proven), unknown
    (stopped before anything was found), or, with a cutoff, dominated: no placement is below it. step_ms and peaks come
    from `simulate`. lower_bound_ms holds for every placement. num_cuts: path cuts of the master; num_bounds: bounds of
    the tree; both are effort, not quality. reason: for infeasible, the constraint that binds and the smallest
    relaxation; else why the search ended before its time. proof: what shows the bound; cuts and prices are what checks
    it, with the proofs of these names.
    """

    status: Status
    placement: Placement | None
    timeline: Timeline | None
    step_ms: float
    lower_bound_ms: float
    solve_s: float
    num_cuts: int = 0
    num_bounds: int = 0
    reason: str = ""
    overflow_bytes: float = 0.0
    proof: Proof = "none"
    cuts: tuple[Cut, ...] = field(default=())
    prices: PriceProof | None = None

    @property
    def gap_fraction(self) -> float:
        """How far the bound is below the step, 0 to 1."""
        if self.placement is None:
            return 0.0 if self.status == "infeasible" else 1.0
        return max(0.0, 1.0 - self.lower_bound_ms / self.step_ms) if self.step_ms > 0.0 else 0.0

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        return tuple(float(b) for b in self.timeline.peak_memory_bytes) if self.timeline else ()

    @property
    def peak_host_bytes(self) -> tuple[float, ...]:
        return tuple(float(b) for b in self.timeline.peak_host_bytes) if self.timeline else ()


def infeasible_result(reason: str, overflow_bytes: float = 0.0) -> PlacementResult:
    """Of a problem that no placement keeps within its limits, for `reason`."""
    return PlacementResult("infeasible", None, None, np.inf, np.inf, 0.0, reason=reason, overflow_bytes=overflow_bytes)
