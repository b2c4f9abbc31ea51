"""Reads throughputs in the form of torchtitan's benchmarks: Llama and its like under FSDP2.

What the table leaves unsaid: FSDP2 is ZeRO 3 in bf16 with fp32 gradients and no accumulation. Activation checkpointing
is of whole layers where the row says `full`; `selective` reruns operators that a policy of torchtitan's picks, and such
rows are refused, like those in FP8, compiled, or with any other technique that no operator here describes. A peak in
this form is of reserved memory (components/metrics.py, max_reserved), which is not predicted: it is not scored.
"""

from __future__ import annotations

import re

from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.measurements.build import build_job, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.table import Row, Unrepresentable

REQUIRED = "table model n_gpus parallel local_bs seq activation_ckpt techniques tps_per_gpu peak_mem_gib gpu source"

_DEGREE = re.compile(r"^(FSDP|HSDP|DDP|DP|TP|CP|PP|EP)(\d+)$")
_PLAIN = frozenset(["fsdp", "eager", "bf16", "vanilla", "tp"])
"""Techniques that are described."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    degrees = _read_degrees(row)
    mbs, rate = row.count("local_bs"), row.optional_positive("tps_per_gpu")
    peak_reserved = row.optional_positive("peak_mem_gib")
    seq_length, num_devices = row.leading_count("seq"), row.count("n_gpus")
    _refuse_what_is_not_described(row, degrees)
    strategy = Strategy(
        pp=1, tp=degrees.get("TP", 1), cp=degrees.get("CP", 1), dp=degrees.get("FSDP", 1), mbs=mbs, zero=3
    )
    check_world(row, strategy, "n_gpus")
    job = build_job(
        row,
        find_model(row.text("model")),
        find_device(row.text("gpu")),
        num_devices,
        {
            "global_batch_size": strategy.dp * mbs,
            "seq_length": seq_length,
            "sequence_parallel": strategy.tp > 1,
            "implementation": "transformers",
        },
    )
    step_ms = None if rate is None else strategy.dp * mbs * seq_length / (rate * num_devices) * 1e3
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{row.text('model')} {row.text('parallel')}",
        job=job,
        plan=lay_layers(job, strategy, row.text("activation_ckpt") == "full"),
        software="torchtitan",
        measured_ms=step_ms,
        measured_bytes=None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=() if peak_reserved is None else ("its peak is of reserved memory, which is not predicted",),
    )


def _read_degrees(row: Row) -> dict[str, int]:
    """`FSDP8 TP2` → {FSDP: 8, TP: 2}."""
    degrees: dict[str, int] = {}
    for word in row.text("parallel").split():
        degree = _DEGREE.match(word)
        if degree is None or int(degree[2]) == 0:
            raise row.error("parallel", f"{word!r} is no degree such as FSDP8 or TP2")
        degrees[degree[1]] = int(degree[2])
    return degrees


def _refuse_what_is_not_described(row: Row, degrees: dict[str, int]) -> None:
    """Raises Unrepresentable with all that the row has and no strategy or operator here describes."""
    techniques = row.text("techniques").lower()
    reasons = []
    others = sorted(name for name, degree in degrees.items() if name not in ("FSDP", "TP", "CP") and degree > 1)
    if others:
        reasons.append(f"{' and '.join(others)}, beside which it does not say what is sharded when")
    if "float8" in techniques or "fp8" in techniques:
        reasons.append("matrix products in FP8")
    if "compile" in techniques:
        reasons.append("layers that a compiler fused")
    if "async" in techniques:
        reasons.append("tensor parallel traffic split and hidden behind products")
    if not reasons:
        reasons += [f"the technique {word!r}" for word in re.split(r"[+,\s]+", techniques) if word not in _PLAIN]
    if row.text("activation_ckpt") not in ("none", "full"):
        reasons.append(f"recompute of operators that it does not name ({row.text('activation_ckpt')})")
    if reasons:
        raise Unrepresentable(f"the row has {' and '.join(reasons)}, which nothing here describes")
