"""Orders as torch.distributed.pipelining reads them: a row of actions for each pipeline rank.

An action is `[stage][F|B|I|W][micro-batch]` (torch/distributed/pipelining/schedules.py, _Action.from_str), where stage
is our virtual stage: chunk x PP + rank, or of a V-shaped order as schedules/virtual_stages.py has it. What `2F0` means
here differs: action.py has the micro-batch first and the chunk last. A forward and a backward that run together are
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
from mm_autoparallel.pipeline.schedules.action import INPUT, KINDS, PAIRED, StageOrder, format_order
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of, virtual_stage
from mm_autoparallel.pipeline.schedules.whole import join_at_inputs, join_backwards
from mm_autoparallel.planner.plan import Plan

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


def write_csv(plan: Plan) -> str:
    """The order in which every stage of `plan` runs its forwards and backwards, whole ones on its first virtual stage.
    Raises PlanError for more than `MAX_ACTIONS`."""
    strategy = plan.strategy
    schedule = find_schedule(strategy.schedule, strategy.vpp)
    check_number(strategy.pp, strategy.vpp, plan.num_microbatches, "plan with a smaller global batch or a larger MBS")
    if plan.orders:
        orders = [*read_orders(plan.orders, strategy.pp, strategy.vpp, plan.num_microbatches)]
    else:
        of = strategy.pp, strategy.vpp, plan.num_microbatches
        orders = [schedule.order(*of, rank) for rank in range(strategy.pp)]
    if schedule.splits:
        orders = list(join_backwards(orders, strategy.vpp, schedule.v_shaped, 1)[0])
    return write_rows(orders, schedule.v_shaped)


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


def join_untrained(orders: Orders, num_frozen: int) -> tuple[Orders, str]:
    """`orders` as torch trains under them where the first `num_frozen` virtual stages train nothing, and what changed.

    The input of the first stage that trains needs no gradient. There torch's I does nothing on virtual stage 0, and W
    is the whole backward; on a later stage W gives no gradients at all, without a word. So that stage, and those before
    it, whose backward does nothing, run whole backwards. Nothing is said where they did already.
    """
    stages, parted = join_backwards(orders.stages, orders.num_chunks, orders.v_shaped, num_frozen + 1)
    if not parted:
        return orders, ""
    which = f"virtual stage{'s' * (len(parted) > 1)} {', '.join(map(str, parted))}"
    why = "the input of the first stage that trains needs no gradient, and torch cannot part a backward there"
    joined = Orders(stages, orders.num_chunks, orders.num_microbatches, orders.v_shaped)
    return joined, f"{which}: each I and W is written as one B, because {why}"


def join_recomputed(orders: Orders, recomputing: Sequence[int]) -> tuple[Orders, str]:
    """`orders` with whole backwards on the virtual stages that recompute layers, and what changed.

    torch computes weight gradients group by group, and runs a recomputed layer once more for each: W of a decoder layer
    takes ten times its forward (tests/benchmarks/order_steps.py measures it). Nothing is said where none is parted.
    """
    parted = [k for k in recomputing if _is_parted(orders, k)]
    if not parted:
        return orders, ""
    stages = join_at_inputs(orders.stages, orders.num_chunks, orders.v_shaped, parted)
    joined = Orders(stages, orders.num_chunks, orders.num_microbatches, orders.v_shaped)
    which = f"virtual stage{'s' * (len(parted) > 1)} {', '.join(map(str, parted))}"
    why = "torch's W would run each recomputed layer again for each of its weights"
    return joined, f"{which}: each I and W is written as one B, because {why}"


def _is_parted(orders: Orders, k: int) -> bool:
    num_stages = len(orders.stages)
    order = orders.stages[stage_of(k, num_stages, orders.v_shaped)]
    return bool(np.any((order[:, 0] == INPUT) & (order[:, 1] == k // num_stages)))


# ------------------------------------------------------------------------------------------------------------- reading


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


def find_frozen(layers: Sequence[Sequence[int]], untrained: Sequence[bool]) -> int:
    """How many virtual stages come before the first that holds something that trains, all of them if none does.

    layers: [virtual stages][blocks] how many each holds; untrained: of blocks.
    """
    trains = [any(count and not frozen for count, frozen in zip(held, untrained, strict=True)) for held in layers]
    return trains.index(True) if True in trains else len(trains)
