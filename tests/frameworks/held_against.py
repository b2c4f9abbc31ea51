"""Holds exported plans against a framework's own parser, in an environment of its own.

A framework's script gives its name, what of a plan its parser must say, and a probe: a file in probes/ that the other
environment runs, which reads a line of JSON for each plan (the files that were written, and the devices) and prints a
line with what the framework makes of them, or with its refusal. Plans are drawn at random, lists that are no
palindromes among them; each must be accepted and equal. Then single words of each export are broken: the framework
refuses it, or our reader does, or reads another plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drawn_decoder_plans import DENSE, EXPERTS, draw_decoder_plan, make_job
from test_every_exporter import make_given

from mm_autoparallel.api.exported import export_plan, find_exporter
from mm_autoparallel.api.imported import find_kind
from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.integrations.accounting import Lost, check_decided
from mm_autoparallel.planner.plan import Plan

PROBES = Path(__file__).resolve().parent / "probes"
BROKEN, WRONG = 10, 5
"""Mutations of each export, and disagreements after which it ends."""


class Probe:
    """The other environment's process, asked line by line."""

    def __init__(self, environment: Path, name: str, checkout: Path | None = None) -> None:
        command = [str(environment / "bin" / "python"), "-P", str(PROBES / f"{name}.py")]
        path = {"PYTHONPATH": str(checkout.resolve())} if checkout else {}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | path
        )

    def ask(self, files: Mapping[str, str], world_size: int) -> dict[str, Any]:
        """What the framework makes of `files`; under `refused` why it does not take them."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"files": files, "world_size": world_size}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the probe ended: {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def break_text(text: str, rng: random.Random) -> str:
    """`text` with one number changed, one word misspelt, or one line without its value."""
    words = [match for match in re.finditer(r"\d+|[A-Za-z_]{4,}", text) if not _is_told(text, match.start())]
    word = rng.choice(words)
    said = word.group()
    new = str(int(said) + rng.choice((1, 2, 7))) if said.isdigit() else said[:-2] + said[-1] + said[-2] + "x"
    return text[: word.start()] + new + text[word.end() :]


def _is_told(text: str, at: int) -> bool:
    """Whether the place lies in a comment."""
    return "#" in text[text.rfind("\n", 0, at) + 1 : at]


def main(
    framework: str,
    expect: Callable[[Plan], Mapping[str, Any]],
    change: Callable[[Plan], Plan] = lambda plan: plan,
    version: str = "",
    read_back: str = "",
    into: Mapping[str, str] | None = None,
    probe_name: str = "",
    of_checkout: bool = False,
) -> int:
    """Draw, export, ask, compare, break. expect: what the probe must say of a plan. change: what a drawn plan becomes
    before it is exported. version, read_back: of the framework and what `import` reads of it, where they are not the
    first ones. into: name → text of a file that plans are written into, where new ones are not. probe_name: of the
    probe, where the framework has several. of_checkout: its code is no release's, but a checkout's. Prints counts; 1
    where the framework disagrees."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--environment", type=Path, metavar="DIR", help="made by environments.py")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="the framework's code, over the environment's")
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.environment is None or not (arguments.environment / "bin" / "python").exists():
        print(f"{framework}: no environment is given; nothing was checked")
        return 0
    if of_checkout and arguments.checkout is None:
        print(f"{framework}: no checkout is given; nothing was checked")
        return 0
    rng, counts, wrong = random.Random(arguments.seed), Counter[str](), list[str]()
    probe = Probe(arguments.environment, probe_name or framework.replace("-", "_"), arguments.checkout)
    back = read_back or find_exporter(framework, version or None)[0].read_back
    with tempfile.TemporaryDirectory() as place:
        folder, number = Path(place), 0
        while counts["accepted"] < arguments.plans and len(wrong) < WRONG:
            number += 1
            sizes = rng.choice((DENSE, EXPERTS))
            plan = change(draw_decoder_plan(sizes, rng))
            out = folder / str(number)
            own = []
            for name, text in (into or {}).items():
                own.append(folder / name)
                own[-1].write_text(text)
            try:
                result = export_plan(plan, make_job(sizes, plan), framework, into=own, out=out, version=version or None)
            except PlanError:
                counts["refused by name"] += 1
                continue
            run = result.exported.plan
            files = {str(path.relative_to(out)): path.read_text() for path in result.files}
            found = probe.ask(files, run.strategy.world_size)
            differ = {key: (found.get(key), each) for key, each in expect(run).items() if found.get(key) != each}
            if "refused" in found or differ:
                wrong.append(f"plan {number}: {found.get('refused', differ)}\n{plan}")
                continue
            counts["accepted"] += 1
            _, kind = find_kind(out / back, framework)
            given = make_given(kind.takes, plan, sizes, folder)
            for _ in range(BROKEN):
                target = rng.choice(sorted(files))
                text = break_text(files[target], rng)
                if "refused" in probe.ask({**files, target: text}, run.strategy.world_size):
                    counts["broken, refused by the framework"] += 1
                    continue
                (out / target).write_text(text)
                try:
                    read = out / (target if kind.is_one(out / target) else back)
                    check_decided(kind.read_plan(read, given), run, None)
                except (PlannerError, Lost):
                    counts["broken, found by ours"] += 1
                else:
                    counts["broken, and runs the plan all the same"] += 1
                (out / target).write_text(files[target])
    print(f"{framework}: {', '.join(f'{number} {word}' for word, number in counts.items())}; {len(wrong)} wrong")
    print("\n".join(wrong[:5]))
    return 1 if wrong or not counts["accepted"] else 0
