"""Tables between the programs of the ND search: what was profiled of each candidate, and which candidates there are.

Profile table: dp, tp, pp, ep name the candidate; dmratio is the forward of a dense layer over that of an expert layer,
bfratio backward over forward, re_grow_ration recompute over forward, hratio head and loss over forward, moe_bw the time
of an expert layer's forward itself (the spelling is the table's). Candidate table: dp, tp, pp, ep, peakMem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value, read_csv
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios
from mm_autoparallel.units import describe_range

WHAT, CANDIDATES = "profile table", "candidate table"
_SIZES = ("dp", "tp", "pp", "ep")
_TIMES = ("dmratio", "bfratio", "re_grow_ration", "hratio", "moe_bw")

_SMALLEST, _LARGEST = 1e-9, 1e9
"""Of ratios, and of a forward in whatever unit. Assumed."""

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
    def check(header: Sequence[str]) -> None:
        if sorted(header) != sorted(columns):
            raise TableError(
                f"{what} {path}: its columns are {', '.join(header[: 2 * len(columns)])}; {','.join(columns)} are "
                "expected"
            )

    _, header, rows = read_csv(path, what, check)
    if not rows:
        raise TableError(f"{what} {path}: it has no rows under its columns")
    return [(line, dict(zip(header, cells, strict=True))) for line, cells in rows]


def _candidate(
    path: Path,
    what: str,
    line: int,
    row: dict[str, str],
    before: dict[Candidate, ProfiledCandidate] | dict[Candidate, None],
) -> Candidate:
    for column in _SIZES:
        if not re.fullmatch("0*[1-9][0-9]{0,14}", row[column]):
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
    if not _SMALLEST <= value <= _LARGEST:
        raise TableError(
            f"{WHAT} {path}: line {line}, column {column} is {describe_value(text)}; "
            f"{describe_range(_SMALLEST, _LARGEST)} is expected"
        )
    return value
