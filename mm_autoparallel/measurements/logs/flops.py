"""Operations that a training step takes by the model's sizes alone: what MFU counts (arXiv:2204.02311, appendix B).

Six for each weight of a matrix product and token, forward and backward; frozen parts two; experts those that a token
goes to; a vocabulary's table as the head alone. Attention's two products: 12 · layers · heads' width · span for each
token, half where causal. Recomputed work does not count.
"""

from __future__ import annotations

from mm_autoparallel.job.job import Job
from mm_autoparallel.job.layers import Layers


def count_model_flops(job: Job) -> float:
    """Of one step of the text decoder. Encoders and other kinds of attention are left out: it is never too much."""
    text, workload = job.model.text, job.workload
    layers = text.layers
    tokens = float(workload.global_batch_size) * workload.seq_length
    passes = 2.0 if text.freeze or job.model.adapters else 6.0
    weights = layers.num_layers * _layer_weights(layers) + text.vocab_size * layers.hidden_size
    if layers.latent or layers.delta or layers.window:
        return tokens * passes * weights
    width = layers.num_heads * (layers.head_dim or layers.hidden_size // layers.num_heads)
    span = workload.seq_length * (0.5 if text.causal else 1.0)
    return tokens * passes * (weights + 2.0 * layers.num_layers * width * span)


def _layer_weights(layers: Layers) -> float:
    """Of the matrices that one token passes in a layer, at least."""
    width, head_dim = layers.hidden_size, layers.head_dim or layers.hidden_size // layers.num_heads
    groups = layers.num_kv_groups or layers.num_heads
    attention = 0 if layers.latent or layers.delta else width * head_dim * (2 * layers.num_heads + 2 * groups)
    matrices = 3 if layers.gated else 2
    experts = layers.experts
    if experts is None:
        return attention + matrices * width * layers.ffn_size
    return attention + matrices * width * (experts.top_k * experts.ffn_size + experts.shared_ffn_size)
