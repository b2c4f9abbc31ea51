"""Starts the ranks of many runs from one process that has torch and transformers loaded already, and waits for them.

A stand-in for torchrun, which would load them anew in every rank of every run. Requests are JSON lines on standard
input, answers JSON lines on standard output: {"argv", "hook", "num_ranks", "folder", "log", "environment", "path",
"timeout_s"} → {"exit_codes"}; a rank that was killed has a negative one. Of the package's own code nothing is loaded
before a rank starts.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

LOADED_BEFORE = ("numpy", "torch", "torch.distributed", "torch.nn.functional", "torch.utils.data", "transformers",
                 "transformers.modeling_utils", "transformers.models.qwen2_vl.modeling_qwen2_vl")  # fmt: skip

GRACE_S = 5.0
"""How long the other ranks may take to end by themselves after one failed."""


def main() -> None:
    """Answer requests until standard input ends."""
    for name in LOADED_BEFORE:
        importlib.import_module(name)
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
