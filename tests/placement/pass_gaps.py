"""Every order of passes between the actions of one stage, listed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np

from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.encoders.play import Words, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import DECODER, Tasks


def list_words(tasks: Tasks, stage: int) -> Iterator[Words]:
    """The words of every way to put passes into gaps of a stage, those of either direction in their order."""
    of_stage = np.flatnonzero(tasks.lane == stage)
    is_pass = tasks.owner[of_stage] != DECODER
    actions, passes = of_stage[~is_pass], of_stage[is_pass]
    forwards, backwards = (passes[(tasks.kind[passes] == FORWARD) == is_forward] for is_forward in (True, False))
    places = range(len(actions) + 1)
    for early in combinations_with_replacement(places, len(forwards)):
        for late in combinations_with_replacement(places, len(backwards)):
            keys = np.zeros(tasks.num_tasks)
            keys[actions] = np.arange(len(actions)) + 0.5
            keys[forwards] = np.array(early) + 1e-3 * np.arange(len(forwards))
            keys[backwards] = np.array(late) + 1e-3 * np.arange(len(backwards)) + 0.1
            yield words_by_starts(tasks, keys.tolist())
