"""Stand-in: reads the command line, and makes process groups unless told not to."""

import argparse
import os

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.training import set_args


def initialize_megatron(extra_args_provider=None, args_defaults=None, skip_mpu_initialization=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("pipeline-model", "tensor-model", "context", "virtual-pipeline-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    for name in ("micro-batch-size", "global-batch-size", "seq-length", "train-iters", "eval-iters"):
        parser.add_argument(f"--{name}", type=int)
    switches = ("bf16", "use-distributed-optimizer", "sequence-parallel", "enable-dummy-optimizer", "use-flash-attn")
    for name in (*switches, "variable-seq-lengths"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    arguments = extra_args_provider(parser).parse_args()
    for key, value in (args_defaults or {}).items():
        setattr(arguments, key, value)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model_ranks = (
        arguments.pipeline_model_parallel_size * arguments.tensor_model_parallel_size * arguments.context_parallel_size
    )
    assert world % model_ranks == 0
    assert arguments.global_batch_size % (arguments.micro_batch_size * world // model_ranks) == 0
    set_args(arguments)
    if not skip_mpu_initialization:
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(
            arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
        )
