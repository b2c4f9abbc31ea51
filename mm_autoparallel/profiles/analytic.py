"""The analytic cost of a block: its operators over what the device reaches of its peak figures.

Time of a matrix product: flops over peak · fraction, or bytes over bandwidth where that is more (Williams et al. 2009,
"Roofline"). Attention has fractions of its own; everything else is bytes over bandwidth. Collectives stand in the
order of Megatron-LM (core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication): in forward none
is hidden; in backward the input that a weight gradient needs is gathered again behind the input gradient's product,
and the input gradient is summed behind the weight gradient's product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mm_autoparallel.blocks.chain import Block, OutputHead, Structure
from mm_autoparallel.blocks.parameters import count_parameters
from mm_autoparallel.blocks.tokens import TokenCounts
from mm_autoparallel.job.cluster import Cluster
from mm_autoparallel.profiles.collectives import Group, exposed_ms, form_group
from mm_autoparallel.profiles.cost import BlockCost
from mm_autoparallel.profiles.efficiency import Efficiency
from mm_autoparallel.profiles.end_operators import list_operators
from mm_autoparallel.profiles.network import NetworkProfile
from mm_autoparallel.profiles.operators import MatrixProduct, Operators, Share


@dataclass(frozen=True)
class Rates:
    """What one device reaches, and its tensor- and context-parallel groups.

    hidden_fraction: the part of traffic that compute beside it hides.
    """

    matrix_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    tp_group: Group
    cp_group: Group
    hidden_fraction: float = 1.0


def rates_of(
    cluster: Cluster, efficiency: Efficiency, tp: int, cp: int, network: NetworkProfile | None = None
) -> Rates:
    """Ranks are numbered tensor parallel fastest, then context parallel. network: what was measured of it."""
    device = cluster.device
    return Rates(
        matrix_flops_per_s=device.bf16_flops_per_s * efficiency.matrix_fraction,
        attention_forward_flops_per_s=device.bf16_flops_per_s * efficiency.attention_forward_fraction,
        attention_backward_flops_per_s=device.bf16_flops_per_s * efficiency.attention_backward_fraction,
        memory_bytes_per_s=device.memory_bytes_per_s * efficiency.memory_fraction,
        tp_group=form_group(cluster.levels, tp, 1, efficiency.network_fraction, network),
        cp_group=form_group(cluster.levels, cp, tp, efficiency.network_fraction, network),
        hidden_fraction=network.hidden_fraction if network else 1.0,
    )


def estimate_block(block: Block, tokens: TokenCounts, share: Share, rates: Rates, gradient_bytes: float) -> BlockCost:
    """The cost of one `block` for a micro-batch of `tokens` per sample. gradient_bytes: of one accumulated gradient.

    A block that gets no tokens takes no time.
    """
    operators = list_operators(block.structure, tokens, share)
    parameter_count = float(count_parameters(block.structure, share.tp))
    forward_ms = input_ms = weight_ms = 0.0
    works = tokens.layer_tokens > 0
    if works:
        forward_ms = _forward_ms(operators, share, rates)
    if works and block.has_backward:
        input_ms = _backward_input_ms(operators, block, share, rates)
    if works and block.trainable:
        # every micro-batch reads and writes the accumulated gradient once
        weight_ms = _backward_weight_ms(operators, block, share, rates)
        weight_ms += _stream_ms(2 * gradient_bytes * _count_gradients(block.structure, share.tp), rates)
    return BlockCost(
        forward_ms=forward_ms,
        backward_input_ms=input_ms,
        backward_weight_ms=weight_ms,
        parameter_count=parameter_count,
        activation_bytes=operators.kept_bytes(block.trainable) if block.has_backward else 0.0,
        checkpoint_bytes=operators.input_bytes if block.has_backward else 0.0,
        transient_bytes=operators.working_bytes(block.trainable, block.has_backward),
        output_bytes=operators.output_bytes,
        time_source="analytic",
        memory_source="analytic",
    )


def _count_gradients(structure: Structure, tp: int) -> int:
    """Gradients a block's backward adds to: of its parameters, and of the table that a tied head shares."""
    return count_parameters(replace(structure, tied=False) if isinstance(structure, OutputHead) else structure, tp)


