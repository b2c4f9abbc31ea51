"""What configuration classes of transformers (5.x) put in where a config.json leaves a key out, sizes only.

From transformers/models/*/configuration_*.py; for OpenGVLab's own code from configuration_intern_vit.py and
configuration_internlm2.py of OpenGVLab/InternVL2-8B.
"""

from __future__ import annotations

from mm_autoparallel.model.readers.foreign import Sizes, sizes

_TEXT = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
_MOE = "moe_intermediate_size num_experts_per_tok num_experts"
_DEEPSEEK = "moe_intermediate_size num_experts_per_tok n_routed_experts n_shared_experts first_k_dense_replace"
_TOWER = "hidden_size intermediate_size num_hidden_layers num_attention_heads image_size patch_size"
_QWEN_TOWER = "hidden_size intermediate_size depth num_heads patch_size out_hidden_size"
_SPEECH = "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model n_window output_dim"
"""Keys of one kind, in the order in which rows below give their values."""

_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
"""Of classes whose files say by themselves whether windows are used."""
_LATE_WINDOW = _WINDOW | {"max_window_layers": 28}

_LLAMA = sizes(_TEXT, 32000, 4096, 11008, 32, 32)
_QWEN2 = sizes(_TEXT, 151936, 4096, 22016, 32, 32, 32)
_QWEN2_VL = sizes(_TEXT, 152064, 8192, 29568, 80, 64, 8) | _WINDOW | {"max_window_layers": 80}
_QWEN2_MOE = sizes(_TEXT, 151936, 2048, 5632, 24, 16, 16) | sizes(_MOE, 1408, 4, 60)
_DEEPSEEK_V2 = (
    sizes(_TEXT, 102400, 4096, 11008, 32, 32)
    | {"moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy"}
    | sizes("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim", 1536, 512, 128, 64, 128)
)
_DEEPSEEK_V3 = _DEEPSEEK_V2 | (
    sizes(_TEXT, 129280, 7168, 18432, 61, 128)
    | sizes(_DEEPSEEK, 2048, 8, 256, 1, 3)
    | {"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4}
)
_GLM4V = sizes(_TEXT, 151552, 4096, 13696, 40, 32, 2, attention_bias=True)
_QWEN3_5 = sizes(_TEXT, 248320, 4096, 12288, 32, 16, 4, head_dim=256, full_attention_interval=4) | {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

GPT2 = sizes("vocab_size n_positions n_embd n_layer n_head", 50257, 1024, 768, 12, 12)

TEXT_DEFAULTS: dict[str, Sizes] = {
    "llama": _LLAMA,
    "mistral": sizes(_TEXT, 32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "phi3": sizes(_TEXT, 32064, 3072, 8192, 32, 32, sliding_window=None),
    "internlm2": _LLAMA | {"vocab_size": 103168, "bias": True},
    "qwen2": _QWEN2 | _LATE_WINDOW,
    "qwen3": _QWEN2 | _LATE_WINDOW | {"head_dim": 128},
    "mixtral": (
        sizes(_TEXT, 32000, 4096, 14336, 32, 32, 8, sliding_window=None)
        | {"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "qwen2_moe": _QWEN2_MOE | _LATE_WINDOW | {"shared_expert_intermediate_size": 5632},
    "qwen3_moe": sizes(_TEXT, 151936, 2048, 6144, 24, 32, 4) | sizes(_MOE, 768, 8, 128) | _WINDOW,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": sizes(_TEXT, 152064, 3584, 18944, 28, 28, 4) | _LATE_WINDOW | {"sliding_window": 32768},
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128},
    "qwen3_omni_moe_text": sizes(_TEXT, 3584, 2048, 18944, 28, 28, 4) | sizes(_MOE, 768, 8, 128),
    "qwen3_asr_text": _QWEN2 | {"head_dim": 128},
    "glm4v_text": _GLM4V,
    "glm4v_moe_text": (_GLM4V | sizes(_TEXT, 151424, 4096, 10944, 46, 96, 8) | sizes(_DEEPSEEK, 1408, 8, 128, 1, 1)),
    "qwen3_vl_moe_text": _QWEN2_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": (
        _QWEN3_5
        | sizes(_TEXT, 151936, 2048, 5632, 48, 16, 2)
        | sizes(_MOE, 512, 10, 512, shared_expert_intermediate_size=512)
    ),
    # It has no dense layers; the width is what TP has to divide, as that of experts.
    "qwen3_5_moe_text": (
        _QWEN3_5
        | sizes(_TEXT, 248320, 2048, 512, 40, 16, 2)
        | sizes(_MOE, 512, 8, 256, shared_expert_intermediate_size=512)
    ),
}
"""A type whose class knows no windows has no sliding_window here."""

_LOCAL_EXPERTS = {"num_experts": "num_local_experts"}
TEXT_ALIASES: dict[str, dict[str, str]] = {
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": _LOCAL_EXPERTS,
    "qwen3_vl_moe_text": _LOCAL_EXPERTS,
    "deepseek_v2": {"n_routed_experts": "num_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts"},
    "glm4v_moe_text": {"n_routed_experts": "num_local_experts"},
}
"""Other names by which classes know what stands above (their attribute_map), and which they may write: key → name."""
GPT2_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
TOWER_ALIASES = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}
SPEECH_ALIASES = {
    "encoder_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}

# What Mistral3Config puts in where text_config, or vision_config, is missing as a whole.
MISTRAL_OF_MISTRAL3 = sizes(_TEXT, 131072, 5120, 32768, 40, 32, 8, head_dim=128, sliding_window=None)

QWEN2_VISION = sizes("hidden_size embed_dim mlp_ratio depth num_heads patch_size", 3584, 1280, 4, 32, 16, 14)
# hidden_size 3584 is the class's default, though every published model of the family has 1280 in its file.
QWEN2_5_VISION = sizes(_QWEN_TOWER, 3584, 3420, 32, 16, 14, 3584, window_size=112) | {
    "fullatt_block_indexes": [7, 15, 23, 31]
}
QWEN3_5_VISION = sizes(_QWEN_TOWER, 1152, 4304, 27, 16, 16, 3584) | {
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
QWEN3_VISION = QWEN3_5_VISION | {"deepstack_visual_indexes": [8, 16, 24]}
KIMI_VISION = sizes(_TOWER, 1152, 4304, 27, 16) | {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
}
GLM4V_VISION = sizes(_QWEN_TOWER, 1536, 13696, 24, 12, 14, 4096, image_size=336)
STEP3_VISION = sizes("width layers heads num_channels image_size patch_size", 1536, 47, 16, 3, 728, 14)
"""From configuration_step_vl.py of stepfun-ai/Step3-VL-10B."""

QWEN2_AUDIO = sizes(_SPEECH, 128, 32, 20, 5120, 1280, 100, 3584)
QWEN3_AUDIO = sizes(_SPEECH, 128, 32, 20, 5120, 1280, 50, 3584, n_window_infer=800, downsample_hidden_size=480)
QWEN3_ASR_AUDIO = QWEN3_AUDIO | sizes(_SPEECH, 128, 24, 16, 4096, 1024)

_INTERNVIT = {"num_channels": 3, "qkv_bias": False}
INTERNVIT_NATIVE = sizes(_TOWER, 1024, 4096, 24, 16, 448, 14, norm_type="layer_norm", qk_normalization=False)
INTERNVIT_NATIVE |= _INTERNVIT
INTERNVIT_OPENGVLAB = sizes(_TOWER, 3200, 12800, 48, 25, 224, 14, norm_type="rms_norm", qk_normalization=True)
INTERNVIT_OPENGVLAB |= _INTERNVIT
CLIP = sizes(_TOWER, 768, 3072, 12, 12, 224, 32, num_channels=3)
# What LlavaConfig puts in where vision_config is missing as a whole.
CLIP_OF_LLAVA = sizes(_TOWER, 1024, 4096, 24, 16, 336, 14, num_channels=3)
PIXTRAL = sizes(_TOWER, 1024, 4096, 24, 16, num_channels=3, patch_size=16)
PIXTRAL_OF_MISTRAL3 = PIXTRAL | {"patch_size": 14}
VIT = CLIP | {"patch_size": 16}
