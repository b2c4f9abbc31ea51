"""StepEndRanking: what came of ranking the best plans by how far apart their steps are, and what is proven of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mm_autoparallel.units import format_percent


@dataclass(frozen=True)
class StepEndRanking:
    """apart_ms: how far apart the answer's steps are. rank_ms: that with the price of its chance to run out of memory,
    by which it was ranked; rank_bound_ms: no plan of the space ranks below. orders: the plans that were ranked, best
    first, by their places where single steps rank them."""

    apart_ms: float
    rank_ms: float
    rank_bound_ms: float
    orders: tuple[int, ...]

    @property
    def gap_fraction(self) -> float:
        return max(0.0, 1.0 - self.rank_bound_ms / self.rank_ms) if self.rank_ms > 0 else 0.0

    def document(self) -> dict[str, Any]:
        """`post_validation` of the result file's objective."""
        return {
            "post_validated_ms": self.apart_ms,
            "rank_ms": self.rank_ms,
            "rank_lower_bound_ms": self.rank_bound_ms,
            "gap_fraction": self.gap_fraction,
            "places_by_step": list(self.orders),
        }

    @property
    def words(self) -> str:
        """A line for a person."""
        place = self.orders[0]
        turned = f"which single steps put in place {place + 1}" if place else "which is first by single steps too"
        return (
            f"ranked by how far apart steps are with post-validation, {len(self.orders)} plans: this one's are "
            f"{self.apart_ms:.2f} ms apart, {turned}; it ranks at {self.rank_ms:.2f} ms, and no plan below "
            f"{self.rank_bound_ms:.2f} ms, the work of its busiest stage (gap {format_percent(self.gap_fraction)})"
        )
