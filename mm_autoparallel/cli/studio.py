"""`studio [JOB]`: a local page on which a person changes a plan and sees at once what that does."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import say

DEFAULT_PORT = 8437

HELP = "change a plan on a local page and see what that does"
DESCRIPTION = (
    "Serve a page to this machine's browser: the views of `report`, live. Move layers, change modes, sizes and the "
    "job; every change is simulated at once and held against what searches have shown. What is done is kept in "
    ".mm-autoparallel-studio in this folder, and is there again when the studio is started again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB", nargs="?", help="the job to work on (default: as it was left)")
    parser.add_argument("--config", type=Path, metavar="PLAN.json", help="the plan of JOB to begin with")
    parser.add_argument(
        "--port",
        type=port,
        default=DEFAULT_PORT,
        metavar="N",
        help="of 127.0.0.1; 0: a free one (default: %(default)s)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def port(text: str) -> int:
    """A port's number, or 0."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65_536):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; a number from 0 to 65535 is expected")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Open the session, serve it until a signal ends it."""
    if not all(find_spec(package) for package in ("starlette", "uvicorn")):
        raise JobError('the studio needs its extra: pip install "mm-autoparallel[studio]"')
    from mm_autoparallel.api import load_solver, read_plan
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.studio.serving import locked, serve
    from mm_autoparallel.studio.session import Session, read_job_text

    if arguments.config is not None and arguments.job is None:
        raise JobError("--config names a plan, and no JOB that it is of; give both")
    folder = Path.cwd()
    with locked(folder):
        session = Session(folder)
        if arguments.job is not None:
            job = read_job(arguments.job)
            plan = read_plan(arguments.config, job) if arguments.config else None
            load_solver()
            session.open_job(arguments.job, read_job_text(arguments.job), plan)
        return serve(session, arguments.port, lambda address: _tell(address, arguments.open))


def _tell(address: str, opens: bool) -> None:
    say(f"the studio is at {address} until Ctrl-C")
    if opens:
        import webbrowser

        webbrowser.open(address)
