"""Progress costs a twentieth of a search's time at most, and its end is told."""

from __future__ import annotations

import time

from mm_autoparallel.planner.search.candidate import Progress
from mm_autoparallel.planner.search.telling import Telling


def test_what_takes_long_is_told_seldom() -> None:
    told: list[Progress] = []
    telling = Telling(told.append)

    def slow() -> Progress:
        time.sleep(0.05)
        return Progress(1.0, 1.0, len(told), 2, 0.0)

    for _ in range(5):
        telling.tell(slow)
    assert len(told) == 1
    telling.tell(slow, is_last=True)
    assert len(told) == 2
