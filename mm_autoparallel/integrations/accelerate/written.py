"""A plan as accelerate's configuration: FSDP2 for ZeRO 2 and 3, Megatron-LM for 0 and 1; new, or in one's own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.accelerate.read import (
    CONTEXT_KINDS,
    DEEPSPEED,
    FSDP,
    MACHINES,
    MEGATRON,
    PROCESSES,
    SIZES,
    TYPE,
    ULYSSES,
    describe_launch,
    find_devices,
    is_config,
    read_launch_plan,
    read_plan,
)
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.config_files import round_recompute, section_at, size_at, spell_by, totals_of
from mm_autoparallel.integrations.export import only, patched_launch
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.yaml_text import set_file_values
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.plan import Plan

CONFIG = "accelerate.yaml"

_ONE_CHUNK = "accelerate's configuration has no chunks (they are an argument of its plugin); plan with search.max_vpp 1"
_SCHEDULE = "accelerate runs 1f1b alone; plan with search.schedule left out"
_ENCODER = "accelerate's pipelines are Megatron-LM's of a decoder alone; plan with search.pp [1] and ZeRO 3"
_ONE_SHARDING = "FSDP2 has no pipeline in accelerate; plan with search.zero [0, 1], or search.pp [1]"
_NO_KEY = "accelerate's configuration has no key for it; plan without it"
_NO_MODE = "accelerate recomputes whole layers, or attention in Megatron-LM; plan without it in search.modes"
_CONTEXT = "accelerate's ring and all_gather alone are torch's and Megatron-LM's; plan with search.cp_kind [ring]"

REFUSED = (
    dict.fromkeys(("chunks", "uneven_chunks", "partial_group"), _ONE_CHUNK)
    | dict.fromkeys(("gpipe", "low_memory_chunks", "split_backwards", "pieces"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), _ENCODER)
    | dict.fromkeys(("zero_2_pipeline", "zero_3_pipeline"), _ONE_SHARDING)
    | dict.fromkeys(("rank_order", "precision", "graphs", "fused_products", "user_buffers"), _NO_KEY)
    | dict.fromkeys(("dispatcher", "token_overlap", "overlaps"), _NO_KEY)
    | dict.fromkeys(("selective_some", "activation", "offload", "recompute_offload"), _NO_MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _NO_MODE)
    | dict.fromkeys(("all_to_all", "hierarchical"), _CONTEXT)
)
"""Feature → why it is refused wherever it stands; `uneven_stages` and `all_gather` depend on the rest of the plan."""

_OF_FSDP = {
    "tensor": "transformers' TP divides no sequences; plan with search.sequence_parallel [false]",
    "experts": "FSDP2 deals no experts in accelerate; plan with EP 1",
    "whole_experts": "FSDP2 deals no experts in accelerate; plan with EP 1",
    "optimizer_offload": "fsdp_offload_params would move weights to the host too; plan without it",
    "selective_all": "fsdp_activation_checkpointing runs whole layers again; plan with search.modes [recompute]",
}
_OF_MEGATRON = {
    "all_gather": "accelerate's Megatron-LM shares attention by ring; plan with search.cp_kind [ring], or ZeRO 3",
}
_CHECKED = ("read back: the configuration as written gives the plan that it is said to run",)
_WRITTEN = ("FSDP", "MEGATRON_LM")
_USUAL = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def export_new(plan: Plan, target: Target) -> Exported:
    """`accelerate.yaml`. Raises PlanError naming what accelerate cannot run."""
    run, values, told = _decide(plan, target)
    job, world_size = target.job, plan.strategy.world_size
    per_node = min(job.cluster.devices_per_node if job else 8, world_size)
    machines = world_size // per_node if world_size % per_node == 0 else 1
    said = {key: value for key, value in values.items() if value is not None}
    document = {**_USUAL, TYPE: values[TYPE], MACHINES: machines, PROCESSES: world_size, **said}
    if FSDP in document:
        wrap = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
        document[FSDP] = {**document[FSDP], **wrap}
    header = "".join(f"# {line}\n" for line in (*target.describe(run), *told))
    text = header + yaml.safe_dump(document, sort_keys=False)
    _check(run, target, yaml.safe_load(text))
    return Exported({Path(CONFIG): text}, run, told, _CHECKED, _unchecked(target), _list_notes(run))


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The configuration at the one of `paths` with `plan` in it: sections that another kind of training needs go."""
    (path,) = only(paths, "accelerate", "its configuration")
    if path.suffix not in (".yaml", ".yml"):
        raise JobError(f"{path}: a plan is written into configurations in YAML; import reads JSON too")
    run, values, told = _decide(plan, target)
    before = read_document(path, "configuration")
    changes: dict[tuple[str | int, ...], Any] = {(PROCESSES,): plan.strategy.world_size}
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            changes |= {(key, name): each for name, each in value.items()}
        elif value is not None or before.get(key):
            changes[(key,)] = value if value is not None else {}
    if size_at(section_at(before, SIZES, str(path)), ULYSSES, str(path)) > 1:
        changes[(SIZES, ULYSSES)] = 1
    text = set_file_values(path, "configuration", changes)
    _check(run, target, yaml.safe_load(text))
    return Exported({path: text}, run, told, _CHECKED, _unchecked(target), _list_notes(run))


def _check(run: Plan, target: Target, document: dict[str, Any]) -> None:
    strategy = run.strategy
    again = read_plan(document, CONFIG, totals_of(run), strategy.mbs, run.global_batch_size, strategy.world_size)
    check_decided(again, run, target.job)


def _unchecked(target: Target) -> tuple[str, ...]:
    return () if target.job else ("without --job: heads, vocabulary and experts are not held against the sizes",)


