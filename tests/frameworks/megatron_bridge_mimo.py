"""Holds layouts that are written for Megatron-Bridge against its own MegatronMIMOParallelismConfig.

    python tests/frameworks/megatron_bridge_mimo.py --bridge CHECKOUT [--plans 200] [--seed 1]

CHECKOUT is a work tree of NVIDIA-NeMo/Megatron-Bridge of 0.6 or later. Its megatron_mimo_config.py is run by itself,
without torch: of megatron-core it needs the decoder's name alone. Every written section must pass its finalize() and
give the sizes of the plan; of every section with one number changed, what finalize() refuses our reader refuses too.
Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_bridge.dialect import read_config_plan
from mm_autoparallel.integrations.megatron_bridge.mimo import LANGUAGE, VERSION
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

CONFIG = Path("src/megatron/bridge/models/megatron_mimo/megatron_mimo_config.py")
SECTION = "megatron_mimo_parallelism_config"


def load_theirs(checkout: Path) -> types.ModuleType:
    """Megatron-Bridge's file as a module, with a stand-in for the one constant that it imports."""
    name = ""
    for part in ("megatron", "core", "models", "mimo", "config", "role"):
        name = f"{name}.{part}" if name else part
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[name].__dict__["MIMO_LANGUAGE_MODULE_KEY"] = LANGUAGE
    found = types.ModuleType("megatron_mimo_config")
    sys.modules[found.__name__] = found
    exec(compile((checkout / CONFIG).read_text(encoding="utf-8"), str(CONFIG), "exec"), found.__dict__)
    return found


def draw_plan(rng: random.Random) -> Plan:
    """A decoder of 1 to 4 stages whose last may hold fewer layers, an encoder before or behind it."""
    pp, tp, dp, own_dp, mbs = (
        rng.choice(sizes) for sizes in ((1, 2, 3, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (4, 8))
    )
    own_tp = rng.choice((1, 2, 4))
    offset = rng.choice((0, pp * tp * dp))
    encoder = ModuleLayout("vision", 1, own_tp, own_dp, mbs * dp // own_dp, rank_offset=offset)
    held = [6] * (pp - 1) + [rng.choice((6, 4))]
    most = rng.choice((0, 0, 3))
    strategy = Strategy(
        1 + pp,
        tp,
        dp,
        mbs,
        zero=rng.choice((0, 1)),
        sequence_parallel=own_tp == 1,
        arrangement=Arrangement("disaggregated", "inline", encoder),
    )
    layers = {"vision": (5, *[0] * pp), "text": (0, *held)}
    recompute = {"vision": (most, *[0] * pp), "text": (0, *[most] * pp)}
    return Plan(strategy, layers, recompute, mbs * dp * rng.choice((1, 8)))


def finalize(theirs: types.ModuleType, section: dict[str, Any], world_size: int) -> str:
    """Why Megatron-Bridge refuses `section`; empty: it takes it."""
    modules = {
        name: theirs.ModuleParallelismConfig(**{key: size for key, size in sizes.items() if key != "_target_"})
        for name, sizes in section["module_parallelisms"].items()
    }
    try:
        theirs.MegatronMIMOParallelismConfig(modules).finalize(world_size)
    except ValueError as refusal:
        return str(refusal)
    return ""


def is_read(path: Path, plan: Plan) -> bool:
    """Whether our reader takes the configuration at `path`, on as many devices and of the model of `plan`."""
    model = path.with_name("model.json")
    sizes = {"hidden_size": 512, "ffn_size": 2048, "num_heads": 8}
    tower = {
        "name": "vision",
        "stem": {"type": "patches", "in_features": 588},
        "layers": sizes | {"num_layers": sum(plan.layers["vision"]), "norm": "layer"},
        "projector": {"norm": "layer", "norm_size": 512, "merge_tokens": 4, "layer_sizes": [2048, 512]},
    }
    text = {"vocab_size": 4096, "layers": sizes | {"num_layers": sum(plan.layers["text"]), "norm": "rms"}}
    model.write_text(json.dumps({"text": text, "encoders": [tower]}), encoding="utf-8")
    try:
        read_config_plan(path, Given(model, world_size=plan.strategy.world_size, seq_length=1024))
    except PlannerError:
        return False
    return True


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bridge", type=Path, metavar="CHECKOUT")
    options.add_argument("--plans", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    if given.bridge is None:
        print("skipped: no work tree of Megatron-Bridge was named (--bridge)")
        return 0
    theirs, rng = load_theirs(given.bridge), random.Random(given.seed)
    told: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.plans):
            plan, path = draw_plan(rng), Path(folder) / str(number) / "planned.yaml"
            world_size = plan.strategy.world_size
            export_plan(plan, None, "megatron-bridge", out=path.parent, version=VERSION)
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
            refusal = finalize(theirs, document["model"][SECTION], world_size)
            wrong += [f"plan {number}: {refusal or 'not read'}"] if refusal or not is_read(path, plan) else []
            told["written"] += 1
            sizes = rng.choice([*document["model"][SECTION]["module_parallelisms"].values()])
            key = rng.choice([key for key in sizes if key != "_target_"])
            sizes[key] = rng.choice([size for size in (0, 1, 2, 3, 5) if size != sizes[key]])
            path.write_text(yaml.safe_dump(document), encoding="utf-8")
            refusal, read = finalize(theirs, document["model"][SECTION], world_size), is_read(path, plan)
            words = ("refused" if refusal else "taken"), ("taken" if read else "refused")
            told[f"changed, {words[0]} by theirs, {words[1]} by ours"] += 1
            wrong += [f"plan {number}, {key} {sizes[key]}: {refusal}"] if refusal and read else []
    for what, count in sorted(told.items()):
        print(f"{count:5d} {what}")
    print("\n".join(wrong) or "none wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
