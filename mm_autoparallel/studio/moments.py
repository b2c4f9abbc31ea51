"""What a person has done: moments, one behind the other, each a job and a plan of it; and how they are kept on disk.

A moment never changes. Undo and redo move between them; what is done at an earlier one takes the place of those behind.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from mm_autoparallel.api.jobs import change_document
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_there, read_document, write_text_atomically
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.records import Name, Noun, Number
from mm_autoparallel.studio.document import Answer, Value
from mm_autoparallel.validation import parse_record

FOLDER, FILE = ".mm-autoparallel-studio", "session.json"
MAX_MOMENTS, MAX_ANSWERS, MAX_PINS = 100, 20, 6
"""Kept at most, the oldest go. Assumed: what a page shows and a file of some MB holds."""

LongText = Annotated[str, Field(strict=True, max_length=4_000_000)]
Line = Annotated[str, Field(strict=True, max_length=4_000)]


class Source(Noun):
    """A job: the text of a job file, where it lies or would lie (from the folder), and other values of some keys."""

    file: Name
    text: LongText
    values: dict[Name, Value] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Differs where the job does."""
        told = json.dumps([self.file, self.text, dict(sorted(self.values.items()))])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def number(self) -> int:
        """The same as a number."""
        return int(self.key[:8], 16)

    def document(self, folder: Path) -> dict[str, Any]:
        """The job file's content with those values. Raises JobError."""
        path = folder / self.file
        given = read_document(path, "job file", JobError, part=self.text)
        return change_document(given, self.values, path) if self.values else given

    def job(self, folder: Path) -> Job:
        """The job. Raises JobError as `read_job` does."""
        return parse_job(self.document(folder), folder / self.file)

    def written(self, folder: Path) -> str:
        """The text of the file that says all of it: the text itself, where nothing is otherwise."""
        return yaml.safe_dump(self.document(folder), sort_keys=False) if self.values else self.text

    def flags(self) -> list[str]:
        """The same values as words of the command line."""
        return [word for key, value in self.values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


class Moment(Noun):
    """words: what was done. command: of the command line that would do it; empty: none would be new. plan: what a
    plan's file needs. file: how commands call that file."""

    words: Line
    command: Line = ""
    source: Source
    plan: dict[str, Any]
    file: Name


class Saved(Noun):
    """The session's file. cursor: of the moment that is shown; -1 while there is none."""

    schema_name: Literal["mm-autoparallel/studio-session/1"] = "mm-autoparallel/studio-session/1"
    revision: Number = 0
    cursor: Annotated[int, Field(strict=True, ge=-1)] = -1
    moments: tuple[Moment, ...] = ()
    pins: dict[Name, Moment] = Field(default_factory=dict)
    answers: tuple[Answer, ...] = ()


@dataclass
class Moments:
    """All of `saved`, written to the folder at each change. Raises OSError where it cannot be."""

    folder: Path
    saved: Saved = field(default_factory=Saved)

    @property
    def path(self) -> Path:
        return self.folder / FOLDER / FILE

    @classmethod
    def read(cls, folder: Path) -> Moments:
        """What was kept in the folder. Raises JobError where its file is none of these."""
        moments = cls(folder)
        if is_there(moments.path):
            document = read_document(moments.path, "session file of the studio")
            saved = parse_record(Saved, document, "session file of the studio", moments.path)
            if not -1 <= saved.cursor < max(len(saved.moments), 0) or (saved.cursor < 0) != (not saved.moments):
                raise JobError(f"cursor is {saved.cursor} of {len(saved.moments)} moments", where=str(moments.path))
            moments.saved = saved
        return moments

    @property
    def present(self) -> Moment | None:
        """The moment that is shown."""
        return self.saved.moments[self.saved.cursor] if self.saved.moments else None

    def add(self, moment: Moment) -> None:
        """Behind the present one, in the place of those that were there."""
        kept = (*self.saved.moments[: self.saved.cursor + 1], moment)[-MAX_MOMENTS:]
        self._change(moments=kept, cursor=len(kept) - 1)

    def move(self, by: int) -> Moment:
        """Show the moment before (-1) or behind (1). Raises JobError where there is none."""
        cursor = self.saved.cursor + by
        if not 0 <= cursor < len(self.saved.moments):
            raise JobError(f"there is nothing to {'undo' if by < 0 else 'redo'}")
        self._change(cursor=cursor)
        return self.saved.moments[cursor]

    def pin(self, name: str) -> None:
        """Keep the present moment under a name. Raises JobError where it is taken, or they are too many."""
        present, pins = self.present, self.saved.pins
        if present is None:
            raise JobError("there is no plan to pin yet")
        if name in pins:
            raise JobError(f"a plan called {name!r} is pinned already; take another name, or unpin that one")
        if len(pins) >= MAX_PINS:
            raise JobError(f"{MAX_PINS} plans are pinned, which is all that a page shows; unpin one first")
        self._change(pins=pins | {name: present})

    def pinned(self, name: str) -> Moment:
        """Raises JobError where none is called so."""
        if name not in self.saved.pins:
            raise JobError(f"no plan called {name!r} is pinned")
        return self.saved.pins[name]

    def unpin(self, name: str) -> None:
        """Put a pinned plan away. Raises JobError where none is called so."""
        self.pinned(name)
        self._change(pins={key: value for key, value in self.saved.pins.items() if key != name})

    def answer(self, answer: Answer) -> None:
        """The last answers are kept."""
        self._change(answers=(*self.saved.answers, answer)[-MAX_ANSWERS:])

    def _change(self, **fields: Any) -> None:
        changed = self.saved.model_copy(update=fields | {"revision": self.saved.revision + 1})
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        write_text_atomically(self.path, changed.model_dump_json())
        self.saved = changed
