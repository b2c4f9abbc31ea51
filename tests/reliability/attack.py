"""Reads mutated inputs by the thousand, and says which of them crash, hang, print nonsense or touch what is not theirs.

    python tests/reliability/attack.py --mutations 2000 --seed 7 --targets job,tables --keep failures
    python tests/reliability/attack.py --mutations 4600 --seed 7 --part 1/2     # and 2/2 beside it

Every batch runs in a process of its own, so that a hang or a full memory costs one mutation, which is named, and the
work goes on behind it. A mutation is known by target, seed and number, and comes back the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutate import NUMBERS, mutate
from targets import ROOT, TARGETS, Target

from mm_autoparallel.planner.search.watched import compile_search

LIMIT_S, LIMIT_BYTES = 10.0, 1_000_000_000
"""Of processor time, children included: wall time says how busy the machine is."""
WAITS_S = 60.0
"""Of wall time: assumed to be more than LIMIT_S takes on a machine that others use too."""
HANG_S = 300.0
"""Of wall time, after which a child is given up: thirty times LIMIT_S."""
BATCH = 300
"""Attacks of one process: starting one takes as long as a hundred."""
REPORT_EVERY = 1000
LAWFUL_CODES = (0, 2, 3, 124)  # the last where a mutated limit of time comes first
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
NO_NUMBER = re.compile(r"(?<![\w.\"'])[-+]?(?:inf|nan|infinity)\b(?![\w.\"'])", re.IGNORECASE)
LONG_NUMBER = re.compile(r"\d{26,}")


@dataclass(frozen=True)
class Attack:
    """One mutation, which comes back the same. A number below 0: the inputs as they should be, which must work."""

    target: str
    seed: int
    number: int

    @property
    def options(self) -> str:
        """What does it again."""
        return f"--targets {self.target} --seed {self.seed} --first {self.number} --mutations 1"


def attack(target: Target, one: Attack, base: Path, room: Path) -> list[str]:
    """What went wrong with one mutation, which is left in `room`; nothing where all is well."""
    rng = random.Random(f"{one.seed} {one.target} {one.number}")
    work, outside = room / "work", room / "outside"
    shutil.copytree(base, work)
    outside.mkdir()
    files = sorted(path for path in work.rglob("*") if path.is_file())
    chosen = [path for path in files if str(path.relative_to(work)).startswith(target.mutates)]
    texts = {path: path.read_text(encoding="utf-8") for path in chosen}
    for path in rng.sample(chosen, min(len(chosen), rng.choice((1, 1, 1, 2, 3)))) if one.number >= 0 else ():
        path.write_bytes(mutate(path.name, texts[path], rng, list(texts.values())))
    given = {path: path.read_bytes() for path in files}
    largest, processor_s, wall_s = _largest_size(), _processor_s(), time.monotonic()
    code, said, told, crash = _run(target, rng, work, room)
    processor_s, wall_s = _processor_s() - processor_s, time.monotonic() - wall_s
    found = []
    if crash:
        found.append(crash)
    elif code not in (LAWFUL_CODES if one.number >= 0 or one.target == "options" else (0,)):
        found.append(f"exit code {code}")
    if processor_s > LIMIT_S:
        found.append(f"{processor_s:.0f} s of processor time")
    elif wall_s > WAITS_S:
        found.append(f"{wall_s:.0f} s, of which {processor_s:.0f} of processor time")
    if max(LIMIT_BYTES, largest) < _largest_size():
        found.append("more than 1 GB of memory")
    written = b"\n".join(given.values()).decode("utf-8", "replace")
    found += _look_at_output(said, told, code, f"{written} {NUMBERS if one.target == 'options' else ''}")
    if sorted(path.name for path in room.iterdir()) != ["outside", "said", "told", "work"] or any(outside.iterdir()):
        found.append("a file outside its folder")
    for path, content in given.items():
        own = str(path.relative_to(work))
        if any(own.startswith(edited) for edited in target.edits):
            continue
        if not path.exists() or path.read_bytes() != content:
            found.append(f"the input {own} was changed")
    return found


def _processor_s() -> float:
    """Of this process so far, and of those that it has waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _largest_size() -> int:
    """The most bytes that this process ever had in memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _run(target: Target, rng: random.Random, work: Path, room: Path) -> tuple[int | None, str, str, str]:
    """Exit code, standard output and error, and where it crashed. What it prints goes where a terminal's would."""
    kept = os.dup(1), os.dup(2)
    code, crash = None, ""
    with (
        (room / "said").open("w", encoding="utf-8") as said,
        (room / "told").open("w", encoding="utf-8", errors="backslashreplace") as told,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(told),
    ):
        os.dup2(said.fileno(), 1)
        os.dup2(told.fileno(), 2)
        os.chdir(work)
        try:
            code = target.run(rng)
        except BaseException as failure:  # noqa: BLE001 - whatever comes out is what is looked for
            crash = _place_of(failure)
            traceback.print_exc()
        finally:
            for descriptor, number in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(room)
    texts = [(room / name).read_bytes().decode("utf-8", "surrogateescape") for name in ("said", "told")]
    return code, texts[0], "" if crash else texts[1], crash


