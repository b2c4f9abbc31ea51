#!/bin/bash
# gpt3-15b at a fraction of its size. Nobody publishes its sizes: 48 layers of width 5120 (assumed) have 15.1 G
# parameters. Here are a quarter of the layers and a twentieth of the width, with layer norms, biases and learned
# positions as GPT-3 has them. Embedding and output are two matrices, since pretrain_gpt.py ties none.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "${PYTHON:-python}" "$HERE/pretrain_gpt.py" \
    --num-layers 12 \
    --hidden-size 256 \
    --num-attention-heads 8 \
    --seq-length 128 \
    --max-position-embeddings 128 \
    --vocab-size 1600 \
    --make-vocab-size-divisible-by 8 \
    --sequence-parallel \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --global-batch-size 32 \
    "$@"
