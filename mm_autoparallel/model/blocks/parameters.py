"""Parameters of a block, whole or on one tensor parallel rank.

Sharding as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3; core/tensor_parallel/layers.py): first
matrices by columns with their biases, second ones by rows with their biases whole on every rank; norms, router, stems
layer scales and the compressing matrices of latent attention whole on every rank; vocabulary tables by rows of the
vocabulary, positions whole; experts like feed-forwards among the ranks that share one (ETP), and dealt to EP ranks
(core/transformer/moe/experts.py).
"""

from __future__ import annotations

from itertools import pairwise

from mm_autoparallel.model.blocks.chain import (
    Adapters,
    Attention,
    AudioStem,
    Chain,
    DeltaAttention,
    Experts,
    FeedForward,
    ImageHead,
    LatentAttention,
    Norm,
    OutputHead,
    PatchEmbedding,
    PredictionModule,
    Projector,
    Structure,
    TokenEmbedding,
    Traced,
    TransformerLayer,
)

NUM_WAVES = 256
"""Sines and cosines that describe a time step (Peebles & Xie 2022, arXiv:2212.09748, models.py, TimestepEmbedder)."""


def count_parameters(structure: Structure, tp: int = 1, ep: int = 1, etp: int = 0) -> int:
    """Parameters that one rank holds of one block; what does not divide is rounded up. etp 0: as tp.

    A tied head counts its norm alone. Where it lies on another stage than the embedding, that stage holds a copy of the
    table: add `count_parameters(TokenEmbedding(...), tp)` there. A prediction module counts neither table nor head.
    """
    if isinstance(structure, Traced):
        return structure.parameter_count
    if isinstance(structure, TransformerLayer):
        own_count = _count_layer(structure, tp) + count_expert_parameters(structure, tp, ep, etp)
        return own_count + count_adapter_parameters(structure, tp)
    if isinstance(structure, PredictionModule):
        layer, width = structure.layer, structure.layer.hidden_size
        # three norms, and a matrix by columns from two widths to one (core/transformer/multi_token_prediction.py)
        own_count = 3 * _count_norm(layer.norm, width) + 2 * width * _split(width, tp)
        return own_count + count_parameters(layer, tp, ep, etp)
    if isinstance(structure, PatchEmbedding):
        vectors = structure.num_positions + int(structure.class_token) + int(structure.bias)
        matrix = structure.in_features * structure.hidden_size
        norm = _count_norm(structure.norm, structure.hidden_size)
        return matrix + vectors * structure.hidden_size + norm + _count_condition(structure)
    if isinstance(structure, AudioStem):
        kernel, width, channels = 3, structure.hidden_size, structure.conv_channels
        if channels:
            convolutions = (9 + 1 + 2 * (9 * channels + 1)) * channels
            return convolutions + (channels * structure.num_conv_bins + structure.num_positions) * width
        return kernel * (structure.num_mel_bins + width) * width + (2 + structure.num_positions) * width
    if isinstance(structure, TokenEmbedding):
        return (_split(structure.vocab_size, tp) + structure.num_added) * structure.hidden_size
    if isinstance(structure, OutputHead):
        table = 0 if structure.tied else _split(structure.vocab_size, tp) * structure.hidden_size
        return table + _count_norm(structure.norm, structure.hidden_size) + _count_masked(structure, tp)
    if isinstance(structure, ImageHead):
        width = structure.hidden_size
        norm = 2 * (width + 1) * width if structure.modulated else _count_norm(structure.norm, width)
        return norm + (width + 1) * structure.num_outputs
    return _count_projector(structure, 1 if structure.replicated else tp)


def count_expert_parameters(structure: Structure, tp: int = 1, ep: int = 1, etp: int = 0) -> int:
    """Those of `count_parameters` that are routed experts, which other ranks hold copies of than all the rest.

    etp 0: as tp.
    """
    if isinstance(structure, PredictionModule):
        return count_expert_parameters(structure.layer, tp, ep, etp)
    if not isinstance(structure, TransformerLayer) or not isinstance(structure.mlp, Experts):
        return 0
    experts = structure.mlp
    return _split(experts.num_experts, ep) * _count_feed_forward(experts.expert, structure.hidden_size, etp or tp)


def list_adapted(layer: TransformerLayer, adapters: Adapters, tp: int = 1) -> list[tuple[str, int, int, bool]]:
    """Of each matrix with adapters: its name, its inputs and outputs on one rank, and whether `tp` divides its outputs
    (else its inputs).
    """
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention)
    width, query = layer.hidden_size, _split(attention.num_heads * attention.head_dim, tp)
    key = _split(attention.num_kv_groups * attention.head_dim, tp)
    sizes = {
        "qkv": (width, query + 2 * key, True),
        "q": (width, query, True),
        "k": (width, key, True),
        "v": (width, key, True),
        "proj": (query, width, False),
    }
    if isinstance(mlp, FeedForward):
        inner = _split(mlp.ffn_size, tp)
        sizes |= {
            "fc1": (width, (2 if mlp.gated else 1) * inner, True),
            "gate": (width, inner, True),
            "up": (width, inner, True),
            "fc2": (inner, width, False),
        }
    return [(target, *sizes[target]) for target in adapters.targets]


def count_adapter_parameters(structure: Structure, tp: int = 1) -> int:
    """Those of `count_parameters` that are adapters."""
    if not isinstance(structure, TransformerLayer) or structure.adapters is None:
        return 0
    adapted = list_adapted(structure, structure.adapters, tp)
    return sum(structure.adapters.rank * (in_size + out_size) for _, in_size, out_size, _ in adapted)


