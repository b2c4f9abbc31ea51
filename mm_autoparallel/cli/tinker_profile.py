"""`tinker --mode profile`: the blocks of a launch script's model, measured here or traced, as a folder of Tinker's."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.profile import this_site
from mm_autoparallel.errors import JobError
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.reports.terminal import say, warn, writing

if TYPE_CHECKING:
    from mm_autoparallel.integrations.framework import LiveModels
    from mm_autoparallel.integrations.tinker.profiles import Config
    from mm_autoparallel.model.job.cluster import Device
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.profilers.subject import Subject

MOST_SAMPLES = 65536
MOST_DEVICES = 1024
"""Of a micro-batch, as Tinker has it, and devices of a node, more than any has."""
_NODES_TRACED = 2
"""So that bandwidth between nodes is written too; measured is one node."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What Tinker does not know: where the model's sizes are, and how to do without devices."""
    group = parser.add_argument_group("with profile and all")
    group.add_argument(
        "--traced", action="store_true", help="trace blocks and price them for --device; nothing is measured"
    )
    group.add_argument("--device", metavar="NAME", help="with --traced: the device, by its name in the catalog")
    group.add_argument(
        "--model-config", type=Path, metavar="CONFIG.json", help="the model's own file, where flags do not say it"
    )
    group.add_argument("--vocab-size", type=count, metavar="N", help="tokens, where the tokenizer alone says it")


