"""The job and strategy that a pretrain YAML describes, for what its sizes alone tell: memory.

Experts are divided over expert parallel ranks and, where `moe_config.expert_model_parallel` is left out and expert
parallel divides data parallel, over tensor parallel ones as well. `enable_parallel_optimizer` divides parameters in
`param_init_type` and Adam's two fp32 moments over data parallel ranks (MindSpore's documentation, optimizer parallel:
"the framework saves the parameters as minimal slices"); every rank keeps a copy in `compute_dtype` to compute with, and
gradients in `param_init_type`, whole, which add up over micro-batches (mindformers/wrapper/wrapper.py clones the
weights for them). With one stage and no accumulation nothing adds up: each gradient is reduced to its shard as it
comes, and waits there in fp32 for the optimizer (MFTrainOneStepCell, grad_scale).
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ConfigDict

from mm_autoparallel.frameworks.mindformers.memory_keys import check_division, has_no_mask
from mm_autoparallel.frameworks.mindformers.pretrain_yaml import DEEPSEEK, WHAT, Pretrain
from mm_autoparallel.job.fields import Count, Factor, Flag, Noun, Number
from mm_autoparallel.job.job import Job, parse_job
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.validation import parse_record

DEVICE = "ascend-910b-64g"
"""MindFormers trains on Ascend; only bytes are taken from the job, which the kind of device has little say in."""

DEVICES_PER_NODE = 8
"""Of an Atlas 800T A2; memory does not depend on it."""

_PARAMETER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


class _Part(Noun):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Sizes(_Part):
    """Names and defaults of MindFormers' LlamaConfig and DeepseekV3Config."""

    seq_length: Count
    hidden_size: Count
    num_heads: Count
    vocab_size: Count
    n_kv_heads: Count | None = None
    intermediate_size: Count | None = None
    multiple_of: Count = 256
    ffn_dim_multiplier: Factor | None = None
    q_lora_rank: Number = 0
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    qkv_has_bias: Flag = False
    tie_word_embeddings: Flag = False
    param_init_type: str = "float16"
    compute_dtype: str = "float16"
    use_flash_attention: Flag = False


class _Experts(_Part):
    expert_num: Count = 1
    num_experts_chosen: Count = 1
    moe_intermediate_size: Count | None = None
    shared_expert_num: Number = 0


def build_job(pretrain: Pretrain, global_batch_size: int | None = None) -> Job:
    """What `pretrain` trains, on as many devices as it is divided over.

    global_batch_size: in place of the YAML's micro-batches. Raises JobError where a size is missing or of no known
    form.
    """
    check_division(pretrain)
    sizes = parse_record(_Sizes, pretrain.document["model"]["model_config"], WHAT, pretrain.path)
    moe = parse_record(_Experts, pretrain.document.get("moe_config") or {}, WHAT, pretrain.path)
    if sizes.param_init_type not in _PARAMETER_BYTES:
        raise pretrain.error(
            "model.model_config.param_init_type", f"is {sizes.param_init_type}; {', '.join(_PARAMETER_BYTES)} are known"
        )
    if sizes.compute_dtype not in _PARAMETER_BYTES:
        raise pretrain.error(
            "model.model_config.compute_dtype", f"is {sizes.compute_dtype}; {', '.join(_PARAMETER_BYTES)} are known"
        )
    parameter_bytes, number_bytes = _PARAMETER_BYTES[sizes.param_init_type], _PARAMETER_BYTES[sizes.compute_dtype]
    world_size = pretrain.dp * pretrain.tp * pretrain.pp * pretrain.cp
    node_size = math.gcd(world_size, DEVICES_PER_NODE)
    document = {
        "model": {"name": "mindformers", "text": _decoder(pretrain, sizes, moe)},
        "cluster": {"num_nodes": world_size // node_size, "devices_per_node": node_size, "device": DEVICE},
        "workload": {
            "global_batch_size": global_batch_size or pretrain.mbs * pretrain.dp * pretrain.num_microbatches,
            "seq_length": sizes.seq_length,
            "weight_bytes": number_bytes,
            "gradient_bytes": parameter_bytes,
            "optimizer_bytes": 8.0 + (parameter_bytes if parameter_bytes != number_bytes else 0.0),
            "attention": "flash" if sizes.use_flash_attention else "unfused",
            "mask_compression": has_no_mask(pretrain),
            "sequence_parallel": pretrain.sequence_parallel,
            "stack": "mindformers",
        },
    }
    return parse_job(document, pretrain.path)


def strategy_of(pretrain: Pretrain) -> Strategy:
    """How `pretrain` is divided."""
    expert_tp = pretrain.expert_tp
    if expert_tp is None:
        expert_tp = pretrain.tp if pretrain.dp % pretrain.ep == 0 else 1
    return Strategy(
        pp=pretrain.pp,
        tp=pretrain.tp,
        dp=pretrain.dp,
        mbs=pretrain.mbs,
        cp=pretrain.cp,
        ep=pretrain.ep,
        vpp=pretrain.vp,
        zero=1 if pretrain.optimizer_parallel else 0,
        etp=expert_tp if pretrain.has_experts else 0,
    )


def _decoder(pretrain: Pretrain, sizes: _Sizes, moe: _Experts) -> dict[str, Any]:
    num_layers = pretrain.num_layers - pretrain.mtp_depth
    layers: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden_size": sizes.hidden_size,
        "ffn_size": sizes.intermediate_size or _llama_ffn_size(sizes),
        "num_heads": sizes.num_heads,
        "norm": "rms",
        "qkv_bias": sizes.qkv_has_bias,
    }
    if pretrain.family == DEEPSEEK:
        if sizes.kv_lora_rank is None:
            raise pretrain.error("model.model_config.kv_lora_rank", "is missing; latent attention needs it")
        layers["latent"] = {
            "q_lora_rank": sizes.q_lora_rank,
            "kv_lora_rank": sizes.kv_lora_rank,
            "qk_nope_head_dim": sizes.qk_nope_head_dim,
            "qk_rope_head_dim": sizes.qk_rope_head_dim,
            "v_head_dim": sizes.v_head_dim,
        }
    else:
        layers["num_kv_groups"] = sizes.n_kv_heads or sizes.num_heads
    if pretrain.has_experts:
        width = moe.moe_intermediate_size or layers["ffn_size"]
        layers["experts"] = {
            "num_experts": moe.expert_num,
            "top_k": moe.num_experts_chosen,
            "ffn_size": width,
            "shared_ffn_size": moe.shared_expert_num * width,
            "dense_layers": list(range(pretrain.num_dense)),
        }
    return {
        "vocab_size": sizes.vocab_size,
        "layers": layers,
        "tied": sizes.tie_word_embeddings,
        "num_mtp": pretrain.mtp_depth,
    }


def _llama_ffn_size(sizes: _Sizes) -> int:
    """Two thirds of four times the width, in whole multiples (mindformers/models/llama/llama_layer.py)."""
    width = 4 * sizes.hidden_size
    if sizes.ffn_dim_multiplier is not None:
        width = int((sizes.ffn_dim_multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return sizes.multiple_of * math.ceil(width / sizes.multiple_of)
