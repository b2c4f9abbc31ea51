"""Simulated against real pipeline schedules: torch.distributed.pipelining on four gloo processes whose blocks sleep.

    python tests/benchmarks/schedule_semantics.py

Compute is virtual, so two cores are enough for four stages; schedule, transport and autograd are real. Several uneven
placements of 16 layers, 1F1B and interleaved, with one round of every placement after the other, so that drift of the
machine meets all alike. Errors are predicted / measured − 1; times are printed, never asserted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.step import simulate

NUM_STAGES, NUM_MICROBATCHES, ROUNDS = 4, 8, 3
FORWARD_MS, BACKWARD_MS, HEAD_MS = 10.0, 20.0, 12.0
PLACEMENTS = {
    "1f1b": [(4, 4, 4, 4), (2, 5, 5, 4), (6, 4, 3, 3), (1, 3, 5, 7), (7, 5, 3, 1)],
    "interleaved_1f1b": [
        (2, 2, 2, 2, 2, 2, 2, 2),
        (1, 2, 2, 3, 1, 2, 2, 3),
        (3, 2, 2, 2, 2, 2, 2, 1),
        (1, 1, 2, 2, 2, 2, 3, 3),
        (4, 1, 2, 1, 1, 2, 1, 4),
    ],
}
"""Layers per virtual stage; the last one also holds a head."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_ms, backward_ms):
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_ms / 1e3)
        return gradient.clone(), None, None


class SleepingStage(nn.Module):
    def __init__(self, num_layers: int, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        head_ms = HEAD_MS if is_last else 0.0
        self.forward_ms = num_layers * FORWARD_MS + head_ms
        self.backward_ms = num_layers * BACKWARD_MS + head_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * self.weight, self.forward_ms, self.backward_ms)


def predict_ms(schedule: str, layers: tuple[int, ...], hop_ms: float) -> float:
    num_chunks = len(layers) // NUM_STAGES
    problem = Problem(
        num_stages=NUM_STAGES,
        num_chunks=num_chunks,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        chain=(
            ChainBlock("layer", "text", sum(layers), FORWARD_MS, BACKWARD_MS),
            ChainBlock("head", "text", 1, HEAD_MS, HEAD_MS, layer=False, pinned="last"),
        ),
        memory_limit_bytes=(1.0,) * NUM_STAGES,
        stage_static_bytes=(0.0,) * NUM_STAGES,
        stage_tail_ms=(0.0,) * NUM_STAGES,
        p2p_ms=(hop_ms,) * (len(layers) - 1),
        p2p_ms_per_byte=(0.0,) * (len(layers) - 1),
    )
    rows = tuple((count, int(k == len(layers) - 1)) for k, count in enumerate(layers))
    return simulate(problem, Placement(rows, (((), ()),) * len(layers))).step_ms


def measure_hop_ms(rank: int) -> float:
    """Half a round trip of a small message between ranks 0 and 1."""
    message, samples_ms = torch.zeros(1, 8), []
    for _ in range(200):
        start_s = time.perf_counter()
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif rank == 1:
            dist.recv(message, 0)
            dist.send(message, 0)
        samples_ms.append((time.perf_counter() - start_s) * 1e3 / 2)
    return statistics.median(samples_ms)


def build(schedule: str, layers: tuple[int, ...], rank: int) -> PipelineStage | Schedule1F1B | ScheduleInterleaved1F1B:
    example = torch.zeros(1, 8, requires_grad=True)  # gradients cross the cuts
    stages = [
        PipelineStage(
            SleepingStage(layers[k], k == len(layers) - 1),
            k,
            len(layers),
            torch.device("cpu"),
            input_args=(example,),
            output_args=(example,),
        )
        for k in range(rank, len(layers), NUM_STAGES)
    ]
    arguments = {"n_microbatches": NUM_MICROBATCHES, "loss_fn": lambda output, _target: output.sum()}
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], **arguments)
    return ScheduleInterleaved1F1B(stages, **arguments)


def step_ms(runner: Schedule1F1B | ScheduleInterleaved1F1B, rank: int) -> float:
    batch = (torch.zeros(NUM_MICROBATCHES, 8, requires_grad=True),) if rank == 0 else ()
    target = {"target": torch.zeros(NUM_MICROBATCHES, 8)} if rank == NUM_STAGES - 1 else {}
    dist.barrier()
    start_s = time.perf_counter()
    runner.step(*batch, **target, return_outputs=False)
    longest = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest) * 1e3


def work() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    hop = torch.tensor([measure_hop_ms(rank)], dtype=torch.float64)
    dist.broadcast(hop, 0)
    cases = [(schedule, layers) for schedule, rows in PLACEMENTS.items() for layers in rows]
    runners = [build(schedule, layers, rank) for schedule, layers in cases]
    samples: list[list[float]] = [[] for _ in cases]
    for round_number in range(ROUNDS + 1):  # the first round warms up
        for runner, found in zip(runners, samples, strict=True):
            measured_ms = step_ms(runner, rank)
            if round_number:
                found.append(measured_ms)
    if rank == 0:
        for (schedule, layers), found in zip(cases, samples, strict=True):
            row = {
                "schedule": schedule,
                "layers": list(layers),
                "predicted_ms": predict_ms(schedule, layers, float(hop)),
                "measured_ms": statistics.median(found),
            }
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def run() -> list[dict[str, object]]:
    """Start the four processes; a row per schedule and placement."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_STAGES), str(Path(__file__))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=600
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    errors = []
    for row in run():
        error = row["predicted_ms"] / row["measured_ms"] - 1
        errors.append(abs(error))
        where = f"{row['schedule']:<17} {row['layers']!s:<26}"
        print(f"{where} predicted {row['predicted_ms']:8.2f} ms, measured {row['measured_ms']:8.2f} ms, {error:+.2%}")
    print(f"absolute error: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    work() if "LOCAL_RANK" in os.environ else main()
