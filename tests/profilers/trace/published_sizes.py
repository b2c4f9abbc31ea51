"""Sizes that the default configs of transformers lack or contradict.

Of each model type only what its default needs to be built and run at all; all else stays the default. They follow the
models named beside them, and were not compared with those models' files: what is checked with them is that a type's
class is read, run and planned, and its blocks against its own parameters.
"""

from __future__ import annotations

from typing import Any

_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}

PUBLISHED: dict[str, dict[str, Any]] = {
    # google/gemma-3-4b-it
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
    "shieldgemma2": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
    # rhymes-ai/Aria
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    # CohereLabs/aya-vision-8b
    "aya_vision": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 364,
            "patch_size": 14,
        }
    },
    # zai-org/GLM-4.1V-9B-Thinking, GLM-4.5V, GLM-4.6V
    "glm4v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm46v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glmga": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": _GLM_ROPE, "head_dim": 128}},
    # HuggingFaceM4/Idefics3-8B-Llama3, HuggingFaceTB/SmolVLM-Instruct
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "smolvlm": {"vision_config": {"image_size": 384, "patch_size": 14}, "scale_factor": 3},
    # HuggingFaceM4/idefics2-8b
    "idefics2": {"vision_config": {"image_size": 980, "patch_size": 14}},
    # meta-llama/Llama-4-Scout-17B-16E
    "llama4": {
        "vision_config": {
            "hidden_size": 1408,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "vision_output_dim": 4096,
        }
    },
    # facebook/chameleon-7b, BAAI/Emu3-Chat-hf
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGAAZ": 4}},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    # google/gemma-4: default towers
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    # mistralai/Ministral-8B-Instruct-2410
    "ministral": {"head_dim": 128},
    # tencent/Hunyuan-7B-Instruct, Hunyuan-A13B-Instruct
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    # LiquidAI/LFM2-8B-A1B
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 6, "num_hidden_layers": 24},
}
