"""Holds what is written for MindSpeed-LLM against its own argument parser: scripts are accepted, and equal after it.

    python tests/frameworks/mindspeed_llm_parser.py --mindspeed-llm DIR --mindspeed DIR --megatron DIR

Work trees of Ascend/MindSpeed-LLM 26.1.0, Ascend/MindSpeed 26.1.0_core_r0.12.1 and NVIDIA/Megatron-LM core_v0.12.1. Two
kinds of scripts are written. Tinker's: the ten best of a folder with figures drawn at random, in published launch
scripts. Exports: plans drawn at random, for a dense decoder and one with experts. Each is run with a torchrun that
prints its words alone; they go through Megatron-LM's parse_args and validate_args in MindSpeed-LLM's decorators, with
all of its features registered, and stand-ins for torch_npu. What comes out is held against the result or plan: sizes,
batches, layers of each stage, recompute. Then one flag of each is misspelt, or one number changed, and must be refused
by that parser, by ours, or come out as another plan. Prints counts; exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from drawn_decoder_plans import DENSE, EXPERTS, draw_decoder_plan, make_job
from tinker_folders import write_folder

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.tinker.cost import Cluster, Score
from mm_autoparallel.integrations.tinker.profiles import read_folder
from mm_autoparallel.integrations.tinker.results import BEST, patch_script
from mm_autoparallel.integrations.tinker.search import search

PUBLISHED = (
    "llama2/pretrain_llama2_13b_ptd.sh",
    "magistral/pretrain_magistral_small_24b_A3_ptd.sh",
    "qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd.sh",
)
"""Below examples/mcore: two dense models and one with experts, none with --use-ascend-coc, at which the parser compiles
operators of an NPU."""
TRAINING = (
    "--lr 1e-4 --min-lr 1e-5 --train-iters 10 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 511 "
    "--use-mcore-models --no-gradient-accumulation-fusion --transformer-impl local"
)
"""What a drawn plan's launch.sh does not say."""
NODES, PER_NODE = 2, 8
_STAND_IN = '#!/bin/bash\nprintf "%s\\n" "$@"\n'
_PASS_ON = "#!/bin/bash\nwhile IFS= read -r line; do printf '%s\\n' \"$line\"; done\n"

