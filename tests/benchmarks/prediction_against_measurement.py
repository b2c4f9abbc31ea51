"""Predicted against measured: bytes and step times of real training on two gloo processes, from profiled blocks alone.

    python tests/benchmarks/prediction_against_measurement.py [--steps 8] [--layouts] [--json]

Trains the model of examples/qwen2vl under five placements each of PP 2, TP 2 and DP 2, in one run; with --layouts under
one plan of each layout, of which steps alone are compared. Profiling and training take turns (turns.py). Kept
activations are what autograd holds at most, counted by storage. Errors are predicted / measured − 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "examples" / "qwen2vl"))

import torch.distributed as dist  # noqa: E402
from turns import Turns, standard_error  # noqa: E402

import pretrain_vlm  # noqa: E402
from arguments import make_parser, read_model_document, read_shape  # noqa: E402
from mm_autoparallel import hooks  # noqa: E402
from mm_autoparallel.hooks.applied import apply  # noqa: E402
from mm_autoparallel.hooks.pretraining import build_job  # noqa: E402
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.job.strategy import Strategy  # noqa: E402
from mm_autoparallel.model.profiles.store import profile_folder  # noqa: E402
from mm_autoparallel.planner.evaluate import Estimate, evaluate  # noqa: E402
from mm_autoparallel.planner.plan import Plan  # noqa: E402
from mm_autoparallel.profilers.clock import Effort  # noqa: E402
from mm_autoparallel.profilers.collectives import profile_network  # noqa: E402
from mm_autoparallel.profilers.device import claim_device, identify_device  # noqa: E402
from mm_autoparallel.profilers.meter import KeptActivations  # noqa: E402
from mm_autoparallel.profilers.worker import Configuration, profile  # noqa: E402
from sizes import make_config  # noqa: E402
from subject import make_subject, make_workload  # noqa: E402
from training import Trainer  # noqa: E402

# (vision, text) layers per stage, then how many of them recompute, of 8 and 12.
PIPELINES = (
    ((8, 0), (2, 10), (0, 0), (0, 0)),
    ((8, 0), (5, 7), (0, 0), (0, 0)),
    ((8, 0), (4, 8), (4, 0), (2, 3)),
    ((6, 2), (0, 12), (0, 0), (0, 6)),
    ((8, 0), (1, 11), (8, 0), (1, 4)),
)
RECOMPUTED = ((0, 0), (8, 0), (0, 12), (4, 6), (8, 12))
COUNTS = ("layers", "recompute")
BYTES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


def plans(layouts: bool) -> Iterator[tuple[str, Plan]]:
    yield from arranged_plans() if layouts else chain_plans()


def chain_plans() -> Iterator[tuple[str, Plan]]:
    pipeline = Strategy(pp=2, tp=1, dp=1, mbs=1, zero=0)
    for vision, text, vision_again, text_again in PIPELINES:
        layers, again = {"vision": vision, "text": text}, {"vision": vision_again, "text": text_again}
        yield "PP 2", Plan(pipeline, layers, again, global_batch_size=4)
    for name, strategy, batch in (
        ("TP 2", Strategy(pp=1, tp=2, dp=1, mbs=1, zero=0), 2),
        ("DP 2", Strategy(pp=1, tp=1, dp=2, mbs=1, zero=0), 4),
    ):
        for vision_count, text_count in RECOMPUTED:
            layers = {"vision": (8,), "text": (12,)}
            yield name, Plan(strategy, layers, {"vision": (vision_count,), "text": (text_count,)}, batch)


def arranged_plans() -> Iterator[tuple[str, Plan]]:
    """The encoder on both ranks beside two stages, inline beside TP 2, and on a rank of its own."""
    pipeline = Strategy(pp=2, tp=1, dp=1, mbs=1, zero=0)
    yield "chain", Plan(pipeline, {"vision": (8, 0), "text": (4, 8)}, {"vision": (0, 0), "text": (0, 0)}, 4)
    for run in ("phases", "recomputed_phases"):
        shared = Arrangement("colocated", run, ModuleLayout("vision", 1, 1, 2, 1))
        yield run, Plan(replace(pipeline, arrangement=shared), {"text": (6, 6)}, {"text": (0, 0)}, 4)
    apart = Arrangement("disaggregated", "inline", ModuleLayout("vision", 1, 1, 1, 1))
    own = replace(pipeline, arrangement=apart)
    yield "apart", Plan(own, {"vision": (8, 0), "text": (0, 12)}, {"vision": (0, 0), "text": (0, 0)}, 4)
    inline = Arrangement("colocated", "inline", ModuleLayout("vision", 1, 1, 2, 1))
    divided = Strategy(pp=1, tp=2, dp=1, mbs=2, zero=0, arrangement=inline)
    yield "inline", Plan(divided, {"vision": (8,), "text": (12,)}, {"vision": (0,), "text": (0,)}, 4)


def first_ranks(rows: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Of each stage one rank: the others hold the same."""
    return [row for row in rows if row["replica"] == row["tp_rank"] == 0]


