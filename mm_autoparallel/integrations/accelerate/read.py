"""A configuration of Hugging Face accelerate: the plan that it runs, with the model that a person names beside it.

What it says is turned into an environment by accelerate/utils/launch.py (1.15), which takes a section's keys as they
come: a key that nobody knows there is passed over, and so is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_document
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
from mm_autoparallel.integrations.deepspeed import read as deepspeed
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

TYPE, FSDP, SIZES, MEGATRON = "distributed_type", "fsdp_config", "parallelism_config", "megatron_lm_config"
DEEPSPEED, ULYSSES = "deepspeed_config", "parallelism_config_sp_size"
PROCESSES, MACHINES = "num_processes", "num_machines"
CONTEXT_KINDS = {"ring": "alltoall", "all_gather": "allgather"}
"""How ranks of a context parallel group share attention → torch's word for what moves keys and values."""

KEYS_OF = {
    FSDP: "activation_checkpointing auto_wrap_policy backward_prefetch cpu_ram_efficient_loading forward_prefetch "
    "ignored_modules min_num_params offload_params reshard_after_forward sharding_strategy state_dict_type "
    "sync_module_states transformer_layer_cls_to_wrap use_orig_params version backward_prefetch_policy",
    SIZES: "dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend "
    "sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    MEGATRON: "attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss "
    "context_parallel_size decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size "
    "expert_tensor_parallel_size gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches "
    "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations recompute_granularity "
    "recompute_method recompute_num_layers sequence_parallelism tp_degree use_custom_fsdp use_distributed_optimizer "
    "use_precision_aware_optimizer use_rotary_position_embeddings",
    DEEPSPEED: "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter "
    "deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping "
    "offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
    "seq_parallel_communication_data_type zero3_init_flag zero3_save_16bit_model zero_stage",
}
"""Section → its keys, without the prefix that all of them have."""

PREFIXES = {FSDP: "fsdp_", SIZES: "parallelism_config_", MEGATRON: "megatron_lm_", DEEPSPEED: ""}
_OLD_SHARDING = {"FULL_SHARD": (3, True), "SHARD_GRAD_OP": (3, False), "NO_SHARD": (0, True), "1": (3, True)}
"""Of FSDP 1: ZeRO and whether weights are given up after the forward."""


