"""Traffic between replicas and stages, and the optimizer step: what of it lengthens a step.

Gradients are reduced once a step, as their layers' last backward ends, and hide behind the backward of the layers that
follow it (Li et al. 2020, "PyTorch distributed", VLDB; Megatron's --overlap-grad-reduce); gathered parameters hide
behind the forward of the layers before them (--overlap-param-gather). Per block that is max(0, traffic − compute of one
block), so that it stays a sum over the blocks of a stage. Stems and embeddings are the first of their modality: their
gradients come last and their parameters are needed first, so nothing hides them.

Buckets run one after the other, each from the end of its own backward on. So a stage whose blocks take traffic t and
compute c ends its traffic max_i (t_i + Σ over later j of (t_j − c_j)) after its compute, which is at most
Σ max(0, t − c) + max min(t, c): the sum errs low by the last bucket at most, which `last_bucket_ms` adds where a job
says how large buckets are, and high where blocks differ so that a later one hides an earlier one's traffic.

ZeRO 2 and 3 reduce gradients behind the backward of every micro-batch; ZeRO 3 gathers each block's weights behind the
forward of the block before it, and unless they are kept once more in the backward, where both share its cover. A
recomputed layer's second forward finds its weights gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mm_autoparallel.model.blocks.chain import Block, Chain
from mm_autoparallel.model.costs.memory import sharded_over
from mm_autoparallel.model.costs.topology import hop_lines, tied_group
from mm_autoparallel.model.job.cluster import Cluster, Device
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.collectives import ALONE, Group, exposed_ms, group_of
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.network import NetworkProfile


def data_group(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> Group:
    """The ranks that hold the same weights, or share one copy of them: context and data parallel together.

    cluster: its levels as they are reached (Calibration.reached). network: what was measured of it.
    """
    return group_of(cluster.levels, strategy, "shard" if strategy.shard else "DP", network)


def copies_group(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> Group:
    """The ranks that hold the same shard, each of another copy of the weights (Strategy.shard)."""
    return group_of(cluster.levels, strategy, "copies", network) if strategy.shard else ALONE


def expert_group(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> Group:
    """The ranks that hold the same part of the same experts, or share one copy of it."""
    if strategy.shard and strategy.ep == 1:
        return data_group(cluster, strategy, network)
    return group_of(cluster.levels, strategy, "expert DP", network)


@dataclass(frozen=True)
class Cover:
    """What traffic of a block may hide behind: a forward of the first micro-batch, a backward of the last one.

    hidden_fraction: the part of their overlap that is hidden.
    """

    forward_ms: float
    backward_ms: float
    hidden_fraction: float = 1.0


def cover_of(
    block: Block,
    cost: BlockCost,
    scale: tuple[float, ...],
    workload: Workload,
    hidden_fraction: float = 1.0,
) -> Cover:
    """`scale`: of the block's times, per micro-batch (empty: all 1)."""
    if block.role == "pre":
        return Cover(0.0, 0.0)
    first_scale, last_scale = (scale[0], scale[-1]) if scale else (1.0, 1.0)
    return Cover(
        forward_ms=cost.forward_ms * first_scale if workload.overlap_param_gather else 0.0,
        backward_ms=(cost.backward_input_ms + cost.backward_weight_ms) * last_scale
        if workload.overlap_grad_reduce
        else 0.0,
        hidden_fraction=hidden_fraction,
    )


def exposed_data_ms(
    cover: Cover,
    held_count: float,
    group: Group,
    workload: Workload,
    strategy: Strategy,
    expert_count: float = 0.0,
    experts: Group = ALONE,
    weight_bytes: float | None = None,
) -> float:
    """Gradient and parameter traffic of one trainable block that no computation hides, in one step.

    ZeRO 1 reduce-scatters gradients and gathers the updated weights; ZeRO 0 all-reduces gradients. Gradients of ZeRO 2
    and weights of ZeRO 3 move in every micro-batch (exposed_pass_ms), and not here. expert_count: how many of the
    parameters are routed experts, which the ranks of `experts` share. weight_bytes: as in block_traffic.
    """
    open_fraction = 1.0 - workload.known_facts.hidden_reduction_fraction
    held_count, expert_count = open_fraction * held_count, open_fraction * expert_count
    traffic = block_traffic(held_count, group, workload, expert_count, experts, weight_bytes)
    if strategy.zero == 0:
        return exposed_ms(traffic.all_reduce_ms, cover.backward_ms, cover.hidden_fraction)
    total_ms = 0.0
    if strategy.zero == 1:
        whole = workload.known_facts.all_reduces
        reduce_ms = traffic.all_reduce_ms if whole else traffic.reduce_ms
        total_ms += exposed_ms(reduce_ms, cover.backward_ms, cover.hidden_fraction)
    if strategy.zero < 3:
        total_ms += exposed_ms(traffic.gather_ms, cover.forward_ms, cover.hidden_fraction)
    return total_ms


