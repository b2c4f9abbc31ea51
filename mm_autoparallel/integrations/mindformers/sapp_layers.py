"""SAPP's layer file: a model's head, body and tail layers with their times and memory, for pipeline balance.

    {"name": "llama2_70b", "layers_description": [
      {"name": "LlamaEmbedding", "type": "HEAD", "time": 4.58, "nb_layer": 1, "memory_parameter": 1245.8},
      {"name": "LLamaDecodeLayer", "type": "BODY", "time": 1.31, "nb_layer": 80, "memory_parameter": 1947.3,
       "memory_activation": 440.3, "memory_select_rec": …, "memory_select_comm": …, "memory_both_comm_select": …,
       "memory_recompute": 16.2},
      {"name": "LlamaRMSNorm", "type": "TAIL", "time": 0.74, "nb_layer": 1, "memory_parameter": 3127.6}]}

`time` is forward and backward, a third and two thirds of it where forward_time and backward_time are not given. A
recomputed layer's backward is `recompute_time` (`select_rec_time`, …), or longer by a share of it (`recompute_coef`, …;
recompute_kinds.py has the defaults). Memory is in MB of 2^20 bytes; `stage_const_mem` is held by every stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.mindformers.memory_decomposition import NONE, LayerMemories
from mm_autoparallel.integrations.mindformers.recompute_kinds import BACKWARD_SHARE, BOTH, COMM, FULL, KINDS, SELECT
from mm_autoparallel.integrations.mindformers.sapp_init import Duration, Megabytes, SappInit
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.records import Few, Name, Noun, or_zero, within
from mm_autoparallel.units import MIB
from mm_autoparallel.validation import parse_record

WHAT = "SAPP layer file"
MODALITY = "text"

SignedMegabytes = Annotated[float, Field(strict=True, ge=-1e12, le=1e12, allow_inf_nan=False)]
"""Of 2^20 bytes; what is not a layer's may come out of measurements below 0."""

Share = Annotated[float, or_zero(1e6), within(1e-6, 1e6)]

_FORWARD_SHARE = 1 / 3
"""Of a layer's time (mindformers, toolkit/pipeline_balance/utils/layer.py, backward_default_ratio 2/3)."""

_MEMORY_KEYS = {
    NONE: "memory_activation",
    SELECT: "memory_select_rec",
    COMM: "memory_select_comm",
    BOTH: "memory_both_comm_select",
    FULL: "memory_recompute",
}
_TIME_KEYS = {
    SELECT: "select_rec_time",
    COMM: "select_comm_time",
    BOTH: "both_comm_select_time",
    FULL: "recompute_time",
}
_SHARE_KEYS = {
    SELECT: "select_rec_coef",
    COMM: "select_comm_coef",
    BOTH: "both_comm_select_coef",
    FULL: "recompute_coef",
}


class _Layer(Noun):
    name: Name
    type: Literal["HEAD", "BODY", "TAIL"]
    time: Duration
    nb_layer: Few
    model_name: str = ""
    memory_parameter: SignedMegabytes = 0.0
    memory_activation: Megabytes = 0.0
    memory_recompute: Megabytes | None = None
    memory_select_rec: Megabytes | None = None
    memory_select_comm: Megabytes | None = None
    memory_both_comm_select: Megabytes | None = None
    forward_time: Duration | None = None
    backward_time: Duration | None = None
    recompute_time: Duration | None = None
    select_rec_time: Duration | None = None
    select_comm_time: Duration | None = None
    both_comm_select_time: Duration | None = None
    backward_coef: Share | None = None
    recompute_coef: Share | None = None
    select_rec_coef: Share | None = None
    select_comm_coef: Share | None = None
    both_comm_select_coef: Share | None = None


class _File(Noun):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    name: str = ""
    stage_const_mem: SignedMegabytes = 0.0
    layers_description: list[_Layer]


@dataclass(frozen=True)
class SappLayers:
    """chain: head, body and tail, times in the file's unit. constant_bytes: of every stage. source: the file."""

    chain: tuple[ChainBlock, ...]
    constant_bytes: float
    source: str
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.chain if block.layer)


