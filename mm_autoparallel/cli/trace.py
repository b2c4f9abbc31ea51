"""`trace JOB`: what the job's real model keeps and runs, at full size, without a device."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.cli.profile import read_huggingface_job
from mm_autoparallel.errors import JobError
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.reports.terminal import say

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.job.traced_model import TracedModel
    from mm_autoparallel.model.job.workload import Workload
    from mm_autoparallel.model.profiles.traced import TracedEntry
    from mm_autoparallel.profilers.subject import Subject
    from mm_autoparallel.profilers.trace.run import Configuration

HELP = "trace what a job's real model keeps and runs, without a device"
DESCRIPTION = (
    "Build the model of JOB at full width with tensors that hold no numbers (its `model` is a Hugging Face "
    "config.json, or --model names code that builds it), and write to DIR/traced/MODEL what each kind of block keeps "
    "in memory and which operators and collectives it runs. Name that folder in the job's `profiles` to plan with it. "
    "A run that was ended continues where it was."
)
_WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument("--tp", type=count, nargs="+", metavar="N", help="tensor parallel sizes (default: the job's)")
    parser.add_argument("--mbs", type=count, nargs="+", metavar="N", help="micro-batch sizes (default: the job's)")
    parser.add_argument(
        "--seq-lengths", type=count, nargs="+", metavar="N", help="lengths of samples (default: the job's)"
    )
    parser.add_argument(
        "--attention", choices=("flash", "unfused"), nargs="+", help="attention kernels (default: the job's)"
    )
    parser.add_argument("--dtype", choices=tuple(_WEIGHT_BYTES), nargs="+", help="of weights (default: the job's)")
    parser.add_argument(
        "--recompute",
        choices=("none", "full"),
        nargs="+",
        default=("none", "full"),
        help="layers as they are, and recomputed whole (default: both)",
    )
    parser.add_argument(
        "--model",
        metavar="CODE",
        help="what to build where the job's model is no config.json: MODULE:NAME of a Subject or of a function that "
        "gives one, or a config.json of the same sizes",
    )
    parser.add_argument("--out", type=Path, default=STORE, metavar="DIR", help="the store (default: %(default)s)")
    add_set_argument(parser)
    parser.add_argument("--json", action="store_true", help="print what was traced as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Trace what is missing, and tell where it lies."""
    from mm_autoparallel.profilers import load_torch

    if find_spec("torch") is None:
        raise JobError("`trace` needs PyTorch; install it with `pip install mm-autoparallel[torch]`")
    load_torch()
    if find_spec("torch.distributed._tools.fake_collectives") is None:
        raise JobError("`trace` needs PyTorch 2.7 or newer, and this environment has an older one; trace in another")
    from mm_autoparallel.model.job.traced_model import TracedModel
    from mm_autoparallel.model.profiles.traced import read_trace, trace_folder
    from mm_autoparallel.profilers.trace.run import trace

    if arguments.model is None:
        job, document, path = read_huggingface_job(arguments.job, parse_changes(arguments.set))
        if isinstance(job.model, TracedModel):
            return _trace_undescribed(arguments, job, job.model, document, path)
    job, code = _find_code(arguments)
    configurations = _list_configurations(arguments, job, code.rescale)
    folder = trace_folder(arguments.out, job.model)
    paths = trace(
        code.make_subject,
        job,
        configurations,
        folder,
        shlex.join(["mm-autoparallel", *sys.argv[1:]]),
        code.implementation,
        recompute="full" in arguments.recompute,
        on_progress=say,
    )
    _note_operators(arguments.out, paths)
    if not arguments.json:
        print_line(str(folder))
        return 0
    files = [{"path": str(path), "entries": [_describe(entry) for entry in read_trace(path).entries]} for path in paths]
    print_document({"folder": str(folder), "implementation": code.implementation, "files": files})
    return 0


def _trace_undescribed(
    arguments: argparse.Namespace, job: Job, model: TracedModel, document: dict[str, Any], path: Path
) -> int:
    """Traces of a model that no reader knows, and beside their folder its file, which is planned without torch."""
    from mm_autoparallel.files import write_text_atomically
    from mm_autoparallel.model.profiles.traced import read_trace, trace_folder
    from mm_autoparallel.profilers.trace.undescribed import Undescribed

    if arguments.tp and list(arguments.tp) != [1]:
        raise JobError(f"--tp is {arguments.tp}; the layers of {model.name} are traced whole, with TP 1 alone")
    folder, command = trace_folder(arguments.out, model), shlex.join(["mm-autoparallel", *sys.argv[1:]])
    paths = []
    for workload in _list_workloads(arguments, job, _rescale):
        found = Undescribed(document, path, workload, model.name, model.frozen)
        for mbs in arguments.mbs or job.search.mbs or (1,):
            recompute = "full" in arguments.recompute
            paths.append(found.write_traces(folder, mbs, workload, command, recompute))
            say(f"MBS {mbs}, {workload.seq_length} tokens")
    _note_operators(arguments.out, paths)
    file = folder.parent / f"{folder.name}.json"
    write_text_atomically(file, json.dumps(model.document(), indent=1) + "\n")
    if not arguments.json:
        print_line(str(file))
        return 0
    files = [{"path": str(path), "entries": [_describe(entry) for entry in read_trace(path).entries]} for path in paths]
    print_document({"folder": str(folder), "implementation": f"transformers {model.class_name}", "files": files})
    return 0


def _note_operators(store: Path, paths: Sequence[Path]) -> None:
    """Tell the store's operator base what ran, so that it can be timed."""
    from mm_autoparallel.model.profiles.operators.base import OperatorBase, base_path
    from mm_autoparallel.model.profiles.traced import list_forms, read_trace

    with OperatorBase.open_to_add(base_path(store)) as base:
        for path in paths:
            base.note(list_forms(read_trace(path).entries))


