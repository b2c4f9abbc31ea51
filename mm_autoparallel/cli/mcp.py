"""`mcp`: planning as tools for an assistant, which starts this and speaks with it over standard input and output."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mm_autoparallel.errors import JobError

HELP = "serve an assistant: planning as tools of the Model Context Protocol"
DESCRIPTION = (
    "Serve an assistant over standard input and output (Model Context Protocol): plan, simulate, edit, explain, report "
    "and more, as tools. Files are read and written only below the folder that it is started in. It needs the extra "
    "`mcp`, and ends when its input does."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="the folder to serve (default: the working directory)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until standard input ends or a signal comes."""
    folder = _enter(arguments.folder)
    try:
        from mm_autoparallel.mcp.serve import serve
    except ModuleNotFoundError as failure:
        if (failure.name or "").split(".")[0] not in ("mcp", "mcp_types", "anyio"):
            raise
        raise JobError(
            "mcp needs the package `mcp` 2, which is not installed; pip install 'mm-autoparallel[mcp]'"
        ) from None
    return serve(folder)


def _enter(named: Path | None) -> Path:
    """Make `named` the working directory; its path. Raises JobError where it is none, or more than a project's."""
    try:
        if named is not None:
            os.chdir(named)
        folder = Path.cwd()
    except OSError as failure:
        raise JobError(f"--folder {named}: {failure.strerror or failure}") from None
    if named is None and folder in (Path("/"), Path(os.environ.get("HOME", "/"))):
        raise JobError(
            f"it was started in {folder}, and all below it would be served; name a project's by --folder DIR"
        )
    return folder