Parse = Callable[[Sequence[str], int], Any]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """In the place of torch_npu, whose names mean nothing to the parser."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """A package, whatever is asked of it."""
        own = name.split(".")[0] == "torch_npu"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: Any) -> Any:
        """An object that has everything."""
        return mock.MagicMock()

    def exec_module(self, module: Any) -> None:
        """Nothing is run."""


def load_parser(mindspeed_llm: Path, mindspeed: Path, megatron: Path) -> Parse:
    """(words, devices) → the arguments; raises what the parser raises, SystemExit for a flag that is not known."""
    sys.path[:0] = [str(mindspeed_llm), str(mindspeed), str(megatron)]
    sys.meta_path.append(StandIns())
    make_bare("mindspeed_llm", mindspeed_llm / "mindspeed_llm")  # its own would patch torch for an NPU
    training = make_bare("megatron.training", megatron / "megatron" / "training")
    for name in ("get_args", "get_timers", "get_adlr_autoresume", "get_tensorboard_writer", "get_wandb_writer"):
        setattr(training, name, None)
    make_bare("mindspeed_llm.training", mindspeed_llm / "mindspeed_llm" / "training")
    sys.modules["mindspeed_llm.training.utils"] = mock.MagicMock(__spec__=None)  # prints arguments
    with quiet():
        import mindspeed_llm.features_manager  # registers its features
        from megatron.training.arguments import parse_args, validate_args
        from mindspeed_llm.training.arguments import parse_args_decorator, validate_args_v2_decorator

    def parse(words: Sequence[str], world_size: int) -> Any:
        environment = {"RANK": "0", "WORLD_SIZE": str(world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        with (
            mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
            mock.patch.dict(os.environ, environment),
            mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
            mock.patch("torch.cuda.get_device_properties", return_value=types.SimpleNamespace(major=9)),
            quiet(),
        ):
            return validate_args_v2_decorator(validate_args)(parse_args_decorator(parse_args)())

    return parse


def make_bare(name: str, path: Path) -> types.ModuleType:
    """A package without its own __init__."""
    bare = types.ModuleType(name)
    bare.__path__ = [str(path)]
    sys.modules[name] = bare
    return bare


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def words_of(script: Path) -> list[str]:
    """What bash hands pretrain_gpt.py when the script runs, where nothing but assignments and torchrun is there."""
    with tempfile.TemporaryDirectory() as name:
        for command, text in (("torchrun", _STAND_IN), ("python", _STAND_IN), ("tee", _PASS_ON)):
            (Path(name) / command).write_text(text)
            (Path(name) / command).chmod(0o755)
        bash = shutil.which("bash") or "bash"
        done = subprocess.run(
            [bash, str(script)], env={"PATH": name}, cwd=name, capture_output=True, text=True, check=False
        )
    words = done.stdout.splitlines()
    return words[words.index("pretrain_gpt.py") + 1 :]


def read_arguments(arguments: Any) -> dict[str, Any]:
    """What a plan decides, as the parser understood it."""
    counts, layout = arguments.num_layer_list, arguments.pipeline_model_parallel_layout
    stages = arguments.pipeline_model_parallel_size * (arguments.virtual_pipeline_model_parallel_size or 1)
    if counts:
        layers = [*map(int, counts.split(","))]
    elif layout:
        layers = [cell.count("t") for cell in layout.split("|")]
    else:
        layers = [arguments.num_layers // stages] * stages
    full = arguments.recompute_granularity == "full"
    return {
        "tp": arguments.tensor_model_parallel_size,
        "pp": arguments.pipeline_model_parallel_size,
        "dp": arguments.data_parallel_size,
        "ep": arguments.expert_model_parallel_size,
        "mbs": arguments.micro_batch_size,
        "batch": arguments.global_batch_size,
        "sp": bool(arguments.sequence_parallel),
        "zero": int(arguments.use_distributed_optimizer),
        "etp": arguments.expert_tensor_parallel_size,
        "cp": arguments.context_parallel_size,
        "layers": layers,
        "num_layers": arguments.num_layers,
        "chunks": arguments.virtual_pipeline_model_parallel_size or 1,
        "recompute": (arguments.recompute_method, arguments.recompute_num_layers) if full else None,
    }


def expect_result(score: Score) -> dict[str, Any]:
    """The same of a result of Tinker's search."""
    config, choice = score.choice.config, score.choice
    return {
        "tp": config.tp,
        "pp": choice.pp,
        "dp": score.dp,
        "ep": config.ep,
        "mbs": config.mbs,
        "batch": choice.global_batch_size,
        "sp": bool(config.sp),
        "zero": int(choice.dist_opt),
        "layers": [*score.layers],
        "num_layers": sum(score.layers),
        "chunks": 1,
        "recompute": ("uniform", 1) if choice.recompute else None,
    }


def break_words(words: Sequence[str], rng: random.Random) -> list[str]:
    """A decided flag misspelt, or its number changed."""
    decided = ("parallel", "batch-size", "layer", "recompute")
    broken = list(words)
    at = rng.choice([k for k, word in enumerate(words) if word.startswith("--") and any(d in word for d in decided)])
    if rng.random() < 0.5 and at + 1 < len(words) and words[at + 1].isdigit():
        broken[at + 1] = str(int(words[at + 1]) + 1)
    else:
        broken[at] = broken[at][:-2]
    return broken


def judge(parse: Parse, words: Sequence[str], world_size: int) -> dict[str, Any] | str:
    """What the parser understood, or why it did not."""
    try:
        return read_arguments(parse(words, world_size))
    except (Exception, SystemExit) as refusal:  # noqa: BLE001 — theirs asserts, raises and exits
        return f"{type(refusal).__name__}: {str(refusal)[:300]}"


