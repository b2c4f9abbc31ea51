"""What a configuration of accelerate says to `lint`: its keys by quantity, and what goes with what (1.15).

Pairs: utils/dataclasses.py, FullyShardedDataParallelPlugin, and the sections that utils/launch.py reads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.accelerate.read import (
    DEEPSPEED,
    FSDP,
    KEYS_OF,
    MEGATRON,
    PREFIXES,
    PROCESSES,
    SIZES,
    TYPE,
    find_devices,
    read_layers,
)
from mm_autoparallel.integrations.accelerate.written import spell
from mm_autoparallel.integrations.config_said import BATCHES, Fields, deal, flatten, make_linter, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.said import KeyTable, Said


def _of(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{PREFIXES[section]}{name}" for name in names)


_OF_FSDP = {
    "tp": _of(SIZES, "tp_size"),
    "cp": _of(SIZES, "cp_size"),
    "dp": _of(SIZES, "dp_shard_size", "dp_replicate_size"),
    "recompute": _of(FSDP, "activation_checkpointing"),
    "zero": (TYPE,),
}
_OF_MEGATRON = {
    "tp": _of(MEGATRON, "tp_degree"),
    "pp": _of(MEGATRON, "pp_degree"),
    "cp": _of(MEGATRON, "context_parallel_size"),
    "ep": _of(MEGATRON, "expert_model_parallel_size"),
    "etp": _of(MEGATRON, "expert_tensor_parallel_size"),
    "micro_batches": _of(MEGATRON, "num_micro_batches"),
    "layers": _of(MEGATRON, "decoder_last_pipeline_num_layers", "pp_degree"),
    "recompute": _of(MEGATRON, "recompute_num_layers", "recompute_granularity"),
    "optimizer_offload": _of(MEGATRON, "optimizer_cpu_offload"),
    "zero": _of(MEGATRON, "use_distributed_optimizer"),
}
_OF_DEEPSPEED = {
    "cp": _of(SIZES, "sp_size"),
    "dp": _of(SIZES, "dp_shard_size", "dp_replicate_size"),
    "micro_batches": _of(DEEPSPEED, "gradient_accumulation_steps"),
    "optimizer_offload": _of(DEEPSPEED, "offload_optimizer_device"),
    "zero": (*_of(DEEPSPEED, "zero_stage"), TYPE),
}
_KINDS = {"MEGATRON_LM": _OF_MEGATRON, "DEEPSPEED": _OF_DEEPSPEED}
KEYS = {
    key: tuple(name for table in (_OF_MEGATRON, _OF_DEEPSPEED, _OF_FSDP) for name in table.get(key, ()))
    for key in {**_OF_FSDP, **_OF_MEGATRON}
}
"""Of all kinds of training."""

KNOWN = {section: [f"{PREFIXES[section]}{key}" for key in keys.split()] for section, keys in KEYS_OF.items()}

_VERSION = f"{FSDP}.fsdp_version"
_GRANULARITY = f"{MEGATRON}.megatron_lm_recompute_granularity"
TABLE = KeyTable(
    exclusive=((f"{FSDP}.fsdp_reshard_after_forward=FULL_SHARD|SHARD_GRAD_OP|NO_RESHARD", f"{_VERSION}=2"),),
    idle=(
        (FSDP, (f"{TYPE}=FSDP",)),
        (MEGATRON, (f"{TYPE}=MEGATRON_LM",)),
        (DEEPSPEED, (f"{TYPE}=DEEPSPEED",)),
    ),
    cancelled=(
        *((key, f"{_VERSION}=2") for key in _of(FSDP, "sharding_strategy", "backward_prefetch", "forward_prefetch")),
        *((key, f"{_GRANULARITY}=selective") for key in _of(MEGATRON, "recompute_num_layers", "recompute_method")),
    ),
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the configuration at `path` says, and its fields. Raises JobError where it cannot be read."""
    document = read_document(path, "configuration")
    fields = dict(flatten(document))
    kind = document.get(TYPE)
    is_megatron = kind == "MEGATRON_LM"
    of_kind = _KINDS.get(str(kind), _OF_FSDP) | {"world_size": (PROCESSES,)}
    said = say(path, given, fields, of_kind, {"per_node": find_devices(path)[1]}, table=TABLE, takes=BATCHES)
    said = replace(said, ulysses=kind == "DEEPSPEED")
    numbers = dict(said.numbers)
    if not is_megatron:
        shard, copies = (fields.get(key) for key in _OF_FSDP["dp"])
        if isinstance(shard, int) or isinstance(copies, int):
            numbers["dp"] = (shard if isinstance(shard, int) else 1) * (copies if isinstance(copies, int) else 1)
        return replace(said, numbers=numbers), fields
    section = document.get(MEGATRON)
    total, pp = said.number("num_layers"), said.size("pp")
    numbers["zero"] = int(fields.get(_OF_MEGATRON["zero"][0]) is True)
    if fields.get(_GRANULARITY) in (None, "full") and fields.get(f"{MEGATRON}.megatron_lm_recompute_method") == "block":
        recomputed = fields.get(_OF_MEGATRON["recompute"][0])
        numbers |= {"recomputed": recomputed} if isinstance(recomputed, int) else {}
    if total is None or not isinstance(section, dict):
        return replace(said, numbers=numbers), fields
    layers = deal(str(path), lambda: read_layers(section, total, pp, str(path)))
    return replace(said, numbers=numbers, layers=layers), fields


LINTER = make_linter(read_said, KEYS, spell, KNOWN)
