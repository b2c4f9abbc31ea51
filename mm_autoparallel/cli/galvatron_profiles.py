"""`galvatron-profiles JOB --out DIR`: a job's costs as the profiles that Galvatron's search reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.reports.terminal import say, warn, writing

HELP = "write a job's costs as Galvatron's profiles"
DESCRIPTION = (
    "Write what Galvatron's profiler would measure of a job's cluster and of its decoder, by the costs that plans are "
    "made from, and the configuration of a search on them: for galvatron-search and for Galvatron's own."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB", help="job file, YAML or JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def run(arguments: argparse.Namespace) -> int:
    """Read the job, price its blocks, write the files, all or none."""
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.integrations.export import write_files
    from mm_autoparallel.integrations.galvatron.written_profiles import SEARCH, format_profiles

    job = read_job(arguments.job)
    warn(job.warnings)
    texts = {arguments.out / name: text for name, text in format_profiles(job).items()}
    with writing(arguments.out):
        write_files(texts, arguments.overwrite)
    say(f"wrote {len(texts)} files to {arguments.out}; next: mm-autoparallel galvatron-search {arguments.out / SEARCH}")
    return 0