def with_batch(job: Job, plan: Plan) -> Job:
    return replace(job, workload=job.workload.model_copy(update={"global_batch_size": plan.global_batch_size}))


def predict_bytes(job: Job, estimate: Estimate) -> list[list[float]]:
    """BYTES of each stage, from what the simulator knows."""
    workload, loads = job.workload, estimate.timeline.loads
    per_parameter_bytes = (workload.weight_bytes, workload.gradient_bytes, workload.optimizer_bytes)
    rows = []
    for stage, context_bytes in enumerate(estimate.problem.stage_static_bytes):
        counted = (loads.static_bytes[stage] - context_bytes) / sum(per_parameter_bytes)
        passing = loads.static_bytes[stage] + loads.restored_bytes[stage] + loads.transient_bytes[stage]
        kept = estimate.peak_memory_bytes[stage] - passing
        rows.append([*(counted * each for each in per_parameter_bytes), kept])
    return rows


def work(num_steps: int, layouts: bool, scratch: Path) -> None:
    """One of the two processes; rank 0 prints a JSON line for every plan."""
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    parser = make_parser()
    hooks.add_arguments(parser)
    arguments = parser.parse_args([])
    document = read_model_document(arguments)
    config, shape = make_config(document), read_shape(arguments, document)
    pretraining = hooks.Pretraining(
        model=document,
        workload=make_workload(arguments, document, shape),
        subject=make_subject(arguments, document),
        freeze={"vision": False, "vision_projector": False, "text": False},
    )
    job = build_job(pretraining, 1, 2, identify_device())
    network = profile_network(scratch, "benchmark", device, 2)
    folder = profile_folder(scratch, job.cluster.device.name, job.model)
    cases, trainers, measured_bytes = list(plans(layouts)), [], []
    for _, plan in cases:
        own = argparse.Namespace(**vars(arguments) | {"global_batch_size": plan.global_batch_size})
        applied = apply(with_batch(job, plan), plan)
        trainer = Trainer(own, config, shape, pretrain_vlm.follow(applied, own))
        kept = KeptActivations(*trainer.bare)
        trainer.step(0, kept)  # which also warms it up
        trainers.append(trainer)
        measured_bytes.append(trainer.count_memory(kept))
    gc.collect()
    gc.freeze()
    measured: dict[int, tuple[Turns, int]] = {}
    for tp in (1, 2):
        chosen = [index for index, (_, plan) in enumerate(cases) if plan.strategy.tp == tp]
        turns = Turns([trainers[index] for index in chosen])
        num_rounds = num_steps * tp * len(chosen) + 1  # steps of TP 2 are half as long
        effort = Effort(budget_s=math.inf, min_rounds=num_rounds, max_rounds=num_rounds, max_warm_up=1)
        arrangement, quiet = "group", lambda line: None
        configurations = [Configuration(tp, tp if layouts else 1)]  # inline beside TP 2 a micro-batch is two samples
        profile(pretraining.subject, job, configurations, folder, "benchmark", arrangement, quiet, effort, turns)
        for place, index in enumerate(chosen):
            measured[index] = turns, place
    if dist.get_rank() == 0:
        assert network is not None
        for index, ((name, plan), rows) in enumerate(zip(cases, measured_bytes, strict=True)):
            own_job = replace(with_batch(job, plan), profiles=(folder, network))
            estimate = evaluate(own_job, plan)
            turns, place = measured[index]
            ratios = turns.ratios(place, estimate)
            report = {
                "parallel": name,
                "layers": {modality: list(counts) for modality, counts in plan.layers.items()},
                "recompute": {modality: list(counts) for modality, counts in plan.recompute.items()},
                "predicted_ms": estimate.step_ms,
                "measured_ms": estimate.step_ms * statistics.median(ratios),
                "steps_ms": [step_ms for step_ms, _ in turns.steps[place]],
                "ratios": ratios,
                "predicted_bytes": [] if layouts else predict_bytes(job, estimate),
                "measured_bytes": [] if layouts else [[row[each] for each in BYTES] for row in first_ranks(rows)],
            }
            print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def run(num_steps: int, layouts: bool) -> list[dict]:
    """Start the two processes; a row per plan."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [__file__, "--steps", str(num_steps), "--scratch", scratch, *(["--layouts"] if layouts else [])]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ordered_pairs(rows: list[dict]) -> tuple[int, int]:
    """Pairs of placements whose steps differ by more than 2 %: how many are predicted in order, and of how many."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :] if a["parallel"] == b["parallel"]]
    told = [pair for pair in pairs if abs(pair[0]["measured_ms"] / pair[1]["measured_ms"] - 1) > 0.02]
    right = [(a["measured_ms"] > b["measured_ms"]) == (a["predicted_ms"] > b["predicted_ms"]) for a, b in told]
    return sum(right), len(right)


