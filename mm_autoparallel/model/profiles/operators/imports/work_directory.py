"""Any file or folder that is to be imported: what it is, and in a folder of Auto Tuning what of it can be read.

Auto Tuning (and Auto Settings, as it is called later) writes pickles, most of them under names that end in `.json`. A
pickle is a program: such files are known by their first bytes, named in the report, and never opened as what they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.confinement import open_file
from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_folder, is_there
from mm_autoparallel.model.profiles.operators.imports import communication, kernel_details
from mm_autoparallel.model.profiles.operators.imports.communication import read_communication
from mm_autoparallel.model.profiles.operators.imports.found import Found
from mm_autoparallel.model.profiles.operators.imports.kernel_details import read_kernel_details
from mm_autoparallel.model.profiles.operators.imports.operator_history import read_operator_history
from mm_autoparallel.model.profiles.operators.platform import Platform

PREFIXES = ("auto_tuning_", "auto_settings_")
"""Of the files that the two programs write."""

MAX_FILES = 100_000
"""Assumed: of a work directory of a thousand ranks a hundred times."""

_PICKLE_PROTOCOLS = range(2, 6)
_PROTOCOL_OPCODE = 0x80


@dataclass(frozen=True)
class Pickle:
    """A file that is refused: a program in the form of data."""

    path: Path

    def __str__(self) -> str:
        return f"{self.path} is a pickle, and what is in one runs as it is opened: it was not"


def read_given(path: Path, platform: Platform) -> tuple[list[Found], list[Pickle]]:
    """What lies at `path`, a file or a folder. platform: of kernel details, which say nothing of theirs.

    Raises ProfileError where it is a pickle, none of the files that are read, or a folder with none of them, and where
    one of them is malformed.
    """
    if not is_there(path):
        raise ProfileError("there is no such file or folder", where=f"import {path}")
    if not is_folder(path):
        if is_pickle(path):
            raise ProfileError(f"{Pickle(path)}; import what it was made from", where=f"import {path}")
        found = _read_file(path, platform)
        if found is None:
            raise ProfileError(
                "it is none of the files that are read: kernel_details*.csv, communication*.json and a database of "
                "operators (*.db) of MindSpeed, or a folder with these",
                where=f"import {path}",
            )
        return [found], []
    finds, pickles = [], []
    for file in _walk(path):
        if is_pickle(file):
            pickles.append(Pickle(file))
            continue
        told = _read_file(file, platform)
        if told is not None:
            finds.append(told)
    if not finds:
        also = f"; {len(pickles)} pickles there were not opened" if pickles else ""
        raise ProfileError(
            f"it holds no kernel_details*.csv, no communication*.json and no database of operators (*.db){also}",
            where=f"import {path}",
        )
    return finds, pickles


def is_pickle(path: Path) -> bool:
    """By its name, or by the bytes that pickles of protocol 2 and later begin with."""
    if path.suffix in (".pkl", ".pickle"):
        return True
    if path.suffix != ".json":
        return False
    try:
        with os.fdopen(open_file(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            beginning = stream.read(2)
    except OSError as failure:
        raise ProfileError(f"it cannot be read ({failure.strerror or failure})", where=f"import {path}") from None
    is_named = path.name.startswith(PREFIXES) and beginning[:1] not in (b"{", b"[", b"", b" ", b"\n")
    return is_named or (len(beginning) == 2 and beginning[0] == _PROTOCOL_OPCODE and beginning[1] in _PICKLE_PROTOCOLS)


def _read_file(path: Path, platform: Platform) -> Found | None:
    """None for a file that has nothing to say of operators."""
    stem_of = {one: Path(one).stem for one in (kernel_details.FILE_NAME, communication.FILE_NAME)}
    if path.suffix == ".csv" and path.name.startswith(stem_of[kernel_details.FILE_NAME]):
        return read_kernel_details(path, platform)
    if path.suffix == ".json" and path.stem == stem_of[communication.FILE_NAME]:
        return read_communication(path)
    return read_operator_history(path) if path.suffix == ".db" and "operator" in path.name else None


def _walk(folder: Path) -> Iterator[Path]:
    """Its regular files and those of folders in it, in order; links are not followed."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > MAX_FILES:
                raise ProfileError(
                    f"it holds more than {MAX_FILES:,} files; name one further down", where=f"import {folder}"
                )
            yield path
