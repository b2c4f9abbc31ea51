"""Sizes that the default configs of transformers lack or contradict.

Of each model type only what its default needs to be built and run at all; all else stays the default. They follow the
models named beside them. `compared` says that a published config.json of that model (or a copy of it in another
repository of the hub) has the same values; the others could not be seen and were not compared. What is checked with all
of them is that a type's class is read, run and planned, and its blocks against its own parameters.
"""

from __future__ import annotations

from typing import Any

_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}

_COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}

_OMNI_THINKER = {
    "audio_start_token_id": 151669,
    "vision_start_token_id": 151652,
    "position_id_per_seconds": 13,
    "audio_config": {"output_dim": 2048},
    "vision_config": {"out_hidden_size": 2048},
    "text_config": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}

_SPEECH_PROJECTOR = {
    "model_type": "blip_2_qformer",
    "hidden_size": 1024,
    "encoder_hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "cross_attention_frequency": 1,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    # Qwen/Qwen2-VL-72B-Instruct, Qwen2.5-VL-72B-Instruct; Qwen3-VL-8B, 30B-A3B; Qwen3.5-9B, 35B-A3B; Qwen3-ASR-1.7B:
    # what towers give is as wide as the text; compared but for Qwen2.5-VL's
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"hidden_size": 1280, "out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_asr": {"audio_config": {"output_dim": 2048}},
    # mistralai/Magistral-Small-2509: its weights have a head of their own, its file names its parts, compared
    "mistral3": {
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"model_type": "mistral"},
        "tie_word_embeddings": False,
    },
    # google/gemma-3-4b-it, compared
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
    "shieldgemma2": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
    # rhymes-ai/Aria
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    # CohereLabs/aya-vision-8b, compared
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
    # HuggingFaceM4/Idefics3-8B-Llama3, HuggingFaceTB/SmolVLM-Instruct (its scale factor compared)
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
    "emu3": {"vocabulary_map": {"<image>": 151851, "<|extra_200|>": 151846, "<|visual token 000000|>": 151854}},
    # google/gemma-4: default towers
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    # google/gemma-4-26B-A4B-it's experts
    "diffusion_gemma": {"text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}},
    # ibm-granite/granite-speech-3.2-8b, compared with a copy of the configuration class published with it
    "granite_speech": {"projector_config": _SPEECH_PROJECTOR},
    "granite_speech_plus": {"projector_config": _SPEECH_PROJECTOR},
    # ibm-granite's Granite 4 vision: four pairs of layers and windows as described, the layers of the tower assumed
    "granite4_vision": {
        "deepstack_layer_map": [[6, 0], [12, 3], [18, 6], [26, 9]],
        "spatial_target_layers": [12, 15, 18, 21],
        "vision_feature_select_strategy": "full",
        "downsample_rate": "4/8",
        "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384]],
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 16,
        },
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 1152,
            "encoder_hidden_size": 1152,
            "intermediate_size": 3072,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "cross_attention_frequency": 1,
        },
    },
    # tencent/HunyuanOCR
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
        }
    },
    # deepseek-ai/DeepSeek-OCR-2
    "deepseek_ocr2": {
        "text_config": {
            "hidden_size": 1280,
            "intermediate_size": 6848,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "mlp_layer_types": ["dense"] + 11 * ["sparse"],
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 6,
        },
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            }
        },
    },
    # Qwen/Qwen3-Omni-30B-A3B-Instruct
    "qwen3_omni_moe": {
        "thinker_config": _OMNI_THINKER,
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 768}},
    },
    "qwen3_omni_moe_thinker": _OMNI_THINKER,
    # google/t5gemma-2-1b-1b: the towers of gemma3
    "t5gemma2": {"encoder": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256}},
    # stepfun-ai/Step-3.5-Flash's windows
    "step3p7": {"text_config": {"sliding_window": 512}},
    # UsefulSensors/moonshine-streaming-tiny: as many groups as heads, where the default names none
    "moonshine_streaming": {"num_key_value_heads": 8},
    # facebook/xmod-base
    "xmod": {"default_language": "en_XX"},
    # CohereLabs/North-Micro-Vision-Instruct
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    # deepseek-ai/DeepSeek-V2-Lite, compared
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    # rednote-hilab/dots.llm1.base, compared
    "dots1": {
        "hidden_size": 4096,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    # databricks/dbrx-base, compared
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}},
    # Nemotron-4 15B (arXiv:2402.16819, table 1)
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    # mistralai/Ministral-8B-Instruct-2410
    "ministral": {"head_dim": 128},
    # tencent/Hunyuan-7B-Instruct, Hunyuan-A13B-Instruct
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    # LiquidAI/LFM2-8B-A1B
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 6, "num_hidden_layers": 24},
}
