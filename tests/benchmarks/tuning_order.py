"""The order of Auto Tuning's plans, predicted against measured: every way to train examples/gpt on two gloo processes.

    python tests/benchmarks/tuning_order.py [--model mixtral_8x7b] [--steps 8] [--only TEXT...] [--json] [MORE FLAGS]

Trains the model of examples/gpt/MODEL.sh, four layers and eight samples a step, under every lawful size of two
devices, layers dealt evenly, each plan in turn with the profile run of its blocks (turns.py). Errors are predicted over
measured, less 1. At the end: what the plan of each predicted rank takes more than that of the same measured rank, and
than the fastest.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import torch.distributed as dist  # noqa: E402
from turns import Turns, standard_error  # noqa: E402

from arguments import Division, make_parser, read_sizes  # noqa: E402
from mm_autoparallel import hooks  # noqa: E402
from mm_autoparallel.hooks.language import LanguageTraining  # noqa: E402
from mm_autoparallel.hooks.pretraining import build_job  # noqa: E402
from mm_autoparallel.model.profiles.store import profile_folder  # noqa: E402
from mm_autoparallel.planner.evaluate import evaluate  # noqa: E402
from mm_autoparallel.planner.plan import Plan  # noqa: E402
from mm_autoparallel.planner.search.space import describe_strategy, list_space  # noqa: E402
from mm_autoparallel.profilers.clock import Effort  # noqa: E402
from mm_autoparallel.profilers.collectives import profile_network  # noqa: E402
from mm_autoparallel.profilers.device import claim_device, identify_device  # noqa: E402
from mm_autoparallel.profilers.worker import Configuration, profile  # noqa: E402
from pretrain_gpt import OWN_LIMITS, make_subject  # noqa: E402
from training import Trainer  # noqa: E402

SMALL = ("--num-layers", "4", "--global-batch-size", "8")
TEXT = "text"


def read_flags(model: str, more: list[str]) -> list[str]:
    """What the example's script passes, its last flags first overridden."""
    text = (EXAMPLE / f"{model}.sh").read_text()
    (passed,) = re.findall(r'pretrain_gpt\.py" \\\n(.*?)"\$@"', text, re.DOTALL)
    return [*shlex.split(passed.replace("\\\n", " ")), *SMALL, *more]


def list_plans(job: object) -> list[Plan]:
    """Of each lawful strategy one, with its layers dealt evenly and none recomputed."""
    plans = []
    for entry in list_space(job):
        strategy = entry.strategy
        count, rest = divmod(4, strategy.pp * strategy.vpp)
        if entry.reason is None and not rest and strategy.mbs <= 2:
            places = strategy.pp * strategy.vpp
            plans.append(Plan(strategy, {TEXT: (count,) * places}, {TEXT: (0,) * places}, 8))
    return plans


def divide(plan: Plan, divides_sequence: bool) -> Division:
    """A plan as the example's trainer takes it."""
    of = plan.strategy
    num_micro_batches = plan.global_batch_size // (of.dp * of.mbs)
    layers, recomputed = plan.layers[TEXT], plan.recompute[TEXT]
    return Division(
        of.pp, of.tp, of.dp, of.ep, of.zero, of.mbs, num_micro_batches, layers, recomputed, divides_sequence
    )


def work(num_steps: int, only: list[str], words: list[str], scratch: Path) -> None:
    """One of the two processes; rank 0 prints a JSON line for every plan. only: texts of which a plan has one."""
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    parser = make_parser()
    hooks.add_arguments(parser)
    hooks.add_tuning_arguments(parser)
    arguments = parser.parse_args(words)
    sizes = read_sizes(arguments)
    subject = make_subject(arguments, sizes)
    pretraining = LanguageTraining(subject, search=OWN_LIMITS, words=words).describe(2)
    job = build_job(pretraining, 1, 2, identify_device())
    network = profile_network(scratch, "benchmark", device, 2)
    folder = profile_folder(scratch, job.cluster.device.name, job.model)
    plans = [plan for plan in list_plans(job) if any(text in describe_strategy(plan.strategy) for text in only)]
    trainers = []
    for plan in plans:
        trainer = Trainer(arguments, sizes, divide(plan, arguments.sequence_parallel))
        trainer.step(0)  # which warms it up
        trainers.append(trainer)
    gc.collect()
    gc.freeze()
    measured: dict[int, tuple[Turns, int]] = {}
    for tp in (1, 2):
        for mbs in (1, 2):
            chosen = [i for i, plan in enumerate(plans) if (plan.strategy.tp, plan.strategy.mbs) == (tp, mbs)]
            turns = Turns([trainers[index] for index in chosen])
            num_rounds = num_steps * len(chosen) + 1 if chosen else 0
            if not num_rounds:
                continue
            effort = Effort(budget_s=math.inf, min_rounds=num_rounds, max_rounds=num_rounds, max_warm_up=1)
            division = [Configuration(tp, mbs)]
            profile(subject, job, division, folder, "benchmark", "group", lambda line: None, effort, turns)
            measured |= {index: (turns, place) for place, index in enumerate(chosen)}
    if dist.get_rank() == 0:
        assert network is not None
        known = replace(job, profiles=(folder, network))
        for index, plan in enumerate(plans):
            estimate = evaluate(known, plan)
            turns, place = measured[index]
            ratios = turns.ratios(place, estimate)
            report = {
                "plan": describe_strategy(plan.strategy),
                "predicted_ms": estimate.step_ms,
                "measured_ms": estimate.step_ms * statistics.median(ratios),
                "ratios": ratios,
                "steps_ms": [step_ms for step_ms, _ in turns.steps[place]],
            }
            print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def run(num_steps: int, only: list[str], words: list[str]) -> list[dict]:
    """Start the two processes; a row per plan, the fastest as predicted first."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [__file__, "--steps", str(num_steps), "--scratch", scratch, "--only", *only, *words]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(rows, key=lambda row: row["predicted_ms"])


def show(rows: list[dict]) -> None:
    """A line per plan, and what is made of them all."""
    print(f"{'plan':<48} {'predicted':>11} {'measured':>11} {'error':>8} {'±':>6}")
    errors = [row["predicted_ms"] / row["measured_ms"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        times = f"{row['predicted_ms']:8.1f} ms {row['measured_ms']:8.1f} ms"
        print(f"{row['plan']:<48} {times} {error:+8.2%} {standard_error(row['ratios']):6.1%}")
    absolute = [abs(error) for error in errors]
    print(f"step time: median {statistics.median(absolute):.2%}, worst {max(absolute):.2%}")
    best = sorted(row["measured_ms"] for row in rows)
    for name, against in (("measured at its rank", best), ("fastest of all", [best[0]] * len(best))):
        more = [f"{row['measured_ms'] / other - 1:.1%}" for row, other in zip(rows[:3], against[:3], strict=True)]
        print(f"the three predicted fastest take {', '.join(more)} more than the plan {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_7b", help="a script of examples/gpt")
    parser.add_argument("--steps", type=int, default=8, help="steps of every plan")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="plans that have one of these in words")
    parser.add_argument("--json", action="store_true", help="print the rows as they were found")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given, more = parser.parse_known_args()
    if given.scratch:
        work(given.steps, given.only, more, given.scratch)
    else:
        found = run(given.steps, given.only, read_flags(given.model, more))
        print(json.dumps(found, indent=1)) if given.json else show(found)
