"""Train a GPT from random weights: alone, under torchrun, or to find out how it is trained best on a cluster.

    python pretrain_gpt.py --num-layers 4 --hidden-size 128 …                            # one process
    torchrun --nproc-per-node 2 pretrain_gpt.py … --pipeline-model-parallel-size 2
    python pretrain_gpt.py … --auto-tuning --auto-tuning-ranks 16 --nproc-per-node 2     # the best three for 16 devices

The lines that begin with `hooks.` are all that the last one needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arguments import ArgumentsError, make_parser, read_division, read_sizes
from mm_autoparallel import hooks
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.subject import Build, Layout, Subject
from model import Recipe, Sizes, Stage
from parallel import ALONE, Group
from training import Trainer, make_optimizer, make_tokens

OWN_LIMITS = {"cp": [1]}
"""Of a search, in a job file's words: this script has no context parallelism."""


def main() -> int:
    """Read the flags, let the planner take over if they say so, else train. The exit code."""
    parser = make_parser()
    hooks.add_arguments(parser)
    hooks.add_tuning_arguments(parser)
    arguments = parser.parse_args()
    try:
        sizes = read_sizes(arguments)
        hooks.auto_tuning(arguments, make_subject(arguments, sizes), search=OWN_LIMITS)
        division = read_division(arguments, sizes, int(os.environ.get("WORLD_SIZE", "1")))
        Trainer(arguments, sizes, division).run()
    except (ArgumentsError, PlannerError) as failure:
        if os.environ.get("RANK", "0") == "0":
            print(f"{parser.prog}: error: {failure}", file=sys.stderr)
        return getattr(failure, "exit_code", 2)
    dist.destroy_process_group()
    return 0


def make_subject(arguments: argparse.Namespace, sizes: Sizes) -> Subject:
    """How the whole model is built at any depth, run on a batch of any size, and updated: the code that trains."""

    def build_model(build: Build) -> Stage:
        mesh = build.tp_mesh
        tp = (
            ALONE
            if mesh is None
            else Group(
                mesh.size(), mesh.get_local_rank(), mesh.get_group(), arguments.sequence_parallel and mesh.size() > 1
            )
        )
        recipe = Recipe(sizes, arguments.seed, build.device, tp)
        return Stage(recipe, range(build.depth["text"]), is_first=True, is_last=True).train()

    def forward_step(model: nn.Module, num_samples: int, workload: Workload) -> Tensor:
        device = next(model.parameters()).device
        rows = make_tokens(0, num_samples, sizes, arguments.seed)[:, : workload.seq_length + 1].to(device)
        return model(tokens=rows[:, :-1].contiguous(), labels=rows[:, 1:].contiguous())

    def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(parameters, arguments.lr)

    return Subject(build_model, forward_step, build_optimizer, Layout({"text": "layers"}))


if __name__ == "__main__":
    sys.exit(main())
