"""Orders as torch.distributed.pipelining reads them: a row of actions for each pipeline rank.

An action is `[stage][F|B|I|W][micro-batch]` (torch/distributed/pipelining/schedules.py, _Action.from_str), where stage
is our virtual stage: chunk x PP + rank, or of a V-shaped order as virtual_stages.py has it. What `2F0` means here
differs: action.py has the micro-batch first and the chunk last. A forward and a backward that run together are
`(0F3;7B1)OVERLAP_F_B`; torch runs one after the other. Which rank holds which stage, torch reads off the rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.schedules.action import KINDS, PAIRED, StageOrder, format_order
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of, virtual_stage

MAX_ACTIONS = 2_000_000
"""Assumed: of all ranks together; 64 stages of 4 chunks run 3,900 micro-batches with as many."""

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_MESSAGE = re.compile(r"[0-9]+(SEND|RECV|UNSHARD|RESHARD|REDUCE)_?")


@dataclass(frozen=True)
class Orders:
    """The orders of all stages, complete ones that end. texts: each as schedules/action.py writes it."""

    stages: tuple[StageOrder, ...]
    num_chunks: int
    num_microbatches: int
    v_shaped: bool

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(format_order(order) for order in self.stages)


def check_number(num_stages: int, num_chunks: int, num_microbatches: int, advice: str) -> None:
    """Raise PlanError where a step has more than `MAX_ACTIONS` forwards and backwards."""
    if 2 * num_microbatches * num_stages * num_chunks > MAX_ACTIONS:
        raise PlanError(
            f"{num_microbatches} micro-batches on PP {num_stages} with VPP {num_chunks} are more than "
            f"{MAX_ACTIONS:,} actions, the most that are written; {advice}"
        )


def write_rows(orders: Sequence[StageOrder], v_shaped: bool) -> str:
    """`orders` of all stages as rows."""
    num_stages = len(orders)
    return "".join(f"{','.join(_cells(order, stage, num_stages, v_shaped))}\n" for stage, order in enumerate(orders))


def _cells(order: StageOrder, stage: int, num_stages: int, v_shaped: bool) -> Iterator[str]:
    forward = ""
    for kind, chunk, micro_batch in order.tolist():
        cell = f"{virtual_stage(chunk, stage, num_stages, v_shaped)}{KINDS[kind % PAIRED]}{micro_batch}"
        if kind == PAIRED:
            forward = cell
        else:
            yield f"({forward};{cell})OVERLAP_F_B" if forward else cell
            forward = ""


def read_csv(text: str, num_stages: int | None = None) -> Orders:
    """The orders that `text` holds, a row for each of `num_stages` ranks (None: of as many as it has).

    Raises PlanError naming line and cell of what is no action, rows that hold stages as no order here does, actions
    that are missing or stand twice, and which actions wait for which where the order never ends.
    """
    rows = [_read_row(line, row) for line, row in enumerate(_lines(text), 1)]
    if not rows:
        raise PlanError("no rows: a row of actions such as 0F0,0F1,0B0,0B1 is needed for each pipeline rank")
    if num_stages is not None and len(rows) != num_stages:
        raise PlanError(f"{len(rows)} rows, and {num_stages} pipeline ranks need one each")
    v_shaped = _is_v_shaped(rows)
    cells = [cell for row in rows for cell in row]
    num_chunks = 1 + max(k for _, (_, k, _) in cells) // len(rows)
    num_microbatches = 1 + max(micro_batch for _, (_, _, micro_batch) in cells)
    check_number(len(rows), num_chunks, num_microbatches, "so a stage or a micro-batch has a wrong number")
    stages = tuple(
        np.array([(kind, k // len(rows), micro_batch) for _, (kind, k, micro_batch) in row], dtype=np.int64)
        for row in rows
    )
    found = Orders(stages, num_chunks, num_microbatches, v_shaped)
    _check(found)
    return found


def _check(orders: Orders) -> None:
    sizes = len(orders.stages), orders.num_chunks, orders.num_microbatches
    try:
        read_orders(orders.texts, *sizes, name_stage=lambda stage: f"line {stage + 1}")
    except PlanError as error:
        raise PlanError(f"{error} (actions as printed here: micro-batch, kind, chunk)") from None
    waiting = find_deadlock(orders.stages, orders.num_chunks, orders.v_shaped)
    if waiting:
        raise PlanError(f"it never ends: {waiting} (actions as printed here: micro-batch, kind, chunk)")


def _lines(text: str) -> list[list[str]]:
    """Rows of cells; empty lines at the end are none."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise PlanError(f"it is no CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


_Cell = tuple[int, tuple[int, int, int]]
"""Number of a cell in its row from 1, and its action: kind, virtual stage, micro-batch."""


def _read_row(line: int, cells: Sequence[str]) -> list[_Cell]:
    found: list[_Cell] = []
    for number, cell in enumerate(cells, 1):
        word = cell.strip()
        where = f"line {line}, cell {number}"
        pair = _PAIR.fullmatch(word)
        if pair:
            forward, backward = (_read_action(part.strip(), where) for part in pair.groups())
            if KINDS[forward[0]] + KINDS[backward[0]] != "FB":
                raise PlanError(f"{where}: {word} is no forward and whole backward, in this order, such as (0F3;7B1)")
            found += [(number, (PAIRED, *forward[1:])), (number, backward)]
        elif word:
            found.append((number, _read_action(word, where)))
    if not found:
        raise PlanError(f"line {line}: it has no actions, and the rank of each line has some")
    return found


def _read_action(word: str, where: str) -> tuple[int, int, int]:
    match = _ACTION.fullmatch(word)
    if match:
        return KINDS.index(match[2]), int(match[1]), int(match[3])
    if _MESSAGE.match(word):
        raise PlanError(
            f"{where}: {word} is a message or a gathering of weights; give the order of computations alone, which "
            "torch calls compute_only"
        )
    raise PlanError(f"{where}: {word!r} is no action such as 2F0: stage, one of F, B, I and W, micro-batch")


def _is_v_shaped(rows: Sequence[Sequence[_Cell]]) -> bool:
    """Whether every second chunk runs back; one of both must hold of all cells. Raises PlanError where neither does."""
    wrong: dict[bool, str] = {}
    for v_shaped in (False, True):
        for rank, row in enumerate(rows):
            for number, (_, k, _) in row:
                right = stage_of(k, len(rows), v_shaped)
                if right != rank:
                    wrong.setdefault(v_shaped, f"line {rank + 1}, cell {number}: stage {k} would lie on rank {right}")
    if len(wrong) < 2:
        return False in wrong
    raise PlanError(
        f"stages lie on ranks as in no order here. Were stage k on rank k modulo {len(rows)}, then {wrong[False]}; "
        f"were every second round of stages to run back, then {wrong[True]}"
    )
