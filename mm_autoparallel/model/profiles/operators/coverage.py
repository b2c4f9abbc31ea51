"""Coverage: what the times of a configuration's operators stand on: measured, regressed between measured, analytic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Coverage:
    """What the times of traced operators stand on: calls and milliseconds of each source. Collectives are none of it.

    Milliseconds of analytic operators are analytic ones, so that coverage is a part of the predicted time.
    """

    num_measured: int = 0
    num_regressed: int = 0
    num_analytic: int = 0
    measured_ms: float = 0.0
    regressed_ms: float = 0.0
    analytic_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Of all operators."""
        return self.measured_ms + self.regressed_ms + self.analytic_ms

    @property
    def coverage_fraction(self) -> float:
        """Of the predicted time, what was found as it stands; of no time all."""
        return self.measured_ms / self.total_ms if self.total_ms else 1.0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __rmul__(self, count: int) -> Coverage:
        return Coverage(*(count * getattr(self, name) for name in self.__dataclass_fields__))

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        total_ms = self.total_ms or 1.0
        return {
            "hits": self.num_measured,
            "regressed": self.num_regressed,
            "misses": self.num_analytic,
            "coverage": round(self.coverage_fraction, 6),
            "regressed_share": round(self.regressed_ms / total_ms, 6),
            "analytic_share": round(self.analytic_ms / total_ms, 6),
        }
