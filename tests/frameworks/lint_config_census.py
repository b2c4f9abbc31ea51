"""Looks at every configuration below folders with `lint`, and counts what its rules of files find.

    python tests/frameworks/lint_config_census.py FOLDER... [--list]

FOLDERs are checkouts, such as of deepspeedai/DeepSpeedExamples, huggingface/accelerate, hpcaitech/ColossalAI,
NVIDIA-NeMo/Megatron-Bridge, pytorch/torchtitan (release-v0.2.2 for TOML) and mindspore-lab/mindformers. A file is
looked at with a model and devices of config_census.py's, the first with which it is read, the usual ones where none is.
Exits with 1 where an error is found that is no refusal to read and not in KNOWN: a published file runs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from config_census import ENTRIES, WORLD_SIZES, first_read, given_all, usual_sizes

from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import WORLD

NAMES = (
    *("accelerate", "colossalai", "deepspeed", "megatron-bridge", "mindformers", "mindspeed-mm-fsdp", "paddle"),
    "torchtitan",
)
WITH_MODEL = ("mindformers", "mindspeed-mm-fsdp")
"""Frameworks whose files say the model."""
KNOWN = {
    **{
        (f"inference/sglang/ds_offload_{kind}.json", "batch-divisible"): "a batch of 1, on one device"
        for kind in ("cpu", "nvme_aio", "nvme_gds")
    },
    ("train_configs/llama4_17bx128e.toml", "micro-batches-below-stages"): "PP 4 with local_batch_size 1, which torch's "
    "Schedule1F1B refuses: a mistake that is there",
    (
        "qwen_vl/h100/qwen35_vl.py",
        "batch-divisible",
    ): "a batch of 32 or 36 with micro-batches of 4 on 4 or 16 replicas: a mistake that is there",
    ("qwen_vl/h100/qwen3_vl.py", "expert-ranks"): "EP 32 on 32 devices with TP 4, which is ETP's default: a mistake "
    "that is there",
    ("llama/h100/llama3.py", "flags-contradict"): "its base's optimizer is sharded, in a file that is not given",
}
"""(end of the path, rule) → why a published file has such an error."""


def files_below(folders: list[Path]) -> Iterator[tuple[str, Path, str | None]]:
    """Framework, file and function of every configuration."""
    kinds = [(name, kind) for name in NAMES for kind in frameworks()[name].launches()]
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        if path.suffix not in (".json", ".yaml", ".yml", ".py", ".toml"):
            continue
        for name, kind in kinds:
            text = path.read_text(encoding="utf-8", errors="replace")
            if not kind.is_one(path) or (kind.asked_last and not ("parallel:" in text and "training:" in text)):
                continue
            lists = ENTRIES.get(name) if path.suffix == ".py" else None
            yield from ((name, path, entry) for entry in (lists(path) if lists else [None]))
            break


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print every finding")
    arguments = parser.parse_args()
    told: Counter[tuple[str, str, str]] = Counter()
    files: Counter[str] = Counter()
    strange = 0
    with tempfile.TemporaryDirectory() as folder:
        models = usual_sizes(Path(folder))
        for name, path, entry in files_below(arguments.folders):
            files[name] += 1
            kind = next(kind for kind in frameworks()[name].launches() if kind.is_one(path))
            several = [Given()] if name in WITH_MODEL else [*given_all(path, models, entry)]
            few = [*several[: len(WORLD_SIZES)], *several[len(WORLD_SIZES) + 1 :: len(WORLD_SIZES)]]
            named = re.search(r"_(\d+)gpu_", entry or "")  # as Megatron-Bridge's recipes are called
            if named:
                few = [replace(few[0], world_size=int(named[1])), *few]
            given = first_read(kind, path, few)
            found = lint_files([path], framework=name, given=given).findings
            for severity, rule in {(one.rule.severity, one.rule.key) for one in found}:
                told[name, severity, rule] += 1
            for one in found:
                is_known = any(str(path).endswith(end) and one.rule.key == rule for end, rule in KNOWN)
                is_ours = one.line is None or one.rule is WORLD  # of what is said beside it here
                is_strange = one.rule.severity == "error" and one.rule.key != "not-read" and not (is_known or is_ours)
                strange += is_strange
                if (arguments.list and one.rule.key not in ("not-read", "not-simulated")) or is_strange:
                    print(f"{path}:{one.line}: {entry or ''} {one.rule.severity}: {one.message} [{one.rule.key}]")
    for (name, severity, rule), number in sorted(told.items()):
        print(f"{name:18} {number:6} {severity:8} {rule}")
    for name, number in sorted(files.items()):
        print(f"{name}: {number} configurations")
    if not files:
        print("no configurations: nothing was looked at")
    return int(strange > 0)


if __name__ == "__main__":
    sys.exit(main())
