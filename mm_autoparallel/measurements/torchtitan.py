"""Reads throughputs and peaks in the form of torchtitan's benchmarks, and refuses what they all have.

Every published row shards parameters over its data parallel ranks (FSDP, which is ZeRO 3), most also compile or compute
in FP8; no strategy here says so. Each row is refused for what it has, so that a reader sees which part is missing.
"""

from __future__ import annotations

import re

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.table import Row, Unrepresentable

REQUIRED = "table model n_gpus parallel local_bs seq activation_ckpt techniques tps_per_gpu peak_mem_gib gpu source"

_DEGREE = re.compile(r"^(FSDP|HSDP|DDP|DP|TP|CP|PP|EP)(\d+)$")


def read_row(row: Row) -> MeasuredCase:
    """Never a case: raises TableError where the row is malformed, else Unrepresentable with what it has."""
    for column in ("n_gpus", "local_bs"):
        row.count(column)
    for column in ("tps_per_gpu", "peak_mem_gib"):
        row.optional_positive(column)
    techniques = row.text("techniques").lower()
    reasons = []
    for word in row.text("parallel").split():
        degree = _DEGREE.match(word)
        if degree is None:
            raise row.error("parallel", f"{word!r} is no degree such as FSDP8 or TP2")
        if degree[1] in ("FSDP", "HSDP"):
            reasons.append("parameters sharded over data parallel ranks (FSDP, ZeRO 3)")
    if "float8" in techniques or "fp8" in techniques:
        reasons.append("matrix products in FP8")
    if "compile" in techniques:
        reasons.append("layers that a compiler fused")
    if "async" in techniques:
        reasons.append("tensor parallel traffic split and hidden behind products")
    if row.text("activation_ckpt") not in ("none", "full"):
        reasons.append(f"recompute of operators that it does not name ({row.text('activation_ckpt')})")
    if reasons:
        raise Unrepresentable(f"the row has {' and '.join(reasons)}, which no strategy here represents")
    find_model(row.text("model"))
    find_device(row.text("gpu"))
    raise Unrepresentable("how torchtitan keeps gradients and optimizer states without FSDP is not stated in the row")