@dataclass(frozen=True)
class _Code:
    """What builds the model: the subject for a workload, whose code that is, and a workload's samples rescaled."""

    make_subject: Callable[[Workload], Subject]
    implementation: str
    rescale: Callable[[Workload, int], Workload]


def _find_code(arguments: argparse.Namespace) -> tuple[Job, _Code]:
    """Raises JobError where the job's model cannot be built."""
    if arguments.model is None:
        job, document, path = read_huggingface_job(arguments.job, parse_changes(arguments.set))
        return job, _huggingface_code(job, document, path)
    from mm_autoparallel.api.jobs import read_job

    job = read_job(arguments.job, parse_changes(arguments.set))
    if arguments.model.endswith(".json"):
        path = Path(arguments.model)
        return job, _huggingface_code(job, _read_config(job, path), path)
    from mm_autoparallel.profilers.trace.factory import find_maker

    make_subject, follows = find_maker(arguments.model)
    if not follows and (arguments.dtype or arguments.attention):
        raise JobError(
            f"--model {arguments.model} takes no workload, so that its precision and attention are its own; leave "
            "--dtype and --attention out, or let it take one"
        )
    return job, _Code(make_subject, arguments.model, _rescale)


def _huggingface_code(job: Job, document: dict[str, Any], path: Path) -> _Code:
    from mm_autoparallel.integrations.catalog import live_models_of

    live = live_models_of(document, f"model file {path}")
    live.make_subject(document, job.model, job.workload, path)  # refuses what cannot be built before anything is traced
    return _Code(
        make_subject=lambda workload: live.make_subject(document, job.model, workload, path),
        implementation=live.describe_code(document),
        rescale=lambda workload, seq_length: live.scale_workload(document, workload, seq_length),
    )


def _read_config(job: Job, path: Path) -> dict[str, Any]:
    """A config.json that stands for the job's model. Raises JobError where it is of other sizes."""
    from mm_autoparallel.files import read_document
    from mm_autoparallel.integrations.catalog import is_built_live
    from mm_autoparallel.model.profiles.store import hash_model
    from mm_autoparallel.model.readers.model_file import read_model

    document = read_document(path, "model file")
    if not is_built_live(document, f"model file {path}"):
        raise JobError(f"--model {path} is no Hugging Face config.json; give one, or MODULE:NAME of code of your own")
    frozen = {encoder.name: encoder.freeze for encoder in job.model.encoders}
    frozen |= {f"{encoder.name}_projector": encoder.projector.freeze for encoder in job.model.encoders}
    found = read_model(path)
    if {modality.name for modality in found.modalities} == {modality.name for modality in job.model.modalities}:
        found = found.with_freeze(frozen | {"text": job.model.text.freeze})
    if hash_model(found) != hash_model(job.model):
        raise JobError(
            f"--model {path} has other sizes than the model {job.model.name} of job file {job.path}; give the "
            "config.json of that model"
        )
    return document


def _rescale(workload: Workload, seq_length: int) -> Workload:
    """Samples of another length, of which images and audio occupy the same part."""
    part = seq_length / workload.seq_length
    media = {"image_tokens_per_sample", "audio_tokens_per_sample"}
    tokens = {key: round(getattr(workload, key) * part) for key in media}
    return workload.model_copy(update={"seq_length": seq_length, **tokens})


def _list_configurations(
    arguments: argparse.Namespace, job: Job, rescale: Callable[[Workload, int], Workload]
) -> list[Configuration]:
    """Raises JobError where no lawful division of the job is among those that are asked for."""
    from mm_autoparallel.hooks.profiling import list_divisions
    from mm_autoparallel.profilers.trace.run import Configuration

    divisions = list_divisions(replace(job, profiles=()))
    wanted = [
        one
        for one in divisions
        if (not arguments.tp or one.tp in arguments.tp) and (not arguments.mbs or one.mbs in arguments.mbs)
    ]
    if not wanted:
        known = ", ".join(f"TP {one.tp} MBS {one.mbs}" for one in divisions)
        raise JobError(
            f"job file {arguments.job}: none of its lawful strategies has a TP of {arguments.tp or 'any'} and an MBS "
            f"of {arguments.mbs or 'any'}; its divisions are {known or 'none with CP 1'}"
        )
    return [
        Configuration(one.tp, one.mbs, workload)
        for workload in _list_workloads(arguments, job, rescale)
        for one in wanted
    ]


def _list_workloads(
    arguments: argparse.Namespace, job: Job, rescale: Callable[[Workload, int], Workload]
) -> list[Workload]:
    lengths: Sequence[int] = arguments.seq_lengths or [job.workload.seq_length]
    kernels: Sequence[str] = arguments.attention or [job.workload.attention]
    weights = [_WEIGHT_BYTES[name] for name in arguments.dtype or ()] or [job.workload.weight_bytes]
    return [
        rescale(job.workload, length).model_copy(update={"attention": attention, "weight_bytes": weight_bytes})
        for length in lengths
        for attention in kernels
        for weight_bytes in weights
    ]


def _describe(entry: TracedEntry) -> dict[str, Any]:
    """An entry with the sums of its operators in place of the operators."""
    described = entry.model_dump(mode="json", exclude={"operators"})
    sums: dict[str, dict[str, dict[str, int]]] = {}
    for one in entry.operators:
        found = sums.setdefault(one.phase, {}).setdefault(one.kind, {"num_calls": 0, "flops": 0, "moved_bytes": 0})
        found["num_calls"] += one.num_calls
        found["flops"] += one.num_calls * one.flops
        found["moved_bytes"] += one.num_calls * one.moved_bytes
    return described | {"operators": sums}
