"""Figures: what a device reaches under a software stack, a number a class of operators and what stands beside."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mm_autoparallel.records import Factor, Flag, Fraction, Noun, Number, PositiveBytesEach, Time, or_zero


class Figures(Noun):
    """What a device reaches. Fractions are of its peak figures; each class of operator has one.

    matrix_fraction: dense matrix products; grouped_matrix_fraction: those of experts, many weights in one call.
    fp8_matrix_fraction, fp4_matrix_fraction: dense ones of the peak in so many bits (None: as those in BF16 say).
    attention_*_fraction: flash attention, forward and backward; unfused_attention_fraction: products with score
    matrices. memory_fraction: memory-bound operators. node_fraction, network_fraction: bandwidth of the innermost level
    and of all others; node_latency_ms, network_latency_ms: of a short collective there (None: the catalog's).
    layer_launch_ms: what a host takes to launch the forward of a layer; where operators are small they wait for it.
    expert_launch_ms: the same of a layer with routed experts, which are dealt out and waited for, where it is more.
    vision_launch_ms: the same of a layer of a tower (0: layer_launch_ms), whose eager code launches more operators;
    rotary_vision_launch_ms: of one that rotates queries and keys (0: vision_launch_ms). launch_backward_factor,
    vision_launch_backward_factor: how many times as long a layer's backward takes to launch. tensor_launch_factor: how
    many times as long a host takes for a decoder's layer that tensor parallel ranks share.
    host_runs_ahead: a host launches layers while the device still works on head and embedding (operators/host.py).
    shape_exchange_ms: what a stage waits for shapes of tensors that are sent before them.
    expert_host_ms: what a host takes to launch forward and backward of a layer with experts, at none a rank, where the
    stack says which graphs it has (model/operators/host.py; 0: not known). exchange_node_fraction,
    exchange_network_fraction: as node_fraction and network_fraction, of an all-to-all whose dispatcher is
    known (None: the same). exposed_exchange_fraction: what of an all-to-all stays open beside another micro-batch.
    hidden_fraction: the part of tensor-parallel traffic that the matrix product beside it in
    the backward hides, 0 where the stack runs one after the other. shard_hidden_fraction: the same of what ZeRO 2 and 3
    move in every micro-batch. shard_gigabyte_ms: what a rank takes for 1e9 bytes of that beside the network, where a
    stack moves tensors one by one (StackFacts.shards); the network then carries what it states, however many ranks
    there are. hop_fraction: of the network's bandwidth between two stages (None: network_fraction).
    scale_ranks: n ranks that reduce across the network together do so at 1/(1 + n / scale_ranks) of its bandwidth (0:
    it does not fall). waves: products take whole waves of tiles over the device's matrix_units. edge_count: rows,
    columns and steps that the edges of a product cost; edge_factor: these grow instead with what is computed while
    memory moves a byte (operators/precision_rates.py; 0: they do not). attention_*_half_count: keys at which flash
    attention reaches half of its fraction (0: it always reaches it); uneven_attention_factor, small_attention_factor:
    where queries and values differ in size, and of heads of 64 numbers and less. triton_attention_factor: Triton's
    flash attention over the fastest. layer_gap_ms: what stands still between the operators of a layer's forward, and
    twice that in its backward. micro_batch_ms, step_ms: what a micro-batch and a step take beside all operators.
    statistics_bytes: what the attention kernel keeps per token and head for its backward besides query, key, value and
    output.
    """

    matrix_fraction: Fraction
    grouped_matrix_fraction: Fraction
    attention_forward_fraction: Fraction
    attention_backward_fraction: Fraction
    unfused_attention_fraction: Fraction
    memory_fraction: Fraction
    node_fraction: Fraction
    network_fraction: Fraction
    node_latency_ms: Time | None = None
    network_latency_ms: Time | None = None
    layer_launch_ms: Time = 0.0
    expert_launch_ms: Time = 0.0
    vision_launch_ms: Time = 0.0
    rotary_vision_launch_ms: Time = 0.0
    launch_backward_factor: Factor = 2.0
    vision_launch_backward_factor: Factor = 2.0
    tensor_launch_factor: Factor = 1.0
    shape_exchange_ms: Time = 5.0
    expert_host_ms: Time = 0.0
    exchange_node_fraction: Fraction | None = None
    exchange_network_fraction: Fraction | None = None
    exposed_exchange_fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    hidden_fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0
    shard_hidden_fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0
    shard_gigabyte_ms: Time = 0.0
    hop_fraction: Fraction | None = None
    scale_ranks: Number = 0
    waves: Flag = False
    edge_count: Number = 0
    triton_attention_factor: Fraction = 1.0
    layer_gap_ms: Time = 0.0
    micro_batch_ms: Time = 0.0
    step_ms: Time = 0.0
    statistics_bytes: PositiveBytesEach = 4.0
    fp8_matrix_fraction: Fraction | None = None
    fp4_matrix_fraction: Fraction | None = None
    edge_factor: Annotated[float, or_zero(1e3)] = 0.0
    attention_forward_half_count: Number = 0
    attention_backward_half_count: Number = 0
    uneven_attention_factor: Fraction = 1.0
    small_attention_factor: Fraction = 1.0
    host_runs_ahead: Flag = False


MEASURED = "measured"
"""What sources of figures begin with that were measured by themselves, and not fitted to steps."""

HOST_FIGURES = ("layer_launch_ms", "expert_launch_ms", "vision_launch_ms", "rotary_vision_launch_ms")
"""What a host takes for one layer."""


LATER_FIGURES = (
    "launch_backward_factor",
    "vision_launch_backward_factor",
    "shard_gigabyte_ms",
    "expert_host_ms",
    "exchange_node_fraction",
    "exchange_network_fraction",
    "exposed_exchange_fraction",
    "fp8_matrix_fraction",
    "fp4_matrix_fraction",
    "edge_factor",
    "attention_forward_half_count",
    "attention_backward_half_count",
    "uneven_attention_factor",
    "small_attention_factor",
    "host_runs_ahead",
)
"""Figures that are newer than calibrations that ship: they are written where they say something."""
