"""Export: what writing a plan into a framework's files left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Export:
    """Files written, and what a person must know before using them.

    approximations: one sentence for each thing that the files alone cannot say as the plan says it, and what they say
    instead. What cannot be approximated safely is refused, so it is never here.
    """

    files: tuple[Path, ...]
    approximations: tuple[str, ...] = ()
