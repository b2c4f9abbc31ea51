"""Reads throughputs in the form of Narayanan et al. 2021 (SC21, arXiv:2104.04473, table 1): GPT on A100.

The step time follows from the throughput by that paper's equation 3; a cell of `derived_iter_s` holds it in seconds.
What the table leaves unsaid is what Megatron-LM did then (korthikanti.py), which had no sequence parallelism and summed
gradients in fp16 (its v2.6, megatron/model/distributed.py; --accumulate-allreduce-grads-in-fp32 is not in the scripts,
examples/academic_paper_scripts/sc21).
"""

from __future__ import annotations

from mm_autoparallel.measurements.build import build_job, check_parameters, check_world, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.measurements.korthikanti import MEGATRON_2022
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row
from mm_autoparallel.model.job.division_law import padded_vocab_size
from mm_autoparallel.model.job.strategy import Strategy

REQUIRED = (
    "model params_b hidden layers heads seq vocab tp pp vpp dp mbs gbs n_gpus gpu recompute achieved_tflops_per_gpu "
    "source"
)

SOFTWARE = "megatron-lm-2021"

_MAX_DISAGREEMENT_FRACTION = 0.01
"""The throughputs are rounded to a whole TFLOP/s of some 140, so a derived time may be off by 0.4 %."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    strategy = Strategy(
        pp=row.count("pp"), tp=row.count("tp"), dp=row.count("dp"), mbs=row.count("mbs"), vpp=row.count("vpp"), zero=0
    )
    hidden_size, num_layers, num_heads = row.count("hidden"), row.count("layers"), row.count("heads")
    seq_length, batch, num_devices = row.count("seq"), row.count("gbs"), check_world(row, strategy, "n_gpus")
    num_tokens = row.count("vocab")
    recompute_all, operators = recompute_of(row.text("recompute"))
    step_s = _step_s(row, batch, seq_length, num_layers, hidden_size, num_tokens, num_devices, recompute_all)
    name = row.text("model")
    job = build_job(
        row,
        gpt_model(name, hidden_size, num_heads, num_layers, seq_length, padded_vocab_size(num_tokens, strategy.tp)),
        find_device(row.text("gpu")),
        num_devices,
        MEGATRON_2022
        | {
            "global_batch_size": batch,
            "seq_length": seq_length,
            "sequence_parallel": False,
            "gradient_bytes": 2.0,
            "recompute_operators": operators,
        },
    )
    check_parameters(row, "params_b", job)
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=name,
        job=job,
        plan=lay_layers(job, strategy, recompute_all),
        software=SOFTWARE,
        measured_ms=step_s * 1e3,
        measured_bytes=None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=("the step time is derived from a throughput rounded to a whole TFLOP/s",),
    )


def _step_s(
    row: Row,
    batch: int,
    seq_length: int,
    num_layers: int,
    hidden_size: int,
    num_tokens: int,
    num_devices: int,
    recompute_all: bool,
) -> float:
    """Equation 3: 96·B·s·L·h²·(1 + s/6h + V/16Lh) operations a step with full recompute, in four passes.

    Without it a step has three of those passes: 72·B·s·L·h²·(1 + s/6h + V/12Lh).
    """
    layer_flops = (96 if recompute_all else 72) * batch * seq_length * num_layers * hidden_size**2
    head = num_tokens / ((16 if recompute_all else 12) * num_layers * hidden_size)
    flops = layer_flops * (1 + seq_length / (6 * hidden_size) + head)
    step_s = flops / (num_devices * row.positive("achieved_tflops_per_gpu") * 1e12)
    if not row.has("derived_iter_s"):
        return step_s
    derived_s = row.positive("derived_iter_s")
    if abs(derived_s / step_s - 1) > _MAX_DISAGREEMENT_FRACTION:
        raise row.error(
            "derived_iter_s",
            f"{derived_s:g} s, and {row.text('achieved_tflops_per_gpu')} TFLOP/s make {step_s:.3f} s by equation 3",
        )
    return derived_s
