"""Cache: what was found out about problems in earlier searches, by their content.

A problem's key is the hash of its numbers, so the same pipeline of another job is found as well. An entry holds the
best placement known and a bound on all. The placement is played again before it counts; the bound counts because the
same code found it: each code, by its fingerprint, has a folder of its own. Entries are written in one step, so searches
that run at once disturb each other at most by forgetting what the other knew.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.solve.solver_code import solver_fingerprint
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.records import Computed, Flag, Noun, Number
from mm_autoparallel.validation import parse_record

SCHEMA = "mm-autoparallel/solved/1"
_WHAT = "cached problem"
#: Steps this close are equal: sums of the same times in another order.
EQUAL_FRACTION = 1e-9


class PlacementEntry(Noun):
    """`placement` of a file of the cache; see problem.Placement."""

    layers: tuple[tuple[Number, ...], ...]
    modes: tuple[tuple[tuple[Number, ...], ...], ...]
    orders: tuple[str, ...] = ()


class SolvedEntry(Noun):
    """One file of the cache. placement None: none was found below what others had reached; step_ms is then None too.

    lower_bound_ms None: nothing fits, for `reason`.
    """

    schema_name: Literal["mm-autoparallel/solved/1"] = Field(alias="schema")
    fingerprint: str
    key: str
    placement: PlacementEntry | None
    step_ms: Computed | None
    lower_bound_ms: Computed | None
    infeasible: Flag
    reason: str
    overflow_bytes: Computed
    solve_s: Computed


class SolvedCache:
    """The cache in `folder`. `warnings`: a sentence for each thing in it that could not be used."""

    def __init__(self, folder: Path) -> None:
        """Raises JobError where `folder` cannot be one."""
        self.warnings: list[str] = []
        self._keeps = True
        self._fingerprint = solver_fingerprint()
        self._folder = folder / f"solved-{self._fingerprint}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            others = sorted(path.name for path in folder.glob("solved-*") if path != self._folder)
            is_new = not any(self._folder.iterdir())
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError("nothing may be written to it")
        except OSError as error:
            raise JobError(f"--cache {folder}: it cannot be used as a folder: {error.strerror or error}") from None
        if others and is_new:
            self.warnings.append(
                f"--cache {folder}: what it holds was solved by other code ({', '.join(others)}) and is not used; "
                f"this code begins {self._folder.name}"
            )

    def find(self, key: str, problem: Problem) -> Answer | None:
        """What is known of `problem`, whose content_key is `key`; None where nothing, or nothing to be trusted."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return self._read(path, key, problem)
        except (JobError, PlanError) as error:
            self.warnings.append(f"{error}; it is solved anew")
            return None

    def keep(self, key: str, answer: Answer) -> None:
        """Write down what `answer` says of the problem `key`. Where that fails (a full disk), warn and keep no more."""
        if not self._keeps:
            return
        found = answer.placement is not None
        entry = {
            "schema": SCHEMA,
            "fingerprint": self._fingerprint,
            "key": key,
            "placement": asdict(answer.placement) if answer.placement is not None else None,
            "step_ms": answer.step_ms if found else None,
            "lower_bound_ms": None if answer.infeasible else answer.lower_bound_ms,
            "infeasible": answer.infeasible,
            "reason": answer.reason if answer.infeasible else "",
            "overflow_bytes": answer.overflow_bytes,
            "solve_s": answer.solve_s,
        }
        try:
            write_text_atomically(self._path(key), json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            self._keeps = False
            reason = error.strerror or error
            self.warnings.append(f"--cache: {self._path(key)} cannot be written: {reason}; nothing more is kept there")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _read(self, path: Path, key: str, problem: Problem) -> Answer:
        entry = parse_record(SolvedEntry, read_document(path, _WHAT), _WHAT, path)
        if entry.fingerprint != self._fingerprint or entry.key != key:
            raise PlanError(f"{_WHAT} {path}: it is of another problem or other code than its name says")
        if entry.infeasible:
            if entry.placement is not None or entry.lower_bound_ms is not None:
                raise PlanError(f"{_WHAT} {path}: infeasible is true, and a placement or a bound stands beside it")
            return Answer(0, None, np.inf, np.inf, entry.solve_s, True, entry.reason, entry.overflow_bytes)
        if entry.lower_bound_ms is None:
            raise PlanError(f"{_WHAT} {path}: lower_bound_ms is missing")
        if entry.placement is None or entry.step_ms is None:
            return Answer(0, None, np.inf, entry.lower_bound_ms, entry.solve_s)
        placement, step_ms = self._play(path, problem, entry.placement)
        if abs(step_ms - entry.step_ms) > EQUAL_FRACTION * step_ms:
            raise PlanError(f"{_WHAT} {path}: step_ms is {entry.step_ms!r}, and its placement takes {step_ms!r}")
        if entry.lower_bound_ms > step_ms * (1.0 + EQUAL_FRACTION):
            raise PlanError(f"{_WHAT} {path}: lower_bound_ms is {entry.lower_bound_ms!r}, above the step {step_ms!r}")
        return Answer(0, placement, step_ms, entry.lower_bound_ms, entry.solve_s)

    def _play(self, path: Path, problem: Problem, entry: PlacementEntry) -> tuple[Placement, float]:
        """The placement and its step. Raises PlanError where it is none of this problem, or does not fit."""
        placement = Placement(entry.layers, entry.modes, entry.orders)
        try:
            timeline = simulate(problem, placement)
        except PlanError as error:
            raise PlanError(f"{_WHAT} {path}: its placement is none of this problem ({error})") from None
        if find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes):
            raise PlanError(f"{_WHAT} {path}: its placement does not fit the memory of this problem")
        return placement, timeline.step_ms