@dataclass(frozen=True)
class Traffic:
    """Of one block, among the ranks that hold the same: gradients summed or reduced to shards, weights gathered."""

    all_reduce_ms: float
    reduce_ms: float
    gather_ms: float


def block_traffic(
    held_count: float,
    group: Group,
    workload: Workload,
    expert_count: float = 0.0,
    experts: Group = ALONE,
    weight_bytes: float | None = None,
    gathered_counts: tuple[float, float] | None = None,
) -> Traffic:
    """The traffic of `held_count` parameters, `expert_count` of them routed experts, which `experts` share.

    weight_bytes: of one weight as it is gathered (None: as the workload says). gathered_counts: both counts of what is
    gathered where more is than has gradients (None: the same).
    """
    weight_bytes = workload.weight_bytes if weight_bytes is None else weight_bytes
    all_count, all_expert_count = (held_count, expert_count) if gathered_counts is None else gathered_counts
    parts = [(group, held_count - expert_count), (experts, expert_count)]
    gathered = [(group, all_count - all_expert_count), (experts, all_expert_count)]
    return Traffic(
        all_reduce_ms=sum(ranks.all_reduce_ms(count * workload.reduction_bytes) for ranks, count in parts),
        reduce_ms=sum(ranks.reduce_scatter_ms(count * workload.reduction_bytes) for ranks, count in parts),
        gather_ms=sum(ranks.all_gather_ms(count * weight_bytes) for ranks, count in gathered),
    )


def exposed_pass_ms(
    block: Block, covers: Sequence[Cover], traffic: Traffic, strategy: Strategy, scale: tuple[float, ...] = ()
) -> tuple[float, float]:
    """What ZeRO 2 and 3 add to a block's forward and backward in each micro-batch, before these are scaled.

    covers: one for each factor of `scale` (one alone where that is empty). Traffic does not grow with such a factor:
    what is added is right in the sum over micro-batches.
    """
    forward_ms = traffic.gather_ms if strategy.zero == 3 else 0.0
    backward_ms = forward_ms if strategy.reshard and block.has_backward else 0.0
    if strategy.zero >= 2 and block.trainable:
        backward_ms += traffic.reduce_ms
    share = 1.0 / (sum(scale) or 1.0)
    return (
        share * sum(exposed_ms(forward_ms, cover.forward_ms, cover.hidden_fraction) for cover in covers),
        share * sum(exposed_ms(backward_ms, cover.backward_ms, cover.hidden_fraction) for cover in covers),
    )


def exposed_copies_ms(
    cover: Cover, shard_count: float, traffic: Traffic, group: Group, workload: Workload, strategy: Strategy
) -> float:
    """The sum over `group` of the gradients of `shard_count` parameters, which several copies of the weights hold.

    It follows the reduction of the last micro-batch, behind what that and the gather leave of the block's backward
    (torch FSDP2 sums once a step where it is told so, distributed/fsdp, set_requires_all_reduce).
    """
    before_ms = traffic.reduce_ms + (traffic.gather_ms if strategy.reshard else 0.0)
    both_ms = before_ms + group.all_reduce_ms(shard_count * workload.gradient_bytes)
    exposed_before_ms = exposed_ms(before_ms, cover.backward_ms, cover.hidden_fraction)
    return exposed_ms(both_ms, cover.backward_ms, cover.hidden_fraction) - exposed_before_ms


def last_bucket_ms(
    block: Block, held_count: float, cover: Cover, traffic: Traffic, workload: Workload, strategy: Strategy
) -> float:
    """What hides behind nothing of a stage whose first and last bucket hold such blocks (grad_bucket_parameters).

    Of a whole block max(0, t − c) is counted already, so min(t, c) more; of a bucket that is a part of a block, or
    several, as much of it.
    """
    if not workload.grad_bucket_parameters or not block.trainable or not held_count:
        return 0.0
    covered_ms = 0.0
    if strategy.zero < 2:
        reduce_ms = traffic.reduce_ms if strategy.zero else traffic.all_reduce_ms
        covered_ms += reduce_ms - exposed_ms(reduce_ms, cover.backward_ms, cover.hidden_fraction)
    if 0 < strategy.zero < 3:
        covered_ms += traffic.gather_ms - exposed_ms(traffic.gather_ms, cover.forward_ms, cover.hidden_fraction)
    return covered_ms * min(workload.grad_bucket_parameters / held_count, block.count)


def tied_table_ms(
    table_count: float,
    cluster: Cluster,
    workload: Workload,
    strategy: Strategy,
    network: NetworkProfile | None = None,
) -> float:
    """The sum of the two gradients of a tied table, on the first and on the last stage, after the last backward."""
    group = tied_group(cluster, strategy, network)
    return group.all_reduce_ms(table_count * workload.gradient_bytes)


