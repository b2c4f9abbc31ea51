"""`plan --script` where an exporter patches a person's files: the plan goes in as by `export --into`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.framework import Exporter, LaunchKind, Target
from mm_autoparallel.planner.plan import Plan

Devices = tuple[int | None, int | None]


def patched_launch(
    title: str,
    is_one: Callable[[Path], bool],
    describe: Callable[[Path, Given], Described],
    read_plan: Callable[[Path, Given], Plan],
    exporter: Exporter,
    find_devices: Callable[[Path], Devices] = lambda _: (None, None),
    planned: Callable[[Path, Path, Given], tuple[Path, ...]] | None = None,
    version: str = "",
    takes: Collection[str] = (),
) -> LaunchKind:
    """Files that `exporter` patches, as a kind of launch: what is not said of them is as LaunchKind's fields have it.

    find_devices: left out: such files say none. planned: left out: the file's own name. version: of the framework, the
    exporter's first where it is left out.
    """
    write_plan = partial(write_patched, exporter, version or exporter.versions[0])
    return LaunchKind(
        title, is_one, find_devices, describe, read_plan, planned or planned_files, write_plan, takes=frozenset(takes)
    )


def planned_files(path: Path, out: Path, _: Given) -> tuple[Path, ...]:
    """What `write_patched` will write of the launch file at `path` into the folder `out`."""
    return (out / path.name,)


def write_patched(
    exporter: Exporter, version: str, plan: Plan, path: Path, out: Path, given: Given, overwrite: bool
) -> Export:
    """The launch file at `path`, and those beside it, with `plan` in them, written to `out` under their own names.

    Raises PlanError or JobError as the exporter's `patch` does, OSError where they cannot be written.
    """
    assert exporter.patch is not None
    exported = exporter.patch(plan, Target(version, None, lambda _: ()), (path, *given.beside))
    texts = {out / source.name: text for source, text in exported.texts.items()}
    write_files(texts, overwrite, {out / source.name: source for source in exported.texts})
    return Export((*texts,), (*exported.approximations, *exported.notes))
