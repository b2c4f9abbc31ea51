"""The studio's process: one for a folder, on a port of 127.0.0.1, until a signal ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from mm_autoparallel.confinement import confine, release
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.private import is_private, private_folders
from mm_autoparallel.signals import forwarded_signals
from mm_autoparallel.studio.moments import FOLDER
from mm_autoparallel.studio.server import build_app, read_token
from mm_autoparallel.studio.session import Session
from mm_autoparallel.studio.work import Worker

CLOSING_S = 5.0
"""A search that was asked to end has as long for it. Assumed."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Around the use of a folder: two studios would write over each other. Raises JobError where one runs already,
    nothing can be written there, or others can write there too."""
    own = folder / FOLDER
    path = own / "lock"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        if not is_private(own) or own.stat().st_mode & 0o077:  # as a studio makes it, and no copy of files does
            raise JobError(f"{own} is a link, or not this user's alone: remove it, or start in another folder")
        write_text_atomically(own / ".gitignore", "*\n")
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JobError(f"a studio runs already in {folder}: use that one, or end it") from None
            yield
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from None


def serve(session: Session, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve the session until a signal; its exit code, 0. on_ready: called with the address, its token in it.

    What jobs that pages make name is read below the folder alone, and where jobs lie that the command line named.

    Raises JobError where the port is in use, or the token cannot be trusted.
    """
    listener = _listen(port)
    port = listener.getsockname()[1]
    worker = Worker(session)
    try:
        token = read_token(session.folder)
    except OSError as error:
        raise JobError(f"the studio's token cannot be kept: {error.strerror or error}") from None
    jobs = {(session.folder / moment.source.file).parent.absolute() for moment in session.moments.saved.moments}
    try:
        confine(session.folder, own=(session.folder / FOLDER, *jobs - {session.folder}, *private_folders()))
    except OSError as error:
        raise JobError(f"{session.folder} cannot be served: {error.strerror or error}") from None
    config = uvicorn.Config(
        build_app(session, worker, port, token),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    with listener, forwarded_signals(lambda _: server.end()):
        on_ready(f"http://127.0.0.1:{port}/?token={token}")
        server.run(sockets=[listener])
    worker.close(CLOSING_S)
    release()
    return 0


class _Server(uvicorn.Server):
    """Signals are this package's to heed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # before anybody is told the address
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
        raise JobError(f"port {port} of 127.0.0.1 {why}; give another with --port, or 0 for a free one") from None
    return listener
