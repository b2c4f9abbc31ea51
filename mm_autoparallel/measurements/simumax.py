"""Reads step times and peaks in the form of SimuMax's benchmark (github MooreThreads/SimuMax, docs/b200).

What the table leaves unsaid, from the scripts of that benchmark (simu_tools/megatron_scripts/scripts): Megatron-Core
with TransformerEngine, flash attention and sequence parallelism, the distributed optimizer, fp32 gradients, nothing
overlapped, no dropout, no recompute unless the case's name says so, context parallelism by all-to-all. The vocabulary
has one token more than the model's (NullTokenizer's end of document) before it is padded; Llama 3 405B has 16 key-value
groups there, and DeepSeek keeps one dense layer however few layers there are. `cef` in a case's name: fused
cross-entropy. The peak of a row is that of its fullest device; reserved bytes and the simulator's own predictions are
not read.
"""

from __future__ import annotations

import re
from typing import Any

from mm_autoparallel.measurements.build import build_job, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.models import cut_layers, find_model
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.division_law import padded_vocab_size
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.units import GIB

REQUIRED = (
    "case model layers tp pp cp ep dp seq mbs num_microbatches gpu precision measured_step_ms "
    "measured_peak_alloc_gib source"
)
OPTIONAL = (
    "simumax_pred_ms time_err_pct simumax_pred_alloc_gib mem_err_pct measured_peak_reserved_gib pred_reserved_gib "
    "steady_iters started note rank0_alloc_mib rank1_alloc_mib rank2_alloc_mib rank3_alloc_mib rank4_alloc_mib "
    "rank5_alloc_mib rank6_alloc_mib rank7_alloc_mib"
)

_NUM_DEVICES = re.compile(r"^(.*?)\s+x\s?(\d+)$")


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    name = row.text("case")
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=row.count("dp"),
        mbs=row.count("mbs"),
        cp=row.count("cp"),
        ep=row.count("ep"),
    )
    measured_ms, peak = row.optional_positive("measured_step_ms"), row.optional_positive("measured_peak_alloc_gib")
    num_layers, seq_length, num_microbatches = row.count("layers"), row.count("seq"), row.count("num_microbatches")
    if row.text("precision") != "bf16":
        raise Unrepresentable(f"the precision {row.text('precision')!r} is not understood; bf16 is")
    if "selective_recompute" in name:
        raise Unrepresentable("its name says selective recompute, and the row does not say of which operators")
    gpu = row.text("gpu")
    counted = _NUM_DEVICES.match(gpu)
    if counted and int(counted[2]) != strategy.world_size:
        raise row.error("gpu", f"{gpu!r}, and PP x TP x CP x DP is {strategy.world_size}")
    job = build_job(
        row,
        _model(row.text("model"), num_layers, strategy.tp),
        find_device(counted[1] if counted else gpu),
        strategy.world_size,
        {
            "global_batch_size": strategy.mbs * strategy.dp * num_microbatches,
            "seq_length": seq_length,
            "gradient_fusion": True,
            "context_parallel": "all_to_all",
            "overlap_p2p": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        }
        | ({"cross_entropy": "fused"} if "cef" in name.split("_") else {}),
    )
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=name,
        job=job,
        plan=lay_layers(job, strategy, "full_recompute" in name),
        software="megatron-core",
        measured_ms=measured_ms,
        measured_bytes=None if peak is None else peak * GIB,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
    )


def _model(name: str, num_layers: int, tp: int) -> dict[str, Any]:
    """The model as the benchmark's scripts have it."""
    model = find_model(name)
    text = model["text"]
    if model["name"] == "llama3-405b":
        text["layers"]["num_kv_groups"] = 16
    if "experts" in text["layers"]:
        text["layers"]["experts"]["dense_layers"] = [0]
    text["vocab_size"] = padded_vocab_size(text["vocab_size"] + 1, tp)
    return cut_layers(model, num_layers)
