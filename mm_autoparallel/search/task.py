"""Task and Answer: one problem to place and what came of it, here or in another process.

They travel between processes as lines of JSON, so that nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mm_autoparallel.placement.place import place
from mm_autoparallel.problem import ChainBlock, Mode, Placement, Problem


@dataclass(frozen=True)
class Task:
    """Place `problem`. number: names the task. The others are what `place` takes."""

    number: int
    problem: Problem
    cutoff_ms: float
    gap_fraction: float
    time_limit_s: float
    hint: Placement | None = None


@dataclass(frozen=True)
class Answer:
    """What is known of task `number` now.

    placement None: none below the cutoff was found; whether there is none, lower_bound_ms says. infeasible: nothing
    fits, for `reason`, by `overflow_bytes`. A `reason` without infeasible says why the task was not finished.
    """

    number: int
    placement: Placement | None
    step_ms: float
    lower_bound_ms: float
    solve_s: float
    infeasible: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0


def solve(task: Task, should_stop: Callable[[], bool], on_better: Callable[[float], None] = lambda _: None) -> Answer:
    """Place the task's problem; the same task gives the same answer, unless it is stopped or runs out of time."""
    result = place(
        task.problem,
        time_limit_s=task.time_limit_s,
        should_stop=should_stop,
        on_better=on_better,
        cutoff_ms=task.cutoff_ms,
        gap_fraction=task.gap_fraction,
        hint=task.hint,
    )
    return Answer(
        number=task.number,
        placement=result.placement,
        step_ms=result.step_ms,
        lower_bound_ms=result.lower_bound_ms,
        solve_s=result.solve_s,
        infeasible=result.status == "infeasible",
        reason=result.reason,
        overflow_bytes=result.overflow_bytes,
    )


def encode(message: Task | Answer) -> bytes:
    """One line of JSON; floats come back as they were, infinite ones too."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_task(line: bytes) -> Task:
    """The task that `encode` wrote."""
    fields = json.loads(line)
    return Task(**fields | {"problem": _problem(fields["problem"]), "hint": _placement(fields["hint"])})


def decode_answer(line: bytes) -> Answer:
    """The answer that `encode` wrote."""
    fields = json.loads(line)
    return Answer(**fields | {"placement": _placement(fields["placement"])})


def _problem(fields: dict[str, Any]) -> Problem:
    chain = []
    for block in fields["chain"]:
        modes = tuple(Mode(**mode) for mode in block["modes"])
        block |= {"modes": modes, "microbatch_scale": tuple(block["microbatch_scale"])}
        chain.append(ChainBlock(**block))
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Problem(**fields | lists | {"chain": tuple(chain)})


def _placement(fields: dict[str, Any] | None) -> Placement | None:
    if fields is None:
        return None
    layers = tuple(tuple(row) for row in fields["layers"])
    return Placement(layers, tuple(tuple(tuple(counts) for counts in row) for row in fields["modes"]))
