"""Parameters of a block, whole or on one tensor parallel rank.

Sharding as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3; core/tensor_parallel/layers.py): first
matrices by columns with their biases, second ones by rows with their biases whole on every rank; norms, router, stems
and layer scales whole on every rank; vocabulary tables by rows of the vocabulary; experts like feed-forwards.
"""

from __future__ import annotations

from mm_autoparallel.blocks.chain import (
    Attention,
    AudioStem,
    Chain,
    Experts,
    FeedForward,
    Norm,
    OutputHead,
    PatchEmbedding,
    Projector,
    Structure,
    TokenEmbedding,
    TransformerLayer,
)


def count_parameters(structure: Structure, tp: int = 1) -> int:
    """Parameters that one of `tp` ranks holds of one block; what does not divide is rounded up.

    A tied head counts its norm alone. Where it lies on another stage than the embedding, that stage holds a copy of the
    table: add `count_parameters(TokenEmbedding(...), tp)` there.
    """
    if isinstance(structure, TransformerLayer):
        return _count_layer(structure, tp)
    if isinstance(structure, PatchEmbedding):
        vectors = structure.num_positions + int(structure.class_token) + int(structure.bias)
        matrix = structure.in_features * structure.hidden_size
        return matrix + vectors * structure.hidden_size + _count_norm(structure.norm, structure.hidden_size)
    if isinstance(structure, AudioStem):
        kernel, width = 3, structure.hidden_size
        return kernel * (structure.num_mel_bins + width) * width + (2 + structure.num_positions) * width
    if isinstance(structure, TokenEmbedding):
        return _split(structure.vocab_size, tp) * structure.hidden_size
    if isinstance(structure, OutputHead):
        table = 0 if structure.tied else _split(structure.vocab_size, tp) * structure.hidden_size
        return table + _count_norm(structure.norm, structure.hidden_size)
    return _count_projector(structure, 1 if structure.replicated else tp)


def count_chain_parameters(chain: Chain, trainable_only: bool = False) -> int:
    """Parameters of the whole model; of the parts that train, if `trainable_only`."""
    return sum(
        block.count * count_parameters(block.structure)
        for block in chain.blocks
        if block.trainable or not trainable_only
    )


def _count_layer(layer: TransformerLayer, tp: int) -> int:
    width = layer.hidden_size
    norms = 2 * _count_norm(layer.norm, width)
    scales = 2 * width if layer.layer_scale else 0
    return norms + scales + _count_attention(layer.attention, layer.norm, width, tp) + _count_mlp(layer.mlp, width, tp)


def _count_attention(attention: Attention, norm: Norm, width: int, tp: int) -> int:
    query = _split(attention.num_heads * attention.head_dim, tp)
    key = _split(attention.num_kv_groups * attention.head_dim, tp)
    count = (query + 2 * key) * width + query * width
    if attention.qkv_bias:
        count += query + key + (key if attention.key_bias else 0)
    if attention.output_bias:
        count += width
    if attention.qk_norm == "head":
        count += 2 * _count_norm(norm, attention.head_dim)
    if attention.qk_norm == "hidden":
        count += _count_norm(norm, query) + _count_norm(norm, key)
    return count


def _count_mlp(mlp: FeedForward | Experts, width: int, tp: int) -> int:
    if isinstance(mlp, FeedForward):
        inner = _split(mlp.ffn_size, tp)
        num_first = 2 if mlp.gated else 1
        return (num_first + 1) * inner * width + (num_first * inner + width if mlp.bias else 0)
    router = mlp.num_experts * width
    shared = _count_mlp(mlp.shared, width, tp) if mlp.shared else 0
    return router + shared + mlp.num_experts * _count_mlp(mlp.expert, width, tp)


def _count_projector(projector: Projector, tp: int) -> int:
    """Matrices alternate: one by columns, the next by rows; a last one by columns gathers its output."""
    count = _count_norm(projector.norm, projector.norm_size)
    for index, (rows, columns) in enumerate(zip(projector.layer_sizes, projector.layer_sizes[1:], strict=False)):
        by_columns = index % 2 == 0
        count += rows * _split(columns, tp) if by_columns else _split(rows, tp) * columns
        if projector.bias:
            count += _split(columns, tp) if by_columns else columns
    out = projector.layer_sizes[-1] if projector.layer_sizes else 0
    return count + projector.num_special_tokens * out


def _count_norm(norm: Norm | None, size: int) -> int:
    return 0 if norm is None else size * (2 if norm == "layer" else 1)


def _split(size: int, tp: int) -> int:
    return -(-size // tp)
