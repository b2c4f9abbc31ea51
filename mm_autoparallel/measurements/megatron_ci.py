"""Reads peaks and iteration times in the form of Megatron-LM's continuous integration: a column for each argument.

The peak is that of the last rank, so of the last pipeline stage. Times repeat to 6 % only (small models, shared
machines): they are scored, and every row says so. What arguments without a column were, data/megatron_ci.json holds for
the cases of that repository; of any other case they have Megatron-LM's defaults. Besides: GPT-2's vocabulary unless a
case names another tokenizer, a node of eight devices where their number is blank, and flash attention where the backend
is blank with TransformerEngine, which chooses by its version (the row then counts as not all stated).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.build import build_job, even_layers, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.pipeline_layout import read_layout
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.domains import count_joined
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.megatron_precision import read_megatron_precision

_SIZES = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups num-experts moe-router-topk "
    "vocab-size make-vocab-size-divisible-by"
)
_FLAGS = "group-query-attention swiglu untie-embeddings-and-output-weights multi-latent-attention"
_OTHERS = (
    "seq-length decoder-seq-length encoder-seq-length micro-batch-size global-batch-size tensor-model-parallel-size "
    "pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
    "context-parallel-size expert-model-parallel-size expert-tensor-parallel-size sequence-parallel "
    "use-distributed-optimizer data-parallel-sharding-strategy use-megatron-fsdp recompute-granularity "
    "recompute-method recompute-num-layers bf16 fp16 use-flash-attn attention-backend transformer-impl "
    "overlap-grad-reduce overlap-param-gather deterministic-mode use-mcore-models spec"
)
REQUIRED = f"case hw env median_iter_s peak_alloc_bytes n_gpus mem_rank source {_SIZES} {_FLAGS} {_OTHERS}"
OPTIONAL = "min_iter_s mad_iter_pct steady_alloc_bytes n_samples train_iters n_gpus_source"

_BLOCKERS = {
    "optimizer": "another optimizer than Adam",
    "experimental-attention-variant": "an experimental attention",
    "use-torch-fsdp2": "parameters sharded by FSDP",
    "export-kd-cfg": "a teacher model beside the trained one",
    "fine-grained-activation-offloading": "activations offloaded to the host",
    "cuda-graph-impl": "CUDA graphs, which keep memory pools of their own",
    "enable-cuda-graph": "CUDA graphs, which keep memory pools of their own",
    "window-size": "attention within windows of tokens",
    "quick-geglu": "a clamped activation",
    "outer-dp-sharding-strategy": "parameters sharded by FSDP",
    "perform-rl-step": "reinforcement learning",
    "num-distributed-optimizer-instances": "optimizer states sharded within a part of the data parallel ranks",
    "account-for-embedding-in-pipeline-split": "a pipeline stage without a layer",
    "cp-comm-type": "context parallelism in two levels",
    "defer-embedding-wgrad-compute": "inputs of the output layer kept until its weight gradient is made up for",
}
"""Arguments that change memory or time in a way that nothing here represents."""

_ENGINE, _LOCAL = "transformer_engine", "local"
"""Whose layers run: Megatron-LM's default of --transformer-impl, and its own layers."""

_SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What Megatron-FSDP shards in ZeRO 0 to 3 (--data-parallel-sharding-strategy, whose default is the first)."""

_TOKENIZER = "GPT2BPETokenizer"
"""What its tests use where they name none."""

_FAMILIES = {
    "t5": "an encoder and a decoder with cross attention",
    "hybrid": "state-space layers among attention layers",
    "mimo": "several models whose sizes the arguments do not hold",
    "multimodal-llava": "several models whose sizes the arguments do not hold",
}
"""Folders of cases whose models are none that a Model can be."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    name = row.text("case")
    measured_ms, peak = row.optional_positive("median_iter_s"), row.optional_positive("peak_alloc_bytes")
    more = _known_cases().get(name, {})
    _refuse_foreign(row, name, more)
    laid = _layout(more)
    strategy, num_devices = _strategy(row, laid)
    device = find_device(row.text("hw"))
    arguments: dict[str, Any] = {column: row.count(column) for column in _SIZES.split() if row.has(column)}
    arguments |= {column: True for column in _FLAGS.split() if row.flag(column, False)}
    arguments |= {"tokenizer-type": _TOKENIZER, "tensor-model-parallel-size": strategy.tp} | more
    seq_length = _required(row, "seq-length")
    recompute_all, operators, num_recomputed = _recompute(row, more)
    unfused, (precision, facts) = _attention(row), _precision(more)
    workload = {
        "precision": precision,
        "facts": facts,
        "global_batch_size": _required(row, "global-batch-size"),
        "seq_length": seq_length,
        "sequence_parallel": row.flag("sequence-parallel", False),
        "attention": "unfused" if unfused else "flash",
        "hidden_dropout": float(more.get("hidden-dropout", 0.1)) > 0,
        "attention_dropout": float(more.get("attention-dropout", 0.1)) > 0,
        "overlap_grad_reduce": row.flag("overlap-grad-reduce", False),
        "overlap_param_gather": row.flag("overlap-param-gather", False),
        "recompute_operators": operators,
        "stack": "megatron-local" if _is_local(row) else "megatron-te",
        # --fp16 accumulates in fp16 unless told otherwise (megatron/training/arguments.py)
        "gradient_bytes": 2.0
        if row.flag("fp16", False) and not more.get("accumulate-allreduce-grads-in-fp32")
        else 4.0,
        "gradient_fusion": not more.get("no-gradient-accumulation-fusion"),
        "cross_entropy": "fused" if more.get("cross-entropy-fusion-impl") == "te" else "unfused",
        "deterministic": "CUBLAS_WORKSPACE_CONFIG" in more or row.flag("deterministic-mode", False),
    }
    model = _model(row, arguments | {"seq-length": seq_length}, bert=name.startswith("bert/"))
    per_node = max(DEVICES_PER_NODE, count_joined(DEVICES[device], num_devices))
    job = build_job(row, model, device, num_devices, workload, per_node)
    other = (
        ()
        if unfused is not None or facts.get("fp8_attention")  # which no unfused backend has
        else (build_job(row, model, device, num_devices, workload | {"attention": "unfused"}, per_node),)
    )
    first, last = more.get("decoder-first-pipeline-num-layers"), more.get("decoder-last-pipeline-num-layers")
    num_layers = job.model.text.layers.num_layers
    if laid and sum(laid) != num_layers:
        raise Unrepresentable(f"its pipeline layout lays {sum(laid)} layers, and the model has {num_layers}")
    layers = laid or even_layers(num_layers, strategy, first, last)
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{name} ({row.text('env')})",
        job=job,
        plan=lay_layers(job, strategy, recompute_all, num_recomputed, layers),
        software="megatron-core",
        measured_ms=None if measured_ms is None else measured_ms * 1e3,
        measured_bytes=None if peak is None else {strategy.pp - 1: peak},
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=("its time repeats to 6 % only",),
        unstated=("attention backend",) if other else (),
        alternatives=other,
        release=row.text("env"),
    )


def _model(row: Row, arguments: Mapping[str, Any], bert: bool) -> dict[str, Any]:
    path = Path(f"{row.path}, row {row.index}")
    try:
        model = read_megatron_arguments(Section(arguments, path, what="arguments of"), bert)
    except JobError as failure:
        raise Unrepresentable(failure.reason) from None
    except ValidationError as failure:
        raise Unrepresentable(str(failure)) from None
    return model.model_dump(mode="json")


