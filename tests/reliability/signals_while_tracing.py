"""Traces a small model again and again in one process, and interrupts each run at a random moment.

    python tests/reliability/signals_while_tracing.py --signals 300 --seed 1

A process of its own for each run would spend its time importing torch, and few signals would meet the trace itself.
Figures go to standard output; exit code 1 where a run ended in any other way than done or interrupted, or late.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import kills

from mm_autoparallel.child_process import followed

LATE_S = 1.5
"""An interrupted run that takes longer than this counts as late; half a second is the package's own."""
USUAL_CODES = ("0", "130")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first is not None:
        return trace(arguments.signals, arguments.seed, arguments.first)
    ended: Counter[str] = Counter()
    late_s, first = [0.0], 0
    while first < arguments.signals:
        command = [sys.executable, __file__, "--signals", arguments.signals, "--seed", arguments.seed, "--first", first]
        run = subprocess.run(followed([*map(str, command)]), capture_output=True, text=True)
        for line in run.stdout.splitlines():
            number, code, late = json.loads(line)
            first = number + 1
            ended[code] += 1
            late_s.append(late)
        if run.returncode:
            print(run.stderr[-4000:], file=sys.stderr)
        if run.returncode > 0 and not run.stdout:
            return 1
        if run.returncode < 0:  # it died; the next run begins afresh
            ended[f"died of {-run.returncode}"] += 1
            first += 1
    print(f"{arguments.signals} signals while torch traces: {dict(ended)}, slowest {max(late_s):.2f} s")
    return int(any(code not in USUAL_CODES for code in ended) or max(late_s) > LATE_S)


def trace(num_signals: int, seed: int, first: int) -> int:
    """Prints number, exit code and seconds after the signal of each run from `first` on."""
    from mm_autoparallel.cli.main import main as run_command

    kills.SEARCH.update(tp=[2], mbs=[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # one that comes after its run is nobody's
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(kills.prepare(Path(temporary) / "home"))

        def once() -> int:
            shutil.rmtree("subgraph_profiles", ignore_errors=True)
            with contextlib.redirect_stdout(io.StringIO()):
                return run_command(["trace", "job.json"])

        once()  # imports
        began_s = time.monotonic()
        once()
        usual_s = time.monotonic() - began_s
        rng = random.Random(f"{seed} {first}")
        for run in range(first, num_signals):
            told = rng.choice((signal.SIGTERM, signal.SIGINT))
            after_s = rng.uniform(0.0, usual_s)
            timer = threading.Timer(after_s, os.kill, (os.getpid(), told))
            began_s = time.monotonic()
            timer.start()
            code = once()
            late_s = max(0.0, time.monotonic() - began_s - after_s) if code else 0.0
            timer.join()
            print(json.dumps([run, str(code), late_s]), flush=True)
            if str(code) not in USUAL_CODES:
                return code
            time.sleep(0.6)  # signals within half a second are one wish
    return 0


if __name__ == "__main__":
    sys.exit(main())
