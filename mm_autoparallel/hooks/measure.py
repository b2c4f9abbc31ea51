"""What a rank of a launched run does: carry out the task that its environment names, and end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.hooks.runs import PROGRESS_FILE
from mm_autoparallel.hooks.task import Task, read_task
from mm_autoparallel.profilers.launch import PEER_FAILED, TASK, report_error
from mm_autoparallel.reports.terminal import say

if TYPE_CHECKING:
    from mm_autoparallel.profilers.subject import Subject

LAST_TO_GO_S = 60.0
"""Assumed: a rank that fails has written down why and is gone long before, and torchrun ends the rest then."""


def measure(subject: Subject, layers: Mapping[str, str], store: Path) -> int:
    """Carry out the task on this rank; the exit code. layers: where the model keeps its layers, if a flag says so.
    store: the folder of the profiles, from this node's own flags.

    An error that the person can mend is left for the launcher, in words; any other ends this process as it is raised.
    A rank that ends only because another one failed lets that one go first.
    """
    from mm_autoparallel.profilers.lockstep import PeerFailed

    path = Path(os.environ[TASK])
    rank = int(os.environ["RANK"])
    try:
        _carry_out(read_task(path), _with_layers(subject, layers), store, path.parent)
    except PeerFailed as error:
        say(str(error))
        time.sleep(LAST_TO_GO_S)
        return PEER_FAILED
    except PlannerError as error:
        say(str(error))
        report_error(path.parent, rank, error)
        return error.exit_code
    return 0


def _with_layers(subject: Subject, layers: Mapping[str, str]) -> Subject:
    if not layers:
        return subject
    from mm_autoparallel.profilers.subject import Layout

    post = subject.layout.post if subject.layout else {}
    return replace(subject, layout=Layout(dict(layers), post))


def _carry_out(task: Task, subject: Subject, store: Path, folder: Path) -> None:
    import torch.distributed as dist

    from mm_autoparallel.model.profiles.operators.base import base_path
    from mm_autoparallel.model.profiles.store import profile_folder
    from mm_autoparallel.profilers.device import claim_device, device_backend, find_device_type

    device = claim_device(int(os.environ["LOCAL_RANK"]))
    job = task.read_job()
    dist.init_process_group(device_backend(find_device_type()))

    def tell(line: str) -> None:
        if os.environ["RANK"] == "0":
            with (folder / PROGRESS_FILE).open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")

    if task.network:
        from mm_autoparallel.profilers.collectives import profile_network

        profile_network(store, task.command, device, int(os.environ["LOCAL_WORLD_SIZE"]))
    if task.divisions:
        from mm_autoparallel.profilers.worker import profile

        profile(
            subject,
            job,
            task.divisions,
            profile_folder(store, job.cluster.device.name, job.model),
            task.command,
            task.arrangement,
            tell,
            operators=base_path(store),
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
