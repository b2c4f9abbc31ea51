"""The token of a launch: what its nodes know and nobody else does, so that they take orders from each other alone."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import temporary_of
from mm_autoparallel.private import is_private, make_private, private_folders

TOKEN = "MM_AUTOPARALLEL_TOKEN"
"""Environment variable: the same on all nodes."""

FILE = "launch-token"
"""In a folder that is private to the user: nodes that share it, and launchers of one machine, need no variable."""

MIN_LENGTH = 16
"""Assumed: of random hexadecimal digits, more than can be tried."""

HOW = (
    f"start all nodes with the same {TOKEN} in their environment, {MIN_LENGTH} characters or more that nobody else "
    "knows (`openssl rand -hex 16` makes some)"
)


def launch_token() -> bytes:
    """The token in $MM_AUTOPARALLEL_TOKEN, else that of the user's own file, which is made where there is none.

    Raises JobError where the token is too short, or the file can neither be made nor trusted.
    """
    given = os.environ.get(TOKEN)
    if given is not None:
        return _checked(given, f"${TOKEN}")
    folder = next((folder for folder in private_folders() if make_private(folder)), None)
    if folder is None:
        raise JobError(f"there is no folder of this user alone that could keep a launch token for several nodes; {HOW}")
    path = folder / FILE
    try:
        if not path.exists():
            _make(path)
        if not is_private(path) or path.stat().st_mode & 0o077:
            raise JobError(
                f"launch token {path}: others can read or change it, so it keeps nothing from them; remove it, and it "
                f"is made anew, or {HOW}"
            )
        return _checked(path.read_text(encoding="utf-8").strip(), str(path))
    except (OSError, UnicodeDecodeError) as failure:
        raise JobError(f"launch token {path}: it can be neither made nor read ({failure}); {HOW}") from None


def _checked(token: str, where: str) -> bytes:
    if len(token) < MIN_LENGTH:
        raise JobError(f"launch token {where}: it has {len(token)} characters, which others could guess; {HOW}")
    if not token.isascii() or not token.isprintable():
        raise JobError(f"launch token {where}: it has characters that are no printable ASCII; {HOW}")
    return token.encode()


def _make(path: Path) -> None:
    """Write a new token to `path`, whole at once; another process's that was quicker stays."""
    temporary = temporary_of(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32) + "\n")
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
