"""Reads step times in the form of vTrain's validation on one node and on many (arXiv:2312.12391): GPT on A100.

What the table leaves unsaid: Megatron-DeepSpeed in fp16 without ZeRO, gradients and their all-reduce in fp16
(DeepSpeed, runtime/engine.py, communication_data_type) after the last backward (runtime/pipe/engine.py,
_exec_reduce_grads), point-to-point messages divided among tensor parallel ranks (same file, is_pipe_partitioned), GPT's
dropouts and unfused attention, the vocabulary padded as Megatron does.
Of `interconnect` the bandwidth between nodes is a fact of their machine and counts, in bits a second of a whole node;
the one inside a node is a parameter of their simulator, and the catalog's NVLink counts.
"""

from __future__ import annotations

import re
from typing import Any

from mm_autoparallel.measurements.build import build_job, check_parameters, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.division_law import padded_vocab_size
from mm_autoparallel.model.job.strategy import Strategy

REQUIRED = (
    "n_gpus gbs mbs hidden heads layers seq tp dp pp iter_ms params_b gpu recompute vocab schedule interconnect "
    "software source"
)

_NETWORK = re.compile(r"\binter ([0-9]{1,9}(?:\.[0-9]{1,9})?) ?Gb/s")


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=row.count("dp"),
        mbs=row.count("mbs"),
        zero=0,
        schedule=row.text("schedule"),
    )
    measured_ms = row.positive("iter_ms")
    software = row.text("software")
    if software != "Megatron-DeepSpeed":
        raise Unrepresentable(f"the software {software!r} is not understood; Megatron-DeepSpeed is")
    vocab = row.leading_count("vocab")
    recompute_all, operators = recompute_of(row.text("recompute"))
    sizes = row.count("hidden"), row.count("heads"), row.count("layers")
    seq_length, num_devices = row.count("seq"), check_world(row, strategy, "n_gpus")
    device = find_device(row.text("gpu"))
    name = f"GPT {row.text('params_b')}B TP{strategy.tp} DP{strategy.dp} PP{strategy.pp} MBS{strategy.mbs}"
    job = build_job(
        row,
        gpt_model(name, *sizes, seq_length, padded_vocab_size(vocab, strategy.tp)),
        device,
        num_devices,
        {
            "global_batch_size": row.count("gbs"),
            "seq_length": seq_length,
            "sequence_parallel": False,
            "attention": "unfused",
            "hidden_dropout": True,
            "attention_dropout": True,
            "gradient_bytes": 2.0,
            "scatter_gather_p2p": True,
            "stack": "megatron-deepspeed",
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "recompute_operators": operators,
        },
        levels=_levels(row, device, num_devices, strategy.tp),
    )
    check_parameters(row, "params_b", job)
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=name,
        job=job,
        plan=lay_layers(job, strategy, recompute_all),
        software="megatron-deepspeed",
        measured_ms=measured_ms,
        measured_bytes=None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
    )


def _levels(row: Row, device: str, num_devices: int, tp: int) -> list[dict[str, Any]]:
    """The node as catalogued, and the network between nodes as the row has it."""
    found = _NETWORK.search(row.text("interconnect"))
    if found is None:
        raise Unrepresentable(
            f"the interconnect {row.text('interconnect')!r} is not understood; `inter N Gb/s`, of a node, is expected"
        )
    catalogued = DEVICES[device]
    node = catalogued.node_link.model_dump() | {
        "name": "node",
        "num_devices": min(num_devices, DEVICES_PER_NODE),
        "source": catalogued.sources["node_link"],
    }
    if num_devices <= DEVICES_PER_NODE:
        return [node]
    network = {
        "name": "cluster",
        "num_devices": num_devices,
        "bandwidth_bytes_per_s": float(found[1]) * 1e9 / 8 / DEVICES_PER_NODE,
        "latency_ms": catalogued.network_link.latency_ms,
        "tensor_parallel": tp > DEVICES_PER_NODE,
        "source": f"{row.path.name}: {found[0]} of a node",
    }
    return [node, network]