def read_sapp_layers(path: Path) -> SappLayers:
    """The layer file at `path`. Raises JobError naming the file, the layer and the key."""
    document = read_document(path, WHAT)
    if isinstance(document.get("layers_description"), list):
        document["layers_description"] = [
            {key.strip(): value for key, value in entry.items()} if isinstance(entry, Mapping) else entry
            for entry in document["layers_description"]  # pipeline balance writes "recompute_time " with a blank
        ]
    record = parse_record(_File, document, WHAT, path)
    bodies = [layer for layer in record.layers_description if layer.type == "BODY"]
    order = [("HEAD", "BODY", "TAIL").index(layer.type) for layer in record.layers_description]
    if not bodies or order != sorted(order):
        raise JobError(f"{WHAT} {path}: layers_description needs BODY layers, HEAD before and TAIL behind them")
    offered = {kind for kind in KINDS if all(getattr(body, _MEMORY_KEYS[kind]) is not None for body in bodies)}
    for body in bodies:
        partly = next((k for k in KINDS if getattr(body, _MEMORY_KEYS[k]) is not None and k not in offered), None)
        if partly is not None:
            raise JobError(f"{WHAT} {path}: {body.name} has {_MEMORY_KEYS[partly]}, and not every BODY layer has")
        if body.time <= 0 and not body.forward_time:
            raise JobError(f"{WHAT} {path}: {body.name} has time 0; a layer takes time")
    chain = tuple(_block(layer, [kind for kind in KINDS if kind in offered]) for layer in record.layers_description)
    return SappLayers(chain, record.stage_const_mem * MIB, str(path))


def layers_from_init(init: SappInit, memory: LayerMemories) -> dict[str, Any]:
    """The layer file that pipeline balance would make of an init file."""
    body = {"memory_parameter": memory.parameter_bytes / MIB}
    body |= {_MEMORY_KEYS[kind]: kept / MIB for kind, kept in memory.activation_bytes.items()}
    return {
        "name": init.path.stem,
        "stage_const_mem": memory.constant_bytes / MIB,
        "layers_description": [
            {
                "name": "HEAD",
                "type": "HEAD",
                "time": init.head_ms,
                "nb_layer": 1,
                "memory_parameter": memory.head_bytes / MIB,
            },
            {"name": "BODY", "type": "BODY", "time": init.body_ms, "nb_layer": init.num_layers, **body},
            {
                "name": "TAIL",
                "type": "TAIL",
                "time": init.tail_ms,
                "nb_layer": 1,
                "memory_parameter": memory.tail_bytes / MIB,
            },
        ],
    }


def format_layers(document: Mapping[str, Any]) -> str:
    """Its text."""
    return json.dumps(document, indent=4) + "\n"


def build_balance_problem(
    layers: SappLayers, num_stages: int, num_chunks: int, num_microbatches: int, memory_mb: float, schedule: str
) -> Problem:
    """The pipeline of `layers`. Raises JobError where it has no room for a layer in every chunk."""
    num_virtual = num_stages * num_chunks
    if num_virtual > layers.num_layers:
        raise JobError(
            f"{layers.source}: {num_stages} stages of {num_chunks} chunks need {num_virtual} layers, one each, and it "
            f"has {layers.num_layers}"
        )
    if num_chunks > 1 and (num_stages == 1 or num_microbatches % num_stages):
        raise JobError(
            f"{layers.source}: {num_chunks} chunks a stage (-i) need two or more stages and micro-batches (-mb) in "
            f"multiples of them; there are {num_stages} and {num_microbatches}"
        )
    find_schedule(schedule, num_chunks)
    hops = (0.0,) * (num_virtual - 1)
    return Problem(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        chain=layers.chain,
        memory_limit_bytes=(memory_mb * MIB,) * num_stages,
        stage_static_bytes=(layers.constant_bytes,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=hops,
        p2p_ms_per_byte=hops,
    )


def _block(layer: _Layer, kinds: list[str]) -> ChainBlock:
    forward = layer.forward_time if layer.forward_time is not None else _FORWARD_SHARE * layer.time
    backward = layer.backward_time if layer.backward_time is not None else (1 - _FORWARD_SHARE) * layer.time
    is_body = layer.type == "BODY"
    return ChainBlock(
        name=layer.name,
        modality=MODALITY,
        count=layer.nb_layer,
        forward_ms=forward,
        backward_ms=backward,
        static_bytes=layer.memory_parameter * MIB,
        activation_bytes=layer.memory_activation * MIB,
        modes=tuple(_mode(layer, kind, backward) for kind in kinds) if is_body else (),
        layer=is_body,
        pinned=None if is_body else "first" if layer.type == "HEAD" else "last",
        recompute_group="layers" if is_body else None,
    )


def _mode(layer: _Layer, kind: str, backward: float) -> Mode:
    whole = getattr(layer, _TIME_KEYS[kind])
    share = getattr(layer, _SHARE_KEYS[kind])
    extra = (
        (BACKWARD_SHARE[kind] if share is None else share) * backward if whole is None else max(0.0, whole - backward)
    )
    return Mode(kind, extra_backward_ms=extra, activation_bytes=getattr(layer, _MEMORY_KEYS[kind]) * MIB)
