"""Checkouts of the planners that are compared: fetched by git, and imported from where they lie."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from others import calculon, galvatron, llm_analysis, simumax
from others.layout import Predict, Source

from mm_autoparallel.child_process import followed

SOURCES: tuple[Source, ...] = (calculon.SOURCE, simumax.SOURCE, llm_analysis.SOURCE, galvatron.SOURCE)

_FETCH_TIMEOUT_S = 600


class Missing(Exception):
    """Why a planner cannot be run here, and what to do, in a paragraph."""


def folder_of(source: Source, folder: Path) -> Path:
    """Where the checkout of `source` lies: called as its repository, in `folder`."""
    return folder / source.repository.rstrip("/").rsplit("/", 1)[-1]


def fetch(source: Source, folder: Path) -> None:
    """Clones `source` into `folder`, its folders at its commit; one that is there stays as it is. Raises Missing."""
    checkout = folder_of(source, folder)
    if checkout.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _git("clone", "--quiet", "--no-checkout", source.repository, str(checkout))
    _git("-C", str(checkout), "sparse-checkout", "set", *source.folders)
    _git("-C", str(checkout), "checkout", "--quiet", "--detach", source.commit)


def commit_of(source: Source, folder: Path) -> str:
    """The commit that the checkout is at. Raises Missing where there is no checkout."""
    checkout = folder_of(source, folder)
    if not checkout.is_dir():
        raise Missing(
            f"{source.name}: no checkout at {checkout}. Clone {source.repository} there at {source.commit}, or give "
            "--fetch where git reaches it"
        )
    return _git("-C", str(checkout), "rev-parse", "HEAD").strip()


def load(source: Source, folder: Path) -> Mapping[str, Predict]:
    """What predicts, from the checkout in `folder`, which must be at the commit of `source`. Raises Missing."""
    found = commit_of(source, folder)
    if found != source.commit:
        raise Missing(
            f"{source.name}: {folder_of(source, folder)} is at {found}, and its adapter was written for "
            f"{source.commit}; check that out"
        )
    checkout = folder_of(source, folder)
    sys.path.insert(0, str(checkout))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return source.load(checkout)
    except ImportError as failure:
        packages = " ".join(source.packages)
        raise Missing(f"{source.name}: {failure}. It needs pip install {packages}") from None
    finally:
        sys.path.remove(str(checkout))


def _git(*arguments: str) -> str:
    """What git prints. Raises Missing with its last words."""
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        done = subprocess.run(
            followed(["git", *arguments]),
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"git {' '.join(arguments)} took more than {_FETCH_TIMEOUT_S} s") from None
    if done.returncode:
        raise Missing(f"git {' '.join(arguments)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
