"""Holds the cost model and the search of Galvatron 2.4.0's space against Galvatron 2.4.0 itself.

    python tests/frameworks/galvatron_2_4_0.py --sources DIR --python FILE [--strategies 300] [--variants 12]

--sources is what `pip download --no-binary :all: hetu-galvatron==2.4.0` unpacks to; --python one with numpy, scipy,
tqdm and, for searches, the sources' csrc/dp_core.cpp compiled as galvatron_dp_core. Strategies drawn layer by layer are
scored by both, under both `--sp_space` and both pipelines: steps and memory must be equal to 1e-9. Variants of the
example with a quarter of its layers (memory, batch, micro-batches) are searched by both: the plan found here must never
be slower. Prints a line for each variant, with processor seconds; exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mm_autoparallel.integrations.galvatron.release_2_4_0 import OlderPlanner, list_parts, list_spaces, search_older
from mm_autoparallel.integrations.galvatron.release_2_4_0_flags import read_flags
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment, format_strategy

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "examples" / "galvatron" / "profiles"
PATHS = ("memory_profiling", "time_profiling", "allreduce_bandwidth_config", "p2p_bandwidth_config", "sp_time")
EQUAL = 1e-9


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sources", type=Path, metavar="DIR")
    parser.add_argument("--python", type=Path, metavar="FILE")
    parser.add_argument("--strategies", type=int, default=300)
    parser.add_argument("--variants", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.sources is None or arguments.python is None:
        print("galvatron 2.4.0: no sources or no interpreter is given; nothing was compared")
        return 0
    rng = random.Random(arguments.seed)
    kinds = itertools.product(("tp", "tp+sp"), ("gpipe", "pipedream_flush"))
    wrong = sum(compare_scores(arguments, rng, *kind) for kind in kinds)
    return 1 if wrong + compare_searches(arguments, rng) else 0


def flags_of(**values: Any) -> dict[str, Any]:
    """Of the example, with these values."""
    flags: dict[str, Any] = {f"{name}_path": str(PROFILES) for name in (*PATHS, "overlap_coe")}
    flags |= {"model_size": "llama2-7b", "set_model_config_manually": 1, "hidden_size": 4096, "num_hidden_layers": 32}
    flags |= {"seq_length": 2048, "time_profile_mode": "batch", "default_dp_type": "zero2", "sequence_parallel": True}
    return flags | values


def ask(arguments: argparse.Namespace, flags: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What Galvatron 2.4.0 answers (probes/galvatron_2_4_0.py)."""
    sizes = {"hidden_size": 4096, "num_layers": flags["num_hidden_layers"], "seq_length": 2048}
    case = {"flags": flags, "name": "llama2-7b_all", **sizes, **more}
    probe = Path(__file__).parent / "probes" / "galvatron_2_4_0.py"
    asked = json.dumps({"folder": str(arguments.sources.resolve()), "cases": [case]})
    done = subprocess.run([arguments.python, probe], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"galvatron 2.4.0: its own code failed: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def compare_scores(arguments: argparse.Namespace, rng: random.Random, sp_space: str, pipeline: str) -> int:
    """Strategies drawn layer by layer: how many differ."""
    flags = flags_of(sp_space=sp_space, pipeline_type=pipeline, min_bsz=8, max_bsz=64, memory_constraint=4000)
    planner = OlderPlanner(*read_flags(flags))
    plans = [draw_plan(planner, rng) for _ in range(arguments.strategies)]
    theirs = ask(arguments, flags, score=[json.loads(format_strategy(plan)) for plan in plans])
    largest, wrong = 0.0, 0
    for plan, scores in zip(plans, theirs["scores"], strict=True):
        ours = planner.score(plan)
        step_s, mib = min(scores, key=lambda each: each[0])
        buffer = {own - other for own, other in zip(ours.stage_mib, mib, strict=True)}
        largest = max(largest, abs(ours.step_s / step_s - 1.0))
        wrong += abs(ours.step_s / step_s - 1.0) > EQUAL or len(buffer) > 1 or min(buffer) < 0
    print(f"{sp_space}, {pipeline}: {len(plans)} drawn, largest difference of a step {largest:.1e}, {wrong} differ")
    return wrong


def draw_plan(planner: OlderPlanner, rng: random.Random) -> Assignment:
    """A strategy of its own for each layer."""
    spaces, parts = [*list_spaces(planner)], []
    while not parts:
        parts = [*list_parts(planner, rng.choice(spaces), Counter())]
    part = rng.choice(parts)
    cuts = [0, *sorted(rng.sample(range(1, 32), part.space.pp - 1)), 32]
    division = tuple(after - before for before, after in itertools.pairwise(cuts))
    layers, batch = tuple(rng.choice(part.layers) for _ in range(32)), part.space.batch
    return Assignment(
        layers,
        part.ends,
        division,
        batch.samples,
        batch.chunks,
        planner.flags.pipeline_type,
        planner.default_dp_type,
    )


def compare_searches(arguments: argparse.Namespace, rng: random.Random) -> int:
    """Variants searched by both: how many are wrong."""
    num_wrong, ours_s, theirs_s = 0, 0.0, 0.0
    for _ in range(arguments.variants):
        batch = 8 * rng.randint(1, 8)
        values = {
            "num_hidden_layers": 8,
            "memory_constraint": rng.randint(6, 16),
            "settle_bsz": batch,
            "settle_chunk": rng.choice([each for each in (1, 2, 4, 8) if batch % each == 0]),
            "pipeline_type": rng.choice(("pipedream_flush", "gpipe")),
            "default_dp_type": rng.choice(("zero2", "ddp")),
            "sp_space": rng.choice(("tp", "tp+sp")),
        }
        flags = flags_of(**values)
        began_s = time.process_time()
        found = search_older(OlderPlanner(*read_flags(flags)))
        own_s = time.process_time() - began_s
        ours = [json.loads(format_strategy(found.best.plan))] if found.best else []
        theirs = ask(arguments, flags, score=ours, search=True)
        told = " ".join(f"{key}={value}" for key, value in values.items())
        ours_s, theirs_s = ours_s + own_s, theirs_s + theirs["cpu_s"]
        other_s = theirs["found_s"]
        if found.best is None:
            wrong, step = other_s is not None, "none"
        else:
            step_s = min(each[0] for each in theirs["scores"][0])
            is_slower = other_s is not None and step_s > other_s * (1 + 1e-12)
            wrong = abs(found.best.step_s / step_s - 1.0) > EQUAL or is_slower or not found.is_proven
            step = f"{step_s:.6f} s" + ("" if other_s is None else f" ({other_s / step_s - 1:+.3%})")
        print(f"{told}: {step} in {own_s:.2f} s; Galvatron {other_s} in {theirs['cpu_s']:.1f} s", flush=True)
        if wrong:
            print("  WRONG")
        num_wrong += wrong
    print(f"{arguments.variants} variants, {num_wrong} wrong; {ours_s:.1f} processor seconds, Galvatron {theirs_s:.0f}")
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
