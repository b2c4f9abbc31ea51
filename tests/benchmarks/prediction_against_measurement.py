"""Predicted against measured: bytes and step times of real training on two gloo processes, from profiled blocks alone.

    python tests/benchmarks/prediction_against_measurement.py [--rounds 7] [--json]

Trains the model of examples/qwen2vl under five placements each of PP 2, TP 2 and DP 2. One run does it all, so that the
machine is the same throughout: blocks are profiled, then a step of every plan is taken in turn, `--rounds` times, then
blocks are profiled once more; a prediction is the mean of those from the two profiles, a measurement the median of the
rounds. Kept activations are what autograd holds at most, counted by storage. Errors are predicted / measured − 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "examples" / "qwen2vl"))

import torch.distributed as dist  # noqa: E402

import pretrain_vlm  # noqa: E402
from arguments import make_parser, read_model_document, read_shape  # noqa: E402
from mm_autoparallel import hooks  # noqa: E402
from mm_autoparallel.hooks.applied import list_stages  # noqa: E402
from mm_autoparallel.hooks.pretraining import build_job  # noqa: E402
from mm_autoparallel.job.job import Job  # noqa: E402
from mm_autoparallel.job.strategy import Strategy  # noqa: E402
from mm_autoparallel.plan import Plan  # noqa: E402
from mm_autoparallel.profilers.collectives import profile_network  # noqa: E402
from mm_autoparallel.profilers.device import claim_device, identify_device  # noqa: E402
from mm_autoparallel.profilers.meter import KeptActivations  # noqa: E402
from mm_autoparallel.profilers.worker import Configuration, profile  # noqa: E402
from mm_autoparallel.profiles.network import network_path  # noqa: E402
from mm_autoparallel.profiles.store import profile_folder  # noqa: E402
from mm_autoparallel.simulate.evaluate import Estimate, evaluate  # noqa: E402
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


def plans(global_batch_size: int) -> Iterator[tuple[str, Plan]]:
    pipeline = Strategy(pp=2, tp=1, dp=1, mbs=1, zero=0)
    for vision, text, vision_again, text_again in PIPELINES:
        layers, again = {"vision": vision, "text": text}, {"vision": vision_again, "text": text_again}
        yield "PP 2", Plan(pipeline, layers, again, global_batch_size)
    for name, strategy in (
        ("TP 2", Strategy(pp=1, tp=2, dp=1, mbs=1, zero=0)),
        ("DP 2", Strategy(pp=1, tp=1, dp=2, mbs=1, zero=0)),
    ):
        for vision_count, text_count in RECOMPUTED:
            layers = {"vision": (8,), "text": (12,)}
            yield name, Plan(strategy, layers, {"vision": (vision_count,), "text": (text_count,)}, global_batch_size)


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


def work(rounds: int, scratch: Path) -> None:
    """One of the two processes; rank 0 prints a JSON line for every plan."""
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    parser = make_parser()
    hooks.add_arguments(parser)
    arguments = parser.parse_args(["--global-batch-size", "8"])
    document = read_model_document(arguments)
    config = make_config(document)
    shape = read_shape(arguments, document)
    pretraining = hooks.Pretraining(
        model=document,
        workload=make_workload(arguments, document, shape),
        subject=make_subject(arguments, document),
        freeze={"vision": False, "vision_projector": False, "text": False},
    )
    job = build_job(pretraining, 1, 2, identify_device())

    def profiled(name: str) -> Job:
        root = scratch / name
        folder = profile_folder(root, job.cluster.device.name, job.model)
        configurations = [Configuration(1, 1), Configuration(2, 1)]
        profile(pretraining.subject, job, configurations, folder, "benchmark", "group", lambda line: None)
        return replace(job, profiles=(folder, network_path(scratch / "network", job.cluster.device.name)))

    profile_network(scratch / "network", "benchmark", device, 2)
    before = profiled("before")
    cases = list(plans(arguments.global_batch_size))
    trainers = []
    for _, plan in cases:
        applied = hooks.AppliedPlan(plan, list_stages(job, plan))
        trainers.append(Trainer(arguments, config, shape, pretrain_vlm.follow(applied, arguments)))
    measured_bytes = []
    for trainer in trainers:  # the first step of each also warms it up
        kept = KeptActivations(*trainer.bare)
        trainer.step(0, kept)
        measured_bytes.append(trainer.count_memory(kept))
    samples: list[list[float]] = [[] for _ in cases]
    gc.disable()
    for iteration in range(1, rounds + 1):
        for trainer, found in zip(trainers, samples, strict=True):
            dist.barrier()
            start_s = time.perf_counter()
            trainer.step(iteration)
            found.append(1e3 * (time.perf_counter() - start_s))
        gc.collect()
    gc.enable()
    after = profiled("after")
    if dist.get_rank() == 0:
        for (name, plan), rows, found in zip(cases, measured_bytes, samples, strict=True):
            estimates = [evaluate(each, plan) for each in (before, after)]
            report = {
                "parallel": name,
                "layers": {modality: list(counts) for modality, counts in plan.layers.items()},
                "recompute": {modality: list(counts) for modality, counts in plan.recompute.items()},
                "predicted_ms": statistics.mean(estimate.step_ms for estimate in estimates),
                "predicted_before_after_ms": [estimate.step_ms for estimate in estimates],
                "measured_ms": statistics.median(found),
                "spread_ms": statistics.median(abs(each - statistics.median(found)) for each in found),
                "predicted_bytes": predict_bytes(job, estimates[0]),
                "measured_bytes": [
                    [row[name] for name in BYTES] for row in rows if not row["replica"] + row["tp_rank"]
                ],
            }
            print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def run(rounds: int) -> list[dict]:
    """Start the two processes; a row per plan."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [__file__, "--rounds", str(rounds), "--scratch", scratch]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ordered_pairs(rows: list[dict]) -> tuple[int, int]:
    """Pairs of plans whose measured steps differ by more than 2 %: how many are predicted in that order, and of all."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    told = [pair for pair in pairs if abs(pair[0]["measured_ms"] / pair[1]["measured_ms"] - 1) > 0.02]
    right = [(a["measured_ms"] > b["measured_ms"]) == (a["predicted_ms"] > b["predicted_ms"]) for a, b in told]
    return sum(right), len(right)


def main(rounds: int) -> None:
    rows = run(rounds)
    time_errors, byte_errors = [], {name: [] for name in BYTES}
    print(f"{'':<5} {'layers (vision | text)':<24} {'recomputed':<18} {'predicted':>11} {'measured':>11} {'error':>8}")
    for row in rows:
        error = row["predicted_ms"] / row["measured_ms"] - 1
        time_errors.append(error)
        layers, again = (
            " | ".join(",".join(map(str, row[key][m])) for m in row[key]) for key in ("layers", "recompute")
        )
        times = f"{row['predicted_ms']:8.1f} ms {row['measured_ms']:8.1f} ms"
        print(f"{row['parallel']:<5} {layers:<24} {again:<18} {times} {error:+8.2%}")
        for predicted, measured in zip(row["predicted_bytes"], row["measured_bytes"], strict=True):
            for name, of_predicted, of_measured in zip(BYTES, predicted, measured, strict=True):
                byte_errors[name].append(of_predicted / of_measured - 1)
    right, total = ordered_pairs(rows)
    absolute = [abs(error) for error in time_errors]
    print(
        f"step time: median {statistics.median(absolute):.2%}, worst {max(absolute):.2%}, bias "
        f"{statistics.mean(time_errors):+.2%}; {right} of {total} pairs that differ by more than 2 % in order"
    )
    for name, errors in byte_errors.items():
        worst = max(errors, key=abs)
        print(f"{name.replace('_', ' '):<17} worst {worst:+.3%} of {len(errors)} stages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of every plan")
    parser.add_argument("--json", action="store_true", help="print the rows as they were found")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.scratch:
        work(given.rounds, given.scratch)
    elif given.json:
        print(json.dumps(run(given.rounds), indent=1))
    else:
        main(given.rounds)
