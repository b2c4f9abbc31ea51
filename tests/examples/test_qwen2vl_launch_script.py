"""A launch script in the manner of Megatron's, run as a whole on a model that is small enough for a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mm_autoparallel.planner.plan import RESULT_FILE

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")

pytestmark = pytest.mark.slow

SMALL_VISION = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2}
SMALL_TEXT = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}

LAUNCH = """#!/bin/bash
set -euo pipefail
NPUS_PER_NODE=1
MASTER_ADDR=localhost
MASTER_PORT={port}
NODE_RANK=0
NNODES=1
TP=1
PP=1
MBS=1
GRAD_ACC_STEP=32
GBS=$(($MBS*$GRAD_ACC_STEP*$NPUS_PER_NODE*$NNODES/$TP/$PP))
GPT_ARGS="
    --use-mcore-models --tensor-model-parallel-size ${{TP}} --pipeline-model-parallel-size ${{PP}} \\
    --micro-batch-size ${{MBS}} --global-batch-size ${{GBS}} \\
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 \\
    --tokenizer-type NullTokenizer --vocab-size 1024 --seq-length 128 --max-position-embeddings 32768 \\
    --make-vocab-size-divisible-by 1 --init-method-std 0.01 --normalization RMSNorm --use-fused-rmsnorm \\
    --swiglu --use-fused-swiglu --lr 1.0e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 5 \\
    --lr-warmup-fraction 0.1 --clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999 \\
    --no-gradient-accumulation-fusion --no-load-optim --no-load-rng --no-save-optim --no-save-rng --seed 42 \\
    --bf16 --load checkpoint --variable-seq-lengths --enable-one-logger --use-distributed-optimizer \\
    --reuse-fp32-param
"
MM_ARGS="--mm-data data.json --mm-model model.json --mm-tool tools.json"
SEARCH_ARGS="
    --auto-parallel-mm --nnodes $NNODES --nproc-per-node $NPUS_PER_NODE --master-addr $MASTER_ADDR \\
    --master-port $MASTER_PORT --node-rank $NODE_RANK --simulated-nnodes 8 --simulated-nproc-per-node 16
"
OUTPUT_ARGS="--log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 --save save_dir"
mkdir -p logs
{python} {script} $GPT_ARGS $MM_ARGS $OUTPUT_ARGS $SEARCH_ARGS --distributed-backend nccl | tee logs/train.log 2>&1
chmod 440 logs/train.log
"""


def small_model(repository: Path) -> dict:
    """MindSpeed-MM's model.json of the 72B example with smaller sizes."""
    model = json.loads((repository / "examples" / "qwen2vl_72b" / "model_72b.json").read_text(encoding="utf-8"))
    encoder = model["image_encoder"]
    encoder["vision_encoder"] |= SMALL_VISION | {"llm_hidden_size": 64, "pipeline_num_layers": [2]}
    encoder["vision_projector"] |= {"input_size": 32, "hidden_size": 64, "ffn_hidden_size": 128}
    sizes = SMALL_TEXT | {"kv_channels": 16, "num_query_groups": 2, "vocab_size": 1024, "pipeline_num_layers": [4]}
    return model | {"img_context_token_id": 1000, "text_decoder": model["text_decoder"] | sizes}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.mark.nightly
def test_the_launch_script_searches_and_leaves_the_result(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(small_model(repository)), encoding="utf-8")
    script = repository / "examples" / "qwen2vl" / "pretrain_vlm.py"
    text = LAUNCH.format(port=free_port(), python=sys.executable, script=script)
    (tmp_path / "launch.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "launch.sh"],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / RESULT_FILE).read_text(encoding="utf-8"))
    assert result["world_size"] <= 128
    assert sum(result["layer_placement"]["llm_layer_placement"]) == 4
    assert sum(result["layer_placement"]["vit_layer_placement"]) == 2
