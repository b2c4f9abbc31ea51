"""How PaddleFormers 1.2 and PaddleNLP 3.0 spell what a plan decides (trainer/training_args.py of both)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.validation import nearest

FORMERS, NLP = "1.2", "3.0"
"""Versions, of PaddleFormers and of PaddleNLP before it."""

MBS, STEPS, SHARDING = "per_device_train_batch_size", "gradient_accumulation_steps", "sharding"
SEQUENCE, ORDER, GRANULARITY = "sequence_parallel", "hybrid_parallel_topo_order", "recompute_granularity"
DISPATCHER, USE_EXPERTS, SEGMENTS = "moe_token_dispatcher_type", "use_expert_parallel", "pp_seg_method"

SIZES: Mapping[str, Mapping[str, str]] = {
    FORMERS: {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "shard": "sharding_parallel_size",
        "sep": "sep_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_model_parallel_size",
    },
    NLP: {
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "vpp": "virtual_pp_degree",
        "shard": "sharding_parallel_degree",
        "sep": "sep_parallel_degree",
        "cp": "context_parallel_degree",
        "ep": "expert_parallel_degree",
        "etp": "expert_tensor_parallel_degree",
    },
}
"""Version → size of a plan → its key. sep: Ulysses; cp: attention shared otherwise."""

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    FORMERS: {GRANULARITY: "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    NLP: {"recompute": True, GRANULARITY: "full"},
}
"""Version → what makes all layers run again."""

NOT_PLANNED = {
    "use_dualpipev": "another order of the pipeline",
    "forward_backward_overlap_scheduler": "another order of the pipeline",
    "split_backward": "another order of the pipeline",
    "best_unbalanced_scheduler": "another order of chunks",
    "tensorwise_offload_optimizer": "states on the host that a device steps",
    "offload_optim": "states on the host that a device steps",
}
"""Key, or word of pipeline_parallel_config → what it is, which no plan says."""

_BESIDE = (
    "auto_parallel_resume_form_hybrid_parallel auto_parallel_sync_shared_params data_parallel_config "
    "enable_auto_parallel eval_accumulation_steps force_reshard_pp fuse_sequence_parallel_allreduce "
    "hybrid_parallel_expert_grad_scale load_sharded_model load_sharded_model_remap_parameter_name no_recompute_layers "
    "optim_shard_num pipeline_parallel_config pp_need_data_degree pp_recompute_interval pp_sharding_comm_overlap "
    "recompute recompute_method recompute_modules recompute_mtp_granularity recompute_mtp_method recompute_mtp_modules "
    "recompute_num_layers recompute_use_reentrant refined_recompute replace_with_parallel_cross_entropy "
    "save_sharded_model save_sharding_stage1_model_include_freeze_params sd_sharding_comm_overlap "
    "sd_shardingv1_comm_overlap sequence_parallel_config sharded_model_from_ema sharding_comm_buffer_size_MB "
    "sharding_comm_group_call_opt sharding_degree sharding_offload_opt_buffersize_GB sharding_parallel_config "
    "sharding_parallel_mesh_dimension tensor_parallel_config tensor_parallel_output use_recompute_mtp "
    "per_device_eval_batch_size"
)
_DECIDING = {MBS, STEPS, SHARDING, SEQUENCE, ORDER, GRANULARITY, USE_EXPERTS, DISPATCHER, SEGMENTS, *NOT_PLANNED}
_ALL = _DECIDING.union(_BESIDE.split(), *(set(names.values()) for names in SIZES.values()))
KNOWN = sorted(_ALL)
_WORDS, _NEAR = ("parallel", "shard", "recompute", "accumulation_step", "_degree"), 0.9
"""What tells that a key would decide something; how near to one that does."""


def find_version(arguments: Mapping[str, Any], where: str) -> str:
    """Whose names the arguments have. Raises JobError where they have both's, or none's key that decides a plan and is
    nearly one."""
    said = {version: sorted(set(names.values()) & set(arguments)) for version, names in SIZES.items()}
    if said[FORMERS] and said[NLP]:
        raise JobError(f"{where}: {said[FORMERS][0]} is PaddleFormers' key and {said[NLP][0]} is PaddleNLP's; keep one")
    for key in arguments:
        if key in KNOWN or len(str(key)) > 60:
            continue
        if any(word in str(key) for word in _WORDS) or get_close_matches(str(key), KNOWN, n=1, cutoff=_NEAR):
            raise JobError(f"{where}: {key} is not known there and would decide nothing{nearest(str(key), KNOWN)}")
    return NLP if said[NLP] or ("recompute" in arguments and not said[FORMERS]) else FORMERS


def read_flag(arguments: Mapping[str, Any], key: str, where: str) -> bool:
    """True or false under `key`, false where it is missing; 0 and 1 mean them too. Raises PlanError."""
    value = arguments.get(key)
    if value not in (None, True, False) and str(value).lower() not in ("true", "false"):
        raise PlanError(f"{where}: {key} is {describe_value(value)}; true or false is expected")
    return value is not None and str(value).lower() in ("true", "1")
