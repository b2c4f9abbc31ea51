"""`validate TABLE.csv...`: predict published measurements from their configurations alone, and score that."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.output import print_document
from mm_autoparallel.errors import JobError, TableError

if TYPE_CHECKING:
    from mm_autoparallel.measurements.case import MeasuredCase, Refused

HELP = "predict published measurements and score the predictions"
DESCRIPTION = (
    "Predict every row of tables of measurements from its configuration alone, and score what choosing by prediction "
    "costs, step time and peak memory against what was measured: once by the assumed figures of the device, once with "
    "its calibration. Errors are signed: predicted / measured - 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE.csv")
    parser.add_argument("--logs", type=Path, nargs="+", metavar="FILE", help="training logs to predict as well")
    parser.add_argument("--device", metavar="NAME", help="what the logs ran on")
    parser.add_argument(
        "--fact", action="append", metavar="NAME=VALUE", help="what the logs do not tell (once more for each)"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.json",
        help="predict rows of its device with it, not with a shipped one",
    )
    parser.add_argument("--rows", action="store_true", help="list every group and row, however many there are")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read every table first, then predict, score and print; 0, or the exit code of a table that cannot be read."""
    from mm_autoparallel.model.profiles.calibration import read_calibration
    from mm_autoparallel.streams import say

    calibration = None if arguments.calibration is None else read_calibration(arguments.calibration)
    read: list[tuple[Path, list[MeasuredCase], list[Refused]]] = _read_logs(arguments)
    unreadable: dict[Path, TableError] = {}
    for path in arguments.tables:
        found = _try_to_read(path)
        if isinstance(found, TableError):
            unreadable[path] = found
            say(str(found))
        else:
            read.append((path, *found))
    exit_code = next((failure.exit_code for failure in unreadable.values()), 0)
    if not read:
        return exit_code

    from mm_autoparallel.measurements.fingerprint import read_memory, tells_memory
    from mm_autoparallel.measurements.predict import predict_all, predict_uncalibrated
    from mm_autoparallel.measurements.score import score_document, score_table
    from mm_autoparallel.pipeline.simulate.compiled import announce_compilation

    announce_compilation("engine.play")
    scores = []
    for path, cases, refused in read:
        predicted, unpredictable = predict_all(cases, calibration)
        reasons = sorted([*refused, *unpredictable], key=lambda one: one.row)
        uncalibrated = predict_uncalibrated([case for case, _ in predicted])
        read_of = {case.row: read_memory(case, calibration) for case, _ in predicted if tells_memory(case)}
        fingerprints = {row: found for row, found in read_of.items() if found is not None}
        scores.append(score_table(path.name, predicted, reasons, uncalibrated, fingerprints))
    if arguments.json:
        reasons_of = [{"file": path.name, "reason": str(failure)} for path, failure in unreadable.items()]
        print_document({**score_document(scores), "unreadable": reasons_of})
    else:
        from mm_autoparallel.cli.validated import print_scores

        print_scores(scores, arguments.rows)
    return exit_code


def _read_logs(arguments: argparse.Namespace) -> list[tuple[Path, list[MeasuredCase], list[Refused]]]:
    """The cases of all logs as one table; none without. Raises JobError where something beside them is missing."""
    if arguments.logs is None:
        if arguments.device is not None or arguments.fact is not None:
            raise JobError("--device and --fact are about logs, and there are none; name them with --logs")
        if not arguments.tables:
            raise JobError("there is nothing to predict: name a TABLE.csv, or training logs with --logs")
        return []
    if arguments.device is None:
        raise JobError("--logs: a log does not tell its device; give --device NAME, as in a job's cluster")

    from mm_autoparallel.measurements.logs.catalog import read_cases
    from mm_autoparallel.measurements.logs.facts import parse_facts

    return [(Path("logs"), read_cases(arguments.logs, arguments.device, parse_facts(arguments.fact or ())), [])]


def _try_to_read(path: Path) -> tuple[list[MeasuredCase], list[Refused]] | TableError:
    """Its rows and those that are refused; or why it cannot be read, which the other tables need not suffer from."""
    from mm_autoparallel.measurements.catalog import read_table

    try:
        return read_table(path)
    except TableError as failure:
        return failure
