"""`profile JOB`: measure what planning a job needs, on the devices of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, fraction
from mm_autoparallel.cli.output import print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.reports.terminal import say, warn

if TYPE_CHECKING:
    from mm_autoparallel.hooks.runs import Site
    from mm_autoparallel.hooks.task import Division
    from mm_autoparallel.model.job.job import Job

HELP = "measure the blocks of a job's model on this machine"
DESCRIPTION = (
    "Build the model of JOB, whose `model` must be a Hugging Face config.json, with random weights and a few layers, "
    "measure its blocks at every TP and MBS that the job's search space needs, and keep them under DIR/DEVICE/MODEL. "
    "A run that was ended continues where it was."
)
_ALONE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "npu"), help="what to measure on (default: an accelerator if there is one)"
    )
    parser.add_argument("--out", type=Path, default=STORE, metavar="DIR", help="the store (default: %(default)s)")
    parser.add_argument(
        "--seq-lengths",
        type=count,
        nargs="+",
        metavar="N",
        help="lengths of samples (default: the job's)",
    )
    parser.add_argument("--tp", type=count, nargs="+", metavar="N", help="only these tensor parallel sizes")
    parser.add_argument(
        "--host-constants",
        action="store_true",
        help="measure only what this host takes to launch a layer, and write it as a calibration",
    )
    parser.add_argument("--mbs", type=count, nargs="+", metavar="N", help="only these micro-batch sizes")
    parser.add_argument(
        "--operators",
        action="store_true",
        help="measure only single operators of the job's traces in DIR that DIR/operators.sqlite lacks, each once",
    )
    parser.add_argument(
        "--coverage",
        type=fraction,
        metavar="F",
        help="with --operators: measure what traced configurations lack whose time is covered to less than this "
        "(default: 0.3)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing. In a rank that a run of this verb has started: carry out its task."""
    from mm_autoparallel.profilers.launch import TASK

    if find_spec("torch") is None:
        raise JobError("`profile` needs PyTorch; install it with `pip install mm-autoparallel[torch]`")
    if TASK in os.environ:
        return _measure(arguments)
    _choose_device(arguments.device)
    from mm_autoparallel.hooks.profiling import describe_carried, list_divisions, profile_missing
    from mm_autoparallel.hooks.stored_device import stored_device
    from mm_autoparallel.integrations.catalog import live_models_of
    from mm_autoparallel.model.profiles.store import profile_folder

    if arguments.operators or arguments.coverage is not None:
        return _profile_operators(arguments)
    job, document, path = read_huggingface_job(arguments.job)
    if arguments.host_constants:
        from mm_autoparallel.cli.profile_host import profile_host

        return profile_host(arguments, job, document, path)
    live = live_models_of(document, f"model file {path}")
    live.make_subject(document, job.model, job.workload, path)  # refuses what cannot be built before ranks are started
    device = stored_device(arguments.out)
    if device.name != job.cluster.device.name:
        warn([f"the job's devices are {job.cluster.device.name}, and what is measured here holds for {device.name}"])
    cluster = job.cluster.model_copy(update={"device": device})
    bare = job.model.model_copy(update={"adapters": None})  # they are carried over from the model without
    job = replace(job, model=bare, cluster=cluster, profiles=())
    if carried := describe_carried(job):
        warn([carried])
    divisions = [one for one in list_divisions(job) if _wanted(one, arguments)]
    if not divisions:
        raise JobError(
            f"job file {arguments.job}: none of its lawful strategies has a TP of {arguments.tp or 'any'} and an MBS "
            f"of {arguments.mbs or 'any'}; its divisions are {_tell(list_divisions(job))}"
        )
    site = this_site(arguments.out)
    measured = False
    for seq_length in arguments.seq_lengths or [job.workload.seq_length]:
        workload = live.scale_workload(document, job.workload, seq_length)
        measured |= profile_missing(replace(job, workload=workload), divisions, site)
    folder = profile_folder(arguments.out, device.name, job.model)
    say(f"{'measured' if measured else 'everything was measured before'}: {_tell(divisions)}")
    print_line(str(folder))
    return 0


def this_site(root: Path) -> Site:
    """Ranks are this command, started again on this machine's devices; what they measure lies in `root`."""
    from mm_autoparallel.hooks.runs import Site
    from mm_autoparallel.profilers.device import count_devices, find_device_type

    return Site(
        program=(sys.executable, *sys.orig_argv[1:]),
        processes_per_node=count_devices(),
        on_cpu=find_device_type() == "cpu",
        root=root,
    )


def _profile_operators(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.cli.profile_operators import profile_operators
    from mm_autoparallel.model.readers.job_file import read_job

    if not arguments.operators:
        raise JobError("--coverage says which operators to measure; give --operators with it")
    if arguments.host_constants:
        raise JobError("--operators and --host-constants each measure one thing; give one of them")
    return profile_operators(arguments, read_job(arguments.job))


def _measure(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.hooks.measure import measure
    from mm_autoparallel.integrations.catalog import live_models_of

    job, document, path = read_huggingface_job(arguments.job)
    live = live_models_of(document, f"model file {path}")
    return measure(live.make_subject(document, job.model, job.workload, path), {}, arguments.out)


def read_huggingface_job(job_path: Path, changes: Mapping[str, Any] | None = None) -> tuple[Job, dict[str, Any], Path]:
    """The job, its config.json, and where that lies. changes: other values of keys of the job file.

    Raises JobError where its model is no such file.
    """
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.files import read_document
    from mm_autoparallel.integrations.catalog import is_built_live

    job = read_job(job_path, changes)
    model = read_document(job_path, "job file").get("model")
    path = job_path.parent / model if isinstance(model, str) else job_path
    document = read_document(path, "model file") if isinstance(model, str) else dict(model or {})
    if not is_built_live(document, f"model file {path}"):
        raise JobError(
            f"job file {job_path}: its model ({path}) is no Hugging Face config.json, and only of such one is a "
            "model built here; trace your own code with `trace --model`, or profile it from its pretrain script "
            "(mm_autoparallel.hooks)"
        )
    return job, document, path


def _choose_device(asked: str | None) -> None:
    """Hides accelerators where the CPU is asked for. Raises JobError where the one that is asked for is not there."""
    if asked == "cpu":
        os.environ.update(dict.fromkeys(_ALONE.values(), ""))
    from mm_autoparallel.profilers import load_torch

    load_torch()
    from mm_autoparallel.profilers.device import find_device_type

    found = find_device_type()
    if asked is not None and found != asked:
        raise JobError(
            f"--device is {asked}, and PyTorch finds {found} here; give --device {found}, or mend the driver"
        )


def _wanted(division: Division, arguments: argparse.Namespace) -> bool:
    return all(
        limit is None or size in limit for size, limit in ((division.tp, arguments.tp), (division.mbs, arguments.mbs))
    )


def _tell(divisions: Any) -> str:
    return ", ".join(f"TP {one.tp} MBS {one.mbs}" for one in divisions)