def main(num_steps: int, layouts: bool) -> None:
    rows = run(num_steps, layouts)
    num_explained, time_errors, byte_errors = 0, [], {name: [] for name in BYTES}
    heads = f"{'layers (vision | text)':<24} {'recomputed':<18} {'predicted':>11} {'measured':>11}"
    print(f"{'':<17} {heads} {'error':>8} {'±':>8}")
    for row in rows:
        error = row["predicted_ms"] / row["measured_ms"] - 1
        time_errors.append(error)
        layers, again = (
            " | ".join(",".join(map(str, row[key][m])) for m in row[key]) for key in ("layers", "recompute")
        )
        times = f"{row['predicted_ms']:8.1f} ms {row['measured_ms']:8.1f} ms"
        known_to = standard_error(row["ratios"])
        num_explained += abs(error) <= 2 * known_to
        print(f"{row['parallel']:<17} {layers:<24} {again:<18} {times} {error:+8.2%} {known_to:8.1%}")
        for predicted, measured in zip(row["predicted_bytes"], row["measured_bytes"], strict=True):
            for name, of_predicted, of_measured in zip(BYTES, predicted, measured, strict=True):
                byte_errors[name].append(of_predicted / of_measured - 1)
    right, total = ordered_pairs(rows)
    absolute = [abs(error) for error in time_errors]
    print(
        f"step time: median {statistics.median(absolute):.2%}, worst {max(absolute):.2%}, bias "
        f"{statistics.mean(time_errors):+.2%}; {right} of {total} pairs that differ by more than 2 % in order; "
        f"{num_explained} of {len(rows)} errors are within two standard errors of the measurement"
    )
    for name, errors in () if layouts else byte_errors.items():
        worst = max(errors, key=abs)
        print(f"{name.replace('_', ' '):<17} worst {worst:+.3%} of {len(errors)} stages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of every plan; twice as many of TP 2")
    parser.add_argument("--layouts", action="store_true", help="one plan of each layout in the place of placements")
    parser.add_argument("--json", action="store_true", help="print the rows as they were found")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.scratch:
        work(given.steps, given.layouts, given.scratch)
    elif given.json:
        print(json.dumps(run(given.steps, given.layouts), indent=1))
    else:
        main(given.steps, given.layouts)