def count_chain_parameters(chain: Chain, trainable_only: bool = False) -> int:
    """Parameters of the whole model; of the parts that train, if `trainable_only`."""
    total_count = 0
    for block in chain.blocks:
        each_count = count_parameters(block.structure)
        if trainable_only:
            each_count = count_adapter_parameters(block.structure) or each_count
        total_count += block.count * each_count * (block.trainable or not trainable_only)
    return total_count


def _count_layer(layer: TransformerLayer, tp: int) -> int:
    """All but routed experts."""
    width = layer.hidden_size
    count = 6 * (width + 1) * width if layer.modulated else 2 * _count_norm(layer.norm, width)
    count += 2 * _count_norm(layer.norm, width) if layer.post_norms else 0
    count += 2 * width if layer.layer_scale else 0
    if isinstance(layer.attention, LatentAttention):
        count += _count_latent_attention(layer.attention, layer.norm, width, tp)
    elif isinstance(layer.attention, DeltaAttention):
        count += _count_delta_attention(layer.attention, width, tp)
    else:
        count += _count_attention(layer.attention, layer.norm, width, tp)
    if isinstance(layer.mlp, FeedForward):
        return count + _count_feed_forward(layer.mlp, width, tp)
    shared = _count_feed_forward(layer.mlp.shared, width, tp) if layer.mlp.shared else 0
    return count + layer.mlp.num_experts * width + shared + (width if layer.mlp.shared_gate else 0)


def _count_attention(attention: Attention, norm: Norm, width: int, tp: int) -> int:
    query = _split(attention.num_heads * attention.head_dim, tp)
    key = _split(attention.num_kv_groups * attention.head_dim, tp)
    count = (query + 2 * key) * width + query * width * (2 if attention.output_gate else 1)
    if attention.qkv_bias:
        count += query + key + (key if attention.key_bias else 0)
    if attention.output_bias:
        count += width
    if attention.qk_norm == "head":
        count += 2 * _count_norm(norm, attention.head_dim)
    if attention.qk_norm == "hidden":
        count += _count_norm(norm, query) + _count_norm(norm, key)
    return count


def _count_delta_attention(attention: DeltaAttention, width: int, tp: int) -> int:
    """Query, key, value, gate and output, two numbers of each value head, a convolution without bias, a norm."""
    heads = _split(attention.num_value_heads, tp)
    value = heads * attention.value_head_dim
    mixed = 2 * _split(attention.num_key_heads, tp) * attention.key_head_dim + value
    own_count = mixed * attention.conv_width + 2 * heads + attention.value_head_dim
    return width * (mixed + 2 * value + 2 * heads) + own_count


def _count_latent_attention(attention: LatentAttention, norm: Norm, width: int, tp: int) -> int:
    """Compressing matrices are whole on every rank (core/transformer/multi_latent_attention.py, `duplicated`)."""
    heads = _split(attention.num_heads, tp)
    query_dim, rank = attention.nope_dim + attention.rope_dim, attention.q_lora_rank
    query = (width + heads * query_dim) * rank if rank else width * heads * query_dim
    key_value = width * (attention.kv_lora_rank + attention.rope_dim)
    if attention.norms:
        query += _count_norm(norm, rank)
        key_value += _count_norm(norm, attention.kv_lora_rank)
    rank = attention.kv_lora_rank
    key_value += rank * heads * (attention.nope_dim + attention.value_dim)
    return query + key_value + heads * attention.value_dim * width + (width if attention.output_bias else 0)


def _count_feed_forward(mlp: FeedForward, width: int, tp: int) -> int:
    inner = _split(mlp.ffn_size, tp)
    num_first = 2 if mlp.gated else 1
    return (num_first + 1) * inner * width + (num_first * inner + width if mlp.bias else 0)


def _count_projector(projector: Projector, tp: int) -> int:
    """Matrices alternate: one by columns, the next by rows; a last one by columns gathers its output."""
    count = _count_norm(projector.norm, projector.norm_size)
    for inner, outer in pairwise(projector.convolutions):
        count += (9 * inner + 1) * outer
    for index, (rows, columns) in enumerate(zip(projector.layer_sizes, projector.layer_sizes[1:], strict=False)):
        by_columns = index % 2 == 0
        count += rows * _split(columns, tp) if by_columns else _split(rows, tp) * columns
        if projector.bias and not (projector.gated_ffn_size and index):
            count += _split(columns, tp) if by_columns else columns
    out = projector.layer_sizes[-1] if projector.layer_sizes else 0
    return count + (projector.num_special_tokens + 3 * _split(projector.gated_ffn_size, tp)) * out


def _count_condition(stem: PatchEmbedding) -> int:
    """Labels' vectors, and two matrices with biases for the time step (Peebles & Xie 2022, models.py)."""
    width = stem.hidden_size
    return (stem.num_labels + NUM_WAVES + 1 + width + 1) * width if stem.num_labels else 0


def _count_masked(head: OutputHead, tp: int) -> int:
    """Two square matrices with biases, a norm, a bias per word, a classifier (core/models/bert): all but the biases of

    words whole on every rank.
    """
    if not head.masked:
        return 0
    width = head.hidden_size
    return 2 * (width + 1) * width + _count_norm(head.norm, width) + _split(head.vocab_size, tp) + 2 * width + 2


def _count_norm(norm: Norm | None, size: int) -> int:
    return 0 if norm is None else size * (2 if norm == "layer" else 1)


def _split(size: int, tp: int) -> int:
    return -(-size // tp)
