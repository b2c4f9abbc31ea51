"""OperatorBase: the SQLite file of operator times, `<store>/operators.sqlite`.

One row of `operator` is a form, one of `platform` a device with its software, and one of `timing` what one source told
of both. Samples are kept, the latest `MAX_SAMPLES`, and their median is what is looked up: never a mean of means.

The file is in SQLite's write-ahead mode and every addition is one transaction: several processes may add at once, and
one that is killed leaves what was there before. That mode needs one machine's memory: over a network file system one
machine at a time may write.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from mm_autoparallel.confinement import pinned
from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_folder, is_there, temporary_of
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.model.profiles.operators.platform import Platform
from mm_autoparallel.model.profiles.store import today

Source = Literal["block profile", "micro-benchmark", "imported"]
SOURCES: tuple[Source, ...] = ("block profile", "micro-benchmark", "imported")
"""The best first: inside its block an operator finds caches and clocks as it does in training."""

FILE_NAME, SUFFIX = "operators.sqlite", ".sqlite"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x6D6D6F70
"""Of SQLite's header: says whose file it is ("mmop")."""

_BEGINNING = b"SQLite format 3\0"

MAX_SAMPLES = 32
WAIT_S = 30.0
"""Assumed: how long a writer waits for others; an addition takes milliseconds."""

