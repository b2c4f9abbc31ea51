"""Small models of a Hugging Face config.json that tests of this room share, and jobs that the tracer's tests divide."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles.traced import TracedEntry
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.profilers.huggingface import make_subject
from mm_autoparallel.profilers.trace.run import Configuration, trace_configuration

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
QWEN = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "tie_word_embeddings": False,
}
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN2_VISION = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "in_channels": 3}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **QWEN,
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, **MROPE, "model_type": "qwen2_vl_text"},
        "vision_config": QWEN2_VISION,
    },
    "qwen2_5_vl": {
        **QWEN,
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, **MROPE, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "in_channels": 3,
        },
    },
    "llava": {
        "model_type": "llava",
        "image_token_index": 300,
        "vision_feature_layer": -1,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**CLIP, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "internvl": {
        "model_type": "internvl",
        "image_token_id": 300,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**CLIP, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
    },
    "llama": {**TEXT, "model_type": "llama"},
    "mixtral": {**TEXT, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **TEXT,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 128,
    },
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
WHOLE_DOCUMENTS: dict[str, dict[str, Any]] = {
    "phi3": {**TEXT, "model_type": "phi3"},
    "qwen3": {**TEXT, "model_type": "qwen3", "head_dim": 16},
    "deepseek_v2": {**TEXT, **_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "head_dim": 8},
    "deepseek_v3": {**TEXT, **_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 32, "num_nextn_predict_layers": 0},
}
"""More of them, that are traced at TP 1."""

IMAGE_TOKENS = {"qwen2_vl": 16, "qwen2_5_vl": 16, "llava": 16, "internvl": 4}
SMALL: dict[str, Any] = {
    **QWEN,
    "image_token_id": 2040,
    "video_token_id": 2041,
    "vision_start_token_id": 2042,
    "vision_end_token_id": 2043,
    "model_type": "qwen2_vl",
    "text_config": {
        **TEXT,
        "model_type": "qwen2_vl_text",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    },
    "vision_config": {"depth": 3, "embed_dim": 128, "hidden_size": 256, "num_heads": 8, "mlp_ratio": 4},
}
"""Qwen2-VL, small: its layers are wide enough for what is kept of each token beside its state to be small."""


def job_of(document: dict[str, Any], seq_length: int = 48, images: int = 2, **workload: Any) -> Job:
    """A job on two devices whose samples have `images` images; parts that train: all."""
    model_type = document["model_type"]
    sizes: dict[str, Any] = {"global_batch_size": 8, "seq_length": seq_length, "sequence_parallel": False}
    freeze: dict[str, bool] = {"text": False}
    if model_type in IMAGE_TOKENS:
        tokens = images * (64 if document is SMALL else IMAGE_TOKENS[model_type])
        sizes |= {"image_tokens_per_sample": tokens, "images_per_sample": images}
        freeze |= {"vision": False, "vision_projector": False}
    content = {
        "model": copy.deepcopy(document),
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "a100-80g"},
        "workload": sizes | workload,
        "freeze": freeze,
    }
    return parse_job(content, Path("job.yaml"))


def trace_job(
    document: dict[str, Any], job: Job, tp: int = 1, mbs: int = 1, recompute: bool = True
) -> dict[str, TracedEntry]:
    """The traced entries of one configuration, by kind."""
    subject = make_subject(document, job.model, job.workload, Path("config.json"))
    entries = trace_configuration(subject, job, Configuration(tp, mbs, job.workload), recompute)
    return {entry.kind: entry for entry in entries}
