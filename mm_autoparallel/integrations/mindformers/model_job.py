"""The job and strategy that a pretrain YAML describes, for what its sizes alone tell: memory.

Experts are divided over expert parallel ranks and, where `moe_config.expert_model_parallel` is left out and expert
parallel divides data parallel, over tensor parallel ones as well; Telechat's are dealt to these whole.
`enable_parallel_optimizer` divides parameters in `param_init_type` and Adam's two fp32 moments over data parallel ranks
(MindSpore's documentation, optimizer parallel: "the framework saves the parameters as minimal slices"); every rank
keeps a copy in `compute_dtype` to compute with, and gradients in `param_init_type`, whole, which add up over micro-
batches (mindformers/wrapper/wrapper.py clones the weights for them). With one stage and no accumulation nothing adds
up: each gradient is reduced to its shard as it comes, and waits there in fp32 for the optimizer (MFTrainOneStepCell,
grad_scale).
"""

from __future__ import annotations

import math
from typing import Any

from mm_autoparallel.integrations.mindformers import decoder
from mm_autoparallel.integrations.mindformers.memory_keys import check_division, deals_whole_experts
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job

DEVICE = "ascend-910b-64g"
"""MindFormers trains on Ascend; only bytes are taken from the job, which the kind of device has little say in."""

DEVICES_PER_NODE = 8
"""Of an Atlas 800T A2; memory does not depend on it."""


def build_job(pretrain: Pretrain, global_batch_size: int | None = None) -> Job:
    """What `pretrain` trains, on as many devices as it is divided over.

    global_batch_size: in place of the YAML's micro-batches. Raises JobError where a size is missing or of no known
    form.
    """
    return parse_job(describe_job(pretrain, global_batch_size), pretrain.path)


def describe_job(pretrain: Pretrain, global_batch_size: int | None = None) -> dict[str, Any]:
    """The sections of that job as its file has them. Raises JobError as `build_job` does."""
    check_division(pretrain)
    if global_batch_size is not None and pretrain.seq_split_num > 1:
        raise pretrain.error(
            "parallel_config.seq_split_num",
            f"is {pretrain.seq_split_num}; divisions are searched for whole micro-batches: set it to 1 for that, and "
            "give the division you choose to pipeline-search with it",
        )
    parameter_bytes, number_bytes = decoder.bytes_of_numbers(pretrain.model)
    world_size = pretrain.dp * pretrain.tp * pretrain.pp * pretrain.cp
    node_size = math.gcd(world_size, DEVICES_PER_NODE)
    return {
        "model": {"name": "mindformers", "text": _decoder(pretrain)},
        "cluster": {"num_nodes": world_size // node_size, "devices_per_node": node_size, "device": DEVICE},
        "workload": {
            "global_batch_size": global_batch_size or pretrain.mbs * pretrain.dp * pretrain.num_microbatches,
            "seq_length": decoder.sequence_length(pretrain.model),
            "weight_bytes": number_bytes,
            "gradient_bytes": parameter_bytes,
            "optimizer_bytes": 8.0 + (parameter_bytes if parameter_bytes != number_bytes else 0.0),
            "attention": "flash" if decoder.has_flash_attention(pretrain.model) else "unfused",
            "mask_compression": decoder.has_no_mask(pretrain.model),
            "sequence_parallel": pretrain.sequence_parallel,
            "stack": "mindformers",
        },
    }


def strategy_of(pretrain: Pretrain) -> Strategy:
    """How `pretrain` is divided."""
    expert_tp, ep = pretrain.expert_tp, pretrain.ep
    if deals_whole_experts(pretrain):
        expert_tp, ep = 1, pretrain.ep * pretrain.tp
    elif expert_tp is None:
        expert_tp = pretrain.tp if pretrain.dp % pretrain.ep == 0 else 1
    return Strategy(
        pp=pretrain.pp,
        tp=pretrain.tp,
        dp=pretrain.dp,
        mbs=pretrain.mbs,
        cp=pretrain.cp,
        ep=ep,
        vpp=pretrain.vp,
        zero=1 if pretrain.optimizer_parallel else 0,
        etp=expert_tp if pretrain.has_experts else 0,
    )


def key_value_bytes(pretrain: Pretrain) -> float:
    """Keys and values of one layer and micro-batch on one rank, in the type that is computed with."""
    workload, layers = (job := build_job(pretrain)).workload, job.model.text.layers
    value_dim = layers.latent.v_head_dim if layers.latent else layers.head_dim
    rows = pretrain.mbs * workload.seq_length / pretrain.cp
    return workload.weight_bytes * rows * max(1.0, layers.num_kv_groups / pretrain.tp) * (layers.head_dim + value_dim)


def _decoder(pretrain: Pretrain) -> dict[str, Any]:
    num_layers = pretrain.num_layers - pretrain.mtp_depth
    return decoder.describe_decoder(
        pretrain.model, num_layers, pretrain.num_dense, pretrain.mtp_depth + pretrain.num_last_mtp, pretrain.tp
    )
