"""steady: one step time out of those that a log tells, without warm-up and outliers, with its spread.

The rule: the second half of the entries is taken for steady. Its median and 1.4826 times the median of its absolute
deviations (a normal error's standard deviation; Rousseeuw & Croux 1993) give a band of three such deviations, at least
_LEAST_BAND_FRACTION of the median, either way. Warm-up is the first entry, which holds compilation and first
allocations, and whatever follows it outside the band; outliers are later entries outside of it (checkpoints, a
straggler). The time is the median of the others, the spread their scaled deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_SCALE = 1.4826
_BAND = 3.0
_LEAST_BAND_FRACTION = 0.02
"""Assumed: what steps of one run differ by while nothing is wrong."""
LEAST_STEPS = 3
"""Entries that must be left. Assumed: fewer show no spread."""
_LARGEST_SPREAD_FRACTION = 0.1
"""Assumed: more would tell a calibration nothing."""
_LEAST_KEPT_FRACTION = 0.5
"""Of the entries after warm-up, that lie in the band. Assumed: else the run never was steady."""


@dataclass(frozen=True)
class Steady:
    """median_ms: of one step. spread_fraction: one standard deviation over it. The numbers are entries of the log."""

    median_ms: float
    spread_fraction: float
    num_kept: int
    num_warmup: int
    num_outliers: int

    @property
    def remark(self) -> str:
        """What a reader of the row should know, in a sentence."""
        dropped = f"{self.num_warmup} of warm-up and {self.num_outliers} outliers dropped"
        return (
            f"median of {self.num_kept} entries, spread {self.spread_fraction * 100:.1f} % (one standard deviation), "
            f"{dropped}"
        )


def find_steady(times_ms: Sequence[float]) -> Steady | str:
    """The steady step of `times_ms`, in the order of the log; why there is none, in words."""
    if len(times_ms) <= LEAST_STEPS:
        return (
            f"it tells {len(times_ms)} step times, and the first is warm-up; at least {LEAST_STEPS + 1} are needed: "
            "let it run longer, or log every step"
        )
    reference = times_ms[len(times_ms) // 2 :]
    centre_ms = median(reference)
    band_ms = max(_BAND * _deviation(reference, centre_ms), _LEAST_BAND_FRACTION * centre_ms)
    inside = [abs(time_ms - centre_ms) <= band_ms for time_ms in times_ms]
    start = next(index for index, is_in in enumerate(inside) if is_in and index)
    kept = [time_ms for time_ms, is_in in zip(times_ms[start:], inside[start:], strict=True) if is_in]
    num_later = len(times_ms) - start
    if len(kept) < LEAST_STEPS or len(kept) < _LEAST_KEPT_FRACTION * num_later:
        return (
            f"only {len(kept)} of the {num_later} step times after warm-up lie within {band_ms:.4g} ms of their median "
            f"{centre_ms:.6g} ms: the run is not steady; let it run longer"
        )
    middle_ms = median(kept)
    spread = _deviation(kept, middle_ms) / middle_ms
    if spread > _LARGEST_SPREAD_FRACTION:
        return f"its step times spread by {spread * 100:.0f} % around {middle_ms:.6g} ms: the run is not steady"
    return Steady(
        median_ms=middle_ms,
        spread_fraction=spread,
        num_kept=len(kept),
        num_warmup=start,
        num_outliers=num_later - len(kept),
    )


def _deviation(times_ms: Sequence[float], centre_ms: float) -> float:
    return _SCALE * median(abs(time_ms - centre_ms) for time_ms in times_ms)
