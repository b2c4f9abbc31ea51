"""Reads every launch script of Megatron-LM, writes a plan into each that can hold one, and counts what becomes of it.

    python tests/frameworks/megatron_core_census.py --megatron CHECKOUT [--list]

CHECKOUT is a work tree of NVIDIA/Megatron-LM, branch core_r0.16.0. Of every script that starts pretrain_gpt.py: is it
read as a job and a plan (64 devices, and a vocabulary of its own where its tokenizer says it), and does a plan that is
written into it leave all but decided flags as they are, pass `bash -n`, keep its first line, and come back when it is
read again? Exits with 1 where a written script fails in any of these.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.launch import is_launch, patch_launch, read_launch_plan
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

WORLD_SIZE = 64
DECIDED = {value for value in vars(flags).values() if isinstance(value, str) and value.startswith("--")}
DECIDED |= {*flags.GRAPHS, *flags.LOW_PRECISION}


def plan_for(path: Path) -> Plan:
    """A plan with chunks and layers dealt unevenly, of as many layers as the script's model has."""
    number = read_passed(read_launch_script(path), WORLD_SIZE).number(flags.NUM_LAYERS) or 24
    cells = 8 if number >= 10 else 4
    vpp = cells // 4
    counts = [1] * cells
    for index in range(number - cells):
        counts[(index * index) % cells] += 1
    strategy = Strategy(pp=4, tp=2, dp=8, mbs=1, vpp=vpp)
    return Plan(strategy, {"text": tuple(counts)}, {"text": tuple(min(1, count) for count in counts)}, 256)


def strangers(before: str, after: str) -> list[str]:
    """Lines that changed in more than decided flags and variables' numbers."""
    found = []
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""):
        if line.startswith(("---", "+++", "@@")):
            continue
        named = set(re.findall(r"--[a-z][\w-]*", line[1:]))
        if not (named & DECIDED or re.match(r"[+-]\s*(?:export\s+)?\w+=\S+", line) or not line[1:].strip()):
            found.append(line)
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megatron", type=Path, metavar="CHECKOUT")
    options.add_argument("--list", action="store_true", help="say of each script what became of it")
    given = options.parse_args()
    if given.megatron is None:
        print("skipped: no work tree of Megatron-LM was named (--megatron)")
        return 0
    told: Counter[str] = Counter()
    wrong = 0
    for path in sorted(given.megatron.rglob("*.sh")):
        if not is_launch(path):
            continue
        said = []
        try:
            read_launch_plan(path, Given(world_size=WORLD_SIZE))
            said.append("read")
        except PlannerError as refusal:
            said.append(f"not read: {str(refusal).replace(str(path), '…')}")
        try:
            plan = plan_for(path)
            script, _, _ = patch_launch(path, plan, None)
        except PlannerError as refusal:
            said.append(f"not written: {str(refusal).replace(str(path), '…')}")
        else:
            before = path.read_text(encoding="utf-8")
            said.append("written")
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "again.sh"
                target.write_text(script.text, encoding="utf-8")
                parsed = subprocess.run(["bash", "-n", str(target)], capture_output=True, text=True, check=False)
                shipped = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
            if parsed.returncode > shipped.returncode:
                said.append(f"WRONG: bash -n says {parsed.stderr.strip()}")
            if strangers(before, script.text):
                said.append(f"WRONG: changed {strangers(before, script.text)}")
            if before.splitlines()[:1] != script.text.splitlines()[:1]:
                said.append("WRONG: its first line changed")
        wrong += any(one.startswith("WRONG") for one in said)
        for one in said:
            told[one.split(":")[0]] += 1
        if given.list:
            print(f"{path.relative_to(given.megatron)}: {'; '.join(said)}")
    for what, number in sorted(told.items()):
        print(f"{number:6} {what}")
    return int(wrong > 0 or not told["written"])


if __name__ == "__main__":
    sys.exit(main())
