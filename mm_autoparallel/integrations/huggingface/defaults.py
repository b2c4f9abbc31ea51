"""What configuration classes of transformers (5.x) put in where a config.json leaves a key out, sizes only.

From transformers/models/*/configuration_*.py; for OpenGVLab's own code from configuration_intern_vit.py and
configuration_internlm2.py of OpenGVLab/InternVL2-8B.
"""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN2 = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_QWEN2_OMNI = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_QWEN3_VL_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}

_MIXTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}
_QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}
_QWEN3_OMNI = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}
_DEEPSEEK_V2 = _LLAMA | {
    "vocab_size": 102400,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "greedy",
}
_GLM4V = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "attention_bias": True,
}
_GLM4V_MOE = _GLM4V | {
    "vocab_size": 151424,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
}

_QWEN3_5 = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
# It has no dense layers; the width is what TP has to divide, as that of experts.
_QWEN3_5_MOE = _QWEN3_5 | {
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}

GPT2: dict[str, Any] = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "phi3": _LLAMA | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
    "internlm2": _LLAMA | {"vocab_size": 103168, "bias": True},
    "qwen2": _QWEN2 | {"max_window_layers": 28},
    "qwen3": _QWEN2 | {"head_dim": 128, "max_window_layers": 28},
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _QWEN2_OMNI,
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128},
    "qwen3_omni_moe_text": _QWEN3_OMNI,
    "qwen3_asr_text": _QWEN2 | {"hidden_size": 4096, "head_dim": 128},
    "glm4v_text": _GLM4V,
    "glm4v_moe_text": _GLM4V_MOE,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
QWEN2_VISION: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
}
# hidden_size 3584 is the class's default, though every published model of the family has 1280 in its file.
QWEN2_5_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN3_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN3_5_VISION: dict[str, Any] = QWEN3_VISION | {"deepstack_visual_indexes": []}
KIMI_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
}
QWEN3_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "n_window": 50,
    "n_window_infer": 800,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
QWEN3_ASR_AUDIO: dict[str, Any] = QWEN3_AUDIO | {
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "d_model": 1024,
}
QWEN2_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "n_window": 100,
    "output_dim": 3584,
}
INTERNVIT_NATIVE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "norm_type": "layer_norm",
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": False,
    "qk_normalization": False,
}
INTERNVIT_OPENGVLAB: dict[str, Any] = {
    "hidden_size": 3200,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "image_size": 224,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": False,
    "qk_normalization": True,
}
CLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "num_channels": 3,
}
# What LlavaConfig puts in where vision_config is missing as a whole.
CLIP_OF_LLAVA: dict[str, Any] = CLIP | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
GLM4V_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "num_heads": 12,
    "image_size": 336,
    "patch_size": 14,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
}
STEP3_VISION: dict[str, Any] = {
    "width": 1536,
    "layers": 47,
    "heads": 16,
    "num_channels": 3,
    "image_size": 728,
    "patch_size": 14,
}
"""From configuration_step_vl.py of stepfun-ai/Step3-VL-10B."""
VIT: dict[str, Any] = CLIP | {"image_size": 224, "patch_size": 16}
