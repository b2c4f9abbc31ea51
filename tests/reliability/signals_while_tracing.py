"""Traces a small model again and again, and interrupts each run at a random moment.

    python tests/reliability/signals_while_tracing.py --signals 300 --seed 1

Each run is a fork of one process that has traced before: starting one afresh would spend its time importing torch, and
few signals would meet the trace itself. Figures go to standard output; exit code 1 where a run ended in any other way
than done or interrupted, or late.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import kills

LATE_S = 1.5
"""An interrupted run that takes longer than this counts as late; half a second is the package's own."""
USUAL_CODES = (0, 130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no other threads
    kills.SEARCH.update(tp=[2], mbs=[1])
    rng = random.Random(arguments.seed)
    ended: Counter[int] = Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(kills.prepare(Path(temporary) / "home"))
        trace()  # imports
        began_s = time.monotonic()
        trace()
        usual_s = time.monotonic() - began_s
        for _ in range(arguments.signals):
            code, late_s = interrupt(rng.choice((signal.SIGTERM, signal.SIGINT)), rng.uniform(0.0, usual_s))
            ended[code] += 1
            slowest_s = max(slowest_s, late_s)
        os.chdir("/")
    told = ", ".join(f"{count} ended {code}" for code, count in sorted(ended.items()))
    print(f"{arguments.signals} signals while torch traces: {told}; slowest {slowest_s:.2f} s")
    return int(any(code not in USUAL_CODES for code in ended) or slowest_s > LATE_S)


def trace() -> int:
    from mm_autoparallel.cli.main import main as run_command

    shutil.rmtree("subgraph_profiles", ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        return run_command(["trace", "job.json"])


def interrupt(told: signal.Signals, after_s: float) -> tuple[int, float]:
    """Exit code of a run that gets a signal `after_s`, and the seconds that it took to end because of it.

    A run that died of a signal has its number below 0 for a code.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)  # one that comes after the trace is nobody's
            code = trace()
        finally:
            os._exit(code)
    timer = threading.Timer(after_s, os.kill, (child, told))
    began_s = time.monotonic()
    timer.start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its number stays its own until no signal can come any more
    took_s = time.monotonic() - began_s
    timer.cancel()
    timer.join()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, max(0.0, took_s - after_s) if code else 0.0


if __name__ == "__main__":
    sys.exit(main())
