"""What a layer in a graph of MindFormers (mode 0, on Ascend) keeps beside what Megatron-LM's keeps.

Found in dry runs of DeepSeek-V3 on 512 and 768 devices (with recompute and without, at TP 4 and 8, of 4,096 and 8,192
tokens), whose differences tell each tensor by how it grows:

- norms compute in fp32 (`layernorm_compute_type`) and keep an fp32 copy of their input;
- a gated activation is a product of two tensors: it keeps both factors, where fused kernels keep one less;
- a dense feed-forward keeps its gathered input, latent attention its gathered compressed vectors;
- experts' outputs are kept for the gradient of the weights that the router gave them;
- latent attention makes a mask of one byte for every pair of tokens in each layer, which stays there, recomputed or not
  (none under use_attn_mask_compression). Llama's model makes one for all its layers (mindformers/models/llama/llama.py,
  construct), which is its stage's;
- a recomputed layer of DeepSeek-V3 keeps what was exchanged with other ranks for experts as well. All four runs divide
  sequences; without that experts take another path (mindformers/modules/transformer/moe.py, MoEV2: `_ffn_forward`, not
  `_ffn_forward_sq`), of which nothing stays: the published YAML of DeepSeek-V2 236B, TP 8, every layer recomputed, has
  43.9 GiB of weights, gradients and states on its first stage, and ran in 59 GiB, where exchanges would be 13.6 more.
  Llama's experts run again whole too: a published YAML of Qwen2 57B would not fit otherwise.

With these, kept activations of those runs are met within 2.4 %, and of recomputed layers exactly in three of four.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Experts, LatentAttention, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, Operators, Saved, Share

_E = ELEMENT_BYTES


def add_kept_by_graph(operators: Operators, layer: TransformerLayer, tokens: TokenCounts, share: Share) -> Operators:
    """`operators` of one layer, with what a graph keeps beside them of one micro-batch of `tokens` per sample."""
    n, h = share.rows(tokens.layer_tokens), layer.hidden_size
    own = n / share.sp
    saved = [Saved(f"fp32 in place of bf16 input of norm {number}", _E * own * h) for number in (1, 2)]
    if isinstance(layer.attention, LatentAttention):
        width = layer.attention.q_lora_rank + layer.attention.kv_lora_rank + layer.attention.rope_dim
        saved.append(Saved("gathered compressed vectors", _E * (n - own) * width, for_weight=True))
    exchanged_bytes = 0.0
    keeps_exchanged = isinstance(layer.attention, LatentAttention) and (share.sp > 1 or share.tp == 1)
    if isinstance(layer.mlp, Experts):
        routed = own * share.expert_gather * layer.mlp.top_k
        exchanged_bytes = _E * routed * h
        saved.append(Saved("experts' outputs before their weight", exchanged_bytes))
        gated = [(layer.mlp.expert, routed, share.expert_tp)]
        gated += [(layer.mlp.shared, n, share.tp)] if layer.mlp.shared else []
    else:
        gated = [(layer.mlp, n, share.tp)]
        saved.append(Saved("gathered input of the feed-forward", _E * n * h if share.sp > 1 else 0.0, for_weight=True))
    for mlp, row_count, num_ranks in gated:
        if mlp.gated:
            saved.append(Saved("activated gate", _E * row_count * mlp.ffn_size / num_ranks))
    is_latent = isinstance(layer.attention, LatentAttention)
    mask_bytes = n * tokens.span_tokens if is_latent and not share.mask_compression else 0.0
    saved.append(Saved("attention mask", mask_bytes))
    return replace(
        operators,
        saved=(*operators.saved, *saved),
        input_bytes=operators.input_bytes + mask_bytes + (exchanged_bytes if keeps_exchanged else 0.0),
    )
