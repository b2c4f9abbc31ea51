"""Reads this project's own table of measurements: for `validate`, and for `calibrate` of what one measured oneself.

A row names a model (models.py), or a model file beside the table, or `gpt` or `llama` with its sizes in columns of its
own; a device of the catalog; a strategy; and any key of a job's workload under its own name. Layers lie evenly over
stages and chunks, or as `layers_per_stage` says (`10;11;11`, one number a stage and chunk, chunk after chunk).
measured_bytes: peak allocated bytes of the fullest device, or of stages (`0:71e9;3:64e9`); first_step: told after one
step. node_bytes_per_s, network_bytes_per_s: what one device sends one way within its node, and beyond. precision: one
of job/precision.py, or fp16; in fp16 Megatron's stacks keep gradients of two bytes (training/arguments.py forces fp32
ones with --bf16 alone). note: may end with whose kernels ran (`…; kernel torch`), by which rows of one job are told
apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.build import build_job, lay_layers, read_peaks
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.cluster_columns import NETWORK, list_levels, precision_of
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.provenance import find_software, noted_facts, split_modules, stated
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row
from mm_autoparallel.measurements.text_models import llama_model
from mm_autoparallel.model.job.precision import PRECISIONS
from mm_autoparallel.model.job.stacks import facts_of
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import ContextParallel, Workload
from mm_autoparallel.model.readers.model_file import read_model

REQUIRED = "model device global_batch_size seq_length pp tp dp mbs"
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "ffn_size", "num_kv_groups")
_NOT_COLUMNS = {
    "encoder_tokens_per_sample",
    "facts",
    "global_batch_size",
    "seq_length",
    "micro_batch_scale",
    "precision",
    "recompute_operators",
    "samples",
    "selective_operators",
}
_WORKLOAD = [name for name in Workload.model_fields if name not in _NOT_COLUMNS]
OPTIONAL = (
    "name cp ep etp vpp zero reshard shard cp_kind optimizer_offload schedule recompute layers_per_stage "
    "devices_per_node precision software measured_ms measured_bytes first_step out_of_memory source note "
    f"{' '.join(NETWORK)} {' '.join(_SIZES)} {' '.join(_WORKLOAD)}"
)


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=row.count("dp"),
        mbs=row.count("mbs"),
        cp=row.count("cp", 1),
        ep=row.count("ep", 1),
        vpp=row.count("vpp", 1),
        etp=row.count("etp", 0, least=0),
        zero=row.count("zero", 1, least=0),
        schedule=row.cells.get("schedule", ""),
        reshard=row.flag("reshard", True),
        shard=row.count("shard", 0, least=0),
        cp_kind=_cp_kind(row),
        optimizer_offload=row.flag("optimizer_offload", False),
    )
    measured_ms, measured_bytes = row.measurement("measured_ms"), read_peaks(row, strategy.pp)
    out_of_memory = row.flag("out_of_memory") if row.has("out_of_memory") else None
    recompute_all, operators = recompute_of(row.text("recompute", "none"))
    device, per_node = find_device(row.text("device")), row.count("devices_per_node", DEVICES_PER_NODE)
    software = find_software(row.text("software", "unknown"), row.text("source", ""))
    facts = noted_facts(row.text("note", ""), software, row.text("recompute", "none"), row.text("source", ""))
    job = build_job(
        row,
        _model(row),
        device,
        strategy.world_size,
        _precision_defaults(row)
        | {key: _typed(row.text(key)) for key in _WORKLOAD if row.has(key)}
        | {
            "global_batch_size": row.count("global_batch_size"),
            "seq_length": row.count("seq_length"),
            "recompute_operators": operators,
            **stated(facts),
        },
        devices_per_node=per_node,
        **list_levels(row, device, strategy.world_size, per_node, strategy.tp),
    )
    layers = _layers_per_stage(row, strategy, job.model.text.layers.num_layers)
    if layers is None and facts_of(software).split == "modules" and strategy.vpp == 1:
        layers = split_modules(job.model.text.layers.num_layers, strategy.pp)
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=row.text("name", f"{row.text('model')} PP{strategy.pp} TP{strategy.tp} DP{strategy.dp} MBS{strategy.mbs}"),
        job=job,
        plan=lay_layers(job, strategy, recompute_all, layers=layers),
        software=software,
        measured_ms=None if out_of_memory else measured_ms,
        measured_bytes=None if out_of_memory else measured_bytes,
        out_of_memory=out_of_memory,
        source=row.text("source", row.path.name),
        content=row.cells,
        kernels=_kernels(row),
        first_step=row.flag("first_step", False),
    )


def _precision_defaults(row: Row) -> dict[str, float | str]:
    """What a precision changes in a workload that says nothing else."""
    if row.text("precision", "bf16") in PRECISIONS:
        return {"precision": row.text("precision", "bf16")}
    of_megatron = row.text("stack", "megatron-te").startswith("megatron")
    return {"gradient_bytes": 2.0} if precision_of(row) == "fp16" and of_megatron else {}


def _cp_kind(row: Row) -> ContextParallel | Literal[""]:
    """The cell, which must be one of the kinds; nothing where it is empty. Raises TableError."""
    text = row.text("cp_kind", " ").strip()
    kinds: tuple[ContextParallel, ...] = get_args(ContextParallel)
    if text and text not in kinds:
        raise row.error("cp_kind", f"{text!r} is no kind of context parallelism; known are {', '.join(kinds)}")
    return next((kind for kind in kinds if kind == text), "")


def _kernels(row: Row) -> str:
    """Whose kernels ran, which the column `note` may end with: `…; kernel torch`."""
    found = re.search(r"\bkernel (.{1,80})$", row.text("note", " "))
    return found[1].strip() if found else ""


def _model(row: Row) -> Mapping[str, Any]:
    """The inline model of a name, of a file beside the table, or of an architecture and its sizes."""
    name = row.text("model")
    if name in ("gpt", "llama"):
        sizes = {size: row.count(size) for size in ("num_layers", "hidden_size", "num_heads", "vocab_size")}
        if name == "gpt":
            return gpt_model(
                row.text("name", name),
                sizes["hidden_size"],
                sizes["num_heads"],
                sizes["num_layers"],
                row.count("seq_length"),
                sizes["vocab_size"],
            )
        groups = row.count("num_kv_groups", sizes["num_heads"])
        model = llama_model(
            sizes["num_layers"],
            sizes["hidden_size"],
            row.count("ffn_size"),
            sizes["num_heads"],
            groups,
            sizes["vocab_size"],
        )
        return {"name": row.text("name", name), **model}
    for size in _SIZES[1:]:
        if row.has(size):
            raise row.error(
                size, f"the model is {name!r}, which has its sizes; only gpt and llama take them from columns"
            )
    num_layers = row.count("num_layers") if row.has("num_layers") else None
    path = row.path.parent / name
    if not name.endswith(".json"):
        return find_model(name, num_layers)
    if num_layers is not None:
        raise row.error("num_layers", f"the model file {name} has its layers; leave the cell empty")
    try:
        return read_model(path).model_dump(mode="json")
    except JobError as failure:
        raise row.error("model", str(failure)) from None


def _layers_per_stage(row: Row, strategy: Strategy, num_layers: int) -> list[int] | None:
    """The cell, which must have a number for each stage and chunk; None where it is empty. Raises TableError."""
    if not row.has("layers_per_stage"):
        return None
    text, num_chunks = row.text("layers_per_stage"), strategy.pp * strategy.vpp
    parts = text.split(";")
    if not all(re.fullmatch("[0-9]{1,9}", part.strip()) for part in parts):
        raise row.error("layers_per_stage", f"{text!r} is no list of whole numbers such as `10;11;11`")
    layers = [int(part) for part in parts]
    if len(layers) != num_chunks or sum(layers) != num_layers:
        raise row.error(
            "layers_per_stage",
            f"{len(layers)} numbers that make {sum(layers)}; PP {strategy.pp} x VPP {strategy.vpp} = {num_chunks} "
            f"numbers that make {num_layers} are expected",
        )
    return layers


def _typed(text: str) -> bool | int | float | str:
    """A cell as a job file would hold it, where no number is without end."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch("[+-]?[0-9]{1,18}", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
