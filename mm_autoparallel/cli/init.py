"""`init --model NAME`: write the job file that `plan --model NAME` would plan, with comments, to go on from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mm_autoparallel.cli.job_words import add_model_arguments, add_set_argument, add_shared_arguments, describe_flags
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import check_writable, say, warn, writing

HELP = "write a job file for a model, to plan and to edit"
DESCRIPTION = (
    "Write the job file of a model on a cluster, with comments that say what may be added. A file that is there stays "
    "as it is. `plan` on it does what `plan --model` does with the same flags."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "--out", type=Path, default=Path("job.yaml"), metavar="FILE.yaml", help="the file (default: %(default)s)"
    )
    add_set_argument(parser)
    add_model_arguments(parser, required=True)
    add_shared_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Describe, read as a check, write."""
    from mm_autoparallel.api.job_text import format_job
    from mm_autoparallel.files import is_folder, is_there, write_text_atomically

    out: Path = arguments.out
    if out.suffix not in (".yaml", ".yml"):
        raise JobError(f"--out {out}: a job file with comments is YAML; name it .yaml")
    if is_there(out) or is_folder(out):
        raise JobError(f"{out} is there already and stays as it is; give another file with --out")
    check_writable(out)
    if is_there(Path(arguments.model)) or is_folder(Path(arguments.model)):
        arguments.model = os.path.relpath(arguments.model, out.absolute().parent)
    words = describe_flags(arguments, out)
    job = words.parse(out)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out, format_job(words, job, str(out)))
    warn(job.warnings)
    say(f"wrote {out}; `mm-autoparallel plan {out}` plans it")
    return 0
