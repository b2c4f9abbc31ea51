"""operator_history.db of MindSpeed's Auto Tuning (operator_different.db and operator_profiling.db have its form).

One table, a row an operator. Its durations are running means that weigh the last time by half. Its device is what was
measured on; its versions of CANN and of the driver are constants of the program that wrote it, and say nothing.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mm_autoparallel.confinement import pinned
from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import describe_value, is_folder, is_there
from mm_autoparallel.model.profiles.operators.base import Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.model.profiles.operators.imports.found import Found
from mm_autoparallel.model.profiles.operators.imports.kernels import kernel_form, read_shapes, read_types
from mm_autoparallel.model.profiles.operators.platform import CONSTANT, Platform

TABLE = "operator_history"
COLUMNS = ("types", "accelerator_core", "input_shape", "output_shape", "duration", "device", "jit", "dtype")
MAX_ROWS = 1_000_000
"""Assumed: a hundred times what a year of searches leaves."""

NOTE = (
    "versions are kept as unknown: MindSpeed writes constants; durations are its running means, one sample each: both "
    "hold for no job's versions"
)


def read_operator_history(path: Path) -> Found:
    """The operators of the database at `path`. Raises ProfileError where it is none of this form, or is damaged."""
    where = f"operator history {path}"
    if not is_there(path) or is_folder(path):
        raise ProfileError("there is no such file" if not is_there(path) else "it is a folder", where=where)
    try:
        with pinned(path) as target:
            uri = f"file:{quote(str(target))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(uri, uri=True)) as connection:
                rows = _read_rows(connection, where)
    except sqlite3.Error as failure:
        raise ProfileError(f"it is no database, or a damaged one ({failure}); copy it anew", where=where) from None
    except OSError as failure:
        raise ProfileError(f"it cannot be opened ({failure.strerror or failure})", where=where) from None
    samples: dict[Platform, list[Sampled]] = {}
    for number, row in rows:
        platform = Platform(_text(row, "device", where, number), {"cann": CONSTANT, "driver": CONSTANT})
        sampled = Sampled(_read_form(row, where, number), [_read_duration(row["duration"], where, number)])
        samples.setdefault(platform, []).append(sampled)
    total_us = sum(each for found in samples.values() for one in found for each in one.samples_us)
    distinct = {tuple(row[name] for name in ("types", "input_shape", "output_shape", "dtype")) for _, row in rows}
    return Found(path, samples, len(rows), len(distinct), total_us, (NOTE,) if rows else ("it has no rows",))


def _read_rows(connection: sqlite3.Connection, where: str) -> list[tuple[int, dict[str, Any]]]:
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({TABLE})")]
    if not columns:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        listed = ", ".join(sorted(tables)) or "none"
        raise ProfileError(f"it has no table {TABLE} (its tables: {listed}); name MindSpeed's", where=where, key=TABLE)
    for name in COLUMNS:
        if name not in columns:
            raise ProfileError(
                f"the table {TABLE} has no column {name} (it has {', '.join(columns)}); name a database of MindSpeed's",
                where=where,
                key=name,
            )
    if connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone()[0] > MAX_ROWS:
        raise ProfileError(f"it has more than {MAX_ROWS:,} rows, the most that are read", where=where, key=TABLE)
    found = connection.execute(f"SELECT rowid, {', '.join(COLUMNS)} FROM {TABLE} ORDER BY rowid")
    return [(row[0], dict(zip(COLUMNS, row[1:], strict=True))) for row in found]


def _read_duration(value: Any, where: str, number: int) -> float:
    is_number = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
    if not is_number:
        raise ProfileError(
            f"duration of row {number} is {describe_value(value)}; microseconds, at least 0, are expected",
            where=where,
            key="duration",
        )
    return float(value)


def _read_form(row: Mapping[str, Any], where: str, number: int) -> OperatorForm:
    dtype = read_types(_text(row, "dtype", where, number), 1)[0]
    inputs, outputs = (_read_tensors(row, column, dtype, where, number) for column in ("input_shape", "output_shape"))
    arguments = {"core": _text(row, "accelerator_core", where, number), "jit": str(row["jit"])}
    kind = _text(row, "types", where, number)
    try:
        return kernel_form(kind, inputs, outputs, arguments)
    except ValueError:
        raise ProfileError(
            f"types of row {number} is {describe_value(kind)}; the type of an operator is expected, of at most 200 "
            "characters, on tensors that a device can hold",
            where=where,
            key="types",
        ) from None


def _read_tensors(row: Mapping[str, Any], column: str, dtype: str, where: str, number: int) -> list[TensorForm]:
    try:
        return [TensorForm(shape=shape, dtype=dtype) for shape in read_shapes(_text(row, column, where, number))]
    except ValueError:
        raise ProfileError(
            f"{column} of row {number} is {describe_value(row[column])}; sizes between commas, tensors between "
            "semicolons are expected",
            where=where,
            key=column,
        ) from None


def _text(row: Mapping[str, Any], column: str, where: str, number: int) -> str:
    value = row[column]
    if not isinstance(value, str) or not value or len(value) > 10_000:
        raise ProfileError(
            f"{column} of row {number} is {describe_value(value)}; text is expected", where=where, key=column
        )
    return value
