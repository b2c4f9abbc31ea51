"""Reads step times, peaks and outcomes in the form of Megatron-Bridge's study of selective recompute, by its recipes.

What the table leaves unsaid, from its recipe moonlight_16b_pretrain_8gpu_h100_bf16 (src/megatron/bridge/recipes):
TransformerEngine with flash attention and its fused cross-entropy, sequence parallelism, experts that tensor
parallelism does not divide, the distributed optimizer with bf16 gradients and bf16 moments beside fp32 weights; tokens
exchanged by all-to-all, and no CUDA graphs. A GB of its peaks is 10^9 bytes (training/utils/train_utils.py). `outcome`:
`ok`, or words that say out of memory.
"""

from __future__ import annotations

from mm_autoparallel.measurements.build import build_job, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.units import GB

REQUIRED = (
    "model gpu n_gpus precision seq mbs gbs tp pp vpp cp ep dp recompute_selective step_ms peak_alloc_GB outcome source"
)
OPTIONAL = "tflops_per_gpu"

_OUTCOMES = {"ok": False, "completed": False, "oom": True, "out of memory": True, "out_of_memory": True}


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=row.count("dp"),
        mbs=row.count("mbs"),
        cp=row.count("cp"),
        ep=row.count("ep"),
        vpp=row.count("vpp"),
        etp=1 if row.count("ep") > 1 else 0,
    )
    num_devices = check_world(row, strategy, "n_gpus")
    out_of_memory = find_outcome(row, "outcome")
    measured_ms, peak = row.optional_positive("step_ms"), row.optional_positive("peak_alloc_GB")
    if not out_of_memory and measured_ms is None:
        raise row.error("step_ms", "the cell is empty, and only a run that was out of memory has no step time")
    if row.text("precision") != "bf16":
        raise Unrepresentable(f"the precision {row.text('precision')!r} is not understood; bf16 is")
    recompute_all, operators = recompute_of(row.text("recompute_selective", "none"))
    name = row.text("model")
    job = build_job(
        row,
        find_model(name.split("(")[0]),
        find_device(row.text("gpu")),
        num_devices,
        {
            "global_batch_size": row.count("gbs"),
            "seq_length": row.count("seq"),
            "gradient_bytes": 2.0,
            "optimizer_bytes": 8.0,
            "recompute_operators": operators,
            "gradient_fusion": True,
            "cross_entropy": "fused",
            "facts": {"dispatcher": "alltoall", "graphs": "none"},
        },
    )
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{name.split('(')[0].strip()}, recompute {row.text('recompute_selective', 'none')}",
        job=job,
        plan=lay_layers(job, strategy, recompute_all),
        software="megatron-core",
        measured_ms=None if out_of_memory else measured_ms,
        measured_bytes=None if out_of_memory or peak is None else peak * GB,
        out_of_memory=out_of_memory,
        source=row.text("source"),
        content=row.cells,
    )


def find_outcome(row: Row, column: str) -> bool:
    """Whether the run was out of memory, told by a cell's first words. Raises TableError where they say neither."""
    text = row.text(column).lower()
    for word, out_of_memory in _OUTCOMES.items():
        if text.startswith(word):
            return out_of_memory
    raise row.error(column, f"{row.text(column)!r} is no outcome known here; known are {', '.join(_OUTCOMES)}")
