"""`calibrate [TABLE] [--logs FILE...] --device NAME --out FILE.json`: fit what a device reaches to step times."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.output import print_document
from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.reports.terminal import say, warn

if TYPE_CHECKING:
    from mm_autoparallel.measurements.calibrate import Fitted
    from mm_autoparallel.measurements.case import MeasuredCase
    from mm_autoparallel.model.profiles.calibration import Calibration

HELP = "fit what a device reaches to measured step times"
DESCRIPTION = (
    "Fit the few figures of a device that rows of TABLE or training logs can tell (what part of its peaks its "
    "operators and links reach) to their step times, and score the other rows with them. Name the file in a "
    "job's `calibration`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("table", type=Path, nargs="?", metavar="TABLE.csv")
    parser.add_argument(
        "--logs",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="training logs to fit to, of Megatron-LM, Megatron-DeepSpeed, MindSpeed, torchtitan or LLM Foundry",
    )
    parser.add_argument(
        "--fact",
        action="append",
        metavar="NAME=VALUE",
        help="what these logs do not tell, as devices_per_node=8 or vocab_size=32000 (once more for each)",
    )
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME,...",
        help="the device's name, as in a job's cluster; of several, rows of all are fitted together",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the calibration to write")
    parser.add_argument("--rows", metavar="N,N,...", help="rows to fit to, counted from 0 (default: all)")
    parser.add_argument("--also", metavar="TABLE.csv:N,N,...", help="rows of another table to fit to as well")
    parser.add_argument(
        "--software",
        metavar="NAME",
        help="fit to rows of this software stack alone; needed where the table has several",
    )
    parser.add_argument("--free", metavar="NAME,...", help="what may be fitted (default: whatever the rows can tell)")
    parser.add_argument(
        "--set", metavar="FIGURE=VALUE,...", help="figures that are known of the stack and are not fitted"
    )
    parser.add_argument(
        "--choose",
        type=int,
        metavar="N",
        help="fit to the N rows that tell most of what is fitted, of TABLE and --holdout, whatever was measured",
    )
    parser.add_argument(
        "--base",
        metavar="CALIBRATION",
        help="what is not fitted is taken from it (name or file; `plain`: rooflines without waves, gaps and scale)",
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="how many times as far as usual figures may lie from where they begin (default: 1)",
    )
    parser.add_argument("--holdout", type=Path, nargs="+", metavar="TABLE.csv", help="more rows to score")
    parser.add_argument("--name", metavar="NAME", help="the calibration's name (default: that of its file)")
    parser.add_argument("--note", metavar="TEXT", help="a sentence for people who read the file")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read all tables, fit, write the file, print the signed errors of the fit and of the rows held out."""
    from mm_autoparallel.files import is_folder
    from mm_autoparallel.measurements.calibrate import Target, calibrate, choose_cases
    from mm_autoparallel.measurements.catalog import read_table
    from mm_autoparallel.model.profiles.calibration import calibration_document
    from mm_autoparallel.model.profiles.disk import check_writable, write_measurements

    rows = None if arguments.rows is None else _parse_rows(arguments.rows, "--rows")
    device_names = _parse_devices(arguments.device)
    _check_inputs(arguments)
    chosen, others = _read_rows(arguments, rows, device_names)
    software = _software_of(chosen, arguments.software, arguments)
    for path in arguments.holdout or ():
        others += [case for case in read_table(path)[0] if case.job.cluster.device.name in device_names]
    others = [case for case in others if case.software == software and case.measured_ms is not None]
    target = Target(
        name=arguments.name or arguments.out.stem,
        device_name=device_names[0],
        software=software,
        free=[name for name in (arguments.free or "").split(",") if name],
        base=_find_base(arguments.base, device_names, software),
        given=_parse_figures(arguments.set or ""),
        note=arguments.note or "",
        command=_command(arguments),
        spread_factor=arguments.spread,
    )
    if arguments.choose is not None:
        if rows is not None or arguments.also is not None:
            raise JobError("--choose names no rows of its own beside --rows and --also; leave either out")
        chosen, others = choose_cases([*chosen, *others], arguments.choose, target)
    check_writable(arguments.out.parent)
    fitted = calibrate(chosen, others, target)
    document = calibration_document(fitted.calibration)
    if is_folder(arguments.out):
        raise ProfileError(f"calibration {arguments.out} is a folder; name a file in it")
    write_measurements(arguments.out, document)
    if arguments.json:
        print_document(document)
    else:
        _print_fit(fitted)
    say(f"wrote {arguments.out}; name it in a job file as `calibration: {arguments.out.name}`")
    return 0


