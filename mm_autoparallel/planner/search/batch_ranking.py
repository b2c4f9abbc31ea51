"""BatchRanking: what came of ranking the best plans by their steps over drawn batches, and what is proven of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mm_autoparallel.model.job.job import BatchObjective

_WHAT = {"mean": "the mean", "p95": "p95", "cvar": "the worst 5 %"}


@dataclass(frozen=True)
class BatchRanking:
    """rank_ms: of the answer, what it was ranked by, with the price of its chance to run out of memory. bound_ms: no
    plan of the space has a mean over batches, or a cvar, that ranks below; None for p95, of which nothing is proven.
    orders: the plans that were played, best first, by their places where mean samples rank them. num_ruled_out:
    strategies of which no plan can win, by Jensen's bound or because none fits; num_open: all others. Of these the
    plans that were found were played, and their other placements are not ruled out.
    """

    objective: BatchObjective
    rank_ms: float
    bound_ms: float | None
    orders: tuple[int, ...]
    num_ruled_out: int
    num_open: int

    def document(self) -> dict[str, Any]:
        """`ranking` of the result file's step_over_batches."""
        return {
            "objective": self.objective,
            "rank_ms": self.rank_ms,
            "rank_lower_bound_ms": self.bound_ms,
            "places_by_mean_samples": list(self.orders),
            "strategies_ruled_out": self.num_ruled_out,
            "strategies_open": self.num_open,
        }

    @property
    def words(self) -> str:
        """A line for a person."""
        place = self.orders[0]
        turned = f"which mean samples put in place {place + 1}" if place else "which is first by mean samples too"
        head = (
            f"ranked by {_WHAT[self.objective]} of steps over drawn batches, {len(self.orders)} plans played: this one"
        )
        if self.bound_ms is None:
            return f"{head}, {turned}; of p95 nothing is proven, the bound is of the step of mean samples"
        return (
            f"{head} at {self.rank_ms:.2f} ms, {turned}; no plan is below {self.bound_ms:.2f} ms (Jensen), "
            f"{self.num_ruled_out} strategies cannot win, of {self.num_open} other placements could"
        )
