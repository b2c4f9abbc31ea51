"""Trace a list of configurations and write a file for each as soon as it is there; what is there already is skipped."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles import traced
from mm_autoparallel.profilers.blocks import LiveModel
from mm_autoparallel.profilers.device import software_versions
from mm_autoparallel.profilers.kinds import Kinds, check_parts, find_kinds, live_layout
from mm_autoparallel.profilers.layout import find_layout, layers_of
from mm_autoparallel.profilers.shard import fake_mesh
from mm_autoparallel.profilers.split import find_split
from mm_autoparallel.profilers.subject import Build, Subject
from mm_autoparallel.profilers.torch_releases import DeviceMesh
from mm_autoparallel.profilers.trace.fakes import build_fake, on_fakes
from mm_autoparallel.profilers.trace.tracer import NUM_LAYERS, trace_blocks

_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Configuration:
    """How one micro-batch of `mbs` samples of a workload is divided among `tp` ranks."""

    tp: int
    mbs: int
    workload: Workload

    @property
    def sequence_parallel(self) -> bool:
        """Where there is anything to divide, what the workload says."""
        return self.workload.sequence_parallel and self.tp > 1

    def __str__(self) -> str:
        divided = " with sequence parallel" if self.sequence_parallel else ""
        workload = self.workload
        precision = f"{workload.weight_bytes:g} bytes a weight, {workload.attention} attention"
        return f"TP {self.tp}{divided} MBS {self.mbs}, {workload.seq_length} tokens, {precision}"


def trace(
    make_subject: Callable[[Workload], Subject],
    job: Job,
    configurations: Sequence[Configuration],
    folder: Path,
    command: str,
    implementation: str,
    recompute: bool,
    on_progress: Callable[[str], None],
) -> tuple[Path, ...]:
    """Traces those of `configurations` that have no file in `folder` yet; the files of all of them.

    make_subject: the subject in the precision of a workload. command: what a person types to trace again.
    implementation: whose code the model is. recompute: trace layers that are recomputed as well. on_progress: told a
    line per configuration. Raises ProfileError where the model cannot be built, split or traced without numbers, where
    it does not fit the job, and where a file in `folder` is stale.
    """
    paths = []
    for one in configurations:
        path = traced.trace_path(folder, one.tp, one.mbs, one.sequence_parallel, one.workload)
        paths.append(path)
        origin = traced.trace_origin(job.model, one.workload, implementation, software_versions(), command)
        if traced.is_traced(path, origin, recompute):
            on_progress(f"{one}: traced before")
            continue
        entries = trace_configuration(make_subject(one.workload), job, one, recompute)
        _write(path, origin, entries)
        on_progress(f"{one}: {len(entries)} kinds of blocks")
    return tuple(paths)


def _write(path: Path, origin: traced.TraceOrigin, entries: Sequence[traced.TracedEntry]) -> None:
    # a class of transformers is there only after a model was built, and its version belongs to the trace
    traced.write_trace(path, origin.model_copy(update={"software": software_versions()}), entries)


def trace_configuration(
    subject: Subject, job: Job, configuration: Configuration, recompute: bool
) -> tuple[traced.TracedEntry, ...]:
    """An entry for each kind of the job's chain that the configuration's workload gives something to do.

    The default process group is used meanwhile, so there must be none. Raises ProfileError as `trace` does.
    """
    one = configuration
    if one.sequence_parallel and not subject.sequence_parallel:
        raise ProfileError(
            f"the job asks for sequence parallel at TP {one.tp} (workload.sequence_parallel), and this model's code "
            "does not divide sequences among tensor parallel ranks; set `sequence_parallel: false` in the job's "
            "workload, or trace with --tp 1"
        )
    job = replace(job, workload=one.workload)
    kinds = find_kinds(job, NUM_LAYERS, subject.lacks)
    with _open_mesh(one.tp) as mesh:
        model = build_fake(lambda: subject.build_model(Build(kinds.depth, _DEVICE, mesh, one.sequence_parallel)))
        _check_precision(model, one.workload)
        with on_fakes(model):
            live, step = _take_apart(subject, model, kinds, one)
            figures = trace_blocks(live, kinds, step, one.tp, recompute)
    entries = []
    for block in kinds.blocks:
        tokens = kinds.tokens[block.modality]
        entries.append(
            traced.TracedEntry(
                kind=block.kind,
                tp=one.tp,
                sequence_parallel=one.sequence_parallel,
                mbs=one.mbs,
                tokens=tokens.layer_tokens,
                spans=tokens.num_spans,
                **vars(figures[block.kind]),
            )
        )
    return tuple(entries)


def _check_precision(model: nn.Module, workload: Workload) -> None:
    """Raises ProfileError where most weights have not the bytes that the job says."""
    counts = Counter[int]()
    for parameter in model.parameters():
        counts[parameter.element_size()] += parameter.numel()
    found_bytes = counts.most_common(1)[0][0]
    if found_bytes != workload.weight_bytes:
        raise ProfileError(
            f"the job's workload has weight_bytes {workload.weight_bytes:g}, and build_model made most weights with "
            f"{found_bytes}; make both agree, or what is kept of each token is counted in the wrong type"
        )


def _take_apart(
    subject: Subject, model: nn.Module, kinds: Kinds, one: Configuration
) -> tuple[LiveModel, Callable[[], Tensor]]:
    def step() -> Tensor:
        return subject.forward_step(model, one.mbs, one.workload)

    layout = live_layout(kinds, find_layout(model, subject.layout))
    split = find_split(model, layout, step)
    layers = layers_of(model, layout)
    check_parts(kinds, split.parts, layers)
    return LiveModel(model, layout, split, layers, _DEVICE), step


@contextlib.contextmanager
def _open_mesh(tp: int) -> Iterator[DeviceMesh | None]:
    if tp == 1:
        yield None
        return
    with fake_mesh(tp, _DEVICE.type) as mesh:
        yield mesh
