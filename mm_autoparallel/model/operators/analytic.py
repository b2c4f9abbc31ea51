"""The analytic cost of a block: its operators over what the device reaches of its peak figures.

Time of a matrix product: flops over peak · fraction, or bytes over bandwidth where that is more (Williams et al. 2009,
"Roofline"). Attention has fractions of its own; everything else is bytes over bandwidth. Collectives stand in the
order of Megatron-LM (core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication): in forward none
is hidden; in backward the input that a weight gradient needs is gathered again behind the input gradient's product,
and the input gradient is summed behind the weight gradient's product. What is still exposed of them fused kernels may
hide in part (Workload.fused_matmul_fraction), and of the experts' exchanges what runs beside them (overlap_all_to_all).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mm_autoparallel.model.blocks.chain import Block, OutputHead, Structure, TransformerLayer
from mm_autoparallel.model.blocks.parameters import (
    count_adapter_parameters,
    count_expert_parameters,
    count_parameters,
)
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.stacks import AttentionKernel, Dispatcher
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.context_traffic import context_exchange_ms, context_groups, exposed_ring_ms
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, AttentionProduct, MatrixProduct, Operators, Share
from mm_autoparallel.model.operators.precision_rates import (
    EVEN_ATTENTION,
    AttentionRate,
    ProductRate,
    attention_rate,
    clock_of,
    count_waves,
    kernel_factors,
    product_rates,
    single_factor,
)
from mm_autoparallel.model.operators.tensor_traffic import added_ms, open_ms
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.model.profiles.collectives import NO_EXCHANGE, Exchange, Group, exposed_ms, form_exchange, group_of
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.lanes import UNMEASURED, Lanes, find_lanes
from mm_autoparallel.model.profiles.network import NetworkProfile


@dataclass(frozen=True)
class Rates:
    """What one device reaches, and its tensor-, context- and expert-parallel groups.

    grouped_flops_per_s: matrix products of several weights in one call (experts). unfused_flops_per_s: products with
    score matrices. lanes: how traffic and compute slow each other down. compute_factor: what all times but those of
    groups are multiplied by. edge_count: rows, columns and steps of a matrix product that its edges cost.
    matrix_units: of which each takes one tile of a product at a time (0: tiles do not count). kernel_factor: of an
    attention kernel, its rate over the usual one. exchange: of a known dispatcher, in place of ep_group's all-to-all;
    exposed_exchange_fraction: what of it stays open beside another micro-batch. edges_move: edge_count stands for what
    a product reads and writes. low: linear layers by their precision, beside BF16. attention: how it falls behind its
    best. dealing_group, passing_group: context parallel ranks that deal heads among themselves, and that pass keys and
    values on, where these are not all of them. single_factor: what single operators of PyTorch reach of memory over
    what others do.
    """

    matrix_flops_per_s: float
    grouped_flops_per_s: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    unfused_flops_per_s: float
    memory_bytes_per_s: float
    tp_group: Group
    cp_group: Group
    ep_group: Group
    dealing_group: Group | None = None
    passing_group: Group | None = None
    lanes: Lanes = UNMEASURED
    compute_factor: float = 1.0
    edge_count: float = 0.0
    matrix_units: int = 0
    kernel_factor: Mapping[str, float] = field(default_factory=dict)
    exchange: Exchange = NO_EXCHANGE
    exposed_exchange_fraction: float = 0.0
    edges_move: bool = False
    low: Mapping[str, ProductRate] = field(default_factory=dict)
    attention: AttentionRate = EVEN_ATTENTION
    single_factor: float = 1.0

    def matrix_ms(self, flops: float, moved_bytes: float, grouped: bool = False, precision: str = "bf16") -> float:
        """A matrix product: `flops`, or operands and result, `moved_bytes`, once each where that takes longer.

        grouped: of several weights, each with its own rows.
        """
        flops_per_s = self.grouped_flops_per_s if grouped else self.matrix_flops_per_s
        flops_per_s *= 1.0 if precision == "bf16" else self.low[precision].rate_factor
        return max(self.compute_factor * flops / flops_per_s * 1e3, self.memory_ms(moved_bytes))

    def shape_factor(
        self,
        row_count: float,
        inner_count: float,
        column_count: float,
        precision: str = "bf16",
        num_products: int = 1,
    ) -> float:
        """How much longer a product of such matrices takes than its operations alone: tiles at the edges are partly
        empty, and so is the last wave of tiles over the device's units (the best of three tilings). num_products: of
        this shape, whose tiles run together.
        """
        edge_count = self.edge_count if precision == "bf16" else self.low[precision].edge_count
        edges = sum(edge_count / max(1.0, count) for count in (row_count, inner_count, column_count))
        if not self.matrix_units:
            return edges + 1.0
        return edges + count_waves(row_count, column_count, self.matrix_units, num_products)

    def attention_ms(self, flops: float, backward: bool, fused: bool = True, kernel: AttentionKernel = "") -> float:
        """Scores and weighted values, of one pass: forward, or `backward`. fused: in one kernel (flash attention)."""
        if not fused:
            flops_per_s = self.unfused_flops_per_s
        elif backward:
            flops_per_s = self.attention_backward_flops_per_s
        else:
            flops_per_s = self.attention_forward_flops_per_s
        if fused:
            flops_per_s *= self.kernel_factor.get(kernel, 1.0)
        return self.compute_factor * flops / flops_per_s * 1e3

    def core_ms(self, attention: AttentionProduct, backward: bool) -> float:
        """The same of one operator."""
        flops = attention.backward_flops if backward else attention.forward_flops
        plain_ms = self.attention_ms(flops, backward, attention.fused, attention.kernel)
        plain_ms *= attention.time_factor
        return plain_ms / self.attention.factor(attention, backward) if attention.fused else plain_ms

    def stream_ms(self, moved_bytes: float, single: bool = False) -> float:
        """A memory-bound operator, or several of PyTorch's that run by themselves (Stream.single)."""
        return self.memory_ms(moved_bytes) / (self.single_factor if single else 1.0)

    def memory_ms(self, moved_bytes: float) -> float:
        """An operator that `moved_bytes`, read and written, decide."""
        return self.compute_factor * moved_bytes / self.memory_bytes_per_s * 1e3


