"""Reads every configuration of frameworks that say no model below folders, and counts what becomes of them.

    python tests/frameworks/config_census.py FOLDER... [--list]

FOLDERs are checkouts, such as of deepspeedai/DeepSpeedExamples, huggingface/accelerate, hpcaitech/ColossalAI,
NVIDIA-NeMo/Megatron-Bridge and pytorch/torchtitan. A file that a framework knows as its own is read as a plan of a
decoder with 24 layers, or another usual number that it can place, for 64 devices or the first of 1024 and fewer that it
runs on; of a file with several configurations, each. A common.py above a file goes beside it, and registries of
torchtitan that it imports. Prints a line a framework, and with --list why what is not read is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from drawn_decoder_plans import DENSE

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.megatron_bridge import recipes as megatron_bridge
from mm_autoparallel.integrations.torchtitan import registry as torchtitan

READ = ("accelerate", "colossalai", "deepspeed", "megatron-bridge", "paddle", "torchtitan")
DEPTHS = (24, 32, 28, 36, 40, 48, 61, 80, 94, 126)
"""Layers of the decoder, the first that a configuration can place."""
ENTRIES = {"megatron-bridge": megatron_bridge.list_entries, "torchtitan": torchtitan.list_entries}
"""Framework → which configurations one of its Python files has."""
WORLD_SIZES = (64, 1024, 512, 256, 128, 8, 4, 2, 1, 96, 832)


def usual_sizes(folder: Path) -> list[Path]:
    """A decoder of each of DEPTHS, written into `folder`."""
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    models = [folder / f"{depth}.json" for depth in DEPTHS]
    for model, depth in zip(models, DEPTHS, strict=True):
        model.write_text(json.dumps(sizes | {"padded-vocab-size": 512, "num-layers": depth}))
    return models


def given_all(path: Path, models: list[Path], entry: str | None) -> Iterator[Given]:
    """What is said beside the file at `path`, the first first."""
    above = [folder / "common.py" for folder in path.parents if path.suffix == ".py"]
    imported = find_imported(path) if path.suffix == ".py" else []
    beside = (*tuple(each for each in above if each.is_file() and each != path)[:1], *imported)
    for model, world_size in product(models, WORLD_SIZES):
        batch = {"seq_length": 1024, "micro_batch_size": 1, "global_batch_size": 1024}
        yield Given(model, world_size=world_size, entry=entry, beside=beside, **batch)


def find_imported(path: Path) -> list[Path]:
    """Registries of torchtitan that the Python file at `path` imports, and its package's own file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    names = [
        name.replace(".", "/") + ".py" for name in re.findall(r"^from ([\w.]+\.config_registry) import", text, re.M)
    ]
    near = [path.with_name("__init__.py")] if names else []
    return [*near, *(each for name in names for folder in path.parents if (each := folder / name).is_file())]


def given_for(kind: LaunchKind, path: Path, models: list[Path], entry: str | None) -> Given:
    """What is said beside the file at `path`: the first with which it is read, the very first where none is."""
    return first_read(kind, path, [*given_all(path, models, entry)])


def first_read(kind: LaunchKind, path: Path, several: list[Given]) -> Given:
    """The first of `several` with which the file at `path` is read, the very first where none is."""
    return next((given for given in several if not refusal_of(kind, path, given)), several[0])


def refusal_of(kind: LaunchKind, path: Path, given: Given) -> str:
    """Why no plan is read from the file at `path`; empty where one is."""
    try:
        kind.read_plan(path, given)
    except PlannerError as failure:
        return str(failure).replace(str(path), path.name)
    return ""


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    kinds = {name: kind for name in READ for kind in frameworks()[name].launches()}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        models = usual_sizes(Path(folder))
        paths = [path for each in arguments.folders for path in sorted(each.rglob("*")) if path.is_file()]
        for path in paths:
            for name, kind in kinds.items():
                if path.suffix not in (".json", ".yaml", ".yml", ".py", ".toml") or not kind.is_one(path):
                    continue
                lists = ENTRIES.get(name) if path.suffix == ".py" else None
                entries = lists(path) if lists else [None]
                for entry in entries:
                    refusal = refusal_of(kind, path, given_for(kind, path, models, entry))
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
