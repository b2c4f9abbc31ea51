"""Traced records: what a block keeps, runs and sends by the code of the user's real model, made without a device.

Schema "mm-autoparallel/trace/1". One entry is one block kind under one division of the work; an operator is a row:

    {"schema": "mm-autoparallel/trace/1",
     "model": {"name": "qwen2vl-7b", "sha256": "…"}, "implementation": "transformers Qwen2VLForConditionalGeneration",
     "software": {"torch": "2.13.0"}, "date": "2025-11-21", "command": "mm-autoparallel trace job.yaml",
     "workload": {"seq_length": 8192, …, "weight_bytes": 2, "attention": "flash"},
     "entries": [{"kind": "text_layer", "tp": 2, "sequence_parallel": true, "mbs": 1, "tokens": 8192, "spans": 1,
                  "parameter_count": …, "activation_bytes": …, …,
                  "operators": [["forward", "mm", "matrix_product", [[8192, 3584], [3584, 1792]], "bf16", 1, …], …]}]}

The rows' columns are OPERATOR_COLUMNS, and where it was traced a last one with the forms of the calls, each with how
many of them there are (operators/form.py): what an operator base knows times of. Traces depend on no device; they
lie at

    <root>/traced/<model>-<hash>/tp2-cp1-mbs1-seq4096-image1024x1-sp.json        one configuration

A job whose `profiles` name `traced` takes those in the current folder's store, and those that are shipped (shipped.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_there, read_document
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.disk import check_writable, clear_strays, read_once, write_file
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.model.profiles.shipped import STORE, TRACED, list_traces, shipped_models
from mm_autoparallel.model.profiles.store import (
    TRACE_SCHEMA,
    ProfiledModel,
    ProfiledWorkload,
    file_name,
    hash_model,
    model_folder,
    profiled_workload,
    read_documents,
    stale_software,
    today,
)
from mm_autoparallel.records import Bytes, Count, Flag, Name, Noun, Number
from mm_autoparallel.validation import parse_record

Phase = Literal["forward", "backward_input", "backward_weight", "recompute"]
"""Of a micro-batch; recompute: what its backward runs more where the block is recomputed whole."""

OperatorKind = Literal["matrix_product", "attention", "memory_bound", "collective"]

OPERATOR_COLUMNS = ("phase", "name", "kind", "shapes", "dtype", "num_calls", "flops", "moved_bytes")

SHIPPED = "traced"
"""What a job's `profiles` names for the traces that are at hand without naming a folder."""

Shape = tuple[Number, ...]


class FormCalls(Noun):
    """Calls of one form; in a file the row [num_calls, form]."""

    num_calls: Count
    form: OperatorForm

    @model_validator(mode="before")
    @classmethod
    def _read_row(cls, row: Any) -> Any:
        return dict(zip(("num_calls", "form"), row, strict=True)) if isinstance(row, list) and len(row) == 2 else row

    @model_serializer
    def _write_row(self) -> list[Any]:
        return [self.num_calls, self.form.row]


