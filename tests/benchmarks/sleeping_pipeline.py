"""A pipeline of blocks that sleep, run by torch under any order; order_steps.py starts it.

    python -m torch.distributed.run --nproc-per-node P sleeping_pipeline.py TASKS.json OUT.json

TASKS.json lists runs: `csv`, the order; `ms`, for each virtual stage the times of its forward, of the gradient of its
input and of that of its weight; `repeats`. OUT.json gets the times of the steps of each run, from a barrier to the end
of the last rank.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

WIDTH = 16


class _Slept(torch.autograd.Function):
    """What it is given; sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradient.contiguous(), None, None  # what I gives is sent as it is, and gloo sends nothing else


class Sleeper(nn.Module):
    """A virtual stage: torch's I runs the backward of its input alone, W that of its weight, B both."""

    def __init__(self, forward_ms: float, input_ms: float, weight_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._ms = (forward_ms, input_ms, weight_ms)

    def forward(self, given: Tensor) -> Tensor:
        """given: [1, WIDTH]; that of the first stage gets a gradient too, so that its backward takes as long."""
        forward_ms, input_ms, weight_ms = self._ms
        if not given.requires_grad and torch.is_grad_enabled():
            given = given.detach().requires_grad_()
        return _Slept.apply(given, forward_ms, input_ms) + _Slept.apply(self.weight, 0.0, weight_ms)


def run(rows: list[list[str]], ms: list[list[float]], repeats: int) -> list[float]:
    """Milliseconds of each step after the first, which makes connections."""
    rank, device = dist.get_rank(), torch.device("cpu")
    order = {each: [_Action.from_str(cell) for cell in row] for each, row in enumerate(rows)}
    actions = [part for row in order.values() for each in row for part in (each.sub_actions or (each,))]
    count = 1 + max(each.microbatch_index for each in actions)
    mine = sorted({part.stage_index for each in order[rank] for part in (each.sub_actions or (each,))})
    passed = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    stages = [
        PipelineStage(Sleeper(*ms[k]), k, len(ms), device, input_args=(passed,), output_args=(passed,)) for k in mine
    ]
    schedule = _PipelineScheduleRuntime(stages, count, loss_fn=lambda output, _: output.sum())
    schedule.pipeline_order = order
    schedule._prepare_schedule_with_comms(order)
    taken_ms = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        schedule.step(
            *([torch.zeros(count, WIDTH)] if 0 in mine else []),
            target=torch.zeros(count, WIDTH) if len(ms) - 1 in mine else None,
            losses=[],
            return_outputs=False,
        )
        elapsed_ms = torch.tensor(1e3 * (time.perf_counter() - began))
        dist.all_reduce(elapsed_ms, op=dist.ReduceOp.MAX)
        taken_ms.append(float(elapsed_ms))
    return taken_ms[1:]


def main() -> None:
    """See the module's docstring."""
    dist.init_process_group("gloo")
    tasks, out = (Path(word) for word in sys.argv[1:])
    measured = [
        run(list(csv.reader(task["csv"].splitlines())), task["ms"], task["repeats"])
        for task in json.loads(tasks.read_text(encoding="utf-8"))
    ]
    if not dist.get_rank():
        out.write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