def is_config(path: Path) -> bool:
    """Whether the file at `path` is a configuration that `accelerate config` writes: it says how processes divide."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        return False
    try:
        document = read_document(path, "configuration")
    except PlannerError:
        return False
    return TYPE in document and ("compute_environment" in document or PROCESSES in document)


def find_devices(path: Path) -> tuple[int | None, int | None]:
    """Machines, and processes of each."""
    document, where = read_document(path, "configuration"), f"configuration {path}"
    machines, processes = size_at(document, MACHINES, where), document.get(PROCESSES)
    if not isinstance(processes, int) or processes < machines or processes % machines:
        return None, None
    return machines, processes // machines


def describe_launch(path: Path, given: Given) -> Described:
    """What the configuration at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    plan = read_launch_plan(path, given)
    document = read_document(path, "configuration")
    is_megatron = document[TYPE] == "MEGATRON_LM"
    stack = "megatron-te" if is_megatron else "transformers"
    notes = [] if is_megatron else ["the training's code sets the batch; it is what was said beside the configuration"]
    return describe_config(path, given, stack, plan, {}, notes)


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the configuration at `path` runs. Raises JobError naming what nobody says, PlanError naming the key
    that is malformed or says what no plan does."""
    document = read_document(path, "configuration")
    totals = read_totals(path, given)
    mbs = need(given.micro_batch_size, path, "--micro-batch-size")
    return read_plan(document, f"configuration {path}", totals, mbs, given.global_batch_size, given.world_size)


def read_plan(
    document: Mapping[str, Any], where: str, totals: Totals, mbs: int, batch: int | None, world_size: int | None
) -> Plan:
    """The plan of a configuration's content. totals: layers of each modality. mbs, batch: samples of a micro-batch and
    of a step; batch may be None where the file tells micro-batches. world_size: None: as the file has it."""
    for section, keys in KEYS_OF.items():
        names = [f"{PREFIXES[section]}{key}" for key in keys.split()]
        check_keys(section_at(document, section, where), names, f"{where}: {section}")
    _check_precision(document, where)
    if world_size is None:
        world_size = size_at(document, PROCESSES, where)
    kind = document.get(TYPE)
    readers = {
        "MEGATRON_LM": _read_megatron,
        "DEEPSPEED": _read_deepspeed,
        **dict.fromkeys(("FSDP", "MULTI_GPU", "NO"), _read_sharded),
    }
    if not isinstance(kind, str) or kind not in readers:
        raise PlanError(f"{where}: {TYPE} is {describe_value(kind)}; planned are {', '.join(readers)}")
    return readers[kind](document, where, totals, mbs, batch, world_size)


def _check_precision(document: Mapping[str, Any], where: str) -> None:
    precision = document.get("mixed_precision", "bf16")
    if precision not in ("bf16", "fp16"):
        raise PlanError(f"{where}: mixed_precision is {describe_value(precision)}; bf16 or fp16 is planned")


def _read_sharded(
    document: Mapping[str, Any], where: str, totals: Totals, mbs: int, batch: int | None, world_size: int
) -> Plan:
    """FSDP, or copies of the whole model."""
    sharding, sizes = section_at(document, FSDP, where), section_at(document, SIZES, where)
    tp, cp, replicas, shard = (
        size_at(sizes, f"parallelism_config_{name}_size", where) for name in ("tp", "cp", "dp_replicate", "dp_shard")
    )
    if size_at(sizes, ULYSSES, where) > 1:
        raise PlanError(f"{where}: {ULYSSES} is DeepSpeed's Ulysses, and {TYPE} is {document[TYPE]}")
    zero, reshard = _read_zero(sharding, where) if document[TYPE] == "FSDP" else (0, True)
    if world_size % (tp * cp):
        raise PlanError(f"{where}: TP {tp} x CP {cp} does not divide {world_size} processes")
    dp = world_size // (tp * cp)
    if sizes and replicas * shard != dp:
        raise PlanError(
            f"{where}: {SIZES} multiplies to {replicas * shard * tp * cp} and {PROCESSES} is {world_size}; accelerate "
            "refuses to start"
        )
    if flag_at(sharding, "fsdp_offload_params", where):
        raise PlanError(f"{where}: fsdp_offload_params keeps weights on the host, which no plan says; take it out")
    strategy = Strategy(
        pp=1,
        tp=tp,
        dp=dp,
        mbs=mbs,
        cp=cp,
        zero=zero,
        reshard=reshard,
        shard=shard * cp if zero == 3 and replicas > 1 else 0,
        cp_kind=_read_context(sizes, where) if cp > 1 else "",
        sequence_parallel=tp == 1,
    )
    runs_again = flag_at(sharding, "fsdp_activation_checkpointing", where)
    recompute = {modality: (count if runs_again else 0,) for modality, count in totals.items()}
    layers = {modality: (count,) for modality, count in totals.items()}
    return Plan(strategy, layers, recompute, _check_batch(batch, dp * mbs, where))


def _read_deepspeed(
    document: Mapping[str, Any], where: str, totals: Totals, mbs: int, batch: int | None, world_size: int
) -> Plan:
    """DeepSpeed's engine, by the keys that utils/dataclasses.py, DeepSpeedPlugin, turns into its configuration."""
    section, sizes = section_at(document, DEEPSPEED, where), section_at(document, SIZES, where)
    if section.get("deepspeed_config_file"):
        raise JobError(
            f"{where}: {DEEPSPEED}.deepspeed_config_file is {describe_value(section['deepspeed_config_file'])}, which "
            f"says the rest; import that file, with --world-size {world_size}"
        )
    for name in ("tp", "cp"):
        if size_at(sizes, f"parallelism_config_{name}_size", where) > 1:
            raise PlanError(f"{where}: parallelism_config_{name}_size is FSDP's, and {TYPE} is DEEPSPEED")
    copies, shard, ulysses = (
        size_at(sizes, f"parallelism_config_{name}_size", where) for name in ("dp_replicate", "dp_shard", "sp")
    )
    if sizes and copies * shard * ulysses != world_size:
        raise PlanError(
            f"{where}: {SIZES} multiplies to {copies * shard * ulysses} and {PROCESSES} is {world_size}; accelerate "
            "refuses to start"
        )
    steps = section.get("gradient_accumulation_steps")
    if batch is None and not isinstance(steps, int):
        raise JobError(f"{where} leaves the batch to the training's code; say it with --global-batch-size N")
    engine = {
        deepspeed.BATCH: batch,
        deepspeed.MICRO_BATCH: mbs,
        deepspeed.MICRO_BATCHES: steps,
        deepspeed.SEQUENCE: ulysses,
        deepspeed.ZERO: {
            "stage": 2 if section.get("zero_stage") is None else section["zero_stage"],
            **{
                key: {"device": section.get(f"{key}_device") or "none"}
                for key in ("offload_optimizer", "offload_param")
            },
        },
    }
    return deepspeed.read_plan(engine, f"{where}: {DEEPSPEED}", totals, None, world_size)


def _check_batch(batch: int | None, per_micro_batch: int, where: str) -> int:
    if batch is None:
        raise JobError(f"{where} leaves the batch to the training's code; say it with --global-batch-size N")
    if batch % per_micro_batch:
        raise PlanError(f"{where}: a batch of {batch} is no multiple of DP x MBS, {per_micro_batch}")
    return batch


