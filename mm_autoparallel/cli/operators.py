"""`operators import|list|export`: what the operator base of a store knows, and what others measured brought into it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import say, warn, writing

if TYPE_CHECKING:
    from mm_autoparallel.model.profiles.operators.base import OperatorBase, Timed
    from mm_autoparallel.model.profiles.operators.form import TensorForm

HELP = "import, list or export measured times of single operators"
DESCRIPTION = (
    "The operator base keeps times of single operators by shapes, types, attributes, device and versions; `profile` "
    "and `trace` fill it, and a job that names it in `profiles` is priced by it. import: kernel_details.csv of CANN's "
    "profiler, operator databases of MindSpeed's Auto Tuning, and work directories of it, but for pickles. list: what "
    "is known. export: the same as one JSON document."
)
SCHEMA = "mm-autoparallel/operators/1"
UNKNOWN_DEVICE = "unknown"
_USUAL_ROWS = 40
_OF_ACTIONS = {"import": ("paths", "device", "software"), "list": ("kind", "limit"), "export": ("kind", "out")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's actions and their options."""
    parser.add_argument("action", choices=tuple(_OF_ACTIONS), metavar="ACTION", help="import, list or export")
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH", help="import: files and folders to bring in")
    parser.add_argument(
        "--base",
        type=Path,
        default=Path("subgraph_profiles/operators.sqlite"),
        metavar="FILE",
        help="the operator base (default: %(default)s)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="import: what kernel_details.csv was measured on, which it lacks"
    )
    parser.add_argument(
        "--software",
        nargs="+",
        metavar="NAME=VERSION",
        help="import: versions that it was measured with, such as cann=8.1",
    )
    parser.add_argument("--kind", metavar="NAME", help="list, export: only operators of this name, such as mm")
    parser.add_argument("--limit", type=count, metavar="N", help=f"list: rows of the table (default: {_USUAL_ROWS})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="export: where the document goes (default: printed)")
    parser.add_argument("--json", action="store_true", help="print what was done or found as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Raises JobError where an option belongs to another action."""
    for action, names in _OF_ACTIONS.items():
        for name in names:
            if name not in _OF_ACTIONS[arguments.action] and getattr(arguments, name):
                spelled = "PATH" if name == "paths" else f"--{name}"
                raise JobError(
                    f"{spelled} belongs to `operators {action}`, and this is `{arguments.action}`; leave it out"
                )
    if arguments.action == "import":
        return _import(arguments)
    return _list(arguments) if arguments.action == "list" else _export(arguments)


def _import(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.model.profiles.operators.base import OperatorBase
    from mm_autoparallel.model.profiles.operators.imports.work_directory import read_given
    from mm_autoparallel.model.profiles.operators.platform import UNKNOWN, Platform

    if not arguments.paths:
        raise JobError("`operators import` needs what to import: a kernel_details.csv, a database or a work directory")
    software = _read_software(arguments.software) or {"cann": UNKNOWN}
    platform = Platform(arguments.device or UNKNOWN_DEVICE, software)
    given = [read_given(path, platform) for path in arguments.paths]  # all are read before anything is kept
    found = [one for finds, _ in given for one in finds]
    pickles = [pickle for _, refused in given for pickle in refused]
    with writing(arguments.base), OperatorBase.open_to_add(arguments.base) as base:
        for one in found:
            one.add_to(base)
    if platform.device == UNKNOWN_DEVICE and any(platform in one.samples for one in found):
        warn([f"kernel_details.csv does not name its device: kept under {UNKNOWN_DEVICE!r}; give --device NAME"])
    warn([str(pickle) for pickle in pickles])
    if arguments.json:
        refused = [str(pickle.path) for pickle in pickles]
        documents = [one.document() for one in found]
        print_document({"schema": SCHEMA, "base": str(arguments.base), "imported": documents, "refused": refused})
        return 0
    for one in found:
        say(
            f"{one.path}: {one.num_rows} rows of {one.num_distinct} distinct operators, {one.total_us:.3f} us; "
            f"{one.num_forms} kept"
        )
        for note in one.notes:
            say(f"  {note}")
        for told in one.collectives:
            say("  " + ", ".join(f"{key} {value}" for key, value in told.items()))
    print_line(str(arguments.base))
    return 0


def _read_software(words: list[str] | None) -> dict[str, str]:
    found = {}
    for word in words or ():
        name, equals, version = word.partition("=")
        if not (name and equals and version):
            raise JobError(f"--software is {word!r}; NAME=VERSION is expected, such as cann=8.1.RC1")
        found[name] = version
    return found


def _list(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.model.profiles.operators.base import OperatorBase

    with OperatorBase.open(arguments.base) as base:
        if arguments.json:
            print_document(_document(base, arguments.kind))
            return 0
        limit, (num_forms, num_timings) = arguments.limit or _USUAL_ROWS, base.count()
        for place, platform in base.list_platforms().items():
            timed = [one for one in base.list_timed(place) if arguments.kind in (None, one.form.kind)]
            timed.sort(key=lambda one: -one.median_us)
            print_line(f"{platform}: {len(timed)} times{', the longest first' if len(timed) > limit else ''}")
            for one in timed[:limit]:
                print_line(_line(one))
        num_untimed = sum(1 for form in base.list_untimed() if arguments.kind in (None, form.kind))
        print_line(f"{num_forms} forms, {num_timings} times; {num_untimed} forms were seen and never timed")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.files import write_text_atomically
    from mm_autoparallel.model.profiles.operators.base import OperatorBase
    from mm_autoparallel.planner.plan import format_document

    with OperatorBase.open(arguments.base) as base:
        document = _document(base, arguments.kind)
    if arguments.out is None:
        print_document(document)
        return 0
    with writing(arguments.out):
        write_text_atomically(arguments.out, format_document(document))
    if arguments.json:
        print_document({"schema": SCHEMA, "base": str(arguments.base), "out": str(arguments.out)})
    else:
        say(f"wrote {arguments.out}")
    return 0


def _document(base: OperatorBase, kind: str | None) -> dict[str, Any]:
    """All that `base` knows of operators of this kind, or of all, as JSON values."""
    platforms = [
        {
            "device": platform.device,
            "software": dict(platform.software),
            "deterministic": platform.deterministic,
            "operators": list(_timed_rows(base, place, kind)),
        }
        for place, platform in base.list_platforms().items()
    ]
    untimed = [form.row for form in base.list_untimed() if kind in (None, form.kind)]
    return {"schema": SCHEMA, "base": str(base.path), "platforms": platforms, "untimed": untimed}


def _timed_rows(base: OperatorBase, place: int, kind: str | None) -> Iterator[dict[str, Any]]:
    for one in base.list_timed(place):
        if kind in (None, one.form.kind):
            figures = {"median_us": one.median_us, "mad_us": one.mad_us, "num_samples": one.num_samples}
            yield {"form": one.form.row, **figures, "source": one.source, "date": one.date}


def _line(one: Timed) -> str:
    times = f"{one.median_us:14.3f} us ± {one.mad_us:<9.3f} {one.num_samples:>2} x {one.source:<15} {one.date}"
    return f"{times}  {one.form.operator}: {_tensors(one.form.inputs)} -> {_tensors(one.form.outputs)}"


def _tensors(tensors: tuple[TensorForm, ...]) -> str:
    return " ".join(f"{'x'.join(map(str, tensor.shape)) or 'scalar'}:{tensor.dtype}" for tensor in tensors)