def _list_notes(run: Plan) -> tuple[str, ...]:
    steps = (
        "the micro-batches are megatron_lm_num_micro_batches"
        if run.strategy.zero < 2
        else (f"set gradient_accumulation_steps to {run.num_microbatches}")
    )
    return (f"the training's code sets the batch of a device to {run.strategy.mbs}; {steps}",)


def spell(path: Path, plan: Plan, better: Plan, job: Job) -> str:
    """How `lint` spells a better plan; nothing of a kind of training whose keys no plan is written in."""
    kind = read_document(path, "configuration").get(TYPE)
    return spell_by(lambda *asked: _decide(*asked)[1])(path, plan, better, job) if kind in _WRITTEN else ""


def _decide(plan: Plan, target: Target) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """What the configuration runs, its decided keys (None: must not stand there), and sentences for what is rounded."""
    refuse_features(plan, target.job, REFUSED)
    is_fsdp = plan.strategy.zero > 1
    refuse_features(plan, target.job, _OF_FSDP if is_fsdp else _OF_MEGATRON)
    if target.job and target.job.model.adapters:
        raise PlanError("plan: its model has adapters, and the configuration says nothing of what is trained")
    return _decide_fsdp(plan, target) if is_fsdp else _decide_megatron(plan)


def _decide_fsdp(plan: Plan, target: Target) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    strategy = plan.strategy
    told: tuple[str, ...] = ()
    if strategy.zero == 2:
        strategy = replace(strategy, zero=3, reshard=False)
        told = (
            "ZeRO 2: FSDP2 shards weights too and keeps them gathered from forward to backward, so less is held "
            "between steps and weights are gathered in each micro-batch",
        )
    shard = strategy.shard or strategy.dp * strategy.cp
    if shard % strategy.cp:
        raise PlanError(
            f"plan: shards of {shard} ranks are no multiple of CP {strategy.cp}; plan with search.shard [0]"
        )
    runs_again = any(any(plan.recompute[modality]) for modality in plan.layers)
    recompute = {
        modality: counts if runs_again else plan.recompute[modality] for modality, counts in plan.layers.items()
    }
    told += round_recompute(plan, recompute, "FSDP recomputes all layers or none")
    run = replace(plan, strategy=strategy, recompute=recompute)
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": strategy.dp * strategy.cp // shard,
        "parallelism_config_dp_shard_size": shard // strategy.cp,
        "parallelism_config_tp_size": strategy.tp,
        "parallelism_config_cp_size": strategy.cp,
    }
    kind = strategy.context_kind(target.job.workload) if target.job else strategy.cp_kind
    if strategy.cp > 1:
        sizes["parallelism_config_cp_comm_strategy"] = CONTEXT_KINDS[kind or "all_gather"]
    sharding = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.reshard,
        "fsdp_activation_checkpointing": runs_again,
        "fsdp_offload_params": False,
    }
    return run, {TYPE: "FSDP", FSDP: sharding, SIZES: sizes, MEGATRON: None, DEEPSPEED: None}, told


def _decide_megatron(plan: Plan) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    strategy, held, recompute = plan.strategy, plan.layers["text"], plan.recompute["text"]
    if set(plan.layers) != {"text"}:
        raise PlanError(f"plan: it places {', '.join(plan.layers)} layers, and {_ENCODER}")
    if len({*held[:-1]}) > 1:
        raise PlanError(
            f"plan: layers {list(held)} differ before the last stage, and accelerate has a key for the last stage's "
            "alone (megatron_lm_decoder_last_pipeline_num_layers); export --to megatron-core, or plan with fewer stages"
        )
    most, selective = max(recompute), plan.modes.get("text", {}).get("selective")
    rounded = tuple(min(most, count) for count in held)
    told = round_recompute(plan, {"text": rounded}, "Megatron-LM has one number for all stages")
    values: dict[str, Any] = {
        "tp_degree": strategy.tp,
        "pp_degree": strategy.pp,
        "num_micro_batches": plan.num_microbatches,
        "sequence_parallelism": strategy.tp > 1 and strategy.sequence_parallel,
        "use_distributed_optimizer": strategy.zero == 1,
        "context_parallel_size": strategy.cp,
        "expert_model_parallel_size": strategy.ep,
        "expert_tensor_parallel_size": strategy.expert_tp if strategy.ep > 1 or strategy.etp else None,
        "decoder_last_pipeline_num_layers": held[-1] if len({*held}) > 1 else None,
        "optimizer_cpu_offload": strategy.optimizer_offload,
        "use_precision_aware_optimizer": strategy.optimizer_offload,
        "recompute_granularity": "selective" if selective else "full",  # left out, it is full for all layers
        "recompute_method": None if selective else "block",
        "recompute_num_layers": None if selective else most,
        "recompute_activations": False,
    }
    section = {f"megatron_lm_{name}": value for name, value in values.items() if value is not None}
    run = replace(plan, recompute={"text": rounded})
    return run, {TYPE: "MEGATRON_LM", MEGATRON: section, FSDP: None, SIZES: None, DEEPSPEED: None}, told


EXPORTER = Exporter(
    ("1.15",),
    CONFIG,
    export_new,
    export_patch,
    frozenset({"recompute_stages", "zero_2"}),
    frozenset({*REFUSED, "uneven_stages", "all_gather"}),
)
LAUNCHES = (
    patched_launch(
        "a configuration of Hugging Face accelerate (YAML or JSON)",
        is_config,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        find_devices,
        takes=("seq_length", "global_batch_size", "micro_batch_size"),
    ),
)
