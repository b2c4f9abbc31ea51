"""Kills commands at random moments and looks at what they leave: files, processes, and whether the next run continues.

    python tests/reliability/kills.py --kills 200 --seed 1

Figures go to standard output; exit code 1 where something was lost, half-written or left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from started import REPOSITORY, Started

from mm_autoparallel.files import is_temporary

EXAMPLES = REPOSITORY / "examples"
CLI = (sys.executable, "-m", "mm_autoparallel.cli.main")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENDS_S = 60.0
"""Assumed: long after an interrupted command has ended on any machine."""

REPORT_EVERY = 20

BEFORE_ANY_LINE = "Could not import runpy module"
"""What Python itself says where Ctrl-C meets its start, before a line of the package: exit code 1."""
JOURNALS = (".sqlite-journal", ".sqlite-wal", ".sqlite-shm")
USUAL_CODES = (0, 130, *(-number for number in SIGNALS))
"""Ended before the signal came, interrupted in order, or by the signal before Python or after it."""

WORKLOAD = {"global_batch_size": 4, "seq_length": 32, "image_tokens_per_sample": 8, "weight_bytes": 4}
SEARCH = {"cp": [1], "tp": [1], "mbs": [1, 2]}


@dataclass(frozen=True)
class Command:
    """What is killed. usual_s: about how long it takes; it is killed before 1.2 times that. makes: a file of it."""

    name: str
    arguments: tuple[object, ...]
    usual_s: float
    makes: str
    needs_torch: bool = True


TABLE = EXAMPLES / "published_measurements" / "korthikanti2022.csv"
RESULT = "auto_parallel_search_optimal_config.json"
COMMANDS = (
    Command("plan", (*CLI, "plan", EXAMPLES / "llava_1_5_7b" / "job.yaml", "--cache", "c"), 3.0, RESULT, False),
    Command(
        "calibrate",
        (*CLI, "calibrate", TABLE, "--device", "a100-80g", "--rows", "0,2", "--free", "matrix", "--out", "mine.json"),
        3.0,
        "mine.json",
        False,
    ),
    Command("trace", (*CLI, "trace", "job.json", "--tp", 1, "--mbs", 1, 2), 12.0, "subgraph_profiles/*/*/*.json"),
    Command("profile", (*CLI, "profile", "job.json", "--device", "cpu"), 20.0, "subgraph_profiles/*/*/tp*.json"),
    Command(
        "pretrain",
        (
            *(sys.executable, REPOSITORY / "tests" / "hooks" / "toy_pretrain.py", "--auto-parallel-mm"),
            *("--nproc-per-node", 1, "--simulated-nproc-per-node", 2),
        ),
        10.0,
        RESULT,
    ),
)


@dataclass
class Tally:
    """What was done and what came of it. left: temporary files of this program's after SIGKILL, which nothing can
    prevent; they are no fault."""

    kills: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    finished: int = 0
    left: int = 0

    def __str__(self) -> str:
        def count(counter: Counter[str]) -> str:
            return ", ".join(f"{number} {name}" for name, number in sorted(counter.items()))

        return (
            f"{sum(self.kills.values())} kills: {count(self.kills)}\nexit codes: {count(self.codes)}\n"
            f"{self.finished} runs after kills, which continued; temporary files after SIGKILL: {self.left}\n"
            f"faults: {len(self.faults)}" + "".join(f"\n  {fault}" for fault in self.faults)
        )


def prepare(folder: Path) -> Path:
    """`folder` with a job of a model so small that it is measured in seconds."""
    sys.path.append(str(REPOSITORY / "tests" / "cli"))
    from small_qwen2vl import CLUSTER, CONFIG

    folder.mkdir(parents=True)
    job = {"model": "config.json", "cluster": CLUSTER, "workload": WORKLOAD, "search": SEARCH}
    for name, document in (("config.json", CONFIG), ("job.json", job)):
        (folder / name).write_text(json.dumps(document))
    return folder


def look(folder: Path) -> tuple[set[Path], list[Path], list[Path]]:
    """(files that are to stay, those of them that are half-written, temporary files) in `folder`; no logs of runs, nor
    SQLite's journals, which whoever opens its file next plays back."""
    files = {path for path in folder.rglob("*") if path.is_file() and "logs" not in path.relative_to(folder).parts}
    files = {path for path in files if not path.name.endswith(JOURNALS)}
    temporary = [path for path in files if path.suffix == ".tmp"]
    whole = files.difference(temporary)
    is_whole = {".sqlite": is_database}
    return whole, [path for path in sorted(whole) if not is_whole.get(path.suffix, is_json)(path)], temporary


