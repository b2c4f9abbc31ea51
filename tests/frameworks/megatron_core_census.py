"""Reads every launch of pretrain_gpt.py, writes a plan into each script that can hold one, and counts what comes of it.

    python tests/frameworks/megatron_core_census.py --megatron CHECKOUT [--list]

CHECKOUT is a work tree of NVIDIA/Megatron-LM, branch core_r0.16.0, or of Ascend/MindSpeed-LLM, or a folder with
several. Of every script that starts pretrain_gpt.py, and every model_config.yaml of Megatron-LM's functional tests that
trains by it: is it read as a job and a plan? Tests run on 8 devices; scripts are read for the devices that they start,
or 64 where the machine says how many, or as many more as make whole replicas; of 131,072 tokens where only the
tokenizer says how many. Does a plan that is written into a script leave all but decided flags as they are, pass
`bash -n`, keep its first line, and come back when it is read again? Exits with 1 where a written script fails in any.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.launch_script import find_world_size, read_launch_script
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.launch import is_launch, patch_launch, read_launch_plan, read_training
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import read_operators
from mm_autoparallel.integrations.mindspeed_llm.dialect import (
    ALGORITHM,
    EXTEND,
    LAYER_LIST,
    LAYER_LISTS,
    MINDSPEED,
    PER_RANK,
    ULYSSES,
)
from mm_autoparallel.integrations.mindspeed_llm.written import is_launch as is_mindspeed_launch
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

WORLD_SIZE, OF_TESTS, TOKENS = 64, 8, 131072
OTHERS = {"bert", "t5", "hybrid", "mimo", "multimodal-llava"}
"""Folders of tests that other entries than pretrain_gpt.py run."""
VOCABULARY = re.compile(r"--vocab-size\b")
TRAINS = re.compile(r"^  --train-(iters|samples): ", re.MULTILINE)
DECIDED = {value for value in vars(flags).values() if isinstance(value, str) and value.startswith("--")}
DECIDED |= {*flags.GRAPHS, *flags.LOW_PRECISION, LAYER_LIST, LAYER_LISTS, ALGORITHM, ULYSSES, EXTEND, PER_RANK}


def dialect_of(path: Path) -> Dialect | None:
    """How the launch at `path` spells its flags; None: it is none of pretrain_gpt.py."""
    if is_launch(path):
        return MEGATRON
    return MINDSPEED if path.suffix == ".sh" and is_mindspeed_launch(path) else None


def least_world(path: Path, usual: int, dialect: Dialect) -> int:
    """The devices that are usual, or as many more as make whole replicas."""
    script = read_training(path)
    usual = (find_world_size(script) if dialect is MINDSPEED else None) or usual
    passed = dialect.read(read_passed(script, usual))
    tp, pp, cp, ep = (passed.number(flag) or 1 for flag in (flags.TENSOR, flags.PIPELINE, flags.CONTEXT, flags.EXPERT))
    group = pp * math.lcm(tp * cp, ep * (passed.number(flags.EXPERT_TENSOR) or tp))
    return -(-usual // group) * group


def plan_for(path: Path, dialect: Dialect) -> Plan:
    """A plan with chunks and layers dealt unevenly, of as many layers as the script's model has; with recompute where
    its layers do not run operators once more."""
    passed = dialect.read(read_passed(read_launch_script(path), WORLD_SIZE))
    number = passed.number(flags.NUM_LAYERS) or 24
    pp, vpp = (4, 2) if number >= 10 else (min(number, 2), 1)
    cells = pp * vpp
    counts = [1] * cells
    for index in range(number - cells):
        counts[(index * index) % cells] += 1
    strategy = Strategy(pp=pp, tp=2, dp=WORLD_SIZE // (2 * pp), mbs=1, vpp=vpp)
    return Plan(strategy, {"text": tuple(counts)}, {"text": (0 if read_operators(passed) else 1,) * cells}, 1024)


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
    for path in sorted([*given.megatron.rglob("*.sh"), *given.megatron.rglob("model_config.yaml")]):
        text = path.read_text(encoding="utf-8")
        dialect = dialect_of(path)
        if dialect is None or (path.suffix == ".yaml" and (not TRAINS.search(text) or OTHERS & {*path.parts})):
            continue
        said: list[str] = []
        try:
            world_size = least_world(path, WORLD_SIZE if path.suffix == ".sh" else OF_TESTS, dialect)
            said_tokens = VOCABULARY.search(text)
            tokens = None if said_tokens else TOKENS
            read_launch_plan(path, Given(world_size=world_size, vocab_size=tokens), dialect)
            said.append(f"read ({path.suffix})")
        except PlannerError as refusal:
            said.append(f"not read ({path.suffix}): {str(refusal).replace(str(path), '…')}")
        if path.suffix == ".yaml":
            told[said[0].split(":")[0]] += 1
            if given.list:
                print(f"{path.relative_to(given.megatron)}: {said[0]}")
            continue
        try:
            plan = plan_for(path, dialect)
            script, _, _ = patch_launch(path, plan, None, dialect)
        except PlannerError as refusal:
            said.append(f"not written: {str(refusal).replace(str(path), '…')}")
        else:
            said.append("written")
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "again.sh"
                target.write_text(script.text, encoding="utf-8")
                parsed = subprocess.run(["bash", "-n", str(target)], capture_output=True, text=True, check=False)
                shipped = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
            if parsed.returncode > shipped.returncode:
                said.append(f"WRONG: bash -n says {parsed.stderr.strip()}")
            if strangers(text, script.text):
                said.append(f"WRONG: changed {strangers(text, script.text)}")
            if text.splitlines()[:1] != script.text.splitlines()[:1]:
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
