"""Holds this package's search of Galvatron's space against Galvatron itself.

    python tests/frameworks/galvatron_upstream.py --galvatron DIR --environment DIR [--paddle DIR] [--strategies 500]
        [--variants 20]

--galvatron is a checkout of PKU-DAIR/Hetu-Galvatron, --paddle one of FeixLiu/paddle-galvatron; --environment one that
environments.py makes (the core of Galvatron's search is compiled there). Strategies drawn layer by layer are scored by
both: steps and memory must be equal to 1e-9. Variants of the example (memory, batch, micro-batches) are searched by
both: the plan found here must never be slower by Galvatron's own score, must fit by its own memory, and its runtime's
reader must take it, ZeRO 3 of embedding and head included. Strategies for Paddle are drawn and scored likewise, and
its runtime forms the meshes that are meant (a stand-in takes the place of Paddle's ProcessMesh). Prints
a line for each variant, with processor seconds; exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.integrations.galvatron.configuration import Search, read_search
from mm_autoparallel.integrations.galvatron.paddle import PaddlePlanner, format_fine_grained, read_flags
from mm_autoparallel.integrations.galvatron.paddle import list_parts as list_paddle_parts
from mm_autoparallel.integrations.galvatron.paddle import list_spaces as list_paddle_spaces
from mm_autoparallel.integrations.galvatron.score import Extensions, Planner
from mm_autoparallel.integrations.galvatron.search import list_spaces, list_strategies, search
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment, format_strategy
from mm_autoparallel.integrations.galvatron.written_profiles import SEARCH, format_profiles

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "galvatron" / "search.yaml"
EQUAL = 1e-9
SIZES = {"num_layers": 16, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16, "gated": True, "norm": "rms"}
JOB: dict[str, Any] = {
    "model": {"name": "small", "text": {"vocab_size": 32000, "layers": SIZES}},
    "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": {"based_on": "a100-80g", "memory_bytes": 12 * 2**30}},
    "workload": {"global_batch_size": 16, "seq_length": 2048},
}
_LACKS_CORE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('galvatron_dp_core') is None)"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--galvatron", type=Path, metavar="DIR")
    parser.add_argument("--paddle", type=Path, metavar="DIR")
    parser.add_argument("--environment", type=Path, metavar="DIR")
    parser.add_argument("--strategies", type=int, default=500)
    parser.add_argument("--variants", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.galvatron is None or arguments.environment is None:
        print("galvatron: no checkout or no environment is given; nothing was compared")
        return 0
    python = arguments.environment / "bin" / "python"
    compile_core(arguments.galvatron, python)
    rng = random.Random(arguments.seed)
    wrong = compare_scores(arguments, python, rng)
    if arguments.paddle is not None:
        wrong += sum(compare_paddle(arguments, python, rng, sp_space) for sp_space in ("tp", "tp+sp"))
    wrong += search_written_profiles(arguments, python) + compare_searches(arguments, python, rng)
    return 1 if wrong else 0


def compile_core(galvatron: Path, python: Path) -> None:
    """Galvatron's search core into the environment, where it is not there yet."""
    if subprocess.run([python, "-c", _LACKS_CORE], check=False).returncode == 0:
        return
    told = "import sysconfig; print(sysconfig.get_paths()['platlib'], sysconfig.get_config_var('EXT_SUFFIX'))"
    folder, suffix = subprocess.run([python, "-c", told], check=True, capture_output=True, text=True).stdout.split()
    includes = subprocess.run([python, "-m", "pybind11", "--includes"], check=True, capture_output=True, text=True)
    command = ["g++", "-O3", "-shared", "-std=c++11", "-fPIC", *includes.stdout.split()]
    out = Path(folder) / f"galvatron_dp_core{suffix}"
    subprocess.run([*command, galvatron / "csrc" / "dp_core.cpp", "-o", out], check=True)