def _read_rows(
    arguments: argparse.Namespace, rows: Sequence[int] | None, device_names: Sequence[str]
) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """The cases to fit to, of the table, the logs and --also, and the other ones of these tables. Raises JobError."""
    from mm_autoparallel.measurements.catalog import read_table

    asked = arguments.software
    chosen: list[MeasuredCase] = []
    others: list[MeasuredCase] = []
    if arguments.table is not None:
        chosen, others = _choose_cases(read_table(arguments.table)[0], rows, device_names, asked, arguments.table)
    if arguments.logs is not None:
        of_logs = _read_logs(arguments.logs, arguments.fact or (), device_names)
        chosen += [case for case in of_logs if case.measured_ms is not None and asked in (None, case.software)]
    if arguments.also is not None:
        name, _, numbers = arguments.also.rpartition(":")
        if not name:
            raise JobError(f"--also is {arguments.also!r}, and `TABLE.csv:0,3` is expected: a table and its rows")
        more, _ = read_table(Path(name))
        fit_to, rest = _choose_cases(more, _parse_rows(numbers, "--also"), device_names, asked, Path(name))
        chosen, others = [*chosen, *fit_to], [*others, *rest]
    return chosen, others


def _read_logs(paths: Sequence[Path], facts: Sequence[str], device_names: Sequence[str]) -> Sequence[MeasuredCase]:
    """The runs of training logs; what each tells is said. Raises JobError where none tells a step time."""
    from mm_autoparallel.measurements.fingerprint import read_memory, tells_memory
    from mm_autoparallel.measurements.logs.catalog import read_cases
    from mm_autoparallel.measurements.logs.facts import parse_facts

    if len(device_names) > 1:
        raise JobError(f"--device names {', '.join(device_names)}, and logs do not tell their own; name theirs alone")
    cases = read_cases(paths, device_names[0], parse_facts(facts))
    for case in cases:
        step = "no step" if case.measured_ms is None else f"{case.measured_ms:.6g} ms a step"
        say(f"log {case.name}, {step}, {'; '.join(case.remarks)}")
        found = read_memory(case) if tells_memory(case) else None
        if found is not None and found.contradicted:
            warn([f"log {case.name}: {found.words}"])
        elif found is not None:
            say(f"log {case.name}: {found.words}")
    if not any(case.measured_ms for case in cases):
        raise JobError("--logs: no step time is told, and times are what is calibrated; name logs of runs that ran")
    return cases


def _command(arguments: argparse.Namespace) -> str:
    """What makes the same file again, without folders: `mm-autoparallel calibrate table.csv --device …`."""
    parts = ["mm-autoparallel", "calibrate"]
    parts += [] if arguments.table is None else [arguments.table.name]
    if arguments.logs is not None:
        parts += ["--logs", *(shlex.quote(path.name) for path in arguments.logs)]
        parts += [shlex.quote(part) for fact in arguments.fact or () for part in ("--fact", fact)]
    parts += ["--device", arguments.device]
    for option in ("rows", "also", "choose", "software", "free", "set", "base", "spread", "note"):
        value = getattr(arguments, option)
        if value and option == "also":
            value = Path(value).name
        if value and not (option == "spread" and value == 1.0):
            parts += [f"--{option}", shlex.quote(str(value))]
    for path in arguments.holdout or ():
        parts += ["--holdout", path.name]
    return " ".join([*parts, "--out", arguments.out.name])


