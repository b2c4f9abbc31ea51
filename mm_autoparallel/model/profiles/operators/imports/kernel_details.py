"""kernel_details.csv of CANN's profiler, a row a kernel that ran. Columns go by name: releases write different sets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.model.profiles.operators.base import MAX_SAMPLES, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.model.profiles.operators.imports.found import Found
from mm_autoparallel.model.profiles.operators.imports.kernels import (
    COLLECTIVES,
    kernel_form,
    read_shapes,
    read_types,
)
from mm_autoparallel.model.profiles.operators.platform import Platform

FILE_NAME = "kernel_details.csv"
NEEDED = ("Type", "Accelerator Core", "Duration(us)", "Input Shapes", "Input Data Types", "Output Shapes")
_TELLING = {"OP State": "state", "Input Formats": "formats", "HF32 Eligible": "hf32"}
"""Other columns that say what changes a kernel's time, and what the form calls them."""

MAX_BYTES, MAX_ROWS = 1_000_000_000, 5_000_000
"""Assumed: ten times a profile of ten steps of a large model."""

Row = Mapping[str, str]


def read_kernel_details(path: Path, platform: Platform) -> Found:
    """The kernels in the file at `path`, which does not name its device. Raises ProfileError naming line and column."""
    forms: dict[bytes, OperatorForm] = {}
    samples_us: dict[bytes, list[float]] = {}
    distinct: set[tuple[str, ...]] = set()
    num_rows, num_collectives, total_us = 0, 0, 0.0
    for line, row in _read_rows(path):
        time_us = _read_time(row["Duration(us)"], path, line)
        num_rows, total_us = num_rows + 1, total_us + time_us
        distinct.add(tuple(row[name] for name in ("Type", "Input Shapes", "Input Data Types", "Output Shapes")))
        if row["Accelerator Core"] == COLLECTIVES:
            num_collectives += 1
            continue
        form = _read_form(row, path, line)
        forms.setdefault(form.digest, form)
        samples_us.setdefault(form.digest, []).append(time_us)
    notes = []
    if num_collectives:
        notes.append(f"{num_collectives} rows are collectives, which belong to network profiles; they are left out")
    samples = [Sampled(form, samples_us[digest][-MAX_SAMPLES:]) for digest, form in forms.items()]
    return Found(path, {platform: samples}, num_rows, len(distinct), total_us, tuple(notes))


def _read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Each row with its line, cells trimmed."""
    text = read_text(path, "kernel details", "CSV file", ProfileError, max_bytes=MAX_BYTES)
    reader = csv.reader(io.StringIO(text), strict=True)
    where = f"kernel details {path}"
    try:
        header = [cell.strip() for cell in next(reader, [])]
        for name in NEEDED:
            if header.count(name) != 1:
                found = "there is no such column" if name not in header else "it stands there twice"
                raise ProfileError(
                    f"the column {name} is needed and {found}; profile at a level that writes it", where=where, key=name
                )
        for number, cells in enumerate(reader):
            if number == MAX_ROWS:
                raise ProfileError(
                    f"it has more than {MAX_ROWS:,} rows, the most that are read; divide it", where=where
                )
            if len(cells) != len(header):
                raise ProfileError(
                    f"line {reader.line_num} has {len(cells)} cells and the header {len(header)}; mend the line",
                    where=where,
                )
            yield reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except csv.Error as failure:
        raise ProfileError(f"it is no valid CSV: {failure} in line {reader.line_num}", where=where) from None


def _read_time(text: str, path: Path, line: int) -> float:
    try:
        time_us = float(text)
    except ValueError:
        time_us = math.nan
    if not 0 <= time_us < math.inf:
        raise ProfileError(
            f"Duration(us) in line {line} is {describe_value(text)}; a number of at least 0 is expected",
            where=f"kernel details {path}",
            key="Duration(us)",
        )
    return time_us


def _read_form(row: Row, path: Path, line: int) -> OperatorForm:
    inputs = _read_tensors(row, "Input", path, line)
    outputs = _read_tensors(row, "Output", path, line)
    arguments = {called: row[name] for name, called in _TELLING.items() if row.get(name, "N/A") != "N/A"}
    try:
        return kernel_form(row["Type"], inputs, outputs, {"core": row["Accelerator Core"], **arguments})
    except ValueError:
        raise ProfileError(
            f"Type in line {line} is {describe_value(row['Type'])}; the type of an operator is expected, of at most "
            "200 characters, on tensors that a device can hold",
            where=f"kernel details {path}",
            key="Type",
        ) from None


def _read_tensors(row: Row, side: str, path: Path, line: int) -> list[TensorForm]:
    column = f"{side} Shapes"
    try:
        shapes = read_shapes(row[column])
        types = read_types(row.get(f"{side} Data Types", ""), len(shapes))
        return [TensorForm(shape=shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
    except ValueError:
        raise ProfileError(
            f"{column} in line {line} is {describe_value(row[column])}; sizes between commas, tensors between "
            "semicolons are expected",
            where=f"kernel details {path}",
            key=column,
        ) from None
