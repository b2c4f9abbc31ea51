"""Looks at every launch of Megatron-LM with `lint`, and counts what is found by rule.

    python tests/frameworks/lint_census.py --megatron CHECKOUT [--list]

CHECKOUT is a work tree of NVIDIA/Megatron-LM, branch core_r0.16.0. Looked at is every script that starts
pretrain_gpt.py, and every model_config.yaml of its functional tests that trains by it, on h100-80g. Tests run on 8
devices, scripts are read for 64, or as many more as make whole replicas; of 131,072 tokens where only the tokenizer
says how many. Exits with 1 where an error is found that is no refusal to read and not in KNOWN: a published file runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from megatron_core_census import OF_TESTS, OTHERS, TOKENS, TRAINS, VOCABULARY, WORLD_SIZE, least_world

from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON
from mm_autoparallel.integrations.megatron_core.launch import is_launch

KNOWN = {
    ("gpt3/train_gpt3_175b_distributed.sh", "flags-contradict"): "it passes --train-iters and --rampup-batch-size, and "
    "validate_args asserts that nobody does: a mistake that is there",
    ("sbatch_mfsdp_deepseek_v3.sh", "out-of-memory"): "DeepSeek-V3 does not fit into the 64 devices",
    (
        "gpt3_mcore_reruns_resume_check_grads/model_config.yaml",
        "batch-divisible",
    ): "its runs are on fewer than 8 devices",
}
"""(end of the path, rule) → why a published file has such an error."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megatron", type=Path, metavar="CHECKOUT")
    options.add_argument("--list", action="store_true", help="print every finding")
    given = options.parse_args()
    if given.megatron is None:
        print("skipped: no work tree of Megatron-LM was named (--megatron)")
        return 0
    told: Counter[tuple[str, str]] = Counter()
    files = strange = clean = 0
    began_s = time.monotonic()
    for path in sorted([*given.megatron.rglob("*.sh"), *given.megatron.rglob("model_config.yaml")]):
        text = path.read_text(encoding="utf-8")
        if not is_launch(path) or (path.suffix == ".yaml" and (not TRAINS.search(text) or OTHERS & {*path.parts})):
            continue
        files += 1
        usual = WORLD_SIZE if path.suffix == ".sh" else OF_TESTS
        try:
            world_size = least_world(path, usual, MEGATRON)
        except PlannerError:
            world_size = usual  # what cannot be read is told below
        said = Given(world_size=world_size, vocab_size=None if VOCABULARY.search(text) else TOKENS)
        device = "b200-192g" if "b200" in str(path) else "h100-80g"
        found = lint_files([path], framework="megatron-core", device=device, given=said).findings
        clean += not found
        for key in {(one.rule.severity, one.rule.key) for one in found}:
            told[key] += 1
        for one in found:
            place = f"{path.relative_to(given.megatron)}:{one.line}"
            is_known = any(str(path).endswith(end) and one.rule.key == rule for end, rule in KNOWN)
            is_strange = one.rule.severity == "error" and one.rule.key != "not-read" and not is_known
            strange += is_strange
            if given.list or is_strange:
                print(f"{place}: {one.rule.severity}: {one.message} [{one.rule.key}] {one.mend}")
    for (severity, rule), number in sorted(told.items()):
        print(f"{number:6} {severity:8} {rule}")
    print(f"{files} files, {clean} without a finding, {time.monotonic() - began_s:.0f} s")
    return int(strange > 0 or not files)


if __name__ == "__main__":
    sys.exit(main())
