"""One rank of a profile run of the toy model: `toy_child.py FOLDER ARRANGEMENT TP,MBS…`, started by torchrun."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch.distributed as dist
from toy_model import SUBJECT, make_job

from mm_autoparallel.profilers.clock import Effort
from mm_autoparallel.profilers.worker import Arrangement, Configuration, profile

EFFORT = Effort(budget_s=0.5, min_rounds=5, max_rounds=5, max_warm_up=2)
"""Little: what tests compare are bytes, and times of milliseconds with those of a formula."""


def main(folder: str, arrangement: Arrangement, *pairs: str) -> None:
    dist.init_process_group("gloo")
    configurations = [Configuration(*map(int, pair.split(","))) for pair in pairs]
    tell = functools.partial(print, flush=True)
    profile(SUBJECT, make_job(), configurations, Path(folder), "toy", arrangement, tell, EFFORT)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])  # type: ignore[arg-type]
