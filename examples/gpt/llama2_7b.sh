#!/bin/bash
# llama2-7b at a fraction of its size: 8 of its 32 layers, a sixteenth of its widths, 8 heads of 32 in place of 32 of
# 128, a thirty-second of its vocabulary and of 8192 tokens. What follows the script's name goes to pretrain_gpt.py.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "${PYTHON:-python}" "$HERE/pretrain_gpt.py" \
    --num-layers 8 \
    --hidden-size 256 \
    --ffn-hidden-size 688 \
    --num-attention-heads 8 \
    --seq-length 256 \
    --vocab-size 1000 \
    --make-vocab-size-divisible-by 8 \
    --normalization RMSNorm \
    --swiglu \
    --position-embedding-type rope \
    --disable-bias-linear \
    --sequence-parallel \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --global-batch-size 32 \
    "$@"