def check_results(parse: Parse, script: Path, rng: random.Random, told: Counter[str]) -> None:
    """The ten best of a folder, in `script`."""
    with tempfile.TemporaryDirectory() as name:
        text = re.sub(r'"your [^"]*"', f'"{name}"', script.read_text(encoding="utf-8"))
        has_experts = "--num-experts" in text
        (layers,) = re.findall(r"--num-layers (\d+)", text)
        source = Path(name) / script.name
        source.write_text(text)
        write_folder(Path(name) / "profiled", rng, int(layers), experts=has_experts)
        scores = search(read_folder(Path(name) / "profiled"), Cluster(NODES, PER_NODE), 64, 1e9)
        # Tinker measures experts beside TP with sequence parallelism alone
        lawful = [one for one in scores if not has_experts or one.choice.config.tp == 1 or one.choice.config.sp]
        shown = rng.sample(lawful, BEST)
        for score in shown:
            written = Path(name) / "written.sh"
            written.write_text(patch_script(source, score))
            words, asked = words_of(written), expect_result(score)
            hold(parse, words, asked, f"Tinker's results in {script.name}", rng, told)


def hold(
    parse: Parse, words: list[str], asked: dict[str, Any], what: str, rng: random.Random, told: Counter[str]
) -> None:
    """One script: accepted and equal; broken, refused or another."""
    world_size = asked["tp"] * asked["pp"] * asked["dp"] * asked.get("cp", 1)
    found = judge(parse, words, world_size)
    same = isinstance(found, dict) and all(found[key] == value for key, value in asked.items())
    told[f"{what}: {'accepted and equal' if same else 'WRONG'}"] += 1
    if not same:
        print(f"{what}: {found} of {asked}")
    changed = break_words(words, rng)
    broken = judge(parse, changed, world_size)
    seen = "refused" if isinstance(broken, str) else "another plan" if broken != found else "UNSEEN"
    told[f"broken, {seen}"] += 1
    if seen == "UNSEEN":
        print(f"{what}: broken and unseen: {set(changed) - set(words)}, {found}")


def check_exports(parse: Parse, number: int, rng: random.Random, told: Counter[str]) -> None:
    """Drawn plans, exported to new files."""
    for index in range(number):
        sizes = EXPERTS if index % 2 else DENSE
        plan = draw_decoder_plan(sizes, rng)
        with tempfile.TemporaryDirectory() as name:
            try:
                job = make_job(sizes, plan, stack="mindspeed")
                result = export_plan(plan, job, "mindspeed-llm", out=Path(name))
            except PlannerError as refusal:
                told[f"exports: refused: {refusal!s:.70}"] += 1
                continue
            words = [*words_of(Path(name) / "launch.sh"), *TRAINING.split()]
            for flag, value in sizes.items():
                words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
            strategy, written = plan.strategy, result.exported.plan
            asked = {name: getattr(strategy, name) for name in ("tp", "pp", "dp", "ep", "mbs", "zero", "cp")}
            asked |= {
                "layers": [*plan.layers["text"]],
                "num_layers": sizes["num-layers"],
                "batch": plan.global_batch_size,
            }
            asked |= {"sp": strategy.tp > 1, "chunks": strategy.vpp}
            number_again = max(written.recompute["text"], default=0)
            asked |= {"recompute": ("block", number_again) if number_again else None}
            hold(parse, words, asked, "exports", rng, told)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mindspeed-llm", type=Path, metavar="DIR")
    parser.add_argument("--mindspeed", type=Path, metavar="DIR")
    parser.add_argument("--megatron", type=Path, metavar="DIR")
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not (given.mindspeed_llm and given.mindspeed and given.megatron):
        print("mindspeed-llm: not all three work trees were named; nothing was compared")
        return 0
    parse = load_parser(given.mindspeed_llm.resolve(), given.mindspeed.resolve(), given.megatron.resolve())
    rng, told = random.Random(given.seed), Counter[str]()
    for script in PUBLISHED:
        check_results(parse, given.mindspeed_llm / "examples" / "mcore" / script, rng, told)
    check_exports(parse, given.plans, rng, told)
    for what, number in sorted(told.items()):
        print(f"{number:6} {what}")
    return int(any(word in what for what in told for word in ("WRONG", "UNSEEN")))


if __name__ == "__main__":
    sys.exit(main())
