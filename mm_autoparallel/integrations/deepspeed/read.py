"""ds_config.json: the plan that it runs, with the model that a person names and the layers that `export` put beside it.

DeepSpeed looks its keys up one by one (runtime/config.py, 0.19): one that nobody knows is passed over at the top, and
so is refused here, but for those that begin with an underscore, which are people's comments. Batches:
train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x DP.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, is_there, read_document
from mm_autoparallel.integrations.config_files import (
    Totals,
    check_keys,
    describe_config,
    flag_at,
    need,
    read_totals,
    section_at,
    size_at,
)
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.python_text import read_lists
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

CONFIG, LAYERS = "ds_config.json", "planned_layers.py"
BATCH, MICRO_BATCH, MICRO_BATCHES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO, TENSOR, SEQUENCE = "zero_optimization", "tensor_parallel", "sequence_parallel_size"

TOP = (
    "activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type "
    "compile compression_training csv_monitor cuda_visible_devices curriculum_learning data_efficiency data_types "
    "dataloader_drop_last disable_allgather disable_python_gc dump_state eigenvalue elasticity flops_profiler "
    "fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor "
    "graph_harvesting hybrid_engine load_universal_checkpoint log_level managed_gradient_accumulation "
    "memory_breakdown monitor_config optimizer pipeline prescale_gradients progressive_layer_drop scheduler "
    "seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients "
    "steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size "
    "train_micro_batch_size_per_gpu use_data_before_expert_parallelism use_node_local_storage vocabulary_size "
    "wall_clock_breakdown wandb comet weight_quantization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer zero_optimization"
)
_NOT_PLANNED = {
    "zero_hpz_partition_size": "a second copy of weights within nodes",
    "mics_shard_size": "MiCS's copies of shards",
    "zero_quantized_weights": "gathering quantised weights",
    "zero_quantized_gradients": "reducing quantised gradients",
    "offload_param": "weights on the host",
}


def is_config(path: Path) -> bool:
    """Whether the file at `path` is a configuration of DeepSpeed: it says a batch or ZeRO by DeepSpeed's names."""
    if path.suffix != ".json":
        return False
    try:
        document = read_document(path, "configuration")
    except PlannerError:
        return False
    return bool({BATCH, MICRO_BATCH, ZERO} & set(document))


def describe_launch(path: Path, given: Given) -> Described:
    """What the configuration at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    plan = read_launch_plan(path, given)
    notes = () if find_layers(path, given) else (f"{LAYERS} is not beside it: one stage and no recompute are assumed",)
    stack = "megatron-deepspeed" if plan.strategy.pp > 1 else "transformers"
    return describe_config(path, given, stack, plan, {}, notes)


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the configuration at `path` runs, with the layers in planned_layers.py beside it.

    Raises JobError naming what nobody says, PlanError naming the key that is malformed or says what no plan does.
    """
    document, totals = read_document(path, "configuration"), read_totals(path, given)
    beside = find_layers(path, given)
    lists = read_lists(beside) if beside else None
    if lists and {modality: sum(counts) for modality, counts in lists[0].items()} != dict(totals):
        raise PlanError(f"{beside}: it places other layers than the model has ({dict(totals)})")
    world_size = need(given.world_size, path, "--world-size")
    return read_plan(document, f"configuration {path}", totals, lists, world_size, given)


def find_layers(path: Path, given: Given) -> Path | None:
    """The planned_layers.py of the configuration at `path`; None where there is none.

    Raises JobError for more files."""
    if len(given.beside) > 1:
        raise JobError(f"{given.beside[1]}: beside {path} one file is read, {LAYERS}")
    beside = given.beside[0] if given.beside else path.parent / LAYERS
    return beside if given.beside or is_there(beside) else None


Lists = tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]


def read_plan(
    document: Mapping[str, Any],
    where: str,
    totals: Totals,
    lists: Lists | None,
    world_size: int,
    given: Given = Given(),  # noqa: B008 - frozen
) -> Plan:
    """The plan of a configuration's content. lists: layers and recompute by modality and stage; None: one stage, and
    nothing recomputes."""
    check_keys({key: each for key, each in document.items() if not key.startswith("_")}, TOP.split(), where)
    zero_section = section_at(document, ZERO, where)
    for key, what in _NOT_PLANNED.items():
        said = zero_section.get(key)
        is_off = said in (None, False, 1, -1, 0) or (isinstance(said, dict) and said.get("device", "none") == "none")
        if not is_off:
            raise PlanError(f"{where}: {ZERO}.{key} is {describe_value(said)}: {what}, which no plan says; take it out")
    device = section_at(zero_section, "offload_optimizer", where).get("device") or "none"
    if device not in ("none", "cpu"):
        raise PlanError(
            f"{where}: {ZERO}.offload_optimizer.device is {describe_value(device)}; none and cpu are planned"
        )
    zero = zero_section.get("stage", 0)
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise PlanError(f"{where}: {ZERO}.stage is {describe_value(zero)}; 0 to 3 are known")
    layers, recompute = lists or ({key: (count,) for key, count in totals.items()}, dict.fromkeys(totals, (0,)))
    pp = len(layers["text"])
    tp = size_at(section_at(document, TENSOR, where), "autotp_size", where)
    cp = size_at(document, SEQUENCE, where)
    if world_size % (pp * tp * cp):
        raise PlanError(f"{where}: PP {pp} x TP {tp} x SP {cp} does not divide {world_size} devices")
    if pp > 1 and zero > 1:
        raise PlanError(f"{where}: ZeRO {zero} with PP {pp} is refused by DeepSpeed's pipeline engine")
    dp = world_size // (pp * tp * cp)
    mbs, micro_batches = _read_batches(document, where, dp, given)
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=dp,
        mbs=mbs,
        cp=cp,
        zero=zero,
        cp_kind="all_to_all" if cp > 1 else "",
        optimizer_offload=device == "cpu" or flag_at(zero_section, "cpu_offload", where),
        sequence_parallel=tp == 1,
    )
    return Plan(strategy, dict(layers), dict(recompute), mbs * micro_batches * dp)


def _read_batches(document: Mapping[str, Any], where: str, dp: int, given: Given) -> tuple[int, int]:
    """Samples of a micro-batch and micro-batches, of which DeepSpeed works out what two others leave open."""
    said = {key: document.get(key) for key in (BATCH, MICRO_BATCH, MICRO_BATCHES)}
    batch, mbs, steps = (
        size_at({key: None if each == "auto" else each for key, each in said.items()}, key, where, 0) for key in said
    )
    batch, mbs = batch or given.global_batch_size or 0, mbs or given.micro_batch_size or 0
    if mbs == 0 and batch and steps and batch % (steps * dp) == 0:
        mbs = batch // (steps * dp)
    if mbs == 0:
        if batch == 0:
            raise JobError(f"{where} says no batch; say it with --micro-batch-size N and --global-batch-size N")
        if said[MICRO_BATCH] == "auto":
            raise JobError(f"{where} leaves {MICRO_BATCH} to the training's code; say it with --micro-batch-size N")
        steps = steps or 1
        mbs = batch // (steps * dp)
    steps = steps or max(1, batch // (mbs * dp))
    if batch not in (0, mbs * steps * dp):
        raise PlanError(
            f"{where}: {BATCH} {batch} is not {MICRO_BATCH} {mbs} x {MICRO_BATCHES} {steps} x DP {dp}; DeepSpeed "
            "refuses to start"
        )
    return mbs, steps
