"""`export PLAN.json --to NAME`: a plan in a framework's own files, new ones or a person's, read back before they are
written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.reports.terminal import say, warn, writing

if TYPE_CHECKING:
    from mm_autoparallel.api.exported import ExportResult
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.planner.plan import Plan

HELP = "write a plan into a framework's own files"
DESCRIPTION = (
    "Write a plan as the files of a framework: each of its choices is written, rounded to the side that keeps less "
    "memory with a sentence, or refused by name. What was written is read back before it is on the disk."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--to", dest="framework", required=True, metavar="NAME", help="the framework, such as megatron-core"
    )
    parser.add_argument(
        "--job", type=Path, metavar="JOB", help="the job of the plan: its laws are checked, its choices written"
    )
    parser.add_argument(
        "--into", type=Path, nargs="+", metavar="FILE", help="change these files of yours: only what the plan decides"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write to this folder (default: exported; with --into in place)"
    )
    parser.add_argument("--target-version", metavar="V", help="the framework's version")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in --out")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, write, read back, print."""
    from mm_autoparallel.api.exported import OUT, export_plan, find_exporter

    find_exporter(arguments.framework, arguments.target_version)
    if arguments.overwrite and arguments.into and arguments.out is None:
        raise JobError("--overwrite goes with --out; --into changes its file in place without it")
    plan, job, said = _read(arguments)
    target = arguments.into[0] if arguments.out is None and arguments.into else arguments.out or OUT
    with writing(target):
        result = export_plan(
            plan,
            job,
            arguments.framework,
            into=arguments.into or (),
            out=arguments.out,
            version=arguments.target_version,
            overwrite=arguments.overwrite,
            said=said,
        )
    exported = result.exported
    warn((*plan.warnings, *exported.approximations, *exported.unchecked, *exported.notes))
    _print(result, as_json=arguments.json)
    return 0


def _read(arguments: argparse.Namespace) -> tuple[Plan, Job | None, tuple[str, ...]]:
    """The plan, its job where one is given, and the figures that the plan's own file has where none is."""
    from mm_autoparallel.planner.bare_plan import read_bare_plan

    if arguments.job is None:
        return read_bare_plan(arguments.plan), None, _figures(arguments.plan)
    from mm_autoparallel.api import read_plan
    from mm_autoparallel.api.jobs import read_job

    job = read_job(arguments.job)
    return read_plan(arguments.plan, job), job, ()


def _figures(path: Path) -> tuple[str, ...]:
    """The step and highest peak that the plan's file has, which nobody simulated anew; nothing where it has none."""
    from mm_autoparallel.files import read_document
    from mm_autoparallel.records import LARGEST_MS
    from mm_autoparallel.units import GIB

    document = read_document(path, "plan", PlanError)
    step_ms, peaks = document.get("e2e_time"), document.get("peak_memory_bytes")
    told = []
    if isinstance(step_ms, (int, float)) and abs(step_ms) <= LARGEST_MS:
        told.append(f"As the plan's file has it: {step_ms:.2f} ms a step")
    if told and isinstance(peaks, list) and peaks and all(isinstance(peak, (int, float)) for peak in peaks):
        told = [f"{told[0]}, highest peak {max(peaks) / GIB:.2f} GiB"]
    return tuple(told)


def _print(result: ExportResult, *, as_json: bool) -> None:
    if as_json:
        print_document(result.document())
        return
    for line in result.header:
        print_line(line)
    say(f"wrote {' and '.join(map(str, result.files))} for {result.framework} {result.version}")
