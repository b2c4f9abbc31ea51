"""Export: what writing a plan into a framework's files left behind, and how such files are written: all or none."""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_there, read_text, write_text_atomically


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
