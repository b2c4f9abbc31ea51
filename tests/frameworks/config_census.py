"""Reads every configuration of frameworks that say no model below folders, and counts what becomes of them.

    python tests/frameworks/config_census.py FOLDER... [--list]

FOLDERs are checkouts, such as of deepspeedai/DeepSpeedExamples, huggingface/accelerate, hpcaitech/ColossalAI and
pytorch/torchtitan. A file that a framework knows as its own is read as a plan of a decoder with 24 layers, for 64
devices or the first of 1024 and fewer that it runs on; of a file with several configurations, each. Prints a line a
framework, and with --list why what is not read is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from drawn_decoder_plans import DENSE

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.torchtitan.config import list_entries

READ = ("accelerate", "colossalai", "deepspeed", "paddle", "torchtitan")
WORLD_SIZES = (64, 1024, 512, 256, 128, 8, 4, 2, 1)


def refusal_of(kind: LaunchKind, path: Path, model: Path, entry: str | None) -> str:
    """Why no plan is read from the file at `path`; empty where one is."""
    refusal = ""
    for world_size in WORLD_SIZES:
        batch = {"seq_length": 1024, "micro_batch_size": 1, "global_batch_size": 1024}
        given = Given(model, world_size=world_size, entry=entry, **batch)
        try:
            kind.read_plan(path, given)
        except PlannerError as failure:
            refusal = refusal or str(failure).replace(str(path), path.name)
        else:
            return ""
    return refusal


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    kinds = {name: kind for name in READ for kind in frameworks()[name].launches()}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.json"
        left_out = ("seq-length", "hidden-dropout", "attention-dropout")
        sizes = {key: value for key, value in DENSE.items() if key not in left_out}
        model.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
        paths = [path for each in arguments.folders for path in sorted(each.rglob("*")) if path.is_file()]
        for path in paths:
            for name, kind in kinds.items():
                if path.suffix not in (".json", ".yaml", ".yml", ".py", ".toml") or not kind.is_one(path):
                    continue
                entries = list_entries(path) if "entry" in kind.takes and path.suffix == ".py" else [None]
                for entry in entries:
                    refusal = refusal_of(kind, path, model, entry)
                    counts[name]["refused" if refusal else "read"] += 1
                    if refusal and arguments.list:
                        print(f"  {refusal[:200]}")
    for name, count in sorted(counts.items()):
        print(f"{name}: {count.total()} configurations, {count['read']} read, {count['refused']} refused")
    if not counts:
        print("no configurations: nothing was read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
