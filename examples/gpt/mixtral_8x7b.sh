#!/bin/bash
# mixtral-8x7b at a fraction of its size: 8 of its 32 layers, a sixteenth of its widths, 8 heads in 2 groups in place of
# 32 in 8, a thirty-second of its vocabulary and of 8192 tokens; all of its 8 experts, of which a token takes 2. Tokens go
# to all experts evenly, as a trained router sends them: one that was never trained chooses the same two for all.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "${PYTHON:-python}" "$HERE/pretrain_gpt.py" \
    --num-layers 8 \
    --hidden-size 256 \
    --ffn-hidden-size 896 \
    --num-attention-heads 8 \
    --group-query-attention \
    --num-query-groups 2 \
    --num-experts 8 \
    --moe-router-topk 2 \
    --moe-router-force-load-balancing \
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