def _place_of(failure: BaseException) -> str:
    """`ValueError in files.py:120: …`: the innermost frame of the package."""
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if "/mm_autoparallel/" in frame.filename]
    where = f"{frames[-1].filename.split('/mm_autoparallel/')[-1]}:{frames[-1].lineno}" if frames else "nowhere"
    return f"{type(failure).__name__} in {where}: {' '.join(str(failure).split())[:100]}"


def _look_at_output(said: str, told: str, code: int | None, given: str) -> list[str]:
    found = []
    for text, where in ((said, "output"), (told, "messages")):
        control = CONTROL.search(text)
        if control:
            found.append(f"control characters in {where}: {control[0]!r}")
    if "Traceback (most recent call last)" in told:
        found.append("a traceback among its messages")
    number = NO_NUMBER.search(said)
    if number and number[0].strip("+-").lower() not in given.lower():
        found.append(f"output: {number[0]}")
    long = LONG_NUMBER.search(said if code else said + told)
    if long and long[0] not in given:
        found.append(f"a number of {len(long[0])} digits")
    return found


def prepare(name: str, folder: Path) -> Path:
    """The inputs of target `name` as they should be, in a new folder in `folder`."""
    base = folder / f"base-{name}"
    base.mkdir()
    os.chdir(base)
    with contextlib.redirect_stderr(io.StringIO()):  # what it says is no finding
        TARGETS[name].prepare(base)
    return base


def run_child(attacks: list[Attack], folder: Path) -> Iterator[dict[str, Any]]:
    """Does `attacks` one after the other; tells of each that it begins, and what came of it."""
    bases: dict[str, Path] = {}
    for index, one in enumerate(attacks):
        if one.target not in bases:
            bases[one.target] = prepare(one.target, folder)
        yield {"begin": index}
        room = folder / str(index)
        room.mkdir()
        found = attack(TARGETS[one.target], one, bases[one.target], room)
        os.chdir(folder)
        yield {"end": index, "found": found}
        if not found:  # else it is there to be kept
            shutil.rmtree(room)
        if any("memory" in finding for finding in found):  # the largest size of a process never falls
            return


class Findings:
    """What was found, by kind, with the first mutations that show it."""

    def __init__(self, keep: Path | None) -> None:
        self.numbers: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.num_done = 0
        self._keep = keep

    def add(self, one: Attack, found: list[str], room: Path) -> None:
        """Count what was found with an attack whose inputs lie in `room`."""
        self.num_done += 1
        for finding in found:
            kind = f"{one.target}: {re.sub('0x[0-9a-f]+', '0x…', finding)}"
            self.numbers[kind] += 1
            if kind not in self.first:
                self.first[kind] = one.options
                self._write_down(one, finding, room)
                print(f"{kind}\n        {one.options}", file=sys.stderr, flush=True)
        if self.num_done % REPORT_EVERY == 0:
            total = f"{self.num_done} mutations, the last of {one.target}; {self.numbers.total()} findings"
            print(total, file=sys.stderr, flush=True)

    def _write_down(self, one: Attack, finding: str, room: Path) -> None:
        if self._keep is None:
            return
        place = self._keep / f"{one.target}-{one.seed}-{one.number}"
        if (room / "work").exists():
            shutil.copytree(room / "work", place, dirs_exist_ok=True, symlinks=True)
        place.mkdir(parents=True, exist_ok=True)
        with (place / "FOUND").open("a", encoding="utf-8") as stream:
            stream.write(f"{finding}\npython tests/reliability/attack.py {one.options}\n")