def _parse_devices(text: str) -> list[str]:
    """`h100-80g,b200-192g` as names."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise JobError(f"--device is {text!r}; a name is expected, or several different ones with commas between")
    return names


def _find_base(name: str | None, device_names: Sequence[str], software: str) -> Calibration:
    """What is not fitted, of all devices: the calibration called `name`, or what is assumed of them without one."""
    from mm_autoparallel.model.profiles.calibration import (
        PLAIN,
        assume_calibration,
        plain_calibration,
        resolve_calibration,
        together,
    )

    def find(device_name: str) -> Calibration:
        if name is None:
            return assume_calibration(device_name, software)
        if name == PLAIN:
            return plain_calibration(device_name, software)
        return resolve_calibration(name, Path(), device_name, "--base")

    return together([find(device_name) for device_name in device_names])


def _parse_rows(text: str, option: str) -> list[int]:
    rows = []
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdigit()):
            raise JobError(f"{option} is {text!r}, and {part.strip()!r} is no row; `0,3,6` would do, counted from 0")
        rows.append(int(part))
    return rows


def _parse_figures(text: str) -> dict[str, float]:
    """`hidden_fraction=0,network_fraction=0.9` as a mapping."""
    figures = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        try:
            figures[name.strip()] = float(value)
        except ValueError:
            raise JobError(
                f"--set is {text!r}, and {part!r} is no FIGURE=VALUE{'' if equals else ' (no `=`)'}; "
                "`hidden_fraction=0` would do"
            ) from None
    return figures


def _choose_cases(
    cases: Sequence[MeasuredCase],
    rows: Sequence[int] | None,
    device_names: Sequence[str],
    software: str | None,
    table: Path,
) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """The cases to fit to, and the others of those devices. Rows that are asked for and cannot be used are an error."""
    timed = [case for case in cases if case.measured_ms is not None]
    usable = [case for case in timed if case.job.cluster.device.name in device_names]
    if not usable:
        found = ", ".join(sorted({case.job.cluster.device.name for case in timed})) or "none"
        raise JobError(
            f"table {table}: no row with a step time is of {', '.join(device_names)}; the devices there are: {found}"
        )
    if rows is None:
        return [case for case in usable if software in (None, case.software)], []
    by_row = {case.row: case for case in usable}
    for row in rows:
        if row not in by_row:
            known = ", ".join(str(known_row) for known_row in by_row)
            raise JobError(
                f"table {table}: --rows names row {row}, which has no step time of {', '.join(device_names)} "
                f"that can be predicted;"
                f" such rows are {known}"
            )
    return [by_row[row] for row in dict.fromkeys(rows)], [case for row, case in by_row.items() if row not in rows]


def _check_inputs(arguments: argparse.Namespace) -> None:
    """Raises JobError where there is nothing to read, or an option stands beside nothing that it is about."""
    if arguments.table is None and arguments.logs is None:
        raise JobError("there is nothing to fit to: name a TABLE.csv, or training logs with --logs")
    if arguments.table is None and arguments.rows is not None:
        raise JobError("--rows chooses rows of TABLE.csv, and there is none; name the logs to fit to with --logs alone")
    if arguments.logs is None and arguments.fact:
        raise JobError("--fact tells what logs leave open, and there are none; name them with --logs")


def _software_of(cases: Sequence[MeasuredCase], asked: str | None, arguments: argparse.Namespace) -> str:
    found = sorted({case.software for case in cases})
    where = "--logs" if arguments.table is None else f"table {arguments.table}"
    if asked is not None and found != [asked]:
        raise JobError(f"{where}: --software is {asked!r}, and the rows are of {', '.join(found) or 'none'}")
    if len(found) != 1:
        raise JobError(f"{where}: the rows are of several stacks, {', '.join(found)}; name one with --software")
    return found[0]


def _print_fit(fitted: Fitted) -> None:
    """Figures with their sources, then the signed errors, row by row and together."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from mm_autoparallel.measurements.score import score
    from mm_autoparallel.reports.console import print_rich

    calibration = fitted.calibration
    figures = Table(
        "figure", *((calibration.others and calibration.devices) or ["value"]), "source", box=box.SIMPLE_HEAD
    )
    figures.pad_edge = False
    for name in type(calibration.figures).model_fields:
        values = [getattr(of_device, name) for of_device in (calibration.figures, *calibration.others.values())]
        told = ["catalog" if value is None else f"{value:.4g}" for value in values]
        figures.add_row(name, *told, calibration.sources.get(name, "assumed"))
    parts: list[Table | Text] = [figures]
    parts += [Text(f"kept: {kept.name} {kept.reason}") for kept in fitted.kept]
    for title, rows in (("fitted", calibration.fitted), ("held out", fitted.held_out)):
        if not rows:
            continue
        table = Table("table", "row", "measured, ms", "error", title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(row.table, str(row.row), f"{row.measured_ms:.1f}", f"{row.error_fraction * 100:+.2f} %")
        found = score(
            [row.row for row in rows],
            [row.measured_ms for row in rows],
            [row.measured_ms * (1 + row.error_fraction) for row in rows],
        )
        assert found is not None
        parts += [
            table,
            Text(
                f"{title}: {len(rows)} rows, mean {found.mean_abs_fraction * 100:.2f} %, bias "
                f"{found.bias_fraction * 100:+.2f} %, median {found.median_abs_fraction * 100:.2f} %, worst row "
                f"{found.worst_row} {found.worst_fraction * 100:+.2f} %"
            ),
        ]
    near = calibration.interval
    parts.append(Text(f"a step is expected at {near.low_factor:.3f} to {near.high_factor:.3f} of its prediction"))
    print_rich(Group(*parts))