def rates_of(
    cluster: Cluster,
    calibration: Calibration,
    strategy: Strategy,
    network: NetworkProfile | None = None,
    workload: Workload | None = None,
) -> Rates:
    """`cluster`: its levels as they are reached (Calibration.reached). network: what was measured of it.

    workload: as in context_groups.
    """
    dealing_group, passing_group = context_groups(cluster.levels, strategy, network, workload)
    device, figures = cluster.device, calibration.figures
    flops_per_s = device.bf16_flops_per_s * clock_of(device)
    low = product_rates(device, figures)
    return Rates(
        matrix_flops_per_s=flops_per_s * figures.matrix_fraction,
        grouped_flops_per_s=flops_per_s * figures.grouped_matrix_fraction,
        attention_forward_flops_per_s=flops_per_s * figures.attention_forward_fraction,
        attention_backward_flops_per_s=flops_per_s * figures.attention_backward_fraction,
        unfused_flops_per_s=flops_per_s * figures.unfused_attention_fraction,
        memory_bytes_per_s=device.memory_bytes_per_s * figures.memory_fraction,
        tp_group=group_of(cluster.levels, strategy, "TP", network),
        cp_group=group_of(cluster.levels, strategy, "CP", network),
        ep_group=group_of(cluster.levels, strategy, "EP", network),
        dealing_group=dealing_group,
        passing_group=passing_group,
        lanes=find_lanes(device, figures, calibration.sources, network, cluster.levels[0].name),
        edge_count=low["bf16"].edge_count,
        matrix_units=(device.matrix_units or 0) if figures.waves else 0,
        kernel_factor=kernel_factors(figures),
        exchange=form_exchange(
            cluster.levels,
            strategy,
            (figures.exchange_node_fraction or figures.node_fraction) / figures.node_fraction,
            (figures.exchange_network_fraction or figures.network_fraction) / figures.network_fraction,
        ),
        exposed_exchange_fraction=figures.exposed_exchange_fraction,
        edges_move=figures.edge_factor > 0,
        low=low,
        attention=attention_rate(figures),
        single_factor=single_factor(figures),
    )


