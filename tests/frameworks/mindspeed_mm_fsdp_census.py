"""Reads all trainings of MindSpeed-MM's FSDP trainer in checkouts, writes plans, and loads these by their own code.

    MINDSPEED_MM_CHECKOUTS=26.0.0=DIR:master=DIR python tests/frameworks/mindspeed_mm_fsdp_census.py --plans 40 --seed 1

Of each launch script it says whether it is read, and if not why. The config.json that a script trains is seldom there:
this project's fixtures stand in where they are of the model that the YAML names. Drawn plans are written; every word of
what is written must be the plan's, all others as before, and the checkout's own classes (mindspeed_mm/fsdp/params) must
take the file and see the plan's sizes in it. Exit code 1 where a word is wrong, or counts fall below those known.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindspeed_mm_fsdp.describe import describe
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import Launch, read_launch, starts_trainer
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import count_layers, find_layer_lists
from mm_autoparallel.integrations.mindspeed_mm_fsdp.plan_yaml import read_plan_back, yaml_with_plan
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import read_trainer
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.space import list_entries

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = {
    "qwen3_vl_moe": "huggingface/qwen3_vl_30b_a3b.json",
    "qwen3_5": "huggingface/qwen3_5_9b.json",
    "qwen3_5_moe": "huggingface/qwen3_5_35b_a3b.json",
    "kimi_k25": "huggingface/kimi_k25.json",
    "qwen3_omni_moe": "mindspeed_mm_configs/qwen3_omni_30b_a3b.json",
    "qwen3_asr": "mindspeed_mm_configs/qwen3_asr_1_7b.json",
    "step3_vl": "mindspeed_mm_configs/step3_vl_10b.json",
}
"""model_id → a config.json of that model, among the fixtures."""

KNOWN = {
    "26.0.0": {"scripts": 13, "YAMLs": 11, "read": 8, "plans": 8},
    "26.1.0": {"scripts": 21, "YAMLs": 17, "read": 10, "plans": 10},
    "master": {"scripts": 22, "YAMLs": 18, "read": 13, "plans": 12},
}
"""What was there when it was looked at, of each release. scripts: that start a trainer of mindspeed_mm/fsdp; YAMLs: of
those the ones whose YAML is read; read: to a job, and planned; plans: scripts whose every drawn plan was right."""

_LOADS = """
import os, sys, types
os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": sys.argv[2]}
checkout = sys.argv[1]
sys.path.insert(0, checkout)
for name in ("mindspeed_mm", "mindspeed_mm.fsdp", "mindspeed_mm.fsdp.utils", "mindspeed_mm.config"):
    module = types.ModuleType(name)
    module.__path__ = [os.path.join(checkout, *name.split("."))]
    sys.modules[name] = module
class Anything(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
for name in ("mindspeed", "mindspeed.fsdp", "mindspeed.fsdp.utils", "mindspeed.fsdp.utils.log"):
    sys.modules[name] = Anything(name)
device = types.ModuleType("mindspeed_mm.fsdp.utils.device")
device.IS_NPU_AVAILABLE = True
sys.modules[device.__name__] = device
import yaml
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
try:
    from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
except ImportError:
    FeatureArguments = None
    from mindspeed_mm.fsdp.params.utils import instantiate_dataclass as make
else:
    make = lambda kind, content: kind(**content)
for path in sys.argv[3:]:
    document = yaml.safe_load(open(path))
    parallel, training = make(ParallelArguments, document["parallel"]), make(TrainingArguments, document["training"])
    held = make(FeatureArguments, document.get("features", {})) if FeatureArguments else parallel
    training.compute_distributed_training(parallel)
    print(repr({
        "dp": parallel.data_parallel_size, "shard": parallel.fully_shard_parallel_size,
        "ep": parallel.expert_parallel_size, "ep_shard": parallel.expert_fully_shard_parallel_size,
        "cp": parallel.ulysses_parallel_size, "reshard": parallel.fsdp_plan.reshard_after_forward,
        "mbs": training.micro_batch_size, "batch": training.global_batch_size,
        "rerun": list(held.recompute_plan.apply_modules) if getattr(held, "recompute", False) else [],
    }))
"""
"""Their own classes on argv: checkout, devices, YAMLs. What only a device or MindSpeed has is stood in for."""


@dataclass
class Found:
    """Of one release."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    """Looks at every checkout that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=40, help="drawn plans of each script")
    parser.add_argument("--loads", type=int, default=3, help="of these, those that the checkout's own code loads")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    named = [entry.partition("=") for entry in os.environ.get("MINDSPEED_MM_CHECKOUTS", "").split(":") if entry]
    if not named:
        print("MINDSPEED_MM_CHECKOUTS names no checkout (26.0.0=DIR:master=DIR); nothing is looked at")
        return 0
    failed = False
    for release, _, folder in named:
        found = look_at(Path(folder), arguments.plans, arguments.loads, random.Random(arguments.seed))
        print(f"{release}: {dict(found.counts)}")
        for line in found.reasons + found.wrong:
            print(f"  {line}")
        known = KNOWN.get(release, {})
        fallen = [name for name, count in known.items() if found.counts[name] < count]
        if fallen:
            print(f"  {', '.join(fallen)} fell below {known}")
        failed |= bool(fallen or found.wrong)
    return int(failed)


