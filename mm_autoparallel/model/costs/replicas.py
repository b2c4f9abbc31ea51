"""What a block costs because other ranks hold copies or shards of it: traffic in each pass, and after the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mm_autoparallel.model.blocks.chain import (
    Block,
    Experts,
    FeedForward,
    OutputHead,
    Structure,
    TokenEmbedding,
    Traced,
    TransformerLayer,
)
from mm_autoparallel.model.costs.communication import (
    Cover,
    Traffic,
    block_traffic,
    copies_group,
    cover_of,
    data_group,
    expert_group,
    exposed_copies_ms,
    exposed_data_ms,
    exposed_pass_ms,
    host_optimizer_ms,
    last_bucket_ms,
    optimizer_ms,
    tied_table_ms,
)
from mm_autoparallel.model.costs.low_parameters import gathered_weight_bytes
from mm_autoparallel.model.costs.memory import count_held_parameters, sharded_over
from mm_autoparallel.model.costs.scales import OPTIMIZER, TIED_TABLE, UNSCALED, CostScales
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.assumed import RING_HOP_MS
from mm_autoparallel.model.profiles.collectives import Group
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.lanes import Lanes
from mm_autoparallel.model.profiles.network import NetworkProfile


@dataclass(frozen=True, eq=False)
class Replicas:
    """The ranks of one strategy as they share blocks.

    cluster: its levels as they are reached. memory_fraction: what is reached of the device's memory bandwidth.
    lanes: how traffic and compute beside it slow each other down. shard_cluster: levels as ZeRO 3 reaches them;
    shard_gigabyte_ms: what a rank takes beside them for 1e9 bytes; shards_open: nothing hides of ZeRO 3's traffic,
    whatever does of that stack's other traffic (StackFacts.shards). table: the cost of the embedding, of which a
    tied head may hold a copy; ties: whether it is tied. scales: what the times of single cost sources are
    multiplied by.
    """

    cluster: Cluster
    workload: Workload
    strategy: Strategy
    network: NetworkProfile | None
    memory_fraction: float
    lanes: Lanes
    table: BlockCost
    ties: bool
    shard_cluster: Cluster
    shard_gigabyte_ms: float = 0.0
    shards_open: bool = False
    scales: CostScales = UNSCALED

    @cached_property
    def groups(self) -> tuple[Group, Group]:
        """The ranks with the same weights, and those with the same part of the same experts."""
        cluster = self.shard_cluster if self.strategy.zero == 3 else self.cluster
        rank_ms_per_byte = self.shard_gigabyte_ms / 1e9 if self.strategy.zero == 3 else 0.0
        group, experts = (
            replace(found, rank_ms_per_byte=rank_ms_per_byte)
            for found in (
                data_group(cluster, self.strategy, self.network),
                expert_group(cluster, self.strategy, self.network),
            )
        )
        return (
            self.scales.scale_replicas(group, self.strategy),
            self.scales.scale_replicas(experts, self.strategy, expert=True),
        )

    def pass_ms(self, block: Block, cost: BlockCost, scale: tuple[float, ...]) -> tuple[float, float]:
        """What ZeRO 2 and 3 add to a block's forward and backward. scale: of its times, per micro-batch."""
        if self.strategy.zero < 2:
            return 0.0, 0.0
        covers = [self._cover(block, cost, (factor,)) for factor in scale or (1.0,)]
        return exposed_pass_ms(block, covers, self._traffic(block, cost), self.strategy, scale)

    def tail_ms(self, block: Block, cost: BlockCost, scale: tuple[float, ...]) -> float:
        """What one block adds after its stage's last backward: exposed data-parallel traffic and its optimizer step."""
        if not block.trainable:
            return 0.0
        held_count, (group, experts) = self._held_count(block, cost), self.groups
        workload, strategy, device = self.workload, self.strategy, self.cluster.device
        cover = self._cover(block, cost, scale)
        shared = (cost.trained_expert_count, experts, gathered_weight_bytes(block, workload, strategy))
        tail_ms = exposed_data_ms(cover, held_count, group, workload, strategy, *shared)
        if strategy.shard:
            tail_ms += self._copies_ms(block, cost, cover)
        if strategy.optimizer_offload:
            update_ms = host_optimizer_ms(held_count, workload, strategy, device, cost.trained_expert_count)
        else:
            memory_bytes_per_s = device.memory_bytes_per_s * self.memory_fraction
            copied_count = held_count - cost.trained_count if cost.optimizer_ms is not None else 0.0
            own_count = held_count - copied_count  # those that train
            update_ms = optimizer_ms(own_count, workload, strategy, memory_bytes_per_s, cost, cost.trained_expert_count)
            update_ms += optimizer_ms(copied_count, workload, strategy, memory_bytes_per_s, self.table)
        tail_ms += self.scales.factor(OPTIMIZER) * update_ms
        structure = block.structure
        shares = isinstance(structure, (TokenEmbedding, OutputHead)) or (
            isinstance(structure, Traced) and structure.table_count > 0
        )
        if shares and self.ties and strategy.pp > 1:
            table_ms = tied_table_ms(held_count, self.cluster, workload, strategy, self.network)
            tail_ms += self.scales.factor(TIED_TABLE) * table_ms
        return tail_ms

    def bucket_tails_ms(
        self, blocks: Sequence[Block], costs: Sequence[BlockCost], scales: Mapping[str, tuple[float, ...]]
    ) -> tuple[float, ...]:
        """Per stage, what its last bucket hides behind nothing: at most, the largest of any layer.

        A stage that begins with a stem that trains ends with that one's traffic, of which nothing is taken as hidden.
        scales: modality → of its blocks' times, per micro-batch.
        """
        if not self.workload.grad_bucket_parameters:
            return (0.0,) * self.strategy.pp
        most_ms = 0.0
        for block, cost in zip(blocks, costs, strict=True):
            held_count, traffic = self._held_count(block, cost), self._traffic(block, cost)
            cover = self._cover(block, cost, scales[block.modality])
            most_ms = max(most_ms, last_bucket_ms(block, held_count, cover, traffic, self.workload, self.strategy))
        first_ms = 0.0 if blocks[0].trainable else most_ms
        return (first_ms, *((most_ms,) * (self.strategy.pp - 1)))

    def _copies_ms(self, block: Block, cost: BlockCost, cover: Cover) -> float:
        """The sum of gradients over copies of the weights; experts that are dealt out are held once."""
        group = copies_group(self.cluster, self.strategy, self.network)
        group = self.scales.scale_replicas(group, self.strategy)
        count = self._held_count(block, cost) - (cost.trained_expert_count if self.strategy.ep > 1 else 0.0)
        shard_count = count / sharded_over(self.strategy)
        return exposed_copies_ms(cover, shard_count, self._traffic(block, cost), group, self.workload, self.strategy)

    def _held_count(self, block: Block, cost: BlockCost) -> float:
        """Parameters that train, with copies that a rank holds of others."""
        return count_held_parameters(block, cost.trained_count, self.strategy, self.table.parameter_count)

    def _traffic(self, block: Block, cost: BlockCost) -> Traffic:
        """Under ZeRO 3 the frozen base of adapters is sharded too, and a unit is gathered whole, its gradients being
        those of what trains (torch FSDP2, distributed/fsdp/_fully_shard/_fsdp_param_group.py; DeepSpeed,
        runtime/zero/partitioned_param_coordinator.py)."""
        group, experts = self.groups
        if self.strategy.zero == 3 and self.workload.known_facts.shards == "tensor":
            counts = _count_tensors(block.structure, self.strategy.ep)
            inner = self.cluster.levels[0].name
            group, experts = (
                replace(found, latency_ms=count * _ring_ms(found, inner))
                for found, count in zip((group, experts), counts, strict=True)
            )
        shared = (cost.trained_expert_count, experts, gathered_weight_bytes(block, self.workload, self.strategy))
        gathered_counts = None
        if self.strategy.zero == 3:
            all_count = count_held_parameters(block, cost.parameter_count, self.strategy, self.table.parameter_count)
            gathered_counts = (all_count, cost.expert_count)
        return block_traffic(self._held_count(block, cost), group, self.workload, *shared, gathered_counts)

    def _cover(self, block: Block, cost: BlockCost, scale: tuple[float, ...]) -> Cover:
        lane = self.lanes.shards if self.strategy.zero >= 2 else self.lanes.data
        if self.shards_open and self.strategy.zero == 3:
            return Cover(0.0, 0.0)
        return cover_of(block, cost, scale, self.workload, lane.hidden_fraction)


def _ring_ms(group: Group, inner: str) -> float:
    """What one collective of `group` takes to go round, whatever its bytes. inner: name of the innermost level."""
    num_nodes = 1 if group.level == inner else group.num_ranks // group.inside
    inner_ms, network_ms = RING_HOP_MS
    return (group.num_ranks - num_nodes) * inner_ms + (num_nodes - 1) * network_ms


def _count_tensors(structure: Structure, ep: int) -> tuple[int, int]:
    """Matrices of a block that are gathered by themselves, of its dense part and of the routed experts of a rank.

    Two of attention, each of a feed-forward; one of any other block. Biases and norms are small enough to stay whole.
    """
    if not isinstance(structure, TransformerLayer):
        return 1, 0
    mlp = structure.mlp
    if not isinstance(mlp, Experts):
        return 2 + _count_matrices(mlp), 0
    shared_count = _count_matrices(mlp.shared) if mlp.shared else 0
    return 2 + shared_count, -(-mlp.num_experts // ep) * _count_matrices(mlp.expert)


def _count_matrices(mlp: FeedForward) -> int:
    return 3 if mlp.gated else 2