def profile(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> Path:
    """Measure or trace what is missing in the store, and write the folder; its path.

    Raises JobError where script, options or sizes are wrong, RankFailure or BackendError where a run failed; what was
    measured before is kept in the store, and the next run continues there.
    """
    from mm_autoparallel.integrations.export import write_files
    from mm_autoparallel.integrations.tinker.written_profiles import Named, format_folder, list_configs

    for name, most in (("max_mbs", MOST_SAMPLES), ("max_npu", MOST_DEVICES)):
        if not 1 <= settings[name] <= most:
            raise JobError(f"--{name} is {settings[name]}; a whole number of 1 to {most} is expected")
    tensor = _read_sizes(settings["prof_tp"], "prof_tp", range(1, MOST_DEVICES + 1))
    sequence = _read_sizes(settings["prof_sp"], "prof_sp", range(2))
    when = time.strftime("%y%m%d-%H%M%S")
    script = str(Path(settings["pretrain_script_path"]).resolve())  # which a search elsewhere reads
    said = {"pretrain_script_path": script, "version": settings["version"], "task_id": settings["task_id"]}
    more = {**said, "task_time": time.strftime("%Y-%m-%d %H:%M:%S"), "command": _command()}
    source = "traced" if arguments.traced else "measured"
    words = (settings["model_name"], settings["model_size"], settings["task_id"] or "", when, source)
    training, device = _read_training(arguments, settings), _find_device(arguments)
    named = Named(*words, more, training.is_fp16)
    _check_environment(arguments)
    device = _stored_device() if device is None else device
    job = training.job(device, settings["max_npu"], _NODES_TRACED if arguments.traced else 1)
    configs, left_out = list_configs(job, tensor, sequence, settings["max_mbs"])
    warn((*training.notes, *left_out))
    say(f"{len(configs)} configurations of {training.title}, {source} on {device.name}")
    profiles = _trace(training, job, configs) if arguments.traced else _measure(training, job, configs)
    texts = format_folder(replace(job, profiles=profiles), configs, named, is_between_known=arguments.traced)
    folder = Path(settings["save_path"]) / named.folder
    with writing(folder):
        write_files({folder / name: text for name, text in texts.items()}, overwrite=False)
    return folder


def measure_rank(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """In a rank that `profile` has started: carry out its task."""
    from mm_autoparallel.hooks.measure import measure

    return measure(_read_training(arguments, settings).subject(), {}, STORE)


def _command() -> str:
    return shlex.join(["mm-autoparallel", *sys.argv[1:]])


def _read_sizes(text: str, name: str, allowed: range) -> list[int]:
    """Of a list such as 1,2,4. Raises JobError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 8 and int(word) in allowed for word in words):
        between = f"{allowed[0]} to {allowed[-1]}"
        raise JobError(f"--{name} is {text!r}; whole numbers of {between} with commas between them are expected")
    return sorted({*map(int, words)})


def _find_device(arguments: argparse.Namespace) -> Device | None:
    """What traced blocks are priced for; None where the devices of this machine are measured. Raises JobError."""
    from mm_autoparallel.model.job.devices import DEVICES
    from mm_autoparallel.validation import nearest

    if arguments.traced and arguments.device is None:
        raise JobError(
            f"--traced needs --device NAME, the device that blocks are priced for; known are {', '.join(DEVICES)}"
        )
    if not arguments.traced and arguments.device is not None:
        raise JobError(
            "--device names what traced blocks are priced for; give --traced with it, or leave it out to measure on "
            "the devices of this machine"
        )
    if arguments.traced and arguments.device not in DEVICES:
        raise JobError(
            f"--device {arguments.device}: no such device{nearest(arguments.device, list(DEVICES))}; known are "
            f"{', '.join(DEVICES)}"
        )
    return DEVICES[arguments.device] if arguments.traced else None


def _stored_device() -> Device:
    from mm_autoparallel.hooks.stored_device import stored_device

    return stored_device(STORE)


def _check_environment(arguments: argparse.Namespace) -> None:
    """Raises JobError where PyTorch is missing, or too old to trace."""
    if find_spec("torch") is None:
        raise JobError("blocks are built with PyTorch; install it with `pip install mm-autoparallel[torch]`")
    from mm_autoparallel.profilers import load_torch

    load_torch()
    if arguments.traced and find_spec("torch.distributed._tools.fake_collectives") is None:
        raise JobError("--traced needs PyTorch 2.7 or newer, and this environment has an older one")


@dataclass(frozen=True)
class _Training:
    """What a launch script trains. document: the config.json of its sizes, read from `path` or made of its flags.
    is_fp16: in this 16-bit type, which is measured as bf16."""

    path: Path
    document: Mapping[str, Any]
    workload: Mapping[str, object]
    notes: tuple[str, ...]
    is_fp16: bool

    @property
    def title(self) -> str:
        """Whose code is measured."""
        return self._live().describe_code(self.document)

    def _live(self) -> LiveModels:
        from mm_autoparallel.integrations.catalog import live_models_of

        return live_models_of(self.document, str(self.path))

    def job(self, device: Device, devices_per_node: int, num_nodes: int) -> Job:
        """A step as large as any that is measured. Raises JobError."""
        from mm_autoparallel.integrations.tinker.written_profiles import BATCHES
        from mm_autoparallel.model.readers.job_file import parse_job
        from mm_autoparallel.model.readers.model_file import parse_foreign_model

        batch = {"global_batch_size": BATCHES[-1] * devices_per_node, "sequence_parallel": True}
        document = {
            "model": parse_foreign_model(self.document, self.path).model_dump(mode="json"),
            "cluster": {
                "num_nodes": num_nodes,
                "devices_per_node": devices_per_node,
                "device": device.model_dump(mode="json"),
            },
            "workload": {**self.workload, **batch},
        }
        return parse_job(document, self.path)

    def subject(self) -> Subject:
        """How the model is built and stepped."""
        from mm_autoparallel.model.job.workload import Workload
        from mm_autoparallel.model.readers.model_file import parse_foreign_model

        workload = Workload.model_validate({**self.workload})
        return self.subject_for(parse_foreign_model(self.document, self.path), workload)

    def subject_for(self, model: Any, workload: Any) -> Subject:
        """The same in the precision of `workload`."""
        return self._live().make_subject(self.document, model, workload, self.path)


def _read_training(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> _Training:
    """Raises JobError where the script, or the file of its model, says no decoder that is built here."""
    from mm_autoparallel.files import read_document
    from mm_autoparallel.integrations.catalog import find_launch, is_built_live
    from mm_autoparallel.integrations.described import Given
    from mm_autoparallel.integrations.huggingface.written import write_config
    from mm_autoparallel.integrations.launch_script import read_launch_script
    from mm_autoparallel.model.job.model import Model

    path, config = Path(settings["pretrain_script_path"]), arguments.model_config
    described = find_launch(path).describe(path, Given(config, vocab_size=arguments.vocab_size))
    is_fp16 = read_launch_script(path).has_flag("--fp16")
    if isinstance(described.model, Model):
        document = write_config(described.model, path, int(str(described.workload["seq_length"])))
        return _Training(path, document, described.workload, described.notes, is_fp16)
    document = read_document(described.model, "model file")
    if not is_built_live(document, f"model file {described.model}"):
        raise JobError(f"model file {described.model}: it is no Hugging Face config.json, of which blocks are measured")
    return _Training(described.model, document, described.workload, described.notes, is_fp16)


def _measure(training: _Training, job: Job, configs: Sequence[Config]) -> tuple[Path, ...]:
    """Where the profiles are that the job's costs come from, those measured that were missing."""
    from mm_autoparallel.hooks.profiling import profile_missing, profile_paths
    from mm_autoparallel.hooks.task import Division

    training.subject_for(job.model, job.workload)  # refuses what cannot be built before ranks are started
    divisions = [Division(tp=tp, mbs=mbs) for tp, mbs in sorted({(each.tp, each.mbs) for each in configs})]
    if not profile_missing(job, divisions, this_site(STORE)):
        say(f"everything was measured before, in {STORE}")
    carried = [f"EP {', '.join(map(str, found))}"] if (found := sorted({each.ep for each in configs} - {1})) else []
    carried += ["TP without sequence parallelism"] if any(each.tp > 1 and not each.sp for each in configs) else []
    if carried:
        say(f"not measured, but carried over by the ratio of analytic costs: {'; '.join(carried)}")
    return profile_paths(job, STORE)


def _trace(training: _Training, job: Job, configs: Sequence[Config]) -> tuple[Path, ...]:
    """The folder of the traces that the job's costs come from, those traced that were missing."""
    from mm_autoparallel.model.profiles.traced import trace_folder
    from mm_autoparallel.profilers.trace.run import Configuration, trace

    folder = trace_folder(STORE, job.model)
    divisions = sorted({(each.tp, each.mbs, each.sp) for each in configs})
    trace(
        lambda workload: training.subject_for(job.model, workload),
        job,
        [
            Configuration(tp, mbs, job.workload.model_copy(update={"sequence_parallel": bool(sp)}))
            for tp, mbs, sp in divisions
        ],
        folder,
        _command(),
        training.title,
        recompute=False,
        on_progress=say,
    )
    return (folder,)


def is_rank() -> bool:
    """Whether this process is a rank that `profile` has started."""
    from mm_autoparallel.profilers.launch import TASK

    return TASK in os.environ
