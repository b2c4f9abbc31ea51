"""What a configuration of DeepSpeed says to `lint`: its keys by quantity, and what goes with what (0.19).

Pairs: runtime/config.py (fp16 and bf16), runtime/zero/config.py (keys of a stage, and the new names of old ones).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.config_files import spell_by
from mm_autoparallel.integrations.config_said import BATCHES, Fields, flatten, make_linter, say
from mm_autoparallel.integrations.deepspeed.read import (
    BATCH,
    MICRO_BATCH,
    MICRO_BATCHES,
    SEQUENCE,
    TENSOR,
    TOP,
    ZERO,
    find_layers,
)
from mm_autoparallel.integrations.deepspeed.written import decide_values
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import DEPRECATED
from mm_autoparallel.integrations.python_text import PLAN, read_lists
from mm_autoparallel.integrations.said import KeyTable, Said

KEYS = {
    "global_batch_size": (BATCH,),
    "mbs": (MICRO_BATCH,),
    "micro_batches": (MICRO_BATCHES,),
    "zero": (f"{ZERO}.stage", ZERO),
    "tp": (f"{TENSOR}.autotp_size",),
    "cp": (SEQUENCE,),
    "optimizer_offload": (f"{ZERO}.offload_optimizer",),
    "layers": (PLAN,),
    "recompute": (PLAN,),
}
_OF_STAGE_3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold"
)
_STAGE = f"{ZERO}.stage"
_ZERO = (
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer "
    "sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload ignore_unused_parameters legacy_stage1 "
    "round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear"
    " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings leaf_module zenflow "
    "stage3_gather_fp16_weights_on_model_save stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"
)
KNOWN = {
    "": TOP.split(),
    ZERO: [*_ZERO.split(), *_OF_STAGE_3.split(), *(f"stage3_{key}" for key in _OF_STAGE_3.split())],
}
"""Section → its keys."""

TABLE = KeyTable(
    exclusive=(("fp16.enabled=true", "bf16.enabled=true"),),
    idle=(
        *((f"{ZERO}.stage3_{key}", (f"{_STAGE}=3",)) for key in _OF_STAGE_3.split()),
        (f"{ZERO}.offload_param.device=cpu|nvme", (f"{_STAGE}=3",)),
        (f"{ZERO}.offload_optimizer.device=cpu|nvme", (f"{_STAGE}=1|2|3",)),
    ),
    deprecated={
        f"{ZERO}.cpu_offload": f"{ZERO}.offload_optimizer.device: cpu",
        f"{ZERO}.cpu_offload_param": f"{ZERO}.offload_param.device: cpu",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    },
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the configuration at `path` says, and its fields. Raises JobError or PlanError where it cannot be read."""
    fields = dict(flatten(read_document(path, "configuration")))
    said = replace(say(path, given, fields, KEYS, table=TABLE, takes=BATCHES), most_zero=1, ulysses=True)
    beside = find_layers(path, given)
    if beside is None:
        return said, fields
    layers, recompute = read_lists(beside)
    held = layers.get("text", ())
    total = said.number("num_layers")
    wrong = f"{beside.name} places {sum(held)} layers, and the model has {total}"
    return replace(
        said,
        numbers={**said.numbers, "pp": len(held)},
        place=lambda key: (beside, 1) if key == PLAN else said.place(key),
        layers=held if total in (None, sum(held)) else wrong,
        recompute=recompute.get("text", ()),
    ), fields


LINTER = make_linter(read_said, KEYS, spell_by(decide_values), KNOWN, (DEPRECATED,))
