"""What it takes an encoder's outputs to reach the decoder's ranks, and their gradients to come back, by framework.

D: bytes of one decoder replica's micro-batch, whole. Replicas of both form equal cells of n encoder and m decoder ones,
of which n or m is 1.

ideal (no framework is named): every rank of the smaller side sends or receives its part over its own link, and the
decoder's tensor parallel ranks gather the parts; it blocks nobody. On shared devices and in one stage the ranks of a
cell gather what they lack.
Megatron (core/models/mimo, bridge_communicator.py): one leader of each replica sends to one leader, two messages of
shapes before, and the leader broadcasts to its tensor and context parallel ranks; both sides stand still for it.
Colocated: an all-gather forward where the encoder has more replicas, or ranks that share a sample's tokens, backward
where it has fewer; the other way each rank narrows what it has.
MindSpeed-MM (hetero_parallel.py): raw pixels are gathered over the decoder's replicas, outputs over the encoder's,
lengths before each of them in every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.collectives import form_group, group_of, hop_line
from mm_autoparallel.model.profiles.network import NetworkProfile

SHAPE_MESSAGES = 2
"""Before each tensor of Megatron's bridge."""


@dataclass(frozen=True)
class Crossing:
    """ms of one decoder micro-batch, in phases of the whole step. blocks: both sides compute nothing meanwhile."""

    forward_ms: float
    backward_ms: float
    blocks: bool = False


def follows_megatron(workload: Workload) -> bool:
    """Whether the job names Megatron as what trains, whose bridge then counts in the ideal's place."""
    return "stack" in workload.model_fields_set and workload.stack.startswith("megatron")


def cross_between_ranks(
    cluster: Cluster, network: NetworkProfile | None, workload: Workload, strategy: Strategy, size_bytes: float
) -> Crossing:
    """From an encoder on ranks of its own. size_bytes: D. strategy: with its arrangement."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    shared = min(encoder.dp, decoder.dp)
    senders, receivers = encoder.dp // shared, decoder.dp // shared
    level, width = _crossed_level(cluster, strategy), decoder.tp * decoder.cp
    if follows_megatron(workload):
        sharing = max(1, level.devices_per_card // max(encoder.tp, width))
        line = hop_line(level, network, sharing)
        most_bytes = max(size_bytes, size_bytes * receivers / senders)
        start_ms = (1 + SHAPE_MESSAGES) * line.latency_ms
        inner = form_group(cluster.levels, width, 1, network)
        broadcast_ms = inner.pass_on_ms(size_bytes)
        each_ms = start_ms + most_bytes / line.bandwidth_bytes_per_s * 1e3 + broadcast_ms
        return Crossing(each_ms, each_ms, blocks=True)
    line = hop_line(level, network)
    num_lanes = min(senders * encoder.tp * encoder.cp, receivers * width)
    moved_ms = line.latency_ms + receivers * size_bytes / num_lanes / line.bandwidth_bytes_per_s * 1e3
    gather_ms = group_of(cluster.levels, decoder, "TP", network).all_gather_ms(size_bytes)
    return Crossing(moved_ms + gather_ms, moved_ms + gather_ms)


def cross_inline(
    cluster: Cluster,
    network: NetworkProfile | None,
    workload: Workload,
    strategy: Strategy,
    size_bytes: float,
    pixel_bytes: float,
) -> Crossing:
    """Of a micro-batch, from an encoder on the devices of a decoder of one stage. size_bytes: D. pixel_bytes: what the
    encoder reads of one decoder replica's micro-batch."""
    if _is_mindspeed_mm(workload):
        return _gather_over_replicas(cluster, network, strategy, size_bytes, pixel_bytes, 1)
    return cross_on_shared_ranks(cluster, network, strategy, size_bytes)