def _read_zero(sharding: Mapping[str, Any], where: str) -> tuple[int, bool]:
    """ZeRO, and whether weights are given up after the forward."""
    if size_at(sharding, "fsdp_version", where) == 1:
        word = str(sharding.get("fsdp_sharding_strategy", "FULL_SHARD"))
        if word not in _OLD_SHARDING:
            raise PlanError(f"{where}: fsdp_sharding_strategy is {word}; planned are {', '.join(_OLD_SHARDING)}")
        return _OLD_SHARDING[word]
    return 3, flag_at(sharding, "fsdp_reshard_after_forward", where, usual=True)


def _read_context(sizes: Mapping[str, Any], where: str) -> Any:
    word = sizes.get("parallelism_config_cp_comm_strategy") or "allgather"
    kind = next((kind for kind, said in CONTEXT_KINDS.items() if said == word), None)
    if kind is None:
        raise PlanError(
            f"{where}: parallelism_config_cp_comm_strategy is {describe_value(word)}; "
            f"{' or '.join(CONTEXT_KINDS.values())} is expected"
        )
    return kind


def _read_megatron(
    document: Mapping[str, Any], where: str, totals: Totals, mbs: int, batch: int | None, world_size: int
) -> Plan:
    section = section_at(document, MEGATRON, where)

    def size(name: str, usual: int = 1) -> int:
        return size_at(section, f"megatron_lm_{name}", where, usual)

    def flag(name: str) -> bool:
        return flag_at(section, f"megatron_lm_{name}", where)

    if len(totals) > 1:
        raise PlanError(
            f"{where}: accelerate's Megatron-LM trains a decoder alone, and the model has {', '.join(totals)}"
        )
    if flag("use_custom_fsdp"):
        raise PlanError(f"{where}: megatron_lm_use_custom_fsdp is not planned; take it out, or use FSDP")
    tp, pp, cp, micro_batches = (
        size("tp_degree"),
        size("pp_degree"),
        size("context_parallel_size"),
        size("num_micro_batches"),
    )
    if world_size % (tp * pp * cp):
        raise PlanError(f"{where}: TP {tp} x PP {pp} x CP {cp} does not divide {world_size} processes")
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=world_size // (tp * pp * cp),
        mbs=mbs,
        cp=cp,
        ep=size("expert_model_parallel_size"),
        etp=size("expert_tensor_parallel_size", 0),
        zero=int(flag("use_distributed_optimizer")),
        cp_kind="ring" if cp > 1 else "",
        optimizer_offload=flag("optimizer_cpu_offload"),
        sequence_parallel=tp == 1 or flag("sequence_parallelism"),
    )
    per_step = micro_batches * strategy.dp * mbs
    if batch not in (None, per_step):
        raise PlanError(
            f"{where}: {micro_batches} micro-batches of {mbs} on DP {strategy.dp} are {per_step} samples, not {batch}"
        )
    layers = read_layers(section, totals["text"], pp, where)
    recompute, modes = _read_recompute(section, layers, where)
    return Plan(strategy, {"text": layers}, {"text": recompute}, per_step, modes=modes)


def read_layers(section: Mapping[str, Any], total: int, pp: int, where: str) -> tuple[int, ...]:
    """The layers of each stage, of `total`. Raises PlanError where they are not dealt evenly."""
    last = size_at(section, "megatron_lm_decoder_last_pipeline_num_layers", where, 0)
    others = (total - last) if last else total
    stages = pp - 1 if last else pp
    if (last and pp == 1) or others < stages or others % stages:
        raise PlanError(f"{where}: {others} layers are not dealt evenly to {stages} stages")
    return (*[others // stages] * stages, *([last] if last else []))


def _read_recompute(
    section: Mapping[str, Any], layers: tuple[int, ...], where: str
) -> tuple[tuple[int, ...], dict[str, dict[str, tuple[int, ...]]]]:
    """Layers of each stage that recompute, and those in other modes. What is left out is full, uniform, 1: the
    defaults of utils/dataclasses.py, MegatronLMPlugin."""
    none = (0,) * len(layers)
    granularity = section.get("megatron_lm_recompute_granularity") or "full"
    if granularity == "selective" or flag_at(section, "megatron_lm_recompute_activations", where):
        return none, {"text": {"selective": layers}}
    if granularity != "full":
        raise PlanError(
            f"{where}: megatron_lm_recompute_granularity is {describe_value(granularity)}; full or selective"
        )
    said = section.get("megatron_lm_recompute_num_layers")
    is_none = type(said) is int and said == 0
    number = 0 if is_none else size_at(section, "megatron_lm_recompute_num_layers", where)
    method = section.get("megatron_lm_recompute_method") or "uniform"
    if method == "uniform" and number == 1:
        return layers, {}
    if method != "block":
        raise PlanError(f"{where}: megatron_lm_recompute_method is {describe_value(method)}; block is planned")
    return tuple(min(number, held) for held in layers), {}
