"""Task and Answer: one problem to place and what came of it, here, in another process or on another machine.

They travel as lines of JSON, so that nothing is ever unpickled; what a line holds is read back by the dataclasses' own
types.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import Known
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.solve.known_paths import KnownPaths

Noun = TypeVar("Noun")


@dataclass(frozen=True)
class Task:
    """Place `problem`, of which no placement is below known_ms. number: names the task. The others are what `place`
    takes."""

    number: int
    problem: Problem
    cutoff_ms: float
    gap_fraction: float
    time_limit_s: float
    hint: Placement | None = None
    known_ms: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What is known of task `number` now.

    placement None: none below the cutoff was found; whether there is none, lower_bound_ms says. infeasible: nothing
    fits, for `reason`, by `overflow_bytes`. A `reason` without infeasible says why the task was not finished.
    is_last False: a better placement, told while the work goes on; only that and its step are meant.
    """

    number: int
    placement: Placement | None
    step_ms: float
    lower_bound_ms: float
    solve_s: float
    infeasible: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0
    is_last: bool = True


def solve(
    task: Task,
    should_stop: Callable[[], bool],
    on_better: Callable[[Answer], None] = lambda _: None,
    latest_cutoff_ms: Callable[[], float] = lambda: np.inf,
    known_paths: KnownPaths | None = None,
) -> Answer:
    """Place the task's problem; the same task gives the same answer, unless it is stopped, runs out of time, is told a
    lower cutoff or begins with what others found. on_better: called with every better placement. known_paths: what
    tasks before it found, and where this one adds to it.
    """
    result = place(
        task.problem,
        time_limit_s=task.time_limit_s,
        should_stop=should_stop,
        on_better=lambda step_ms, placement: on_better(
            Answer(task.number, placement, step_ms, lower_bound_ms=0.0, solve_s=0.0, is_last=False)
        ),
        cutoff_ms=task.cutoff_ms,
        gap_fraction=task.gap_fraction,
        hint=task.hint,
        latest_cutoff_ms=latest_cutoff_ms,
        known=Known(known_paths.of(task.problem) if known_paths else (), task.known_ms, task.number),
    )
    if known_paths:
        known_paths.keep(task.problem, result.cuts)
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
    return revive(Task, json.loads(line))


def decode_answer(line: bytes) -> Answer:
    """The answer that `encode` wrote."""
    return revive(Answer, json.loads(line))


def revive(noun: type[Noun], fields: dict[str, Any]) -> Noun:
    """The frozen dataclass of type `noun` whose `asdict` came back from JSON as `fields`: lists are tuples again.

    Raises KeyError or TypeError where the fields are not those of `noun`.
    """
    kind: Any = noun
    hints = _hints(kind)
    return noun(**{name: _revive_value(hints[name], value) for name, value in fields.items()})


@lru_cache
def _hints(noun: Any) -> dict[str, Any]:
    return get_type_hints(noun)


def _revive_value(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        noun: Any = next(kind for kind in (hint, *get_args(hint)) if is_dataclass(kind))
        return revive(noun, value)
    if not isinstance(value, list):
        return value
    rows = next(kind for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple)
    kinds = get_args(rows)
    if kinds[-1] is ...:
        return tuple(_revive_value(kinds[0], item) for item in value)
    return tuple(_revive_value(kind, item) for kind, item in zip(kinds, value, strict=True))
