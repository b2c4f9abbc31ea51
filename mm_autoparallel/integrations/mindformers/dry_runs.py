"""What dry runs of candidates left behind: a folder for each, called after it, with the log that says its peak.

DIR/dryrun_DP16_TP4_PP16_EP8_pretrain/dryrun_new.log: … Used peak memory usage (without fragments): 48874M
"""

from __future__ import annotations

import re
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_folder, read_text
from mm_autoparallel.integrations.mindformers.profile_table import Candidate, name_candidate
from mm_autoparallel.units import MIB

WHAT = "dry run"
_NAME = re.compile(r"DP([0-9]+)_TP([0-9]+)_PP([0-9]+)_EP([0-9]+)(?![0-9])")
_PEAK = re.compile(r"Used peak memory usage \(without fragments\):\s*([0-9]+)M")
_MAX_DIGITS = 12
"""Of a peak in MB: an exabyte."""


def find_candidate_folders(folder: Path) -> dict[Candidate, Path]:
    """The folders below `folder` that are called after a candidate, `…DP1_TP2_PP4_EP8…`.

    Raises JobError where `folder` is none, holds none, or two are of one candidate.
    """
    if not is_folder(folder):
        raise JobError(f"{folder}: there is no such folder; one with a folder for each candidate is expected")
    found: dict[Candidate, Path] = {}
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        match = _NAME.search(path.name)
        if match is None:
            continue
        dp, tp, pp, ep = (int(size) for size in match.groups())
        if (dp, tp, pp, ep) in found:
            name = name_candidate((dp, tp, pp, ep))
            raise JobError(f"{path} and {found[dp, tp, pp, ep]} are both of {name}; keep one of them")
        found[dp, tp, pp, ep] = path
    if not found:
        raise JobError(f"{folder}: no folder in it is called after a candidate, like DP16_TP4_PP16_EP8")
    return found


def read_dry_runs(folder: Path) -> dict[Candidate, float]:
    """Candidate → peak bytes of its dry run. Raises JobError naming the log that is missing or tells no peak."""
    peaks: dict[Candidate, float] = {}
    for candidate, path in find_candidate_folders(folder).items():
        logs = sorted(path.glob("*.log"))
        if not logs:
            raise JobError(f"{WHAT} {path}: there is no log in it; dryrun_new.log is expected")
        found = [peak for log in logs for peak in _PEAK.findall(read_text(log, WHAT, "log"))]
        if not found:
            raise JobError(
                f"{WHAT} {path}: no line of its log is `Used peak memory usage (without fragments): …M`; the run did "
                "not end well: run it again, or take its folder away"
            )
        if any(len(peak) > _MAX_DIGITS for peak in found):
            raise JobError(f"{WHAT} {path}: its log tells a peak of more than {_MAX_DIGITS} digits of MB; run it again")
        peaks[candidate] = float(max(map(int, found)) * MIB)
    return peaks
