"""Holds exported plans against Megatron-LM's own parser: every one is accepted, and equal after it.

    python tests/frameworks/megatron_core_parser.py --megatron CHECKOUT [--plans 200] [--seed 1]

CHECKOUT is a work tree of NVIDIA/Megatron-LM, branch core_r0.16.0. Plans are drawn at random, lists that are no
palindromes among them, for a dense decoder and one with experts. Each is exported to files; the flags in launch.sh go
through parse_args, validate_args and core_transformer_config_from_args, with stand-ins for a device alone. What comes
out is held against the plan: sizes, batches, ZeRO, recompute, and by get_num_layers_to_build the layers of each stage
and chunk. Then flags are broken, one at a time, and must be refused by that parser or by ours. The best plans of the
examples that have a decoder's flags go the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shlex
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from drawn_decoder_plans import DENSE, EXPERTS, draw_decoder_plan, make_job

from mm_autoparallel.api import plan as search
from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import read_plan
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.plan import Plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
TRAINING = (
    "--lr 1e-4 --min-lr 1e-5 --train-iters 10 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 511 "
    "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"
)
"""Of the last line: what TransformerEngine and apex have, which need no device to be checked here."""


def load_parser(checkout: Path) -> types.ModuleType:
    """megatron.training.arguments, whose package would ask for tokenizers and more."""
    sys.path.insert(0, str(checkout))
    bare = types.ModuleType("megatron.training")
    bare.__path__ = [str(checkout / "megatron" / "training")]
    for name in ("get_args", "get_timers", "get_adlr_autoresume", "get_tensorboard_writer", "get_wandb_writer"):
        setattr(bare, name, None)
    sys.modules["megatron.training"] = bare
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import megatron.training.arguments as found
    return found


def parse(parser: types.ModuleType, words: list[str], world_size: int, fsdp: bool) -> tuple[Any, Any]:
    """Arguments and TransformerConfig. Raises what the parser raises; SystemExit for an unknown flag."""
    environment = {"RANK": "0", "WORLD_SIZE": str(world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "8" if fsdp else "1"}
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
        mock.patch.dict(os.environ, environment),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=types.SimpleNamespace(major=9)),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        arguments = parser.validate_args(parser.parse_args())
        return arguments, parser.core_transformer_config_from_args(arguments)


def compare(arguments: Any, config: Any, plan: Plan, job: Job) -> None:
    """Raises AssertionError where the parser understood something else than `plan`."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    strategy = plan.strategy
    fsdp = ZERO[arguments.data_parallel_sharding_strategy] if arguments.use_megatron_fsdp else None
    found = {
        "pp": arguments.pipeline_model_parallel_size,
        "tp": arguments.tensor_model_parallel_size,
        "cp": arguments.context_parallel_size,
        "ep": arguments.expert_model_parallel_size,
        "dp": arguments.data_parallel_size,
        "vpp": arguments.virtual_pipeline_model_parallel_size or 1,
        "mbs": arguments.micro_batch_size,
        "zero": int(arguments.use_distributed_optimizer) if fsdp is None else fsdp,
        "expert_tp": arguments.expert_tensor_parallel_size,
        "optimizer_offload": arguments.optimizer_cpu_offload,
    }
    if strategy.pp > 1:
        found["rank_order"] = "tp-cp-ep-pp-dp" if arguments.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    for name, value in found.items():
        assert value == getattr(strategy, name), f"{name}: {value}, and the plan has {getattr(strategy, name)}"
    assert arguments.global_batch_size == plan.global_batch_size
    assert arguments.sequence_parallel == (strategy.tp > 1)
    counts = []
    parallel_state.set_virtual_pipeline_model_parallel_world_size(strategy.vpp if strategy.vpp > 1 else None)
    for chunk in range(strategy.vpp):
        for stage in range(strategy.pp):
            parallel_state.set_pipeline_model_parallel_rank(stage)
            vp_stage = chunk if strategy.vpp > 1 else None
            counts.append(get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage))
    assert tuple(counts) == tuple(plan.layers["text"]), f"layers {counts}, and the plan has {plan.layers['text']}"
    number = config.recompute_num_layers if config.recompute_granularity == "full" else 0
    recompute = tuple(min(number, held) for held in counts)
    assert recompute == tuple(plan.recompute["text"]), f"recompute {recompute}, and the plan {plan.recompute['text']}"
    assert (config.recompute_granularity == "selective") == bool(plan.modes or job.workload.recompute_operators)


