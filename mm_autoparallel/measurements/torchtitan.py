"""Reads throughputs in the form of torchtitan's benchmarks: Llama and its like under FSDP2.

What the table leaves unsaid: FSDP2 is ZeRO 3 in bf16 with fp32 gradients and no accumulation. Activation checkpointing
is of whole layers where the row says `full`; `selective` is by operator, as torchtitan's presets have it
(train_configs/llama3_8b.toml, selective_ac_option; Workload.recompute_operators, second_products). FP8 is tensorwise
unless the row says rowwise, in all linear layers but the head (components/quantization). Context parallel ranks gather
keys and values (context_parallel_rotate_method, by default allgather). A peak in this form is of reserved memory
(components/metrics.py, max_reserved), which is not predicted: it is not scored. What else a row has is refused.
"""

from __future__ import annotations

import re
from typing import Any

from mm_autoparallel.measurements.build import build_job, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.strategy import Strategy

REQUIRED = "table model n_gpus parallel local_bs seq activation_ckpt techniques tps_per_gpu peak_mem_gib gpu source"

_DEGREE = re.compile(r"^(FSDP|HSDP|DDP|DP|TP|CP|PP|EP)(\d+)$")
_PLAIN = frozenset(["fsdp", "eager", "bf16", "vanilla", "tp", "compile", "torch.compile", "tensorwise"])
_FP8 = frozenset(["float8", "fp8"])
"""Techniques that are described, beside rowwise scales and asynchronous tensor parallelism."""
_SELECTIVE = frozenset(["selective", "selective(default)", "per-op sac"])


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    degrees = _read_degrees(row)
    mbs, rate = row.count("local_bs"), row.optional_positive("tps_per_gpu")
    peak_reserved = row.optional_positive("peak_mem_gib")
    seq_length, num_devices = row.leading_count("seq"), row.count("n_gpus")
    words = frozenset(word for word in re.split(r"[+,\s]+", row.text("techniques").lower()) if word)
    checkpointing = row.text("activation_ckpt").lower()
    _refuse_what_is_not_described(words, checkpointing, degrees)
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
            **stack_workload(strategy.tp),
            "precision": _read_precision(words),
            "recompute_operators": ["second_products"] if checkpointing in _SELECTIVE else [],
            "facts": _read_facts(words),
        },
    )
    step_ms = None if rate is None else strategy.dp * mbs * seq_length / (rate * num_devices) * 1e3
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{row.text('model')} {row.text('parallel')}",
        job=job,
        plan=lay_layers(job, strategy, checkpointing == "full"),
        software="torchtitan",
        measured_ms=step_ms,
        measured_bytes=None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=() if peak_reserved is None else ("its peak is of reserved memory, which is not predicted",),
    )


def stack_workload(tp: int) -> dict[str, Any]:
    """What every run of torchtitan has of a workload, whatever says the rest: a table or a log."""
    return {
        "sequence_parallel": tp > 1,
        "stack": "transformers",
        "cross_entropy": "transformers",
        "context_parallel": "all_gather",
    }


ROWWISE_UNDER_TENSORS = "rowwise FP8 under tensor parallelism, whose slowness is a known problem of that release"
"""Refused: its page says of these rows that they are slower than they should be (pytorch/torchtitan, issue 1207)."""


def _read_degrees(row: Row) -> dict[str, int]:
    """`FSDP8 TP2` → {FSDP: 8, TP: 2}."""
    degrees: dict[str, int] = {}
    for word in row.text("parallel").split():
        degree = _DEGREE.match(word)
        if degree is None or int(degree[2]) == 0:
            raise row.error("parallel", f"{word!r} is no degree such as FSDP8 or TP2")
        degrees[degree[1]] = int(degree[2])
    return degrees


def _read_precision(words: frozenset[str]) -> str:
    if not words & _FP8:
        return "bf16"
    return "fp8_rowwise" if "rowwise" in words else "fp8_current"


def _read_facts(words: frozenset[str]) -> dict[str, object]:
    """What the run does otherwise than torchtitan by itself: compile, asynchronous tensor parallelism."""
    facts: dict[str, object] = {"compiled": True} if words & {"compile", "torch.compile"} else {}
    return facts | ({"tp_overlap": "asynchronous"} if "async" in words else {})


def _refuse_what_is_not_described(words: frozenset[str], checkpointing: str, degrees: dict[str, int]) -> None:
    """Raises Unrepresentable with all that the row has and no strategy, operator or fact here describes."""
    reasons = []
    others = sorted(name for name, degree in degrees.items() if name not in ("FSDP", "TP", "CP") and degree > 1)
    if others:
        reasons.append(f"{' and '.join(others)}, beside which it does not say what is sharded when")
    if "rowwise" in words and degrees.get("TP", 1) > 1:
        reasons.append(ROWWISE_UNDER_TENSORS)
    reasons += [f"the technique {word!r}" for word in sorted(words - _PLAIN - _FP8 - {"rowwise", "async"})]
    if checkpointing not in ("none", "full", *_SELECTIVE):
        reasons.append(f"recompute of operators that it does not name ({checkpointing})")
    if reasons:
        raise Unrepresentable(f"the row has {' and '.join(reasons)}, which nothing here describes")
