"""Tables between the programs of the ND search: what was profiled of each candidate, and which candidates there are.

Profile table: dp, tp, pp, ep name the candidate; dmratio is the forward of a dense layer over that of an expert layer,
bfratio backward over forward, re_grow_ration recompute over forward, hratio head and loss over forward, moe_bw the time
of an expert layer's forward itself (the spelling is the table's). Candidate table: dp, tp, pp, ep, peakMem.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.frameworks.mindformers.pipeline_problem import Ratios

WHAT, CANDIDATES = "profile table", "candidate table"
_SIZES = ("dp", "tp", "pp", "ep")
_TIMES = ("dmratio", "bfratio", "re_grow_ration", "hratio", "moe_bw")

Candidate = tuple[int, int, int, int]
"""dp, tp, pp, ep."""


@dataclass(frozen=True)
class ProfiledCandidate:
    """ratios: of its layers. expert_forward_ms: of one expert layer, in whatever unit the table has."""

    ratios: Ratios
    expert_forward_ms: float


def read_profile_table(path: Path) -> dict[Candidate, ProfiledCandidate]:
    """Candidate → what was profiled of it.

    Raises TableError naming file, line and column where one is missing, unknown, no number above 0, or a candidate
    stands there twice.
    """
    found: dict[Candidate, ProfiledCandidate] = {}
    for line, row in _read_rows(path, WHAT, (*_SIZES, *_TIMES)):
        candidate = _candidate(path, WHAT, line, row, found)
        dense, backward, again, head, forward = (_number(path, line, column, row[column]) for column in _TIMES)
        found[candidate] = ProfiledCandidate(Ratios(dense, backward, head, again), forward)
    return found


def read_candidates(path: Path) -> tuple[Candidate, ...]:
    """The candidates of an ND search in the table at `path`. Raises TableError as read_profile_table does."""
    found: dict[Candidate, None] = {}
    for line, row in _read_rows(path, CANDIDATES, (*_SIZES, "peakMem")):
        found[_candidate(path, CANDIDATES, line, row, found)] = None
    return tuple(found)


def name_candidate(candidate: Candidate) -> str:
    """`DP4_TP2_PP8_EP16`, as files of candidates are called."""
    return "_".join(f"{key.upper()}{size}" for key, size in zip(_SIZES, candidate, strict=True))


def _read_rows(path: Path, what: str, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    reader = csv.reader(io.StringIO(read_text(path, what, "CSV file", TableError)), strict=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as failure:
        raise TableError(f"{what} {path}: line {reader.line_num} is no CSV ({failure})") from None
    if not lines:
        raise TableError(f"{what} {path}: it is empty; columns {','.join(columns)} are expected")
    (_, header), *rows = lines
    if sorted(header) != sorted(columns):
        raise TableError(f"{what} {path}: its columns are {','.join(header)}; {','.join(columns)} are expected")
    if not rows:
        raise TableError(f"{what} {path}: it has no rows under its columns")
    for number, row in rows:
        if len(row) != len(header):
            raise TableError(f"{what} {path}: line {number} has {len(row)} values for {len(header)} columns")
    return [(number, dict(zip(header, row, strict=True))) for number, row in rows]


def _candidate(
    path: Path,
    what: str,
    line: int,
    row: dict[str, str],
    before: dict[Candidate, ProfiledCandidate] | dict[Candidate, None],
) -> Candidate:
    for column in _SIZES:
        if not (row[column].isascii() and row[column].isdigit() and int(row[column]) >= 1):
            raise TableError(
                f"{what} {path}: line {line}, column {column} is {describe_value(row[column])}; a whole number of at "
                "least 1 is expected"
            )
    dp, tp, pp, ep = (int(row[column]) for column in _SIZES)
    if (dp, tp, pp, ep) in before:
        raise TableError(f"{what} {path}: line {line} has {name_candidate((dp, tp, pp, ep))} a second time; keep one")
    return dp, tp, pp, ep


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise TableError(
            f"{WHAT} {path}: line {line}, column {column} is {describe_value(text)}; a number above 0 is expected"
        )
    return value