def estimate_block(block: Block, tokens: TokenCounts, share: Share, rates: Rates, gradient_bytes: float) -> BlockCost:
    """The cost of one `block` for a micro-batch of `tokens` per sample. gradient_bytes: of one accumulated gradient.

    A block that gets no tokens takes no time.
    """
    operators = list_operators(block.structure, tokens, share)
    division = (share.tp, share.ep, share.etp)
    forward_ms = input_ms = weight_ms = rerun_ms = 0.0
    works = tokens.layer_tokens > 0
    if works:
        forward_ms = _forward_ms(operators, share, rates)
    if works and block.has_backward:
        rerun_ms = _forward_ms(operators.rerun, share, rates) if operators.rerun else 0.0
        input_ms = _backward_input_ms(operators, block, share, rates) + rerun_ms
    if works and block.trainable:
        # every micro-batch reads and writes the accumulated gradient once
        weight_ms = _backward_weight_ms(operators, block, share, rates)
        added_bytes = 2 * gradient_bytes + (ELEMENT_BYTES if share.facts.writes_gradients else 0)
        # what a product writes is in its edges, where these say how much it moves
        added_bytes -= ELEMENT_BYTES if rates.edges_move else 0
        weight_ms += rates.memory_ms(added_bytes * _count_gradients(block.structure, *division))
    if share.facts.recomputes_ends and block.role != "layer" and block.has_backward:
        input_ms += forward_ms
    hidden_ms = _hidden_exchanges_ms(operators, block, share, rates, forward_ms, input_ms + weight_ms)
    # a layer runs once more by itself, before its backward goes beside another micro-batch's forward
    open_ms = hidden_ms[0] if share.overlap_all_to_all == "micro_batches" else 0.0
    forward_ms, input_ms = forward_ms - hidden_ms[0], input_ms - hidden_ms[1]
    return BlockCost(
        forward_ms=forward_ms,
        backward_input_ms=input_ms,
        backward_weight_ms=weight_ms,
        parameter_count=float(count_parameters(block.structure, *division)),
        frozen_count=_count_frozen(block.structure, *division),
        expert_count=float(count_expert_parameters(block.structure, *division)),
        activation_bytes=operators.kept_bytes(block.trainable) if block.has_backward else 0.0,
        checkpoint_bytes=operators.input_bytes if block.has_backward else 0.0,
        transient_bytes=operators.working_bytes(block.trainable, block.has_backward, share.shared_gradients),
        output_bytes=operators.output_bytes,
        time_source="analytic",
        memory_source="analytic",
        recompute_ms=_recompute_ms(operators, block, share, rates, forward_ms, rerun_ms - open_ms),
    )


def _recompute_ms(
    operators: Operators, block: Block, share: Share, rates: Rates, forward_ms: float, spared_ms: float
) -> float | None:
    """What recomputing a whole block adds to its backward; None: its forward. Nothing in it runs a third time.

    spared_ms: of its forward, what runs again anyhow, less what the forward hides and this pass does not.
    """
    if share.facts.stops_early and block.role == "layer" and operators.products:
        spared_ms += _product_ms(operators.products[-1], rates)
    return max(0.0, forward_ms - spared_ms) if spared_ms else None


def _count_gradients(structure: Structure, tp: int, ep: int, etp: int) -> int:
    """Gradients a block's backward adds to: of its parameters, and of the table that a tied head shares."""
    if isinstance(structure, TransformerLayer) and structure.adapters:
        return count_adapter_parameters(structure, tp)
    whole = replace(structure, tied=False) if isinstance(structure, OutputHead) else structure
    return count_parameters(whole, tp, ep, etp)


def _count_frozen(structure: Structure, tp: int, ep: int, etp: int) -> float:
    """Parameters that do not train although the block does: all but the adapters of a layer that has them."""
    if not isinstance(structure, TransformerLayer) or structure.adapters is None:
        return 0.0
    return float(count_parameters(structure, tp, ep, etp) - count_adapter_parameters(structure, tp))