def look_at(checkout: Path, num_plans: int, num_loads: int, rng: random.Random) -> Found:
    """All launch scripts of one checkout."""
    found = Found()
    for script in sorted(checkout.glob("examples/**/*.sh")):
        if not starts_trainer(script.read_text(errors="replace")):
            continue
        name = str(script.relative_to(checkout))
        found.counts["scripts"] += 1
        try:
            launch = read_launch(script)
            trainer = read_trainer(launch.yaml_path, launch.checkout)
            found.counts["YAMLs"] += 1
            config = CONFIGS.get(trainer.section("model").text("model_id", ""))
            described = describe(script, model_config=FIXTURES / config if config else None)
            assert isinstance(described.model, Model)
            assert described.world_size
            cluster = {"num_nodes": 1, "devices_per_node": described.world_size, "device": "ascend-910b-64g"}
            content: dict[str, Any] = {"model": described.model.model_dump(), "cluster": cluster}
            sections = {"workload": dict(described.workload), "search": dict(described.search)}
            job = parse_job(content | sections, Path(name))
            read_plan_back(script, described.model)
        except (JobError, PlanError) as failure:
            found.reasons.append(f"{name}: {str(failure).replace(str(checkout), '')}")
            continue
        found.counts["read"] += 1
        wrong = list(_check_plans(launch, job, described.model, num_plans, num_loads, rng))
        found.wrong += [f"{name}: {line}" for line in wrong]
        found.counts["plans"] += not wrong
    return found


def _check_plans(
    launch: Launch, job: Job, model: Model, num_plans: int, num_loads: int, rng: random.Random
) -> list[str]:
    lawful = [entry.strategy for entry in list_entries(job) if entry.reason is None]
    before = launch.yaml_path.read_text()
    wrong: list[str] = []
    written: list[tuple[str, Plan]] = []
    for number in range(num_plans):
        plan = _draw(model, job, rng.choice(lawful), rng)
        try:
            text, _ = yaml_with_plan(plan, model, launch.yaml_path, launch.checkout)
        except (JobError, PlanError) as failure:
            wrong.append(f"{plan.strategy}: {failure}")
            continue
        allowed = _list_decided(yaml.safe_load(before), yaml.safe_load(text))
        if allowed:
            wrong.append(f"{plan.strategy}: also changed {', '.join(allowed)}")
        if number < num_loads:
            written.append((text, plan))
    wrong += _compare(launch, written, model)
    if launch.yaml_path.read_text() != before:
        wrong.append("the checkout's own file has changed")
    return wrong


def _draw(model: Model, job: Job, strategy: Strategy, rng: random.Random) -> Plan:
    layers, recompute, modes = {}, {}, {}
    for modality in model.modalities:
        name, count = modality.name, modality.layers.num_layers
        keeps = name == "text" or not modality.freeze
        moved = rng.choice((0, 0, rng.randint(0, count))) if keeps and "recompute_offload" in job.search.modes else 0
        layers[name], recompute[name] = (count,), (rng.randint(0, count - moved) if keeps else 0,)
        if moved:
            modes[name] = {"recompute_offload": (moved,)}
    return Plan(strategy, layers, recompute, job.workload.global_batch_size, modes=modes)


_DECIDED = (
    "parallel.fully_shard_parallel_size",
    "parallel.ulysses_parallel_size",
    "parallel.ring_attention_size",
    "parallel.expert_parallel_size",
    "parallel.expert_fully_shard_parallel_size",
    "parallel.fsdp_plan.reshard_after_forward",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "model.skip_",
    "model.activation_offload_plan.",
    "parallel.recompute",
    "features.recompute",
    "features.enable_activation_offload",
    "features.activation_offload_plan.",
)


def _list_decided(before: Any, after: Any, path: str = "") -> list[str]:
    """Keys that differ and that no plan decides; a section that was not there held nothing."""
    if before is None and isinstance(after, dict):
        before = {}
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        parts = (_list_decided(before.get(key), after.get(key), f"{path}.{key}".lstrip(".")) for key in sorted(keys))
        return [name for part in parts for name in part]
    return [path] if before != after and not path.startswith(_DECIDED) else []


def _compare(launch: Launch, written: list[tuple[str, Plan]], model: Model) -> list[str]:
    """What the checkout's own classes see in written files, against their plans, all of one world size."""
    if not written:
        return []
    devices = written[0][1].strategy.world_size
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.yaml" for number in range(len(written))]
        for path, (text, _) in zip(paths, written, strict=True):
            path.write_text(text)
        command = [sys.executable, "-c", _LOADS, str(launch.checkout), str(devices), *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        return [f"their own classes refuse a plan: {done.stderr.strip().splitlines()[-1]}"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = []
    for line, (_, plan) in zip(lines, written, strict=True):
        seen, strategy = ast.literal_eval(line), plan.strategy
        expected = {
            "dp": strategy.dp,
            "shard": strategy.shard or devices,
            "ep": strategy.ep,
            "cp": strategy.cp,
            "reshard": strategy.reshard,
            "mbs": strategy.mbs,
            "batch": plan.global_batch_size,
        }
        wrong += [f"{strategy}: {name} is {seen[name]}" for name, value in expected.items() if seen[name] != value]
        if strategy.ep > 1 and seen["ep"] * seen["ep_shard"] != devices:
            wrong.append(f"{strategy}: experts are sharded over {seen['ep_shard']}")
        rerun = plan.recompute["text"][0] + plan.modes.get("text", {}).get("recompute_offload", (0,))[0]
        lists = find_layer_lists(seen["rerun"], ["text"])
        found = count_layers(seen["rerun"], lists["text"], model.text.layers.num_layers) if lists else 0
        if found != rerun:
            wrong.append(f"{strategy}: {found} text layers recompute and {rerun} should")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
