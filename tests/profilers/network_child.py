"""One rank that measures the network: `network_child.py ROOT RANKS_PER_NODE`, started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.collectives import profile_network


def main(root: str, num_per_node: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        path = profile_network(
            Path(root), "python pretrain.py", torch.device("cpu"), int(num_per_node), sizes_bytes=(1 << 12, 1 << 18)
        )
        print(f"rank {dist.get_rank()}: {path}", flush=True)
    except ProfileError as failure:
        print(f"rank {dist.get_rank()} refused: {failure}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