def _exchanges_ms(operators: Operators, share: Share, rates: Rates) -> float:
    """What nothing hides of one pass, in forward as in backward, beside the collectives of products."""
    total_ms = rates.tp_group.all_reduce_ms(operators.exchanged_bytes)
    total_ms += _expert_exchanges_ms(operators, share, rates)
    if operators.attention:
        total_ms += context_exchange_ms(operators.attention, rates)
    return total_ms


def _expert_exchanges_ms(operators: Operators, share: Share, rates: Rates) -> float:
    """Tokens go to their experts' ranks and come back, in each pass: two all-to-alls of
    tokens · top_k · hidden · bytes, of which (EP − 1)/EP leaves a rank, or as much as its dispatcher sends.
    """
    group, dispatcher = rates.ep_group, share.facts.dispatcher
    if not dispatcher or "all_to_all" in group.lines:
        return 2 * group.all_to_all_ms(operators.all_to_all_bytes)
    one_way_ms = rates.exchange.one_way_ms(
        operators.all_to_all_bytes, operators.copies, dispatcher in _ONCE_A_DOMAIN, operators.groups
    )
    return 2 * group.operation_factor.get("all_to_all", 1.0) * one_way_ms


_ONCE_A_DOMAIN: tuple[Dispatcher, ...] = ("deepep", "hybridep")
"""They send a token once to each node that it needs (deepseek-ai/DeepEP, README: tokens are forwarded from RDMA to
NVLink)."""


def _hidden_exchanges_ms(
    operators: Operators, block: Block, share: Share, rates: Rates, forward_ms: float, backward_ms: float
) -> tuple[float, float]:
    """Of the experts' exchanges a, what hides behind compute in forward and in backward: a − max(0, a − cover).

    The cover is the same pass of the shared expert, or the other pass of the layer in another micro-batch, whose own
    exchanges cover nothing; that a pipeline's first forwards and last backwards have no other is not counted.
    forward_ms, backward_ms: of the layer, exchanges included.
    """
    if share.overlap_all_to_all == "none" or not operators.all_to_all_bytes or not forward_ms:
        return 0.0, 0.0
    exchanges_ms = _expert_exchanges_ms(operators, share, rates)
    if share.overlap_all_to_all == "micro_batches":
        covers_ms = backward_ms - exchanges_ms, forward_ms - exchanges_ms
    elif operators.beside:
        backward_cover_ms = _backward_input_ms(operators.beside, block, share, rates)
        if block.trainable:
            backward_cover_ms += _backward_weight_ms(operators.beside, block, share, rates)
        covers_ms = _forward_ms(operators.beside, share, rates), backward_cover_ms
    else:
        return 0.0, 0.0
    hidden_fraction = rates.lanes.experts.hidden_fraction
    exposed = [exposed_ms(exchanges_ms, max(0.0, cover_ms), hidden_fraction) for cover_ms in covers_ms]
    if share.overlap_all_to_all == "micro_batches" and share.facts.dispatcher:
        exposed = [max(left_ms, rates.exposed_exchange_fraction * exchanges_ms) for left_ms in exposed]
    return exchanges_ms - exposed[0], (exchanges_ms - exposed[1]) if block.has_backward else 0.0


def _forward_ms(operators: Operators, share: Share, rates: Rates) -> float:
    total_ms = _exchanges_ms(operators, share, rates)
    total_ms += sum(rates.stream_ms(stream.forward_bytes, stream.single) for stream in operators.streams)
    for product in operators.products:
        product_ms = _product_ms(product, rates)
        total_ms += product_ms + rates.tp_group.all_gather_ms(product.joined_bytes)
        if product.quantises_input:
            total_ms += _quantised_ms(product, product.input_count, share, rates)
        if share.sequence_parallel:
            gather_ms = rates.tp_group.all_gather_ms(product.gather_factor * product.gathered_bytes)
            for traffic_ms in (gather_ms, rates.tp_group.reduce_scatter_ms(product.summed_bytes)):
                total_ms += added_ms(traffic_ms, product, product_ms, share, rates)
        else:
            total_ms += open_ms(rates.tp_group.all_reduce_ms(product.summed_bytes), share)
    if operators.attention:
        compute_ms = rates.core_ms(operators.attention, backward=False)
        total_ms += compute_ms + exposed_ring_ms(compute_ms, operators.attention.ring_bytes, share, rates)
    return total_ms


