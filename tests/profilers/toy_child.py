"""One rank of a profile run of the toy model: `toy_child.py FOLDER ARRANGEMENT TP,MBS…`, started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from toy_model import SUBJECT, make_job

from mm_autoparallel.profilers.worker import Arrangement, Configuration, profile


def main(folder: str, arrangement: Arrangement, *pairs: str) -> None:
    dist.init_process_group("gloo")
    configurations = [Configuration(*map(int, pair.split(","))) for pair in pairs]
    profile(SUBJECT, make_job(), configurations, Path(folder), "toy", arrangement, lambda line: print(line, flush=True))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])  # type: ignore[arg-type]
