"""`import FILE... --from NAME`: launch files as job and plan, for `simulate`, `explain` and `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.given import add_given, read_given
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import say, warn, writing

HELP = "read a launch script as a job and a plan"
DESCRIPTION = (
    "Read what a launch script trains, without running it, and write it as a job and as the plan that it runs under "
    "today: job.yaml and plan.json, which simulate, explain and plan take. What was assumed is said."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "file", type=Path, nargs="+", metavar="FILE", help="the launch script or configuration, then files beside it"
    )
    add_given(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of both files (default: imported)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, simulate, write, print."""
    from mm_autoparallel.api.imported import JOB_FILE, OUT, PLAN_FILE, import_launch
    from mm_autoparallel.cli.job_words import read_cluster
    from mm_autoparallel.files import is_there
    from mm_autoparallel.reports.estimates import describe_strategy
    from mm_autoparallel.units import GIB

    out = arguments.out if arguments.out is not None else OUT
    for name in (JOB_FILE, PLAN_FILE):
        if is_there(out / name):
            raise JobError(f"{out / name} is there already and stays as it is; give another folder with --out")
    cluster = read_cluster(arguments.cluster, arguments.device)
    launch, *beside = arguments.file
    result = import_launch(
        launch,
        framework=arguments.framework,
        device=arguments.device,
        cluster=cluster,
        given=read_given(arguments, beside),
    )
    with writing(out):
        files = result.write(out)
    warn((*result.notes, *result.job.warnings, *result.estimate.warnings))
    if arguments.json:
        print_document(result.document(files))
        return 0
    estimate = result.estimate
    fits = "fits" if estimate.fits else "does not fit"
    print_line(
        f"{result.framework}: {describe_strategy(estimate.plan)}: {estimate.step_ms:.2f} ms a step, highest peak "
        f"{max(estimate.peak_memory_bytes) / GIB:.2f} GiB of {estimate.memory_limit_bytes / GIB:.2f} GiB, {fits}"
    )
    say(f"wrote {' and '.join(map(str, files))}; `mm-autoparallel plan {files[0]}` looks for a better plan")
    return 0