def _backward_input_ms(operators: Operators, block: Block, share: Share, rates: Rates) -> float:
    """Gradients of everything but weights; sums of them hide behind the weight gradients where there are any."""
    total_ms = _exchanges_ms(operators, share, rates)
    total_ms += sum(rates.stream_ms(stream.backward_bytes, stream.single) for stream in operators.streams)
    for product in operators.products:
        if product.quantises_gradient:
            total_ms += _quantised_ms(product, product.output_count, share, rates)
        product_ms = _product_ms(product, rates, "input")
        if share.sequence_parallel:
            gather_ms = rates.tp_group.all_gather_ms(product.gather_factor * product.summed_bytes)
            total_ms += added_ms(gather_ms, product, product_ms, share, rates)
        if product.entry and not block.propagates_gradient:
            continue
        collective = rates.tp_group.reduce_scatter_ms if share.sequence_parallel else rates.tp_group.all_reduce_ms
        cover_ms = product_ms if block.trainable and product.trains else 0.0
        num_sums = product.num_linears if share.facts.linear_sums and not share.sequence_parallel else 1
        traffic_ms = num_sums * collective(product.gathered_bytes)
        total_ms += product_ms + open_ms(traffic_ms, share, cover_ms, rates.lanes.tensor.hidden_fraction)
    if operators.attention:
        compute_ms = rates.core_ms(operators.attention, backward=True)
        # the gradients of keys and values travel with them, or are summed where these were gathered once more
        total_ms += compute_ms + exposed_ring_ms(compute_ms, 2 * operators.attention.ring_bytes, share, rates)
        total_ms += rates.cp_group.reduce_scatter_ms(operators.attention.gathered_bytes)
    return total_ms


def _backward_weight_ms(operators: Operators, block: Block, share: Share, rates: Rates) -> float:
    """Gradients of weights; their inputs are gathered again behind the input gradients."""
    total_ms = sum(rates.stream_ms(stream.weight_bytes, stream.single) for stream in operators.streams)
    for product in operators.products:
        if not product.trains:
            continue
        product_ms = _product_ms(product, rates, "weight")
        total_ms += product_ms
        if share.sequence_parallel and share.facts.gathers == "matrix":
            cover_ms = 0.0 if product.entry and not block.propagates_gradient else product_ms
            gather_ms = rates.tp_group.all_gather_ms(product.gather_factor * product.gathered_bytes)
            total_ms += open_ms(gather_ms, share, cover_ms, rates.lanes.tensor.hidden_fraction)
    return total_ms


def _quantised_ms(product: MatrixProduct, width: float, share: Share, rates: Rates) -> float:
    """Bringing `width` numbers of each row into the precision of `product`; a compiler spares half of the traffic."""
    if product.precision == "bf16":
        return 0.0
    each_bytes = rates.low[product.precision].quantised_bytes * (0.5 if share.facts.fused_casts else 1.0)
    return rates.memory_ms(each_bytes * product.row_count * width)


def _product_ms(product: MatrixProduct, rates: Rates, result: Literal["output", "input", "weight"] = "output") -> float:
    """result: what it makes: its output, or the gradient of its input or of its weight."""
    rows, inputs, outputs = product.row_count / product.num_weights, product.input_count, product.output_count
    padding_factor, num_products = 1.0, 1
    if product.tile_rows and rows:
        num_products, whole_rows = product.num_weights, math.ceil(rows / product.tile_rows) * product.tile_rows
        padding_factor, rows = whole_rows / rows, whole_rows
    shape = {
        "output": (rows, inputs, outputs),
        "input": (rows, outputs, inputs),
        "weight": (inputs, rows, outputs),
    }[result]
    factor = padding_factor * rates.shape_factor(*shape, product.precision, num_products)
    flops, grouped = factor * product.flops, product.num_weights > 1
    return rates.matrix_ms(flops, product.moved_bytes, grouped, product.precision)
