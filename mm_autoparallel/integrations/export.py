"""Export: what writing a plan into a framework's files left behind, and how such files are written: all or none.

`plan --script` writes by it too, where an exporter patches a person's files: the plan goes in as by `export --into`.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_there, read_text, write_text_atomically
from mm_autoparallel.integrations.described import Described, Given
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


@dataclass(frozen=True)
class Export:
    """Files written, and what a person must know before using them.

    approximations: one sentence for each thing that the files alone cannot say as the plan says it, and what they say
    instead. What cannot be approximated safely is refused, so it is never here.
    """

    files: tuple[Path, ...]
    approximations: tuple[str, ...] = ()


def read_exactly(path: Path, what: str = "file", form: str = "text") -> str:
    """The text of `path` as it stands there, ends of lines and byte order marks too. Raises JobError as read_text."""
    return read_text(path, what, form, with_marks=True)


def write_files(
    texts: Mapping[Path, str],
    overwrite: bool,
    sources: Mapping[Path, Path] | None = None,
    executable: Collection[Path] = (),
) -> None:
    """Write all of `texts`, or leave everything as it was and raise OSError.

    overwrite: files that are there already may be replaced. sources: of a target, the file whose mode it gets.
    executable: those of `texts` that are started. Raises
    JobError where a file would be replaced by another text, and may not be.
    """
    before = {target: read_exactly(target) if is_there(target) else None for target in texts}
    for target, text in texts.items():
        if before[target] not in (None, text) and not overwrite:
            raise JobError(
                f"{target} is there already and holds something else; give another folder, or ask for it to be replaced"
            )
    modes = dict.fromkeys(executable, 0o755)
    modes |= {target: stat.S_IMODE(source.stat().st_mode) for target, source in (sources or {}).items()}
    try:
        for target, text in texts.items():
            write_text_atomically(target, text, modes.get(target))
    except BaseException:  # Ctrl-C as well
        for target, old in before.items():
            if old is None:
                target.unlink(missing_ok=True)
            elif read_exactly(target) != old:
                write_text_atomically(target, old)
        raise


def only(paths: Sequence[Path], framework: str, *what: str) -> Sequence[Path]:
    """`paths`, of which there is one for each of `what`. Raises JobError naming what the framework's plans go into."""
    if len(paths) != len(what):
        raise JobError(f"--into {' '.join(map(str, paths))}: a plan for {framework} goes into {' and '.join(what)}")
    return paths


def describe_other_devices(there: int | None, needed: int) -> list[str]:
    """A sentence where a launch script starts other devices than a plan is for. there: None where it does not say."""
    if there in (None, needed):
        return []
    return [
        f"the launch script starts {there} devices and the plan is for {needed}; set the nodes and the processes per "
        "node in it before training"
    ]
