"""Reads step times and peaks per rank in the form of MindSpeed-MM's continuous integration, on Ascend.

The columns hold Megatron's arguments and not the model, which data/mindspeed_mm.json has for the cases of that
repository: sizes, layers on each stage, frozen and recomputed parts. A rank is of the pipeline stage that Megatron-LM's
order of ranks gives it, and the fullest rank of a stage counts. Sequences are as long as their samples there
(--variable-seq-lengths), which the table does not say: the means of the repository's README are taken, and peaks lie
between those of samples of images alone, all equal, and of samples of seq-length. `facts` are what scripts leave out
(--use-fused-swiglu) and InternVL2's attention of 1.0.0 and 2.0.0 (examples/internvl2/dot_product_attention.py), whose
values are views. Its logs tell memory once, after the first step (Megatron-LM, training/training.py,
report_memory). Attention is fused; the device is a 910B with 64 GB.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from mm_autoparallel.measurements.build import build_job, check_lawful
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.provenance import stated
from mm_autoparallel.measurements.table import LARGEST, SMALLEST, Row, Unrepresentable
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.twice import UNEVEN_FRACTION
from mm_autoparallel.units import MIB

REQUIRED = (
    "case release n_npu steady_step_ms per_rank_max_alloc_mib tensor-model-parallel-size pipeline-model-parallel-size "
    "context-parallel-size micro-batch-size global-batch-size seq-length use-distributed-optimizer bf16 "
    "reuse-fp32-param hw source"
)
OPTIONAL = (
    "n_steps n_ranks_mem max_alloc_mib per_rank_alloc_mib num-layers hidden-size ffn-hidden-size num-attention-heads "
    "num-query-groups train-iters vocab-size mm-model mm-data npus_per_node nnodes dp grad_acc_step script"
)

_KEPT_OPTIMIZER_BYTES, _REUSED_OPTIMIZER_BYTES = 12.0, 10.0
"""--reuse-fp32-param keeps the bf16 weight as the upper half of the fp32 one, two bytes a parameter less."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    name, release = row.text("case"), row.text("release")
    measured_ms, peaks = row.optional_positive("steady_step_ms"), _rank_bytes(row, _PEAKS)
    resting = _rank_bytes(row, _RESTING) if row.has(_RESTING) else {}
    facts = _find_case(name, release)
    num_devices = row.count("n_npu")
    tp, pp = row.count("tensor-model-parallel-size", 1), row.count("pipeline-model-parallel-size", 1)
    cp = row.count("context-parallel-size", 1)
    if num_devices % (tp * pp * cp):
        raise row.error("n_npu", f"{num_devices} devices, which PP {pp} x TP {tp} x CP {cp} does not divide")
    dp, stated_mbs = num_devices // (tp * pp * cp), row.count("micro-batch-size", 1)
    mbs = max(facts.get("micro_batch_size", 1), stated_mbs)
    if len(facts["layers"]["text"]) != pp:
        raise Unrepresentable(f"the case is known with PP {len(facts['layers']['text'])}, and the row has PP {pp}")
    strategy = Strategy(pp=pp, tp=tp, dp=dp, mbs=mbs, cp=cp, zero=int(row.flag("use-distributed-optimizer", False)))
    batch = row.count("global-batch-size") * mbs // stated_mbs
    tokens = min(row.count("seq-length"), facts["image_tokens"] + facts["text_tokens"])
    reuses = row.flag("reuse-fp32-param", False)
    workload = {
        "global_batch_size": batch,
        "image_tokens_per_sample": facts["image_tokens"],
        "images_per_sample": facts.get("images", 1),
        "sequence_parallel": False,
        "stack": "mindspeed",
        "cross_entropy": "shifted",
        "optimizer_bytes": _REUSED_OPTIMIZER_BYTES if reuses else _KEPT_OPTIMIZER_BYTES,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    } | stated(facts.get("facts", {}))
    uneven = {"length_spread_fraction": UNEVEN_FRACTION, "variable_seq_lengths": pp > 1} if facts.get("uneven") else {}
    job, shortest, longest = (
        build_job(
            row,
            _known()["models"][facts["model"]],
            find_device(row.text("hw")),
            num_devices,
            workload | lengths | {"seq_length": -(-length // (2 * cp * tp)) * 2 * cp * tp},
        )
        for length, lengths in ((tokens, uneven), (facts["image_tokens"], {}), (row.count("seq-length"), {}))
    )
    check_lawful(job, strategy)
    layers = {modality: tuple(counts) for modality, counts in facts["layers"].items()}
    recompute = {m: counts if m in facts.get("recompute", ()) else (0,) * pp for m, counts in layers.items()}
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{name} {release}",
        job=job,
        plan=Plan(strategy, layers, recompute, batch),
        software="mindspeed-mm",
        measured_ms=measured_ms,
        measured_bytes=_by_stage(row, _PEAKS, peaks, num_devices, pp) or None,
        resting_bytes=_by_stage(row, _RESTING, resting, num_devices, pp) or None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=(facts["tokens_source"],),
        unstated=("tokens of a sample",),
        memory_alternatives=(shortest, longest),
        first_step=True,
    )


_PEAKS, _RESTING = "per_rank_max_alloc_mib", "per_rank_alloc_mib"


def _by_stage(row: Row, column: str, of_rank: dict[int, float], num_devices: int, pp: int) -> dict[int, float]:
    """Of the fullest rank of each stage."""
    per_stage: dict[int, float] = {}
    for rank, size_bytes in of_rank.items():
        if rank >= num_devices:
            raise row.error(column, f"it names rank {rank} of {num_devices}")
        stage = rank // (num_devices // pp)
        per_stage[stage] = max(size_bytes, per_stage.get(stage, 0.0))
    return per_stage


def _rank_bytes(row: Row, column: str) -> dict[int, float]:
    """Rank → allocated bytes, of a cell such as `0:24900.0;2:27331.4`, in MiB."""
    peaks: dict[int, float] = {}
    for part in filter(None, row.cells[column].split(";")):
        rank, _, mib = part.partition(":")
        if not re.fullmatch(r"[0-9]{1,9}", rank.strip()):
            raise row.error(column, f"{part[:40]!r} is no `rank:MiB`")
        try:
            value_mib = float(mib)
        except ValueError:
            raise row.error(column, f"{mib!r} is no number of MiB") from None
        if not SMALLEST <= value_mib <= LARGEST:
            raise row.error(column, f"{mib} MiB is measured, so it must be above zero and finite")
        peaks[int(rank)] = value_mib * MIB
    return peaks


def _find_case(name: str, release: str) -> dict[str, Any]:
    known = _known()
    for pattern, reason in known["refused"].items():
        if fnmatchcase(name, pattern) or f"{name} {release}" == pattern:
            raise Unrepresentable(reason)
    if name not in known["cases"]:
        raise Unrepresentable(
            f"the sizes of the case {name!r} are not known (its model is in no column); known are "
            f"{', '.join(known['cases'])}"
        )
    found: dict[str, Any] = known["cases"][name]
    return found


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    path = Path(__file__).parent / "data" / "mindspeed_mm.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
