"""Mean steps over drawn batches, as predicted and as four gloo processes take them.

    python tests/benchmarks/unequal_batches.py [--batches 12] [--micro-batches 8] [--scale-ms 20]

A 1F1B pipeline of four stages whose forwards and backwards sleep: an encoder on stage 0 and a decoder on all, each
micro-batch with loads of its own, drawn from lognormals. The prediction is what plans are told over batches
(pipeline/simulate/unequal.py). Times are printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.pipeline.simulate.unequal import prepare

NUM_STAGES, LAYERS = 4, ((2, 1), (0, 3), (0, 3), (0, 3))
SPREADS = {"vision": 1.0, "text": 0.5}
"""Standard deviations of the logarithms of loads."""
Floats = NDArray[np.float64]


def describe(num_microbatches: int, scale_ms: float) -> tuple[Problem, Placement]:
    """The pipeline, and its layers on stages."""
    counts = [sum(row[e] for row in LAYERS) for e in range(2)]
    vision = ChainBlock("vision", "vision", counts[0], scale_ms, 2 * scale_ms)
    text = ChainBlock("text", "text", counts[1], scale_ms, 2 * scale_ms)
    none, every = (0.0,) * (NUM_STAGES - 1), (0.0,) * NUM_STAGES
    problem = Problem(
        NUM_STAGES, 1, num_microbatches, "1f1b", (vision, text), (1.0,) * NUM_STAGES, every, every, none, none
    )  # fmt: skip
    return problem, Placement(LAYERS, (((), ()),) * NUM_STAGES)


def draw(num_batches: int, num_microbatches: int, seed: int = 1) -> Floats:
    """[batches, modalities, M] factors of mean about 1."""
    random = np.random.default_rng(seed)
    rows = [
        random.lognormal(-(spread**2) / 2, spread, (num_batches, num_microbatches)) for spread in SPREADS.values()
    ]  # fmt: skip
    return np.stack(rows, axis=1)


def sleep_steps(tasks: Path) -> list[float]:
    """This process is one stage: the milliseconds of each step of the file, from a barrier to the end of the last."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    stage, content = dist.get_rank(), json.loads(tasks.read_text(encoding="utf-8"))
    order, taken_ms = content["orders"][stage], []
    for ms in content["steps_ms"]:
        dist.barrier()
        began = time.perf_counter()
        sent = []
        for kind, micro_batch in order:
            source, target = (stage - 1, stage + 1) if kind == 0 else (stage + 1, stage - 1)
            tag = 2 * micro_batch + kind
            if 0 <= source < NUM_STAGES:
                dist.recv(torch.empty(1), source, tag=tag)
            time.sleep(ms[stage][kind][micro_batch] / 1e3)
            if 0 <= target < NUM_STAGES:
                sent.append(dist.isend(torch.zeros(1), target, tag=tag))
        for one in sent:
            one.wait()
        elapsed_ms = torch.tensor(1e3 * (time.perf_counter() - began))
        dist.all_reduce(elapsed_ms, op=dist.ReduceOp.MAX)
        taken_ms.append(float(elapsed_ms))
    dist.destroy_process_group()
    return taken_ms


def run(factors: Floats, scale_ms: float) -> tuple[Floats, list[float]]:
    """Predicted and measured milliseconds of each batch; one more runs first, which makes connections."""
    problem, placement = describe(factors.shape[2], scale_ms)
    ready = prepare(problem, placement)
    counts = np.array(LAYERS, dtype=np.float64)  # [stages, modalities]
    forward = scale_ms * np.einsum("se,bej->bsj", counts, factors)
    steps_ms = np.stack([forward, 2 * forward], axis=2)  # [batches, stages, kinds, M]
    rule = SCHEDULES["1f1b"]
    orders = [rule.order(NUM_STAGES, 1, factors.shape[2], stage)[:, [0, 2]].tolist() for stage in range(NUM_STAGES)]
    with tempfile.TemporaryDirectory() as folder:
        tasks, out = Path(folder) / "tasks.json", Path(folder) / "out.json"
        content = {"orders": orders, "steps_ms": [steps_ms[0].tolist(), *steps_ms.tolist()]}
        tasks.write_text(json.dumps(content), encoding="utf-8")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_STAGES}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*launch, __file__, "--sleep", str(tasks), str(out)]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        measured = json.loads(out.read_text(encoding="utf-8"))[1:]
    return ready.play(factors), measured


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--scale-ms", type=float, default=20.0, help="milliseconds of a layer's forward")
    parser.add_argument("--sleep", type=Path, nargs=2, metavar="FILE", help="one process of the run: tasks, times")
    arguments = parser.parse_args()
    if arguments.sleep:
        measured = sleep_steps(arguments.sleep[0])
        if os.environ["RANK"] == "0":
            arguments.sleep[1].write_text(json.dumps(measured), encoding="utf-8")
        return
    factors = draw(arguments.batches, arguments.micro_batches)
    predicted, measured = run(factors, arguments.scale_ms)
    problem, placement = describe(arguments.micro_batches, arguments.scale_ms)
    even = prepare(problem, placement).play(
        np.broadcast_to(factors.mean(axis=(0, 2))[None, :, None], factors[:1].shape)
    )
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
    print(f"with mean durations {even[0]:.1f} ms; over {len(measured)} batches:")
    error = predicted.mean() / statistics.mean(measured) - 1
    print(
        f"predicted mean {predicted.mean():.1f} ms, measured {statistics.mean(measured):.1f} ms, {100 * error:+.2f} %"
    )
    print(f"batch by batch: median {100 * statistics.median(errors):.2f} %, largest {100 * max(errors):.2f} %")


if __name__ == "__main__":
    main()