def optimizer_ms(
    held_count: float,
    workload: Workload,
    strategy: Strategy,
    memory_bytes_per_s: float,
    cost: BlockCost | None = None,
    expert_count: float = 0.0,
) -> float:
    """The optimizer step of a block: as measured where its `cost` says so, in proportion to what of it a rank holds.

    Else Adam, memory bound: gradients are read, the sharded state is read and written, weights are written, beside what
    the stack reads and writes of all of them (StackFacts.step_bytes).
    expert_count: how many of the parameters are routed experts, which fewer ranks share.
    """
    shard_count = (held_count - expert_count) / sharded_over(strategy)
    shard_count += expert_count / sharded_over(strategy, expert=True)
    if cost and cost.optimizer_ms is not None and cost.parameter_count > 0:
        return cost.optimizer_ms * shard_count / cost.parameter_count
    moved_bytes = shard_count * (workload.gradient_bytes + 2 * workload.optimizer_bytes + workload.weight_bytes)
    moved_bytes += held_count * workload.known_facts.step_bytes
    return moved_bytes / memory_bytes_per_s * 1e3


def host_optimizer_ms(
    held_count: float, workload: Workload, strategy: Strategy, device: Device, expert_count: float = 0.0
) -> float:
    """The optimizer step of a block on the host: gradients go there, Adam runs in its memory, weights come back.

    One after the other, as Megatron-LM has it (--optimizer-cpu-offload without --overlap-cpu-optimizer-d2h-h2d, core/
    optimizer/cpu_offloading). Adam on a host is memory bound, as on a device (ZeRO-Offload, arXiv:2101.06840).
    """
    assert device.host_link_bytes_per_s
    assert device.host_memory_bytes_per_s
    shard_count = (held_count - expert_count) / sharded_over(strategy)
    shard_count += expert_count / sharded_over(strategy, expert=True)
    moved_bytes = shard_count * (workload.gradient_bytes + workload.weight_bytes)
    stepped_bytes = moved_bytes + shard_count * 2 * workload.optimizer_bytes
    return (moved_bytes / device.host_link_bytes_per_s + stepped_bytes / device.host_memory_bytes_per_s) * 1e3


def hop_costs(
    cluster: Cluster, strategy: Strategy, workload: Workload, network: NetworkProfile | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ms and ms per byte of a block's output of each hop between virtual stages, one line of `hop_lines` each.

    Under sequence parallelism that output is one rank's part already.
    """
    if strategy.pp == 1:
        return (0.0,) * (strategy.vpp - 1), (0.0,) * (strategy.vpp - 1)
    lines = hop_lines(cluster, strategy, network)
    if strategy.divides_sequences(workload) or strategy.tp == 1 or not workload.scatter_gather_p2p:
        return tuple(line.latency_ms for line in lines), tuple(1e3 / line.bandwidth_bytes_per_s for line in lines)
    group = group_of(cluster.levels, strategy, "TP", network)
    some_bytes = 1e9  # one size large enough to tell the slope of a gathering line from its start
    start_ms = max(0.0, 2 * group.all_gather_ms(some_bytes) - group.all_gather_ms(2 * some_bytes))
    ms_per_byte = (group.all_gather_ms(2 * some_bytes) - group.all_gather_ms(some_bytes)) / some_bytes
    return (
        tuple(line.latency_ms + start_ms for line in lines),
        tuple(1e3 / line.bandwidth_bytes_per_s / strategy.tp + ms_per_byte for line in lines),
    )


def waits_ms(
    chain: Chain,
    outputs_bytes: Sequence[float],
    strategy: Strategy,
    workload: Workload,
    p2p_ms: Sequence[float],
    p2p_ms_per_byte: Sequence[float],
) -> list[float]:
    """What each block's forward, and its backward, waits for transfers that nothing overlaps; all 0 where they overlap.

    A stage of several chunks sends each chunk's output and receives its next input in one exchange, during which it
    computes nothing. The transfers of all chunks are shared out evenly among the layers, which is exact where chunks
    hold equally many. With one chunk a stage the order of work itself waits for every hop; but a stage stands still for
    each beside that where a stack moves them one by one in front of its compute (StackFacts.waits_for_hops), an inner
    one for two in each pass, or where it sends and receives in one exchange (StackFacts.exchanges_hops), for one. One
    of two stages has half of them. First and last of several stages count as inner ones, which set the pace.
    """
    facts, num_waits = workload.known_facts, 0
    if strategy.vpp == 1:
        num_waits = 2 if facts.waits_for_hops else int(facts.exchanges_hops)
    elif not strategy.overlaps.of(workload).overlap_p2p:
        num_waits = 1
    if not p2p_ms or not num_waits:
        return [0.0] * len(chain.blocks)
    num_layers = sum(block.count for block in chain.blocks if block.role == "layer")
    start_ms, ms_per_byte = sum(p2p_ms) / len(p2p_ms), sum(p2p_ms_per_byte) / len(p2p_ms)
    share = num_waits * strategy.pp * strategy.vpp / num_layers
    if strategy.pp == 2 and strategy.vpp == 1:
        share /= 2
    return [
        share * (start_ms + ms_per_byte * output_bytes) if block.role == "layer" else 0.0
        for block, output_bytes in zip(chain.blocks, outputs_bytes, strict=True)
    ]