def _forward_ms(operators: Operators, share: Share, rates: Rates) -> float:
    total_ms = rates.tp_group.all_reduce_ms(operators.exchanged_bytes)
    total_ms += _stream_ms(sum(stream.forward_bytes for stream in operators.streams), rates)
    for product in operators.products:
        total_ms += _product_ms(product, rates)
        if share.sequence_parallel:
            total_ms += rates.tp_group.all_gather_ms(product.gathered_bytes)
            total_ms += rates.tp_group.reduce_scatter_ms(product.summed_bytes)
        else:
            total_ms += rates.tp_group.all_reduce_ms(product.summed_bytes)
    if operators.attention:
        attention = operators.attention
        compute_ms = attention.forward_flops / rates.attention_forward_flops_per_s * 1e3
        total_ms += compute_ms + _exposed_ring_ms(compute_ms, attention.ring_bytes, rates)
    return total_ms


def _backward_input_ms(operators: Operators, block: Block, share: Share, rates: Rates) -> float:
    """Gradients of everything but weights; sums of them hide behind the weight gradients where there are any."""
    total_ms = rates.tp_group.all_reduce_ms(operators.exchanged_bytes)
    total_ms += _stream_ms(sum(stream.backward_bytes for stream in operators.streams), rates)
    for product in operators.products:
        if share.sequence_parallel:
            total_ms += rates.tp_group.all_gather_ms(product.summed_bytes)
        if product.entry and not block.propagates_gradient:
            continue
        product_ms = _product_ms(product, rates)
        collective = rates.tp_group.reduce_scatter_ms if share.sequence_parallel else rates.tp_group.all_reduce_ms
        cover_ms = product_ms if block.trainable else 0.0
        total_ms += product_ms + exposed_ms(collective(product.gathered_bytes), cover_ms, rates.hidden_fraction)
    if operators.attention:
        attention = operators.attention
        compute_ms = attention.backward_flops / rates.attention_backward_flops_per_s * 1e3
        # the gradients of keys and values travel with them
        total_ms += compute_ms + _exposed_ring_ms(compute_ms, 2 * attention.ring_bytes, rates)
    return total_ms


def _backward_weight_ms(operators: Operators, block: Block, share: Share, rates: Rates) -> float:
    """Gradients of weights; their inputs are gathered again behind the input gradients."""
    total_ms = _stream_ms(sum(stream.weight_bytes for stream in operators.streams), rates)
    for product in operators.products:
        product_ms = _product_ms(product, rates)
        total_ms += product_ms
        if share.sequence_parallel:
            cover_ms = 0.0 if product.entry and not block.propagates_gradient else product_ms
            gather_ms = rates.tp_group.all_gather_ms(product.gathered_bytes)
            total_ms += exposed_ms(gather_ms, cover_ms, rates.hidden_fraction)
    return total_ms


def _product_ms(product: MatrixProduct, rates: Rates) -> float:
    return max(product.flops / rates.matrix_flops_per_s, product.moved_bytes / rates.memory_bytes_per_s) * 1e3


def _stream_ms(size_bytes: float, rates: Rates) -> float:
    return size_bytes / rates.memory_bytes_per_s * 1e3


def _exposed_ring_ms(compute_ms: float, ring_bytes: float, rates: Rates) -> float:
    """Ring attention (Liu et al. 2023, arXiv:2310.01889), the sequence dealt in zig-zag so that every rank has the same

    part of the causal triangle: in each of cp − 1 steps keys and values travel behind one cp-th of the attention.
    """
    group = rates.cp_group
    step_ms = exposed_ms(group.pass_on_ms(ring_bytes), compute_ms / group.num_ranks, rates.hidden_fraction)
    return (group.num_ranks - 1) * step_ms
