"""Reads step times in the form of Korthikanti et al. 2022 (arXiv:2205.05198, table 5): GPT on A100.

What the table leaves unsaid, from that paper: a vocabulary of 51200 (section 6), dropout on attention and hidden states
(equation 1 counts their masks), attention that keeps its scores, point-to-point messages divided among tensor parallel
ranks (Megatron-LM's scatter-gather), no distributed optimizer and no overlap of gradients (Megatron-LM of 2022).
"""

from __future__ import annotations

from typing import Any

from mm_autoparallel.measurements.build import build_job, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.gpt import PADDED_VOCAB_SIZE, gpt_model
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import BYTES_PER_UNIT, MS_PER_UNIT, Row, Unrepresentable
from mm_autoparallel.model.job.strategy import Strategy

REQUIRED = (
    "model hidden heads layers seq tp pp vpp dp gbs mbs n_gpus gpu precision recompute sequence_parallel metric unit "
    "value kind source"
)

SOFTWARE = "megatron-lm"

MEGATRON_2022: dict[str, Any] = {
    "attention": "unfused",
    "hidden_dropout": True,
    "attention_dropout": True,
    "scatter_gather_p2p": True,
    "overlap_p2p": False,
    "stack": "megatron-local",
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""What Megatron-LM did in 2021 and 2022, as keys of a workload."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    if row.text("kind") != "measured":
        raise Unrepresentable(f"the row is {row.text('kind')}, and only measured ones are predicted")
    metric = row.text("metric")
    measured_ms = measured_bytes = None
    if metric == "iteration_time":
        measured_ms = row.in_unit("value", "unit", MS_PER_UNIT)
    elif metric == "peak_memory":
        measured_bytes = row.in_unit("value", "unit", BYTES_PER_UNIT)
    else:
        raise Unrepresentable(f"the metric {metric!r} is not predicted; known are iteration_time and peak_memory")
    precision = row.text("precision")
    if precision not in ("fp16/bf16 mixed", "bf16", "fp16", "bf16 mixed", "fp16 mixed"):
        raise Unrepresentable(f"the precision {precision!r} is not understood; fp16 and bf16 are")
    recompute = row.text("recompute")
    recompute_all, operators = recompute_of(recompute)
    strategy = Strategy(
        pp=row.count("pp"), tp=row.count("tp"), dp=row.count("dp"), mbs=row.count("mbs"), vpp=row.count("vpp"), zero=0
    )
    seq_length = row.count("seq")
    sizes = row.count("hidden"), row.count("heads"), row.count("layers")
    name = row.text("model")
    job = build_job(
        row,
        gpt_model(name, *sizes, seq_length, PADDED_VOCAB_SIZE),
        find_device(row.text("gpu")),
        check_world(row, strategy, "n_gpus"),
        MEGATRON_2022
        | {
            "global_batch_size": row.count("gbs"),
            "seq_length": seq_length,
            "sequence_parallel": row.flag("sequence_parallel"),
            "recompute_operators": operators,
        },
    )
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{name} {recompute}",
        job=job,
        plan=lay_layers(job, strategy, recompute_all),
        software=SOFTWARE,
        measured_ms=measured_ms,
        measured_bytes=measured_bytes,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
    )