def attack_in_children(attacks: list[Attack], findings: Findings, hang_s: float = HANG_S) -> None:
    """Does all `attacks`, a batch to a process; behind one that a process died of, the next goes on."""
    done = 0
    while done < len(attacks):
        done += _run_batch(attacks[done : done + BATCH], findings, hang_s)


def _run_batch(attacks: list[Attack], findings: Findings, hang_s: float) -> int:
    """How many attacks a child got through, the one that it was given up at included."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        environment = {"XDG_CACHE_HOME": str(Path.home() / ".cache")} | os.environ
        environment |= {"PYTHONPATH": str(ROOT), "HOME": folder, "COLUMNS": "120"}
        given = json.dumps([asdict(one) for one in attacks]).encode()
        with subprocess.Popen(
            [sys.executable, __file__, "--child", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            cwd=folder,
        ) as child:
            assert child.stdin is not None
            child.stdin.write(given)
            child.stdin.close()
            begun, ended = -1, -1
            for event in _events(child, hang_s):
                begun = event.get("begin", begun)
                if "end" in event:
                    ended = event["end"]
                    findings.add(attacks[ended], event["found"], Path(folder, str(ended)))
        if begun < 0:
            raise RuntimeError(f"{attacks[0].target}: nothing could be prepared (code {child.returncode})")
        if ended < begun:
            end = "it hangs" if child.returncode == -signal.SIGKILL else f"its process ended with {child.returncode}"
            findings.add(attacks[begun], [end], Path(folder, str(begun)))
        return begun + 1


def _events(child: subprocess.Popen[bytes], hang_s: float) -> Iterator[dict[str, Any]]:
    """What the child tells until it ends; it is killed where it is silent for `hang_s`."""
    assert child.stdout is not None
    rest = b""
    while True:
        if not select.select([child.stdout], [], [], hang_s)[0]:
            os.killpg(child.pid, signal.SIGKILL)
        chunk = child.stdout.read(1 << 20)
        *lines, rest = (rest + (chunk or b"")).split(b"\n")
        yield from map(json.loads, lines)
        if not chunk:
            child.wait()
            return


def _part(text: str) -> tuple[int, int]:
    part, of = map(int, text.split("/"))
    if not 1 <= part <= of:
        raise ValueError(text)
    return part, of


def main(argv: list[str] | None = None) -> int:
    """The script: its exit code is 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="I/N",
        help="every N-th mutation from the I-th on: N runs are the whole",
    )
    parser.add_argument("--keep", type=Path, help="folder for the inputs of each first finding of a kind")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_AS, (16 * LIMIT_BYTES, 16 * LIMIT_BYTES))
        with os.fdopen(os.dup(1), "w", buffering=1) as pipe, (arguments.child / "said").open("wb") as said:
            os.dup2(said.fileno(), 1)  # what the preparation prints is no event
            for event in run_child([Attack(**one) for one in json.load(sys.stdin)], arguments.child):
                pipe.write(json.dumps(event) + "\n")
        return 0
    numbers = range(arguments.first, arguments.first + arguments.mutations)
    part, of = arguments.part
    attacks = [Attack(name, arguments.seed, number) for name in arguments.targets.split(",") for number in numbers]
    attacks = attacks[part - 1 :: of]
    compile_search()  # no attack pays for it
    begin_s, findings = time.monotonic(), Findings(arguments.keep.resolve() if arguments.keep else None)
    attack_in_children(attacks, findings)
    what = f"seed {arguments.seed}" + (f", part {part} of {of}" if of > 1 else "")
    print(f"{findings.num_done} mutations with {what} in {time.monotonic() - begin_s:.0f} s")
    for kind, number in findings.numbers.most_common():
        print(f"{number:6d}  {kind}\n        {findings.first[kind]}")
    return 1 if findings.numbers else 0


if __name__ == "__main__":
    sys.exit(main())
