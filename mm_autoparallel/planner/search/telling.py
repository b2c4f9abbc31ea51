"""Telling: how far a search is, told seldom enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from mm_autoparallel.planner.search.candidate import Progress

#: Progress is shown once so many times what telling it takes have passed: all strategies are gone through. Assumed.
WORTH_FACTOR = 20


class Telling:
    """on_progress is called in a twentieth of the time at most, and at the end."""

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self._on_progress = on_progress
        self._ended_s = self._took_s = 0.0

    def tell(self, progress: Callable[[], Progress], is_last: bool = False) -> None:
        """Work out the progress and tell it, if it is time to."""
        began_s = time.monotonic()
        if is_last or began_s - self._ended_s >= WORTH_FACTOR * self._took_s:
            self._on_progress(progress())
            self._ended_s = time.monotonic()
            self._took_s = self._ended_s - began_s
