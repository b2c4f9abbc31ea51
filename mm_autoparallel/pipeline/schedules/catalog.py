"""Every pipeline schedule by name. A schedule is one pure function; a new one is a file, a line here and a golden
grid."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NoReturn

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.schedules.action import StageOrder
from mm_autoparallel.pipeline.schedules.dualpipev import LEAST_ROUNDS, dualpipev, dualpipev_whole
from mm_autoparallel.pipeline.schedules.gpipe import gpipe
from mm_autoparallel.pipeline.schedules.interleaved import interleaved_1f1b, interleaved_1f1b_low_memory
from mm_autoparallel.pipeline.schedules.one_f_one_b import one_f_one_b
from mm_autoparallel.pipeline.schedules.seq_1f1b import seq_one_f_one_b
from mm_autoparallel.pipeline.schedules.v_blocks import v_half, v_min
from mm_autoparallel.pipeline.schedules.zbv import zbv
from mm_autoparallel.pipeline.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

GIVEN, FREE = "given", "free"
"""The schedules whose order a person gives, and whose order is found."""

MAX_ACTIONS = 20_000_000
"""Assumed: forwards and backwards of one step over all stages; as arrays they fill about a gigabyte."""

V_CHUNKS = 2
"""Chunks a stage of every V-shaped schedule: one on the way there, one on the way back."""


@dataclass(frozen=True)
class Schedule:
    """`order(num_stages, num_chunks, num_microbatches, stage)` is what the stage runs, in program order.

    interleaved: takes more than one chunk a stage. periodic: after a warm-up the same work repeats every `num_stages`
    micro-batches, which lets the simulator skip over the middle of long runs. num_pieces: of a micro-batch's sequences,
    where these are what it runs. splits: it parts backwards into I and W. pairs: it runs forwards and
    backwards together. v_shaped: see virtual_stages. least_rounds:
    it needs so many micro-batches for each stage. given_by: who says the order: a rule, which is `order`, or the
    problem or the placement, which then has one text for each stage.
    """

    name: str
    order: Callable[[int, int, int, int], StageOrder]
    interleaved: bool
    periodic: bool
    num_pieces: int = 1
    splits: bool = False
    pairs: bool = False
    v_shaped: bool = False
    least_rounds: int = 0
    given_by: Literal["rule", "problem", "placement"] = "rule"


def _order_of_problem(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> NoReturn:
    """The order that the problem gives under `orders`, one text a stage."""
    raise JobError("schedule given has no order of its own: the problem gives one text for each stage under orders")


def _order_to_find(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> NoReturn:
    """Any order: it is found together with the placement, which has one text a stage; backwards may be parted. Two
    chunks a stage run there and back."""
    raise JobError("schedule free has no order of its own: it is found together with the placement")


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
        Schedule("zb_h1", zb_h1, interleaved=False, periodic=False, splits=True),
        Schedule("zb_h2", zb_h2, interleaved=False, periodic=False, splits=True),
        Schedule("interleaved_zb", interleaved_zb, interleaved=True, periodic=False, splits=True),
        Schedule("zbv", zbv, interleaved=True, periodic=False, splits=True, v_shaped=True),
        Schedule("v_half", v_half, interleaved=True, periodic=False, splits=True, v_shaped=True),
        Schedule("v_min", v_min, interleaved=True, periodic=False, splits=True, v_shaped=True),
        *(
            Schedule(
                order.__name__,
                order,
                interleaved=True,
                periodic=False,
                splits=True,
                pairs=True,
                v_shaped=True,
                least_rounds=LEAST_ROUNDS,
            )
            for order in (dualpipev, dualpipev_whole)
        ),
        Schedule(GIVEN, _order_of_problem, interleaved=True, periodic=False, given_by="problem"),
        Schedule(FREE, _order_to_find, interleaved=False, periodic=False, splits=True, given_by="placement"),
    )
}

OF_MICROBATCHES = tuple(
    name
    for name, schedule in SCHEDULES.items()
    if schedule.num_pieces == 1 and not schedule.splits and schedule.given_by == "rule"
)
"""Schedules whose micro-batches and backwards are whole ones: those that a job can have without naming one."""

OF_JOBS = tuple(
    name for name, schedule in SCHEDULES.items() if schedule.num_pieces == 1 and schedule.given_by != "problem"
)
"""Those that a job can name: these, and others that part backwards, or whose order is to be found."""


def parts_backwards(name: str, num_chunks: int, orders: Sequence[str]) -> bool:
    """Whether the schedule called `name` parts backwards, or the `orders` of its stages do, where they are given."""
    return find_schedule(name, num_chunks).splits or any("I" in order for order in orders)


def find_schedule(name: str, num_chunks: int = 1) -> Schedule:
    """The schedule called `name`. Raises JobError if there is none or if it cannot run `num_chunks` chunks a stage."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise JobError(f"schedule {name!r} is not known: known are {', '.join(SCHEDULES)}{hint}")
    schedule = SCHEDULES[name]
    if name == FREE and num_chunks == V_CHUNKS:
        return replace(schedule, interleaved=True, v_shaped=True)
    if name == FREE and num_chunks > 1:
        raise JobError(
            f"schedule {name} runs one chunk a stage, or {V_CHUNKS} there and back, and num_chunks is {num_chunks}"
        )
    if num_chunks > 1 and not schedule.interleaved:
        raise JobError(
            f"schedule {name} runs one chunk a stage and num_chunks is {num_chunks}: "
            f"use interleaved_1f1b or interleaved_1f1b_low_memory, or one chunk"
        )
    if schedule.v_shaped and num_chunks != V_CHUNKS:
        raise JobError(
            f"schedule {name} is V-shaped: it runs through the stages and back, {V_CHUNKS} chunks a stage, and "
            f"num_chunks is {num_chunks}"
        )
    return schedule


def check_rounds(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    """Raise JobError where `schedule` needs more micro-batches."""
    least = schedule.least_rounds * num_stages
    if num_microbatches < least:
        raise JobError(
            f"schedule {schedule.name} on {num_stages} stages needs {least} micro-batches or more, and "
            f"num_microbatches is {num_microbatches}"
        )
