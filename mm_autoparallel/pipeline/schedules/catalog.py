"""Every pipeline schedule by name. A schedule is one pure function; a new one is a file, a line here and a golden
grid."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.schedules.action import StageOrder
from mm_autoparallel.pipeline.schedules.gpipe import gpipe
from mm_autoparallel.pipeline.schedules.interleaved import interleaved_1f1b, interleaved_1f1b_low_memory
from mm_autoparallel.pipeline.schedules.one_f_one_b import one_f_one_b
from mm_autoparallel.pipeline.schedules.seq_1f1b import seq_one_f_one_b

MAX_ACTIONS = 20_000_000
"""Assumed: forwards and backwards of one step over all stages; as arrays they fill about a gigabyte."""


@dataclass(frozen=True)
class Schedule:
    """`order(num_stages, num_chunks, num_microbatches, stage)` is what the stage runs, in program order.

    interleaved: takes more than one chunk a stage. periodic: after a warm-up the same work repeats every `num_stages`
    micro-batches, which lets the simulator skip over the middle of long runs. num_pieces: of a micro-batch's sequences,
    where these are what it runs.
    """

    name: str
    order: Callable[[int, int, int, int], StageOrder]
    interleaved: bool
    periodic: bool
    num_pieces: int = 1


SEQUENCE_PIECES = (2, 4, 8, 16)
"""Pieces of a micro-batch's sequences that seq_1f1b is there for."""


def name_seq_1f1b(num_pieces: int) -> str:
    """What seq_1f1b of so many pieces is called."""
    return f"seq_1f1b_{num_pieces}"


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe, interleaved=False, periodic=False),
        Schedule("1f1b", one_f_one_b, interleaved=False, periodic=True),
        Schedule("interleaved_1f1b", interleaved_1f1b, interleaved=True, periodic=True),
        Schedule("interleaved_1f1b_low_memory", interleaved_1f1b_low_memory, interleaved=True, periodic=True),
        *(
            Schedule(
                name_seq_1f1b(pieces),
                partial(seq_one_f_one_b, pieces),
                interleaved=False,
                periodic=False,
                num_pieces=pieces,
            )
            for pieces in SEQUENCE_PIECES
        ),
    )
}

OF_MICROBATCHES = tuple(name for name, schedule in SCHEDULES.items() if schedule.num_pieces == 1)
"""Schedules whose micro-batches are whole ones: those that a job can have."""


def find_schedule(name: str, num_chunks: int = 1) -> Schedule:
    """The schedule called `name`. Raises JobError if there is none or if it cannot run `num_chunks` chunks a stage."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise JobError(f"schedule {name!r} is not known: known are {', '.join(SCHEDULES)}{hint}")
    schedule = SCHEDULES[name]
    if num_chunks > 1 and not schedule.interleaved:
        raise JobError(
            f"schedule {name} runs one chunk a stage and num_chunks is {num_chunks}: "
            f"use interleaved_1f1b or interleaved_1f1b_low_memory, or one chunk"
        )
    return schedule
