"""The command line in processes of their own that import nothing anew: one server imports it, and forks for every run.

A run sees its own arguments, folder, environment and streams, and ends as its process would: exit code, what `atexit`
runs, a traceback of a bug. What it does not show is the start of an interpreter; tests of that start one.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn


class ForkedCli:
    """A server and its runs. Close it when no more runs come."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Exit code, output and errors of one run in `folder` under this process's environment as it is now.

        Raises subprocess.TimeoutExpired where it takes longer than `timeout_s`; the run is killed then.
        """
        server = self._started()
        assert server.stdin
        assert server.stdout
        with _text_file() as output, _text_file() as errors:
            streams = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (output, errors)]
            request = {"arguments": arguments, "folder": str(folder), "environment": dict(os.environ)}
            server.stdin.write(json.dumps(request | {"streams": streams}) + "\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            late = not select.select([server.stdout], [], [], timeout_s)[0]
            if late:
                os.kill(pid, signal.SIGKILL)
            code = int(server.stdout.readline())
            if late:
                raise subprocess.TimeoutExpired(arguments, timeout_s)
            told = []
            for stream in (output, errors):
                stream.seek(0)
                told.append(stream.read())
        return subprocess.CompletedProcess(arguments, code, *told)

    def close(self) -> None:
        if self._server:
            self._server.communicate(timeout=60)

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._server


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8")


def _serve() -> None:
    """Answers every line of standard input, a request, by the number of the process that runs it and its exit code."""
    if find_spec("numba"):
        from mm_autoparallel.planner.search.watched import compile_search

        compile_search()
    from mm_autoparallel.cli import parser

    parser.build_parser()
    gc.freeze()  # a run then copies no page for being counted
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _run(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    descriptors = [os.open("/dev/null", os.O_RDONLY), *(os.open(path, os.O_WRONLY) for path in request["streams"])]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = _written(1)
    sys.stderr = _written(2)
    sys.argv = ["mm-autoparallel", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", "mm_autoparallel.cli.main", *request["arguments"]]  # what starts ranks
    code = 1
    try:
        from mm_autoparallel.cli.main import start

        start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  (a crash of the command's own process)
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _written(descriptor: int) -> io.TextIOWrapper:
    """Text by lines into the file behind `descriptor`; what it cannot say is escaped."""
    file = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


if __name__ == "__main__":
    _serve()
