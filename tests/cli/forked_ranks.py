"""The ranks of many runs, from one process that has torch and transformers loaded already.

A stand-in for torchrun, which would load them anew in every rank of every run; tests of how torchrun starts a script
use that. The server needs no more than what it loads: requests are JSON lines on standard input, answers JSON lines on
standard output: {"argv", "hook", "num_ranks", "folder", "log", "environment", "path", "timeout_s"} → {"exit_codes"}; a
rank that was killed has a negative one. Of the package's own code nothing is loaded before a rank starts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LOADED_BEFORE = ("numpy", "torch", "torch.distributed", "torch.distributed.optim", "torch.nn.functional",
                 "torch.utils.data")  # fmt: skip
LOADED_IF_THERE = ("transformers", "transformers.modeling_utils", "transformers.models.qwen2_vl.modeling_qwen2_vl",
                   "safetensors.torch", "skimage.transform", "skimage.data", "skimage.io", "tifffile", "numba",
                   "pydantic", "yaml", "torch.distributed.pipelining.schedules")  # fmt: skip

GRACE_S = 5.0
"""How long the other ranks may take to end by themselves after one failed."""


class ForkedRanks:
    """A server and its runs, which have the environment that it was started with and what a run adds. Close it when no
    more runs come.

    command: what starts it, `[python, this file]` as a rule. environment: None for this process's.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = command, environment
        self._server: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The exit codes of one run's ranks; None where the server ended: what it said stands on standard error."""
        if self._server is None:
            self._server = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        return tuple(json.loads(answer)["exit_codes"]) if answer else None

    def run(
        self, script: Path, arguments: list[str], num_ranks: int, folder: Path, path: list[Path], timeout_s: float = 400
    ) -> str:
        """What the ranks of a script printed. path: before all else on sys.path, but for the script's folder.

        Raises AssertionError, with the end of what they printed, where one failed.
        """
        log = folder / f"{script.stem}.log"
        log.unlink(missing_ok=True)
        codes = self.ask(
            {
                "argv": [str(script), *arguments],
                "hook": False,
                "num_ranks": num_ranks,
                "folder": str(folder),
                "log": str(log),
                "environment": {"HF_HUB_OFFLINE": "1"},
                "path": [str(each) for each in (script.parent, *path)],
                "timeout_s": timeout_s,
            }
        )
        told = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        assert codes == (0,) * num_ranks, f"{codes}\n{told[-6000:]}"
        return told

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=60)


def main() -> None:
    """Answer requests until standard input ends."""
    for name in LOADED_BEFORE:
        importlib.import_module(name)
    for name in LOADED_IF_THERE:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a rank then copies no page for being counted
    for line in sys.stdin:
        print(json.dumps({"exit_codes": run(json.loads(line))}), flush=True)


def run(request: Mapping[str, Any]) -> list[int]:
    """Start the ranks, and give their exit codes."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    running: dict[int, int] = {}
    for rank in range(request["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, rank, port)
        running[pid] = rank
    return _wait(running, time.monotonic() + request["timeout_s"])


def _wait(running: dict[int, int], ends_s: float) -> list[int]:
    codes = {}
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            code = codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code:
                ends_s = min(ends_s, time.monotonic() + GRACE_S)
        elif time.monotonic() > ends_s:
            for each in running:
                os.kill(each, signal.SIGKILL)
            ends_s = float("inf")
        else:
            time.sleep(0.05)
    return [codes[rank] for rank in sorted(codes)]


def _become_rank(request: Mapping[str, Any], rank: int, port: int) -> None:
    """Run the script in this process, as torchrun would have started it; never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    number = str(request["num_ranks"])
    os.environ |= request["environment"] | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sys.path[:0] = request["path"]
    code = 0
    try:
        if request["hook"]:
            # As `python -m` leaves it: the module's own place first, and the current folder before all others.
            sys.argv = ["mm_autoparallel.hooks.mindspeed_mm", *request["argv"]]
            sys.path.insert(0, "")
            importlib.import_module("mm_autoparallel.hooks.mindspeed_mm").main()
        else:
            sys.argv = list(request["argv"])
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # a rank's last words, whatever ended it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
