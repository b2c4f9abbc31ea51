"""The folder that is served: what tools may be asked to read and write.

Files are opened below it alone (confinement.py). Here names are refused that lead elsewhere or that nobody means to
write, with a sentence that says why, before any work is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.api.results import Result
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_folder, is_there, write_text_atomically
from mm_autoparallel.planner.plan import format_document
from mm_autoparallel.reports.terminal import check_writable
from mm_autoparallel.streams import visible


@dataclass(frozen=True)
class Folder:
    """root: its absolute path, which is the working directory too."""

    root: Path

    def read(self, name: str) -> Path:
        """The path of a file to read, relative to the folder. Raises JobError where it leads out of it."""
        shown = visible(name)
        if any(ord(character) < 32 for character in name):
            raise JobError(f"{shown!r} has characters that no file's name has here; give a plain path")
        path = Path(name)
        if path.is_absolute():
            if not path.is_relative_to(self.root):
                raise JobError(
                    f"{shown} lies outside the folder that is served, {self.root}; give a path relative to that"
                )
            path = path.relative_to(self.root)
        if ".." in path.parts:
            raise JobError(f"{shown} goes up by `..`; give a path below the folder that is served, {self.root}")
        return path

    def write(self, name: str, ending: str, overwrite: bool, sources: Sequence[Path] = ()) -> Path:
        """The path of a file to write, that may be written as things stand. sources: what the same call reads.

        Raises JobError where it may not.
        """
        path = self.read(name)
        if path.suffix not in (ending, ending.replace(".yaml", ".yml")):
            raise JobError(f"out is {visible(name)}; name it with the ending {ending}")
        if any(part.startswith(".") for part in path.parts):
            raise JobError(f"out is {visible(name)}; names that begin with a dot are not written here")
        if path in sources:
            raise JobError(f"out is {visible(name)}, which this call reads; name another file")
        there = next(folder for folder in path.parents if os.path.lexists(folder))
        if not is_folder(there):
            raise JobError(f"{there} is a link or no folder, and nothing is written below it; name another file as out")
        self._check_free(path, overwrite)
        check_writable(path)
        return path

    def write_folder(self, name: str) -> Path:
        """The path of a folder to write to. Raises JobError where nothing may be written there."""
        path = self.read(name)
        if any(part.startswith(".") for part in path.parts):
            raise JobError(f"out is {visible(name)}; names that begin with a dot are not written here")
        there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        if not is_folder(there):
            raise JobError(f"{there} is a link or no folder, and nothing is written below it; name another one as out")
        return path

    def write_optional(self, name: str | None, overwrite: bool, sources: Sequence[Path]) -> Path | None:
        """The path of a JSON file to write, where one is asked for. Raises JobError as `write` does."""
        return None if name is None else self.write(name, ".json", overwrite, sources)

    def put_result(self, path: Path | None, overwrite: bool, result: Result) -> str | None:
        """Write all of `result` as JSON where that is asked for; its name for an answer."""
        if path is None:
            return None
        text = format_document(result.to_dict())
        return self.put(path, overwrite, lambda target: write_text_atomically(target, text))

    def put(self, path: Path, overwrite: bool, write: Callable[[Path], None]) -> str:
        """Have `path` written by `write`, unless it came into being meanwhile; its name for an answer.

        Raises JobError where it cannot be written.
        """
        self._check_free(path, overwrite)
        try:
            write(path)
        except OSError as failure:
            raise JobError(f"{path} cannot be written: {failure.strerror or failure}") from None
        return str(path)

    def _check_free(self, path: Path, overwrite: bool) -> None:
        if os.path.islink(path):  # noqa: PTH114 - which raises where no file could be called so
            raise JobError(f"{path} is a link, and links are not followed here; name another file as out")
        if not overwrite and is_there(path):
            raise JobError(
                f"{path} is there already and stays as it is; name another file as out, or give overwrite: true"
            )