def ask(arguments: argparse.Namespace, python: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Galvatron answers to each case (probes/galvatron.py)."""
    probe = Path(__file__).parent / "probes" / "galvatron.py"
    asked = json.dumps({"folder": str(arguments.galvatron.resolve()), "cases": cases})
    done = subprocess.run([python, probe], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"galvatron: its own code failed: {done.stderr[-1500:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def case_of(read: Search, /, folder: Path = EXAMPLE.parent / "profiles", **more: Any) -> dict[str, Any]:
    """The configuration as Galvatron takes it, with profiles of `folder`."""
    config = read.configuration.model_dump()
    config["profiling_info"] = {
        key: value if key.endswith("mode") else str(folder) for key, value in config["profiling_info"].items()
    }
    config["model_info"] = {}
    sizes = {"hidden_size": read.hidden_size, "num_layers": read.num_layers, "seq_length": read.seq_length}
    return {"config": config, "name": read.model_name, **sizes, **more}


def override(values: Mapping[str, object]) -> list[str]:
    """Overrides by their key below the section `search_engine`."""
    return [f"search_engine.{key}={value}" for key, value in values.items()]


def compare_scores(arguments: argparse.Namespace, python: Path, rng: random.Random) -> int:
    """Strategies drawn layer by layer: how many differ."""
    read = read_search(EXAMPLE, override({"batch_size_info.min_bsz": 64, "batch_size_info.max_bsz": 64}))
    planner = Planner(read)
    plans = [draw_plan(planner, rng) for _ in range(arguments.strategies)]
    texts = [json.loads(format_strategy(plan)) for plan in plans]
    (theirs,) = ask(arguments, python, [case_of(read, score=texts)])
    largest, wrong = 0.0, 0
    for plan, (step_s, mib) in zip(plans, theirs["scores"], strict=True):
        ours = planner.score(plan)
        buffer = [own - other for own, other in zip(ours.stage_mib, mib, strict=True)]
        largest = max(largest, abs(ours.step_s / step_s - 1.0))
        wrong += abs(ours.step_s / step_s - 1.0) > EQUAL or len(set(buffer)) > 1
    print(f"galvatron: {len(plans)} drawn strategies, largest difference of a step {largest:.1e}, {wrong} differ")
    return wrong


def draw_plan(planner: Planner, rng: random.Random) -> Assignment:
    """A strategy of its own for each layer."""
    while True:
        space = rng.choice([*list_spaces(planner.config, planner.search.num_layers)])
        layers, ends = list_strategies(planner, space, Counter())
        if layers and ends:
            break
    cuts = sorted(rng.sample(range(1, planner.search.num_layers), space.pp - 1))
    division = [after - before for before, after in itertools.pairwise([0, *cuts, planner.search.num_layers])]
    return Assignment(
        tuple(rng.choice(layers) for _ in range(planner.search.num_layers)),
        rng.choice(ends),
        tuple(division),
        space.batch.samples,
        space.batch.chunks,
        planner.config.parallelism_info.pipeline_type,
        planner.default_dp_type,
    )


def compare_paddle(arguments: argparse.Namespace, python: Path, rng: random.Random, sp_space: str) -> int:
    """Strategies for Paddle, drawn layer by layer: how many differ."""
    flags = paddle_flags(sp_space=sp_space, min_bsz=8, max_bsz=64, bsz_step=8, memory_upper_limit=4000)
    planner = PaddlePlanner(read_flags(flags), is_as_is=True)
    plans, ours, spaces = [], [], [*list_paddle_spaces(planner.flags)]
    while len(plans) < arguments.strategies:
        space = rng.choice(spaces)
        parts = [*list_paddle_parts(planner, space, Counter())]
        if not parts:
            continue
        part = rng.choice(parts)
        cuts = [0, *sorted(rng.sample(range(1, 32), space.pp - 1)), 32]
        division = tuple(after - before for before, after in itertools.pairwise(cuts))
        layers = tuple(rng.choice(part.layers) for _ in range(32))
        batch = space.batch
        plan = Assignment(layers, part.ends, division, batch.samples, batch.chunks, "pipedream_flush", "zero2")
        plans.append({"file": json.loads(format_fine_grained(plan)), "least": min(each.ends.degree for each in parts)})
        ours.append(planner.score(plan))
    told = {key: str(value) for key, value in flags.items() if key.endswith(("_path", "_mode", "_list"))}
    asked = {"folder": str(arguments.paddle.resolve()), "sp_space": sp_space, "plans": plans}
    asked["flags"] = told | {"profile_gpu_num": 8}
    probe = Path(__file__).parent / "probes" / "galvatron_paddle.py"
    done = subprocess.run([python, probe], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"galvatron: Paddle's own code failed: {done.stderr[-1500:]}")
    largest, wrong = 0.0, 0
    for own, (step_s, mib, meshes) in zip(ours, json.loads(done.stdout), strict=True):
        largest = max(largest, abs(own.step_s / step_s - 1.0))
        formed = [[layer.dp, layer.degree] for layer in (own.plan.ends, *own.plan.layers, own.plan.ends)]
        wrong += abs(own.step_s / step_s - 1.0) > EQUAL or [*own.stage_mib] != mib or meshes != formed
    print(f"galvatron: {len(plans)} drawn for Paddle, {sp_space}, largest difference {largest:.1e}, {wrong} differ")
    return wrong


def paddle_flags(**values: object) -> dict[str, Any]:
    """Of the example in tests/fixtures, with these values."""
    folder = ROOT / "tests" / "fixtures" / "galvatron" / "paddle"
    files = {"time_profile_data": "comp", "memory_profile_data": "mem", "overlap_coe": "ov", "allreduce_coe": "ar"}
    files |= {"p2p_coe": "p2p", "sp_time": "sp"}
    flags: dict[str, Any] = {f"{name}_path": folder / f"{file}.json" for name, file in files.items()}
    flags |= {"time_profile_mode": "batch", "memory_profile_mode": "static", "search_granularity": "fine-grained"}
    flags |= {"hidden_size_list": 4096, "layernum_list": 32, "layernum": 32, "seqlen_list": 2048}
    return flags | values


def search_written_profiles(arguments: argparse.Namespace, python: Path) -> int:
    """Galvatron's own search on profiles that a job's costs are written as: 1 where it finds another best plan."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(JOB))
        for file, text in format_profiles(read_job(folder / "job.json")).items():
            (folder / file).write_text(text)
        read = read_search(folder / SEARCH, [])
        found = search(Planner(read))
        assert found.best is not None
        ours = [json.loads(format_strategy(found.best.plan))]
        (theirs,) = ask(arguments, python, [case_of(read, folder=folder, score=ours, search=True, read=True)])
    step_s, other_s = theirs["scores"][0][0], theirs["found_s"]
    wrong = abs(found.best.step_s / step_s - 1.0) > EQUAL or step_s > other_s * (1 + 1e-12)
    told = f"{step_s:.6f} s, Galvatron {other_s:.6f} s in {theirs['cpu_s']:.1f} s{'  WRONG' if wrong else ''}"
    print(f"galvatron: on written profiles {told}", flush=True)
    return int(wrong)


def compare_searches(arguments: argparse.Namespace, python: Path, rng: random.Random) -> int:
    """Variants searched by both: how many are wrong."""
    num_wrong = num_better = 0
    ours_s = theirs_s = 0.0
    for number in range(arguments.variants):
        batch = 8 * rng.randint(1, 8)
        values = {
            "hardware_info.memory_constraint": rng.randint(12, 80),
            "batch_size_info.settle_bsz": batch,
            "batch_size_info.settle_chunk": rng.choice([each for each in range(1, 17) if batch % each == 0]),
            "parallelism_info.default_dp_type": rng.choice(("zero2", "ddp")),
            "parallelism_info.pipeline_type": rng.choice(("pipedream_flush", "gpipe")),
        }
        read = read_search(EXAMPLE, override(values))
        began_s = time.process_time()
        found = search(Planner(read, Extensions()))
        own_s = time.process_time() - began_s
        ours = [json.loads(format_strategy(found.best.plan))] if found.best else []
        (theirs,) = ask(arguments, python, [case_of(read, score=ours, search=True, read=True)])
        told = " ".join(f"{key.split('.')[-1]}={value}" for key, value in values.items())
        ours_s, theirs_s = ours_s + own_s, theirs_s + theirs["cpu_s"]
        if found.best is None:
            wrong = theirs["found"] is not None
            print(f"{number}: {told}: none fits; Galvatron {theirs['found_s']}{'  WRONG' if wrong else ''}")
        else:
            (step_s, mib), other_s = theirs["scores"][0], theirs["found_s"]
            buffer = found.best.stage_mib[0] - mib[0]
            wrong = (
                abs(found.best.step_s / step_s - 1.0) > EQUAL
                or (other_s is not None and step_s > other_s * (1 + 1e-12))
                or any(each + buffer > found.best.limit_mib for each in mib)
                or theirs["read"] != [ours[0]["embed_sdp"]]
                or not found.is_proven
            )
            num_better += other_s is None or step_s < other_s * (1 - 1e-9)
            gain = "finds none" if other_s is None else f"{other_s:.6f} s ({other_s / step_s - 1:+.3%})"
            print(
                f"{number}: {told}: {step_s:.6f} s in {own_s:.2f} s; Galvatron {gain} in {theirs['cpu_s']:.1f} s"
                + ("  WRONG" if wrong else ""),
                flush=True,
            )
        num_wrong += wrong
    print(
        f"galvatron: {arguments.variants} variants, {num_better} better than Galvatron's, {num_wrong} wrong; "
        f"{ours_s:.1f} processor seconds, Galvatron {theirs_s:.0f}"
    )
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
