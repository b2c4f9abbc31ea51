"""OperatorTimes: what a base says of traced operators on one device: measured, regressed, or nothing.

The order is the same for each: the very form, else a regression between timed ones of its family inside what was
measured, else nothing, and the analytic time stands. A time of another device or of other versions is never given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_there
from mm_autoparallel.model.profiles.operators.base import SUFFIX, OperatorBase
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.model.profiles.operators.platform import Platform
from mm_autoparallel.model.profiles.operators.regression import regress_us

Answer = Literal["measured", "regressed"]
Answered = tuple[float, Answer]
"""µs, and where they are from."""

WINDOW_FACTOR = 16
"""Assumed: neighbours of a regression move at least and at most so many times fewer or more bytes."""


@dataclass
class OperatorTimes:
    """The times of one platform of an open base. place: its number there."""

    base: OperatorBase
    place: int
    platform: Platform
    _found: dict[bytes, Answered | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, base: OperatorBase, device: str, software: Mapping[str, str]) -> OperatorTimes | None:
        """The times in `base` that hold for `device` and these versions, those measured last; None without any."""
        platforms = base.list_platforms().items()
        fitting = ((place, platform) for place, platform in platforms if platform.holds_for(device, software))
        return next((cls(base, place, platform) for place, platform in fitting), None)

    def find_us(self, form: OperatorForm) -> Answered | None:
        """The time of a form in µs and where it is from; None where there is none."""
        if form.digest not in self._found:
            self._found[form.digest] = self._look_up(form)
        return self._found[form.digest]

    def regress_kind_us(self, kind: str, dtype: str, flops: int, moved_bytes: int) -> float | None:
        """The time in µs of an operator of which no more is known than its kind and type, FLOPs and bytes."""
        points = self.base.near("kind", kind, dtype, _window(moved_bytes), self.place)
        return regress_us(points, flops, moved_bytes)

    def _look_up(self, form: OperatorForm) -> Answered | None:
        known_us = self.base.median_us(form.digest, self.place)
        if known_us is not None:
            return known_us, "measured"
        points = self.base.near("family", form.family, "", _window(form.moved_bytes), self.place)
        regressed_us = regress_us(points, form.flops, form.moved_bytes)
        return None if regressed_us is None else (regressed_us, "regressed")


def is_base(path: Path) -> bool:
    """Whether a path of a job's `profiles` means a base of operators."""
    return path.suffix == SUFFIX


def open_base(paths: Sequence[Path]) -> OperatorBase | None:
    """The base among the `profiles` of a job; None where there is none. Raises ProfileError where one is no base, is
    missing, or where there are two."""
    named = [path for path in paths if is_base(path)]
    if len(named) > 1:
        raise ProfileError(f"{named[0]} is one already; name one base of operators in `profiles`", where=str(named[1]))
    if named and not is_there(named[0]):
        raise ProfileError(
            "there is no such file; `mm-autoparallel profile JOB --operators` makes one, or leave it out of the job's "
            "`profiles`",
            where=f"operator base {named[0]}",
        )
    return OperatorBase.open(named[0]) if named else None


def _window(moved_bytes: int) -> tuple[float, float]:
    return moved_bytes / WINDOW_FACTOR, moved_bytes * WINDOW_FACTOR