_SCHEMA = (
    "CREATE TABLE platform (id INTEGER PRIMARY KEY, device TEXT NOT NULL, software TEXT NOT NULL,"
    " deterministic INTEGER NOT NULL, UNIQUE (device, software, deterministic))",
    "CREATE TABLE operator (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, family BLOB NOT NULL,"
    " kind TEXT NOT NULL, dtype TEXT NOT NULL, flops INTEGER NOT NULL, moved_bytes INTEGER NOT NULL,"
    " form TEXT NOT NULL)",
    "CREATE INDEX operator_family ON operator (family, moved_bytes)",
    "CREATE INDEX operator_kind ON operator (kind, dtype, moved_bytes)",
    "CREATE TABLE timing (operator INTEGER NOT NULL REFERENCES operator, platform INTEGER NOT NULL REFERENCES platform,"
    " source INTEGER NOT NULL, median_us REAL NOT NULL, mad_us REAL NOT NULL, num_samples INTEGER NOT NULL,"
    " samples TEXT NOT NULL, date TEXT NOT NULL, PRIMARY KEY (operator, platform, source)) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Timed:
    """What one source tells of a form. num_samples: those kept. date: of the latest."""

    form: OperatorForm
    source: Source
    median_us: float
    mad_us: float
    num_samples: int
    date: str


@dataclass(frozen=True)
class Sampled:
    """Times of one form that were just measured, in µs."""

    form: OperatorForm
    samples_us: Sequence[float]


def base_path(store: Path) -> Path:
    """Where the base of a store lies."""
    return store / FILE_NAME


class OperatorBase:
    """An open base; use as a context, or close it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection

    @classmethod
    def open(cls, path: Path) -> OperatorBase:
        """The base at `path`, to be read. Raises ProfileError where it is missing, damaged or no base of this form."""
        if not is_there(path):
            raise ProfileError("there is no such file; `mm-autoparallel profile` makes one", where=_where(path))
        return cls._connect(path, "ro")

    @classmethod
    def open_to_add(cls, path: Path) -> OperatorBase:
        """The base at `path`, made where there is none. Raises ProfileError as `open` does, and where it cannot be
        written."""
        return cls._connect(path, "rw")

    @classmethod
    def _connect(cls, path: Path, mode: Literal["ro", "rw"]) -> OperatorBase:
        if is_folder(path):
            raise ProfileError("it is a folder; name the base's file", where=_where(path))
        with _telling(path), pinned(path) as target:
            if mode == "rw" and not is_there(path):
                _make(target)
            _check_kind(target, path)
            connection = _open_file(target, mode)
            try:
                connection.execute("PRAGMA synchronous = NORMAL")
                _check(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def __enter__(self) -> OperatorBase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go."""
        self._connection.close()

    # ----------------------------------------------------------------------------------------------------- additions

    def add(self, platform: Platform, source: Source, found: Iterable[Sampled]) -> int:
        """Keeps the samples, all of them or none; how many forms they were of. Raises ProfileError."""
        with _telling(self.path), self._transaction() as cursor:
            place, count, date = _place_of(cursor, platform), 0, today()
            for one in found:
                _add_samples(cursor, (_operator_of(cursor, one.form), place, SOURCES.index(source)), one, date)
                count += 1
        return count

    def note(self, forms: Iterable[OperatorForm]) -> None:
        """Keeps forms that were seen and not timed, so that they can be. Raises ProfileError."""
        with _telling(self.path), self._transaction() as cursor:
            for form in forms:
                _operator_of(cursor, form)

    # ---------------------------------------------------------------------------------------------------------- reads

    def list_platforms(self) -> dict[int, Platform]:
        """The platforms by their numbers here, the one that was measured last first."""
        latest = (
            "SELECT id, device, software, deterministic FROM platform ORDER BY"
            " (SELECT max(date) FROM timing WHERE timing.platform = platform.id) DESC, id DESC"
        )
        with _telling(self.path):
            rows = self._connection.execute(latest).fetchall()
            return {row[0]: Platform(row[1], json.loads(row[2]), bool(row[3])) for row in rows}

    def count(self) -> tuple[int, int]:
        """Forms, and timings of them."""
        with _telling(self.path):
            counts = "SELECT (SELECT count(*) FROM operator), (SELECT count(*) FROM timing)"
            num_forms, num_timings = self._connection.execute(counts).fetchone()
            return int(num_forms), int(num_timings)

    def median_us(self, digest: bytes, place: int) -> float | None:
        """The time of a form, by its digest, on the platform `place`, of the best source that tells it; else None."""
        with _telling(self.path):
            row = self._connection.execute(_LOOK_UP, (digest, place)).fetchone()
        return None if row is None else float(row[0])

    def near(
        self,
        column: Literal["family", "kind"],
        value: bytes | str,
        dtype: str,
        moved_bytes: tuple[float, float],
        place: int,
    ) -> list[tuple[int, int, float]]:
        """FLOPs, bytes and µs of timed forms of a family, or of a kind and type, that move so many bytes."""
        where = "family = ?" if column == "family" else "kind = ? AND dtype = ?"
        keys: tuple[object, ...] = (value,) if column == "family" else (value, dtype)
        query = (
            "SELECT flops, moved_bytes, median_us, operator.id FROM operator JOIN timing ON operator = operator.id"
            f" WHERE {where} AND moved_bytes BETWEEN ? AND ? AND platform = ? ORDER BY operator.id, source LIMIT ?"
        )
        with _telling(self.path):
            rows = self._connection.execute(query, (*keys, *moved_bytes, place, _MAX_NEAR)).fetchall()
        best = {row[3]: row[:3] for row in reversed(rows)}
        return list(best.values())

    def list_timed(self, place: int) -> Iterator[Timed]:
        """All that is known on the platform `place`, in the order of forms."""
        query = (
            "SELECT form, source, median_us, mad_us, num_samples, date FROM timing JOIN operator ON operator.id ="
            " operator WHERE platform = ? ORDER BY operator.id, source"
        )
        with _telling(self.path):
            for row in self._connection.execute(query, (place,)):
                yield Timed(OperatorForm.model_validate(json.loads(row[0])), SOURCES[row[1]], *row[2:])

    def list_untimed(self) -> Iterator[OperatorForm]:
        """Forms that nobody timed anywhere."""
        query = "SELECT form FROM operator WHERE id NOT IN (SELECT operator FROM timing) ORDER BY id"
        with _telling(self.path):
            for (form,) in self._connection.execute(query):
                yield OperatorForm.model_validate(json.loads(form))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")


_LOOK_UP = (
    "SELECT median_us FROM timing WHERE operator = (SELECT id FROM operator WHERE digest = ?) AND platform = ?"
    " ORDER BY source LIMIT 1"
)
_MAX_NEAR = 4096
"""Neighbours that a regression looks at."""


def _operator_of(cursor: sqlite3.Cursor, form: OperatorForm) -> int:
    row = cursor.execute("SELECT id FROM operator WHERE digest = ?", (form.digest,)).fetchone()
    if row is None:
        text = json.dumps(form.row, separators=(",", ":"))
        values = (form.digest, form.family, form.kind, form.dtype, form.flops, form.moved_bytes, text)
        cursor.execute(
            "INSERT INTO operator (digest, family, kind, dtype, flops, moved_bytes, form) VALUES (?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        return int(cursor.lastrowid or 0)
    return int(row[0])


def _place_of(cursor: sqlite3.Cursor, platform: Platform) -> int:
    values = (platform.device, platform.versions, int(platform.deterministic))
    cursor.execute("INSERT OR IGNORE INTO platform (device, software, deterministic) VALUES (?, ?, ?)", values)
    query = "SELECT id FROM platform WHERE device = ? AND software = ? AND deterministic = ?"
    return int(cursor.execute(query, values).fetchone()[0])


def _add_samples(cursor: sqlite3.Cursor, key: tuple[int, int, int], found: Sampled, date: str) -> None:
    query = "SELECT samples FROM timing WHERE operator = ? AND platform = ? AND source = ?"
    row = cursor.execute(query, key).fetchone()
    kept = ([] if row is None else json.loads(row[0])) + [round(sample, 3) for sample in found.samples_us]
    kept = kept[-MAX_SAMPLES:]
    median_us = statistics.median(kept)
    mad_us = statistics.median(abs(sample - median_us) for sample in kept)
    cursor.execute(
        "INSERT OR REPLACE INTO timing VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*key, median_us, mad_us, len(kept), json.dumps(kept), date),
    )


def _open_file(target: Path, mode: str) -> sqlite3.Connection:
    # to read beside writers takes files beside the base; nobody writes where a folder cannot be written
    alone = mode == "ro" and not os.access(target.parent, os.W_OK)
    uri = f"file:{quote(str(target))}?mode={mode}{'&immutable=1' if alone else ''}"
    return sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None, check_same_thread=False)


def _make(target: Path) -> None:
    """Makes an empty base; of several processes that do, the first one's stays."""
    temporary = temporary_of(target)
    connection = _open_file(temporary, "rwc")
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    finally:
        connection.close()
    with suppress(FileExistsError):
        os.link(temporary, target)
    temporary.unlink()


def _check_kind(target: Path, path: Path) -> None:
    with target.open("rb") as stream:
        beginning = stream.read(len(_BEGINNING))
    if beginning != _BEGINNING:
        raise ProfileError(
            "it is no SQLite database; name a base of operators, or remove it and fill it anew", where=_where(path)
        )


def _check(connection: sqlite3.Connection, path: Path) -> None:
    whose, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if whose != APPLICATION_ID:
        listed = ", ".join(sorted(tables)) or "none"
        raise ProfileError(
            f"it is a database of another program (application_id {whose:#x}, tables: {listed}); a base of operators "
            "has that of mm-autoparallel. Bring in what MindSpeed wrote with `mm-autoparallel operators import`",
            where=_where(path),
            key="application_id",
        )
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"user_version is {version}, and this mm-autoparallel knows the form {SCHEMA_VERSION}; "
            + ("it was written by a newer one: use that" if version > SCHEMA_VERSION else "remove it and fill it anew"),
            where=_where(path),
            key="user_version",
        )
    if missing := {"platform", "operator", "timing"} - tables:
        raise ProfileError(f"it has no table {min(missing)}; it is damaged, so put back a copy", where=_where(path))


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """SQLite's and the system's failures as errors that name the file."""
    try:
        yield
    except sqlite3.Error as failure:
        if isinstance(failure, sqlite3.OperationalError):  # locked for WAIT_S, read-only, a full disk
            reason = f"it cannot be read or written ({failure}); end what holds it, make room or give permission there"
        else:
            reason = f"it is damaged ({failure}); put back a copy, or remove it and fill it anew"
        raise ProfileError(reason, where=_where(path)) from None
    except OSError as failure:
        raise ProfileError(f"it cannot be opened ({failure.strerror or failure})", where=_where(path)) from None


def _where(path: Path) -> str:
    return f"operator base {path}"