def cross_on_shared_ranks(
    cluster: Cluster, network: NetworkProfile | None, strategy: Strategy, size_bytes: float
) -> Crossing:
    """The same by Megatron's law, which is the ideal. size_bytes: D."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    # an encoder replica's samples are those of as many decoder replicas, and context parallel ranks share their tokens
    number, of_one = max(1, decoder.dp // encoder.dp), max(1, encoder.dp // decoder.dp)
    there = form_group(cluster.levels, of_one * encoder.cp, encoder.tp, network)
    back = form_group(cluster.levels, number, decoder.tp * decoder.cp, network)
    return Crossing(there.all_gather_ms(number * size_bytes), back.all_gather_ms(number * size_bytes))


def cross_in_phases(
    cluster: Cluster,
    network: NetworkProfile | None,
    workload: Workload,
    strategy: Strategy,
    size_bytes: float,
    pixel_bytes: float,
) -> Crossing:
    """Of a whole step, from an encoder on all devices to the decoder's first stage. pixel_bytes: what the encoder reads
    of one decoder replica's micro-batch."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder, num_microbatches = arrangement.encoder, decoder.num_microbatches(workload.global_batch_size)
    step_bytes = num_microbatches * size_bytes
    if _is_mindspeed_mm(workload):
        num_calls = workload.global_batch_size // (encoder.dp * encoder.mbs)
        pixels = num_microbatches * pixel_bytes
        return _gather_over_replicas(cluster, network, strategy, step_bytes, pixels, num_calls)
    if decoder.pp == 1:
        return cross_on_shared_ranks(cluster, network, strategy, step_bytes)
    return cross_to_first_stage(cluster, network, strategy, step_bytes)


def _is_mindspeed_mm(workload: Workload) -> bool:
    return "stack" in workload.model_fields_set and workload.stack == "mindspeed-mm"


def _gather_over_replicas(
    cluster: Cluster,
    network: NetworkProfile | None,
    strategy: Strategy,
    size_bytes: float,
    pixel_bytes: float,
    num_calls: int,
) -> Crossing:
    """MindSpeed-MM's: raw pixels over the decoder's replicas, outputs over the encoder's, and lengths before both.

    size_bytes, pixel_bytes: of one decoder replica, over all `num_calls` of the encoder.
    """
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    over_decoder = form_group(cluster.levels, decoder.dp, decoder.tp * decoder.cp, network)
    over_encoder = form_group(cluster.levels, encoder.dp, encoder.tp, network)
    outputs_ms = over_encoder.all_gather_ms(decoder.dp * size_bytes)
    pixels_ms = over_decoder.all_gather_ms(decoder.dp * pixel_bytes)
    lengths_ms = 2 * num_calls * (over_decoder.latency_ms + over_encoder.latency_ms)
    return Crossing(pixels_ms + outputs_ms + lengths_ms, outputs_ms)


def cross_to_first_stage(
    cluster: Cluster, network: NetworkProfile | None, strategy: Strategy, size_bytes: float
) -> Crossing:
    """From an encoder on the ranks of any stage to those of the decoder's first. size_bytes: of what crosses, whole."""
    decoder = strategy.of_decoder()
    width = decoder.tp * decoder.cp
    reached = next((level for level in cluster.levels if level.num_devices >= decoder.world_size), cluster.levels[-1])
    line = hop_line(reached, network)
    moved_ms = line.latency_ms + size_bytes / width / line.bandwidth_bytes_per_s * 1e3
    gather_ms = group_of(cluster.levels, decoder, "TP", network).all_gather_ms(size_bytes)
    return Crossing(moved_ms + gather_ms, moved_ms)


def _crossed_level(cluster: Cluster, strategy: Strategy) -> Level:
    """The innermost level whose groups hold an encoder's and a decoder's first stage whole; else the outermost."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    behind = encoder.num_ranks if encoder.rank_offset == 0 else 0
    last_stage = encoder.rank_offset + encoder.num_ranks - encoder.tp * encoder.cp * encoder.dp
    ranks = [last_stage, encoder.rank_offset + encoder.num_ranks - 1]
    ranks += [behind, behind + decoder.tp * decoder.cp * decoder.dp - 1]
    for level in cluster.levels:
        if len({rank // level.num_devices for rank in ranks}) == 1:
            return level
    return cluster.levels[-1]