def _layout(more: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers of each chunk, where the case has a layout of its own."""
    text = more.get("pipeline-model-parallel-layout")
    if text is None:
        return None
    laid = read_layout(str(text))
    if laid is None or 0 in laid:
        what = "is not understood" if laid is None else "has a chunk without a layer, which is not represented"
        raise Unrepresentable(f"the pipeline layout {text!r} {what}")
    return laid


def _precision(more: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What linear layers multiply in, and what the case states beside it."""
    try:
        found = read_megatron_precision(more)
    except ValueError as failure:
        raise Unrepresentable(str(failure)) from None
    return found.precision, found.facts


def _refuse_foreign(row: Row, name: str, more: Mapping[str, Any]) -> None:
    family = name.split("/")[0]
    if family in _FAMILIES or row.has("encoder-seq-length") or (row.has("spec") and "hybrid" in row.text("spec")):
        reason = _FAMILIES.get(family) or _FAMILIES["t5" if row.has("encoder-seq-length") else "hybrid"]
        raise Unrepresentable(f"the case is {reason}, which is not represented")
    if row.has("spec") and row.text("spec") != _LOCAL:
        raise Unrepresentable(f"the layer specification {row.text('spec')!r} is not understood")
    if "last rank" not in row.text("mem_rank"):
        raise Unrepresentable(f"its memory is of {row.text('mem_rank')!r}; only that of the last rank is understood")
    if row.flag("fp16", False) and row.flag("bf16", False):
        raise row.error("fp16", "fp16 and bf16 are both true")
    for argument, reason in _BLOCKERS.items():
        if argument in more:
            raise Unrepresentable(f"the case has {reason} (--{argument}), which is not represented")


def _required(row: Row, column: str) -> int:
    if not row.has(column):
        raise Unrepresentable(f"{column} is blank, and it decides memory and time")
    return row.count(column)


def _strategy(row: Row, laid: tuple[int, ...] | None) -> tuple[Strategy, int]:
    """The strategy, with Megatron-LM's default of 1 where a size is blank, and the number of devices."""
    tp, pp = row.count("tensor-model-parallel-size", 1), row.count("pipeline-model-parallel-size", 1)
    cp, ep = row.count("context-parallel-size", 1), row.count("expert-model-parallel-size", 1)
    num_devices = row.count("n_gpus", DEVICES_PER_NODE)
    if num_devices % (tp * pp * cp):
        raise Unrepresentable(
            f"PP {pp} x TP {tp} x CP {cp} does not divide {num_devices} devices"
            + ("" if row.has("n_gpus") else ", the node that is assumed where n_gpus is blank")
        )
    return (
        Strategy(
            pp=pp,
            tp=tp,
            cp=cp,
            dp=num_devices // (tp * pp * cp),
            mbs=_required(row, "micro-batch-size"),
            ep=ep,
            etp=row.count("expert-tensor-parallel-size", 0, least=0) if row.has("num-experts") else 0,
            vpp=_num_chunks(row, pp, laid),
            zero=_zero(row),
        ),
        num_devices,
    )


def _zero(row: Row) -> int:
    """The ZeRO stage: that of Megatron-FSDP by what it shards, else of the distributed optimizer."""
    if not row.flag("use-megatron-fsdp", False):
        return 1 if row.flag("use-distributed-optimizer", False) else 0
    sharded = row.text("data-parallel-sharding-strategy", "no_shard")
    if sharded not in _SHARDED:
        raise Unrepresentable(
            f"the data parallel sharding strategy {sharded!r} is not understood; known are {', '.join(_SHARDED)}"
        )
    return _SHARDED.index(sharded)


def _num_chunks(row: Row, pp: int, laid: tuple[int, ...] | None) -> int:
    if laid:
        if len(laid) % pp:
            raise Unrepresentable(f"its pipeline layout has {len(laid)} chunks, no multiple of PP {pp}")
        return len(laid) // pp
    if row.has("num-virtual-stages-per-pipeline-rank"):
        return row.count("num-virtual-stages-per-pipeline-rank")
    if not row.has("num-layers-per-virtual-pipeline-stage"):
        return 1
    per_chunk, num_layers = row.count("num-layers-per-virtual-pipeline-stage"), _required(row, "num-layers")
    if num_layers % (pp * per_chunk):
        raise Unrepresentable(f"{num_layers} layers are no multiple of PP {pp} x {per_chunk} layers a chunk")
    return num_layers // (pp * per_chunk)


def _attention(row: Row) -> bool | None:
    """Whether scores are kept; None where that is not said and TransformerEngine chooses."""
    backend = row.text("attention-backend", "auto")
    if backend in ("unfused", "local"):
        return True
    if backend in ("flash", "fused") or row.flag("use-flash-attn", False):
        return False
    if backend != "auto":
        raise Unrepresentable(f"the attention backend {backend!r} is not understood; unfused, local, flash, fused are")
    return True if _is_local(row) else None


def _is_local(row: Row) -> bool:
    return _LOCAL in (row.text("transformer-impl", _ENGINE), row.text("spec", ""))


def _recompute(row: Row, more: Mapping[str, Any]) -> tuple[bool, tuple[str, ...], int]:
    """Whether all layers recompute, which operators of all others do, and else how many layers of a chunk do."""
    granularity = row.text("recompute-granularity", "none")
    if granularity == "selective":
        modules = more.get("recompute-modules", "core_attn")
        _, operators = recompute_of(",".join(modules.strip("[]").split() if isinstance(modules, str) else modules))
        return False, operators, 0
    if granularity == "none":
        return False, (), 0
    if granularity != "full":
        raise Unrepresentable(f"the recompute granularity {granularity!r} is not understood; full and selective are")
    method, num_layers = row.text("recompute-method", "uniform"), row.count("recompute-num-layers", 1)
    if method == "block":
        return False, (), num_layers
    if num_layers > 1:
        raise Unrepresentable(f"recompute in groups of {num_layers} layers is not represented; one layer each is")
    return True, (), 0


@lru_cache(maxsize=1)
def _known_cases() -> dict[str, dict[str, Any]]:
    document = json.loads((Path(__file__).parent / "data" / "megatron_ci.json").read_text(encoding="utf-8"))
    cases: dict[str, dict[str, Any]] = document["cases"]
    return cases
