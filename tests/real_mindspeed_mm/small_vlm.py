"""A small model of the Qwen2.5-VL kind with its data file and flags, as a launch script of MindSpeed-MM gives them.

4 vision layers (64 wide, windows, full attention on the second and the fourth) and 6 text layers (128 wide). Key names
and their meaning are MindSpeed-MM's; the sizes are made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION_LAYERS, TEXT_LAYERS = 4, 6
SEQ_LENGTH, VOCAB_SIZE = 64, 512
PATCH, MERGE, CHANNELS, FRAMES = 14, 2, 3, 2
GRID = (1, 8, 4)
"""Patches of a sample's image: frames, rows, columns."""

IMAGE_TOKENS = GRID[0] * GRID[1] * GRID[2] // MERGE**2
IMAGE_TOKEN, IMAGE_START = 511, 510
GLOBAL_BATCH = 4

Numbers = list[int] | list[list[int]]


def model_json(dtype: str, frozen_vision: bool = False) -> dict[str, Any]:
    """The model in the form of a model.json, on one stage. dtype: `fp32` or `bf16`."""
    types = {"params_dtype": dtype, "bf16": dtype == "bf16", "fp16": False}
    vision = {
        "model_id": "qwen2vit",
        "num_layers": VISION_LAYERS,
        "pipeline_num_layers": [VISION_LAYERS],
        "hidden_size": 64,
        "ffn_hidden_size": 160,
        "intermediate_size": 160,
        "llm_hidden_size": 64,
        "num_attention_heads": 4,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "in_channels": CHANNELS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "tokens_per_second": 2,
        "window_attn_size": 56,
        "fullatt_block_indexes": [1, 3],
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "attention_mask_type": "general",
        "use_fused_rotary_pos_emb": True,
        "post_layer_norm": False,
        "freeze": frozen_vision,
        **types,
    }
    projector = {
        "model_id": "lnmlp",
        "num_layers": 1,
        "num_attention_heads": 4,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
        "add_bias_linear": True,
        "input_size": 64,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "activation_func": "gelu",
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "freeze": frozen_vision,
        **types,
    }
    text = {
        "model_id": "qwen2_5_lm",
        "num_layers": TEXT_LAYERS,
        "pipeline_num_layers": [TEXT_LAYERS],
        "hidden_size": 128,
        "ffn_hidden_size": 320,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "seq_length": SEQ_LENGTH,
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "mrope_section": [4, 6, 6],
        "position_embedding_type": "mrope",
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.02,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "activation_func": "silu",
        "gated_linear_unit": True,
        "use_fused_rotary_pos_emb": True,
        "attention_softmax_in_fp32": True,
        "parallel_output": True,
        "use_remove_padding": False,
        **types,
    }
    return {
        "model_id": "qwen2_5vl",
        "img_context_token_id": IMAGE_TOKEN,
        "vision_start_token_id": IMAGE_START,
        "image_encoder": {"vision_encoder": vision, "vision_projector": projector},
        "text_decoder": text,
        "text_encoder": None,
        "video_encoder": None,
        "patch": {"bridge_patch": False},
    }


DATA: dict[str, Any] = {
    "dataset_param": {
        "dataset_type": "huggingface",
        "preprocess_parameters": {"image_max_pixels": IMAGE_TOKENS * (PATCH * MERGE) ** 2},
        "basic_parameters": {},
    },
    "dataloader_param": {"dataloader_mode": "sampler"},
}
"""The data file. Its samples are made in `train_small_vlm.py`; the limit of pixels is what the planner reads."""


def flags(model: Path, data: Path, tools: Path, dtype: str, iterations: int) -> list[str]:
    """The command line of the launch script, of one process without any division."""
    return [
        "--use-mcore-models",
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
        *("--context-parallel-size", "1", "--context-parallel-algo", "ulysses_cp_algo"),
        *("--micro-batch-size", "1", "--global-batch-size", str(GLOBAL_BATCH)),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE), "--make-vocab-size-divisible-by", "1"),
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", "4096"),
        *("--num-layers", "1", "--hidden-size", "128", "--num-attention-heads", "4"),
        *("--normalization", "RMSNorm", "--use-fused-rmsnorm", "--swiglu", "--use-fused-swiglu"),
        *("--no-masked-softmax-fusion", "--attention-softmax-in-fp32", "--no-gradient-accumulation-fusion"),
        *("--lr", "1.0e-3", "--lr-decay-style", "constant", "--weight-decay", "0", "--clip-grad", "1.0"),
        *("--adam-beta1", "0.9", "--adam-beta2", "0.999", "--train-iters", str(iterations), "--seed", "42"),
        *(["--bf16"] if dtype == "bf16" else []),
        *("--use-flash-attn", "--use-distributed-optimizer", "--no-load-optim", "--no-load-rng"),
        *("--no-save-optim", "--no-save-rng", "--num-workers", "0", "--distributed-backend", "nccl"),
        *("--mm-data", str(data), "--mm-model", str(model), "--mm-tool", str(tools)),
        *("--log-interval", "1", "--save-interval", "10000", "--eval-interval", "10000", "--eval-iters", "0"),
    ]


def write_files(folder: Path, model: dict[str, Any]) -> tuple[Path, Path]:
    """model.json and data.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (("model.json", model), ("data.json", DATA)):
        (folder / name).write_text(json.dumps(document, indent=4))
    return folder / "model.json", folder / "data.json"
