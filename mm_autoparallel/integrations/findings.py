"""Finding: what `lint` tells of a training's files; Rule: what it looks for; Linter: a framework's own rules.

Rules of plans and their simulation are lint/plan_rules.py's, for every framework that `import` reads. A framework adds
those of its files: what its parser lets pass and its run does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mm_autoparallel.integrations.described import Given
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.planner.plan import Plan

Severity = Literal["error", "warning", "note"]
"""The run ends or cannot be held; it trains, and something is wasted or otherwise than the file says; worth knowing."""


Figures = Mapping[str, float]
"""What was counted, by names that end with the unit."""


@dataclass(frozen=True)
class Rule:
    """What is looked for. key: stable, in kebab-case. finds, mends: for people, a clause each."""

    key: str
    severity: Severity
    finds: str
    mends: str


@dataclass(frozen=True)
class Finding:
    """A place in a training's files where `rule` holds.

    message: what is there and what comes of it. line: from 1; None where the whole file is meant. stage: of the
    pipeline, where it is one's. mend: the flag or key with
    its value that mends it, empty where several could. unread: `import` reads no plan from a file with this, so that
    what the run holds is not simulated.
    """

    rule: Rule
    message: str
    path: Path
    line: int | None = None
    stage: int | None = None
    figures: Figures = field(default_factory=dict)
    mend: str = ""
    unread: bool = False


@dataclass(frozen=True)
class Linter:
    """Rules of a framework's files.

    find: (file, what a person says beside it) → findings; goes on after the first, and needs no plan to be readable.
    locate: (file, a field of Strategy, or layers, recompute, global_batch_size, which of several functions of the file,
    None: it has none) → the line that decides it. spell:
    (file, its plan, a better one, job) → the flags or keys that make the better one of it. choices: a workload's key →
    the flag that turns it on. Without these three, findings of simulated plans name the file alone, in a plan's words.
    """

    rules: tuple[Rule, ...]
    find: Callable[[Path, Given], Iterable[Finding]]
    locate: Callable[[Path, str, str | None], int | None] | None = None
    spell: Callable[[Path, Plan, Plan, Job], str] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)


def find_line(message: str, locate: Callable[[str], int | None]) -> int | None:
    """The line of a file that `message` is about: the one it names, or that of the first flag or dotted key in it that
    stands there. locate: flag or key → its line."""
    named = re.search(r"\blines? (\d+)\b", message)
    if named:
        return int(named[1])
    words = re.findall(r"--[A-Za-z][\w-]+|\b[A-Za-z]\w*(?:\.\w+)+|\b[a-z]\w*_\w+\b", message)
    return next((line for word in words if (line := locate(word)) is not None), None)
