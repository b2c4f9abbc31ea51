"""Train Qwen2-VL from random weights: alone, under torchrun, or as the planner says.

    python pretrain_vlm.py                                              # one process
    torchrun --nproc-per-node 2 pretrain_vlm.py --pipeline-model-parallel-size 2
    python pretrain_vlm.py --auto-parallel-mm --simulated-nnodes 8      # profile, search, write the plan
    torchrun --nproc-per-node 2 pretrain_vlm.py --auto-parallel-config auto_parallel_search_optimal_config.json

The three lines that begin with `hooks.` are all that a training script needs for the last two.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch.distributed as dist

import releases  # noqa: F401  (before what older releases lack)
from arguments import make_parser, read_model_document, read_order, read_parallelism, read_shape
from data import SampleShape
from failures import TrainingError
from mm_autoparallel import hooks
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.torch.schedule_csv import orders_of
from parallelism import Encoder, Parallelism
from sizes import make_config
from subject import make_subject, make_workload
from training import Trainer


def main() -> int:
    """Read the flags, let the planner take over if they say so, else train. The exit code."""
    parser = make_parser()
    hooks.add_arguments(parser)
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except (TrainingError, PlannerError) as failure:
        if os.environ.get("RANK", "0") == "0":
            print(f"{parser.prog}: error: {failure}", file=sys.stderr)
        return getattr(failure, "exit_code", 2)


def run(arguments: argparse.Namespace) -> int:
    """What the flags ask for. Raises TrainingError and PlannerError, each one paragraph."""
    document = read_model_document(arguments)
    shape = read_shape(arguments, document)
    pretraining = hooks.Pretraining(
        model=document,
        workload=make_workload(arguments, document, shape),
        subject=make_subject(arguments, document),
        search={"cp": [1], "zero": [int(arguments.use_distributed_optimizer)]},
        freeze={"vision": arguments.freeze_vit, "vision_projector": arguments.freeze_projector, "text": False},
    )
    hooks.auto_parallel(arguments, pretraining)
    plan = hooks.applied_plan(arguments, pretraining)
    if plan is None:
        parallelism = read_parallelism(arguments, document, int(os.environ.get("WORLD_SIZE", "1")))
    else:
        parallelism = follow(plan, arguments)
    train(arguments, document, shape, parallelism, plan.planned_ms if plan else None)
    return 0


def follow(applied: hooks.AppliedPlan, arguments: argparse.Namespace) -> Parallelism:
    """The parallelism of a plan, which decides in the place of the flags. TrainingError for a flag against it."""
    if arguments.use_torch_fsdp2:
        raise TrainingError("--use-torch-fsdp2 goes beyond the ZeRO stages that a plan decides; drop it.")
    strategy = applied.plan.strategy
    if strategy.arrangement and (arguments.pipeline_order or arguments.uneven_images):
        raise TrainingError(
            f"the plan's layout is {strategy.arrangement.name}, which runs its own schedule over samples of one size; "
            "drop --pipeline-order and --uneven-images"
        )
    order = read_order(arguments, strategy.pp)
    if order is None and applied.plan.stage_orders and not strategy.arrangement:
        order = orders_of(applied.plan)
    if order is not None and order.num_chunks != strategy.vpp:
        raise TrainingError(
            f"--pipeline-order {arguments.pipeline_order} has {order.num_chunks} chunks a stage, and the plan's VPP is "
            f"{strategy.vpp}"
        )
    if strategy.zero > 1 or strategy.cp > 1 or strategy.optimizer_offload:
        raise TrainingError(
            f"the plan has ZeRO {strategy.zero}, CP {strategy.cp} and optimizer offload {strategy.optimizer_offload}; "
            "this script runs ZeRO 0 and 1, CP 1 and its optimizer on the device. Plan within those."
        )
    if strategy.arrangement and strategy.arrangement.encoder.cp > 1:
        raise TrainingError(
            f"the plan's layout is {strategy.arrangement.name}, and this script's encoder ranks have whole images; "
            "plan without search.encoder_cp."
        )
    if strategy.rank_order != "tp-cp-ep-dp-pp":
        raise TrainingError(
            f"the plan has its ranks in the order {strategy.rank_order}, and this script's stand in that of "
            "tp-cp-ep-dp-pp; plan without search.rank_order."
        )
    encoder = None
    if strategy.arrangement:
        trains = not (arguments.freeze_vit and arguments.freeze_projector)
        if not trains and strategy.arrangement.encoder_run != "prefetch":
            raise TrainingError(
                f"the plan's layout is {strategy.arrangement.name}, in which gradients go back to the encoder, and "
                "with --freeze-ViT and --freeze-projector there are none; drop one, or take a plan with it as prefetch "
                "or in the chain"
            )
        encoder = Encoder(strategy.arrangement, applied.encoder, applied.plan.orders)
    decoder = strategy.of_decoder()
    return Parallelism(
        pp=decoder.pp,
        dp=decoder.dp,
        tp=strategy.tp,
        micro_batch_size=strategy.mbs,
        zero=strategy.zero,
        fsdp=False,
        schedule=strategy.schedule,
        pieces=applied.stages,
        order=order,
        encoder=encoder,
    )


def train(
    arguments: argparse.Namespace,
    document: dict[str, Any],
    shape: SampleShape,
    parallelism: Parallelism,
    planned_ms: float | None,
) -> None:
    """Train to the end and leave the process group, if it was joined here. planned_ms: what a plan says of a step."""
    joined = dist.is_initialized()
    try:
        Trainer(arguments, make_config(document), shape, parallelism).run(planned_ms)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
