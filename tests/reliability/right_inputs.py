"""Inputs as they should be, small enough that reading them takes milliseconds."""

from __future__ import annotations

from typing import Any

TEXT = {"num_layers": 6, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "num_kv_groups": 4, "norm": "rms"}
VISION = {"num_layers": 2, "hidden_size": 256, "ffn_size": 1024, "num_heads": 4, "norm": "layer", "gated": False}
JOB: dict[str, Any] = {
    "model": {
        "name": "small",
        "encoders": [
            {
                "name": "vision",
                "stem": {"type": "patches", "in_features": 588},
                "layers": VISION,
                "projector": {"norm": "layer", "norm_size": 256, "merge_tokens": 4, "layer_sizes": [1024, 512]},
                "freeze": True,
            }
        ],
        "text": {"vocab_size": 32000, "layers": TEXT},
    },
    "cluster": {"num_nodes": 2, "devices_per_node": 2, "device": {"based_on": "a100-80g", "memory_bytes": 4e9}},
    "workload": {
        "global_batch_size": 16, "seq_length": 1024, "image_tokens_per_sample": 256,
        "micro_batch_scale": {"vision": [1.0, 0.5]}, "weight_bytes": 2.0,
    },
    "search": {"pp": [2], "tp": [1], "mbs": [1, 2], "max_vpp": 2, "zero": [1], "modes": ["recompute"]},
}  # fmt: skip
PLAN = {
    "parallel_config": {"PP": 2, "TP": 1, "DP": 2, "MBS": 1},
    "layer_placement": {"vit_layer_placement": [2, 0], "llm_layer_placement": [2, 4]},
    "layer_recompute": {"vit_layer_recompute": [0, 0], "llm_layer_recompute": [1, 0]},
    "e2e_time": 12.5,
    "throughput": 100.0,
}
PROBLEM = {
    "num_stages": 2, "num_chunks": 1, "num_microbatches": 4, "schedule": "1f1b", "memory_limit_bytes": [6e9, 5e9],
    "stage_static_bytes": 1e8, "p2p_ms": [0.1], "p2p_ms_per_byte": 1e-9, "host_ms_per_byte": 1e-9,
    "host_limit_bytes": 1e12, "stage_time_factor": [1.0, 1.1],
    "chain": [
        {"name": "pre", "modality": "v", "count": 1, "forward_ms": 0.1, "backward_ms": 0.0, "layer": False,
         "pinned": "first", "attach": "next"},
        {"name": "layer", "modality": "v", "count": 6, "forward_ms": 1.0, "backward_ms": 2.0, "static_bytes": 1e8,
         "activation_bytes": 3e8, "output_bytes": 1e6, "microbatch_scale": [1.0, 0.5, 1.0, 2.0],
         "modes": [{"name": "recompute", "extra_backward_ms": 0.3, "activation_bytes": 1e7},
                   {"name": "offload", "host_bytes": 1e8, "restored_bytes": 1e6}]},
        {"name": "head", "modality": "t", "count": 1, "forward_ms": 0.5, "backward_ms": 1.0, "layer": False,
         "pinned": "last"},
    ],
}  # fmt: skip
SAPP_INIT = """pipeline_config: {pipeline_num: 4, num_layer: 16, offset: [[0, 1, -1, 0], [0, 0, 0, 0]]}
time_config: {head: 3, body: 30, tail: 30}
recompute_config: {recompute: [[0, 3, 0, 0], false]}
memory_usage:
  head_memory: 12900
  tail_memory: 7200
  body_memories: {stage_id: [[1, 2], [1]], memories: [[8900, 6000], [10000]]}
"""
SAPP_LAYERS = {
    "name": "small",
    "stage_const_mem": 100.0,
    "layers_description": [
        {"name": "HEAD", "type": "HEAD", "time": 3, "nb_layer": 1, "memory_parameter": 900},
        {"name": "BODY", "type": "BODY", "time": 30, "nb_layer": 8, "memory_parameter": 500, "memory_activation": 300,
         "memory_recompute": 30},
        {"name": "TAIL", "type": "TAIL", "time": 30, "nb_layer": 1, "memory_parameter": 700},
    ],
}  # fmt: skip
DECODER: dict[str, Any] = {
    "num-layers": 4, "hidden-size": 256, "ffn-hidden-size": 512, "num-attention-heads": 8, "padded-vocab-size": 512,
    "max-position-embeddings": 256, "swiglu": True, "disable-bias-linear": True, "normalization": "RMSNorm",
    "position-embedding-type": "rope", "untie-embeddings-and-output-weights": True,
}  # fmt: skip
"""Megatron-LM's flags of a small decoder."""
RECIPE = """from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer

LENGTH = 128


def _split(cfg: ConfigContainer, stages: int = 2) -> None:
    cfg.model.pipeline_model_parallel_size = stages


def small_pretrain_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.seq_length = LENGTH * 2
    _split(cfg, stages=2)
    if cfg.model.context_parallel_size > 1 and not cfg.model.sequence_parallel:
        cfg.model.cp_comm_type = "a2a"
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 16
    return cfg
"""
MEMORY = (
    "layer_mem=100\nact_mem=100\nre_comp_mem=10\nlayer_mem012=80\nact_mem0=90\nre_comp_mem0=9\nmem_lim_stage0=6400\n"
    "mem_lim_others=6400\nmem_lim_last=6400\n"
)
RANK_HEADER = "dp,tp,pp,ep,dmratio,bfratio,re_grow_ration,hratio,moe_bw\n"
LOG = "[INFO] Used peak memory usage (without fragments): 48874M\n"
SCRIPT = """#!/bin/bash
NPUS_PER_NODE=8  # cards
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
MM_MODEL="./examples/tiny/model.json"
TP=4
PP=2
MBS=1
GRAD_ACC_STEP=96
DP=$(($WORLD_SIZE/$TP/$PP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES pretrain_vlm.py \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \\
    --micro-batch-size ${MBS:-1} --global-batch-size ${GBS} --use-distributed-optimizer --mm-model $MM_MODEL
"""
MEGATRON = {
    "num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048, "padded_vocab_size": 32000,
    "seq_length": 1024, "swiglu": True, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope", "add_bias_linear": False,
}  # fmt: skip