class TracedOperator(Noun):
    """Alike calls of one operator on one rank. flops, moved_bytes: of one call.

    name: PyTorch's (`mm`), or of a collective its operation (`all_reduce`). shapes: of the tensors it takes. dtype: of
    what it gives. moved_bytes: operands and results, once each; of a collective those of the whole tensor, as
    profiles/collectives counts. forms: of the calls one by one; empty where an older trace does not say.
    """

    phase: Phase
    name: Name
    kind: OperatorKind
    shapes: tuple[Shape, ...]
    dtype: str
    num_calls: Count
    flops: Number
    moved_bytes: Number
    forms: tuple[FormCalls, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_row(cls, row: Any) -> Any:
        if not isinstance(row, list):
            return row
        if len(row) not in (len(OPERATOR_COLUMNS), len(OPERATOR_COLUMNS) + 1):
            columns = ", ".join(OPERATOR_COLUMNS)
            raise ValueError(f"an operator has the columns {columns} and perhaps forms, and this row has {len(row)}")
        return dict(zip((*OPERATOR_COLUMNS, "forms"), row))  # noqa: B905 - forms may be left out

    @model_serializer
    def _write_row(self) -> list[Any]:
        row = [getattr(self, name) for name in OPERATOR_COLUMNS]
        return [*row, [[calls.num_calls, calls.form.row] for calls in self.forms]] if self.forms else row


class TracedEntry(Noun):
    """One block of a kind on one rank, for one micro-batch; bytes as in BlockCost.

    tokens, spans: as in ProfileEntry. sequence_parallel: norms, residuals and boundaries are divided by tp. parameter_
    and gradient_bytes: as the model itself holds them. forward_ and backward_transient_bytes: the most that is alive in
    either pass beyond what stays. recompute_transient_bytes: the same of a backward that recomputes the block first,
    what it restores included; None where that was not traced.
    """

    kind: Name
    tp: Count
    sequence_parallel: Flag
    mbs: Count
    tokens: Count
    spans: Count = 1
    parameter_count: Number
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    activation_bytes: Bytes
    checkpoint_bytes: Bytes
    output_bytes: Bytes | None = None
    forward_transient_bytes: Bytes
    backward_transient_bytes: Bytes
    recompute_transient_bytes: Bytes | None = None
    operators: tuple[TracedOperator, ...]

    @property
    def transient_bytes(self) -> int:
        return max(self.forward_transient_bytes, self.backward_transient_bytes)

    def flops(self, phase: Phase, kind: OperatorKind) -> int:
        """FLOPs of all operators of a kind in a phase."""
        found = (one for one in self.operators if one.phase == phase and one.kind == kind)
        return sum(one.num_calls * one.flops for one in found)


class TraceOrigin(Noun):
    """How a trace came to be. implementation: whose code it was: package and class of the model.

    software: versions that decide what is kept. workload: in whose precision and of whose samples.
    """

    model: ProfiledModel
    implementation: Name
    software: dict[str, str]
    date: Name
    command: Annotated[str, Field(strict=True, min_length=1, max_length=10_000)]
    workload: ProfiledWorkload


class TracedFile(TraceOrigin):
    """A whole file of traces."""

    schema_name: Literal["mm-autoparallel/trace/1"] = Field(alias="schema")
    entries: Annotated[tuple[TracedEntry, ...], Field(min_length=1)]


def list_forms(entries: Iterable[TracedEntry]) -> list[OperatorForm]:
    """The forms of all operators of `entries`, each once, in their order."""
    found = {
        calls.form.digest: calls.form for entry in entries for operator in entry.operators for calls in operator.forms
    }
    return list(found.values())


def trace_origin(
    model: Model, workload: Workload, implementation: str, software: Mapping[str, str], command: str
) -> TraceOrigin:
    """The origin of what is traced today. command: what a person types to have it traced (again)."""
    return TraceOrigin(
        model=ProfiledModel(name=model.name, sha256=hash_model(model)),
        implementation=implementation,
        software=dict(software),
        date=today(),
        command=command,
        workload=profiled_workload(workload),
    )


def trace_folder(root: Path, model: Model) -> Path:
    """Where traces of `model` lie."""
    return model_folder(root / TRACED, model)


def trace_path(folder: Path, tp: int, mbs: int, sequence_parallel: bool, workload: Workload) -> Path:
    """The file of one configuration in the folder of its model."""
    plain = file_name(tp, 1, mbs, workload)
    return folder / (plain.replace(".json", "-sp.json") if sequence_parallel else plain)


def write_trace(path: Path, origin: TraceOrigin, entries: Iterable[TracedEntry]) -> None:
    """Writes one file, whole or not at all, an operator a line. Raises ProfileError where that is not possible."""
    document: dict[str, Any] = {"schema": TRACE_SCHEMA, **origin.model_dump(mode="json")}
    document["entries"] = [entry.model_dump(mode="json", exclude_none=True) for entry in entries]
    text = json.dumps(document, separators=(",", ":"))
    write_file(path, re.sub(r'(?=\{"kind":|\["(?:forward|backward_input|backward_weight|recompute)",)', "\n", text))


def read_trace(path: Path) -> TracedFile:
    """The traces at `path`, whatever their model. Raises ProfileError where it is missing or malformed."""
    return parse_record(TracedFile, read_document(path, "trace file", ProfileError), "trace file", path, ProfileError)


def is_traced(path: Path, now: TraceOrigin, recompute: bool) -> bool:
    """Whether `path` is there and holds for `now`, its recomputed form included where that is asked for.

    Clears away what killed runs left half-written. Raises ProfileError where it is stale or cannot be read, and where
    the folder could not be written.
    """
    clear_strays(path.parent)
    if not is_there(path):
        check_writable(path.parent)
        return False
    found = read_trace(path)
    versions = stale_software(found.software, now.software)
    stale = f"it was traced with {versions}" if versions else ""
    if not stale and found.model.sha256 != now.model.sha256:
        stale = f"it is of the model {found.model.name} ({found.model.sha256[:12]}…)"
    if not stale and found.implementation != now.implementation:
        stale = f"it is of {found.implementation}, and this is {now.implementation}"
    if stale:
        raise ProfileError(
            f"{stale}, so its figures may no longer hold; remove it and renew it with "
            f"`{now.command}`, or keep it and name another folder",
            where=f"trace file {path}",
        )
    return not recompute or any(entry.recompute_transient_bytes is not None for entry in found.entries)


def read_traces(paths: Sequence[Path], model: Model, workload: Workload) -> list[tuple[Path, TracedFile]]:
    """The traces among `paths`, files or folders, of which one may be SHIPPED (`list_traces`).

    A folder may hold traces of several precisions: those of others than `workload` has are left out. Raises
    ProfileError where one is malformed or of another model, and where there is none in this precision.
    """
    given = [path for path in paths if not is_shipped(path)]
    names = [(path, path) for path, document in read_documents(given) if document.get("schema") == TRACE_SCHEMA]
    if len(given) < len(paths):
        names += _find_shipped(model)
    traces = [(name, _check_model(name, read_once(path, read_trace), model)) for name, path in names]
    fitting = [item for item in traces if _computes_alike(item[1].workload, workload)]
    if traces and not fitting:
        path, trace = traces[0]
        raise ProfileError(
            f"it was traced with {trace.workload.weight_bytes:g} bytes a weight and "
            f"{trace.workload.attention} attention, and the job's workload has {workload.weight_bytes:g} and "
            f"{workload.attention}; trace that too (`mm-autoparallel trace JOB`), or leave it out of the job's "
            "`profiles`",
            where=f"trace file {path}",
        )
    return sorted(fitting, key=lambda item: item[1].workload != profiled_workload(workload))


def is_shipped(path: Path) -> bool:
    """Whether a path of a job's `profiles` means the traces that are at hand, and is no folder beside the job."""
    return path.name == SHIPPED and not is_there(path)


def _find_shipped(model: Model) -> list[tuple[Path, Path]]:
    """Name and path of those of models with the sizes of `model`. Raises ProfileError where there are none."""
    found = list_traces(hash_model(model)[:8])
    if not found:
        raise ProfileError(
            f"profiles: {SHIPPED} asks for the traces in {STORE / TRACED} here and for those that come with "
            f"mm-autoparallel, which are of {', '.join(shipped_models()) or 'none'}; there is none with the sizes and "
            f"frozen parts of {model.name} ({hash_model(model)[:8]}). Make them with `mm-autoparallel trace JOB`"
        )
    return found


def _check_model(path: Path, trace: TracedFile, model: Model) -> TracedFile:
    if trace.model.sha256 != hash_model(model):
        raise ProfileError(
            f"model.sha256 is {trace.model.sha256[:12]}… ({trace.model.name}) and the job's model "
            f"{model.name} has {hash_model(model)[:12]}…, so this is a trace of another model, or of other frozen "
            f"parts; renew it ({trace.command}), or leave it out of the job's `profiles`",
            where=f"trace file {path}",
        )
    return trace


def _computes_alike(traced: ProfiledWorkload, workload: Workload) -> bool:
    """Whether operators and what they keep have the same types; gradients and optimizer are counted apart."""
    return traced.weight_bytes == workload.weight_bytes and traced.attention == workload.attention
