"""Files in MindSpeed-MM's format, small enough to read, and plans for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn_plans import draw_plan as draw_plan_of

from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

MODEL = """{
    "model_id": "tiny_vl",
    "image_encoder": {
        "vision_encoder": {
            "model_id": "qwen2vit",  "num_layers": 6,
            "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
            "add_qkv_bias": true,
            "freeze": true,
            "pipeline_num_layers": [6, 0]
        },
        "vision_projector": {"model_id": "lnmlp", "input_size": 32, "ffn_hidden_size": 128, "hidden_size": 64,
                             "freeze": true}
    },
    "text_decoder": {
        "num_layers": 10,
        "pipeline_num_layers": [4,
                                6],
        "hidden_size": 64,   "ffn_hidden_size": 128,
        "num_attention_heads": 8, "num_query_groups": 4,
        "vocab_size": 512, "normalization": "RMSNorm", "gated_linear_unit": true,
        "rope_scaling": null,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1
    },
    "text_encoder": null, "video_encoder": null
}"""

SCRIPT = r"""#!/bin/bash
# TP=16 --tensor-model-parallel-size 16
NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
MM_MODEL="./examples/tiny/model.json"

TP=4
PP=2
CP=1
MBS=1   # samples
GRAD_ACC_STEP=96
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --seq-length 1024 \
    --use-distributed-optimizer \
    --moe-token-dispatcher-type alltoall \
    --bf16 \
"
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    --mm-model $MM_MODEL \
    2>&1 | tee logs/train.log
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder laid out as a checkout: examples/tiny with model.json and train.sh."""
    folder = tmp_path / "checkout" / "examples" / "tiny"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(MODEL)
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "train.sh").chmod(0o755)
    return tmp_path / "checkout"


@pytest.fixture
def model_json(checkout: Path) -> Path:
    return checkout / "examples" / "tiny" / "model.json"


@pytest.fixture
def launch_script(checkout: Path) -> Path:
    return checkout / "examples" / "tiny" / "train.sh"


@pytest.fixture
def tiny_plan() -> Plan:
    """All vision on the first of two stages, with the first four text layers."""
    return Plan(
        Strategy(pp=2, tp=2, dp=4, mbs=2),
        layers={"vision": (6, 0), "text": (4, 6)},
        recompute={"vision": (0, 0), "text": (4, 1)},
        global_batch_size=64,
    )


@pytest.fixture
def draw_plan() -> Callable[[Model, Strategy, int, random.Random], Plan]:
    """A plan drawn at random: a chain of layers cut anywhere, audio where text begins, any recompute."""
    return draw_plan_of