def flags_of(folder: Path) -> list[str]:
    """What bash hands pretrain_gpt.py when launch.sh runs."""
    (folder / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(folder / "launch.sh")], env=environment, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    return words[words.index("pretrain_gpt.py") + 1 :]


def as_words(flag: str, value: Any) -> list[str]:
    return [f"--{flag}"] if value is True else [f"--{flag}", str(value)]


def break_flags(words: list[str], rng: random.Random) -> list[str]:
    """One flag misspelt, or one number or layout changed so that it is another."""
    broken = list(words)
    kind = rng.choice(("flag", "number", "layout"))
    layouts = [k for k, word in enumerate(words) if "|" in word]
    if kind == "layout" and layouts:
        broken[layouts[0]] = words[layouts[0]].replace("t", "", 1)
    elif kind == "number":
        place = words.index("--pipeline-model-parallel-size") + 1
        broken[place] = str(int(words[place]) + 1)
    else:
        place = rng.choice([k for k, word in enumerate(words) if word.startswith("--")])
        broken[place] = broken[place][:-2]
    return broken


def refuses(parser: types.ModuleType, words: list[str], model: list[str], plan: Plan, folder: Path) -> str:
    """Who refuses these flags: `theirs`, `ours` or nobody."""
    try:
        parse(parser, [*words, *model, *shlex.split(TRAINING)], plan.strategy.world_size, plan.strategy.zero > 1)
    except (Exception, SystemExit):  # noqa: BLE001 — theirs asserts, raises and exits
        return "theirs"
    script = folder / "broken.sh"
    script.write_text(f"torchrun pretrain_gpt.py {shlex.join([*words, *model])}\n")
    try:
        passed = read_passed(read_launch_script(script), plan.strategy.world_size)
        again = read_plan(passed, plan.strategy.world_size, sum(plan.layers["text"]))
    except PlanError:
        return "ours"
    return "nobody" if again.layers == plan.layers else "ours"


def check_example(parser: types.ModuleType, path: Path, folder: Path) -> str:
    """What becomes of the best plan of an example that has Megatron-LM's flags for its model; others have encoders, or
    a model file of another tool."""
    model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    if "num-layers" not in model:
        return "no decoder by its flags"
    job = read_job(path)
    plan = search(job, time_limit_s=30).plan
    result = export_plan(plan, job, "megatron-core", out=folder, overwrite=True)
    sizes = [word for flag, value in model.items() if flag != "padded-vocab-size" for word in as_words(flag, value)]
    sizes += ["--max-position-embeddings", str(job.workload.seq_length)]
    every = [*flags_of(folder), *sizes, *shlex.split(TRAINING)]
    arguments, config = parse(parser, every, plan.strategy.world_size, plan.strategy.zero > 1)
    compare(arguments, config, result.exported.plan, job)
    return "accepted and equal"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megatron", type=Path, metavar="CHECKOUT")
    options.add_argument("--plans", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    if given.megatron is None:
        print("skipped: no work tree of Megatron-LM was named (--megatron)")
        return 0
    parser = load_parser(given.megatron.resolve())
    rng = random.Random(given.seed)
    told: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(given.plans):
            sizes = EXPERTS if index % 2 else DENSE
            plan = draw_decoder_plan(sizes, rng)
            job = make_job(sizes, plan)
            try:
                result = export_plan(plan, job, "megatron-core", out=folder, overwrite=True)
            except PlanError as refusal:
                told[f"refused: {refusal!s}"] += 1
                continue
            words = flags_of(folder)
            model = [word for flag, value in sizes.items() for word in as_words(flag, value)]
            every = [*words, *model, *shlex.split(TRAINING)]
            arguments, config = parse(parser, every, plan.strategy.world_size, plan.strategy.zero > 1)
            compare(arguments, config, result.exported.plan, job)
            told["accepted and equal"] += 1
            told["by layout"] += any("|" in word for word in words)
            told["rounded"] += bool(result.exported.approximations)
            told[f"broken, refused by {refuses(parser, break_flags(words, rng), model, plan, folder)}"] += 1
        for path in sorted(EXAMPLES.glob("*/job.yaml")):
            told[f"of the examples, {check_example(parser, path, folder)}"] += 1
    for what, number in sorted(told.items()):
        print(f"{number:6} {what}")
    return int(told["broken, refused by nobody"] > 0 or not told["accepted and equal"])


if __name__ == "__main__":
    sys.exit(main())