def is_json(path: Path) -> bool:
    """Whether `path` holds a whole JSON document."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def is_database(path: Path) -> bool:
    """Whether `path` holds an SQLite database without a fault, once its journal is played back."""
    try:
        with closing(sqlite3.connect(path)) as database:
            return database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        return False


def kill_once(command: Command, folder: Path, number: signal.Signals, after_s: float, tally: Tally) -> None:
    """Start `command` in `folder`, send it a signal, and write down what it leaves."""
    what = f"{command.name}, {number.name} after {after_s:.2f} s"
    before, _, _ = look(folder)
    started = Started(command.arguments, folder, {"PYTHONFAULTHANDLER": "1"})
    time.sleep(after_s)
    if started.process.poll() is None:
        # Ctrl-C reaches the whole group that a terminal runs
        (os.killpg if number == signal.SIGINT else os.kill)(started.process.pid, number)
        tally.kills[f"{command.name} {number.name}"] += 1
    try:
        _, stderr = started.process.communicate(timeout=ENDS_S)
    except subprocess.TimeoutExpired:
        os.kill(started.process.pid, signal.SIGABRT)  # at which Python says where it was
        _, told = started.process.communicate()
        tally.faults.append(f"{what}: it had not ended after {ENDS_S:g} s more:\n{told[-3000:]}")
        return
    code = started.process.returncode
    tally.codes[f"x {code}"] += 1
    if code not in USUAL_CODES and not stderr.startswith(BEFORE_ANY_LINE):
        tally.faults.append(f"{what}: exit code {code}:\n{stderr[-3000:]}")
    tally.faults += [f"{what}: still runs: {process}" for process in started.left_over()]
    after, torn, temporary = look(folder)
    tally.faults += [f"{what}: lost: {path.relative_to(folder)}" for path in sorted(before - after)]
    tally.faults += [f"{what}: half-written: {path.relative_to(folder)}" for path in torn]
    if number == signal.SIGKILL:
        tally.left += len(temporary)
        temporary = [path for path in temporary if not is_temporary(path)]
    tally.faults += [f"{what}: left: {path.relative_to(folder)}" for path in temporary]


def finish(command: Command, folder: Path, tally: Tally) -> None:
    """Run `command` to its end where it was killed."""
    ended = Started(command.arguments, folder).wait()
    tally.finished += 1
    if ended.code != 0 or not list(folder.glob(command.makes)):
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        tally.faults.append(f"{command.name} after kills: exit code {ended.code}: {last}")


def run(
    commands: Sequence[Command], num_kills: int, seed: int, folder: Path, to_finish: Sequence[str], fresh: float = 0.3
) -> Tally:
    """`num_kills` kills of `commands` in turn, signals and moments drawn from `seed`; each of `to_finish` ends whole.

    fresh: how often a command begins from nothing again, and not from what killed runs have left.
    """
    seeded, tally = random.Random(seed), Tally()
    homes = {command.name: prepare(folder / command.name) for command in commands}
    for index in range(num_kills):
        command = commands[index % len(commands)]
        if seeded.random() < fresh:
            homes[command.name] = prepare(folder / f"{command.name}-{index}")
        number = seeded.choice(SIGNALS)
        kill_once(command, homes[command.name], number, seeded.uniform(0.0, 1.2 * command.usual_s), tally)
        if (index + 1) % REPORT_EVERY == 0:
            print(f"{index + 1} of {num_kills}; faults: {len(tally.faults)}", file=sys.stderr, flush=True)
    for command in commands:
        if command.name in to_finish:
            finish(command, homes[command.name], tally)
    return tally


def main() -> int:
    """As the command line says; 1 where there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--only", nargs="+", choices=[command.name for command in COMMANDS], metavar="COMMAND")
    arguments = parser.parse_args()
    # A shell that runs this in the background ignores Ctrl-C for it, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands = [command for command in COMMANDS if not arguments.only or command.name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        names = [command.name for command in commands]
        tally = run(commands, arguments.kills, arguments.seed, Path(folder), names)
    print(tally)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
