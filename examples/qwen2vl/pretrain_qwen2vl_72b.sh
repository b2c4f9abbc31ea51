#!/bin/bash
# Searches how to train Qwen2-VL-72B on 8 nodes of 16 devices, from profiles of the devices of this node.
#
# Run it on every node that profiles, with its own NODE_RANK:   NNODES=2 NODE_RANK=1 MASTER_ADDR=... bash pretrain_qwen2vl_72b.sh
# Then train under what was found, on all nodes: the same flags without SEARCH, started by torchrun, and
#   --auto-parallel-config auto_parallel_search_optimal_config.json
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)

# The devices at hand, which profile
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6010}
# The cluster that is planned for
SIMULATED_NNODES=${SIMULATED_NNODES:-8}
SIMULATED_NPROC_PER_NODE=${SIMULATED_NPROC_PER_NODE:-16}
LOG=${LOG:-logs/search_$(date +%Y%m%d_%H%M%S).log}

MODEL=(
    --model-size 72b
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 29568
    --num-attention-heads 64
    --vocab-size 152064
    --make-vocab-size-divisible-by 1
    --max-position-embeddings 32768
    --normalization RMSNorm
    --swiglu
    --init-method-std 0.01
    --tokenizer-type NullTokenizer
)
DATA=(
    --seq-length 8192
    --image-size 896
    --images-per-sample 4
    --global-batch-size 512
)
# What the search decides is not given here: pipeline and tensor parallel sizes, layers per stage, recompute,
# micro-batch size.
TRAINING=(
    --bf16
    --use-distributed-optimizer
    --lr 1.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0
    --clip-grad 0.0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --train-iters 5
    --seed 42
    --log-interval 1
)
SEARCH=(
    --auto-parallel-mm
    --nnodes "$NNODES"
    --nproc-per-node "$NPROC_PER_NODE"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
    --simulated-nnodes "$SIMULATED_NNODES"
    --simulated-nproc-per-node "$SIMULATED_NPROC_PER_NODE"
)

mkdir -p "$(dirname "$LOG")"
python "$HERE/pretrain_vlm.py" "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}" "${SEARCH[@]}" 2>&1 | tee "$LOG"
