"""`plan --script` where an exporter patches a person's files: the plan goes in as by `export --into`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.framework import Exported, Target
from mm_autoparallel.planner.plan import Plan

Patch = Callable[[Plan, Target, Sequence[Path]], Exported]


def planned_files(path: Path, out: Path, _: Given) -> tuple[Path, ...]:
    """What `write_patched` will write of the launch file at `path` into the folder `out`."""
    return (out / path.name,)


def write_patched(
    patch: Patch, version: str, plan: Plan, path: Path, out: Path, given: Given, overwrite: bool
) -> Export:
    """The launch file at `path`, and those beside it, with `plan` in them, written to `out` under their own names.

    Raises PlanError or JobError as `patch` does, OSError where they cannot be written.
    """
    exported = patch(plan, Target(version, None, lambda _: ()), (path, *given.beside))
    texts = {out / source.name: text for source, text in exported.texts.items()}
    write_files(texts, overwrite, {out / source.name: source for source in exported.texts})
    return Export((*texts,), (*exported.approximations, *exported.notes))
