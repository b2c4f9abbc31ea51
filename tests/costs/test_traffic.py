"""Traffic between replicas and stages, and the optimizer step, against their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import Attention, Block, Chain, FeedForward, TokenEmbedding, TransformerLayer
from mm_autoparallel.model.costs.communication import (
    Cover,
    cover_of,
    data_group,
    expert_group,
    exposed_data_ms,
    hop_costs,
    optimizer_ms,
    tied_table_ms,
    waits_ms,
)
from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.cost import BlockCost

CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"])
NODE, NETWORK = CLUSTER.levels
WORKLOAD = Workload(global_batch_size=64, seq_length=4096)
LAYER = Block("layer", "layer", "text", "layer", TransformerLayer(64, "rms", Attention(1, 1, 64), FeedForward(128)), 8)
EMBEDDING = Block("text_pre", "text_pre", "text", "pre", TokenEmbedding(1000, 64))


def cost(forward_ms: float, backward_ms: float) -> BlockCost:
    return BlockCost(forward_ms, backward_ms / 2, backward_ms / 2, 1e8, 0, 0, 0, 0, "analytic", "analytic")


class TestDataParallel:
    STRATEGY = Strategy(pp=2, tp=2, cp=2, dp=4, mbs=1)
    COUNT = 1e8

    def exposed_ms(
        self,
        cost: BlockCost,
        block: Block = LAYER,
        workload: Workload = WORKLOAD,
        zero: int = 1,
        scale: tuple[float, ...] = (),
    ) -> float:
        strategy = replace(self.STRATEGY, zero=zero)
        cover = cover_of(block, cost, scale, workload)
        return exposed_data_ms(cover, self.COUNT, data_group(CLUSTER, strategy), workload, strategy)

    def ring_ms(self, size_bytes: float) -> float:
        """Eight ranks two apart: four in each of two nodes, so four links out of a node."""
        return 7 / 8 * size_bytes / (4 * NETWORK.bandwidth_bytes_per_s) * 1e3 + NODE.latency_ms + NETWORK.latency_ms

    def test_bare_traffic(self) -> None:
        idle = cost(0, 0)
        assert self.exposed_ms(idle) == pytest.approx(self.ring_ms(4e8) + self.ring_ms(2e8))
        assert self.exposed_ms(idle, zero=0) == pytest.approx(2 * self.ring_ms(4e8))

    def test_each_part_hides_behind_its_own_pass(self) -> None:
        reduce_ms, gather_ms = self.ring_ms(4e8), self.ring_ms(2e8)
        assert self.exposed_ms(cost(0, 1)) == pytest.approx(reduce_ms - 1 + gather_ms)
        assert self.exposed_ms(cost(1, 0)) == pytest.approx(reduce_ms + gather_ms - 1)
        assert self.exposed_ms(cost(1e3, 1e3)) == 0
        assert self.exposed_ms(cost(1e3, 1), zero=0) == pytest.approx(2 * reduce_ms - 1)

    def test_overlap_can_be_switched_off(self) -> None:
        busy = cost(1e3, 1e3)
        plain = WORKLOAD.model_copy(update={"overlap_grad_reduce": False, "overlap_param_gather": False})
        assert self.exposed_ms(busy, workload=plain) == self.exposed_ms(cost(0, 0))
        half = WORKLOAD.model_copy(update={"overlap_grad_reduce": False})
        assert self.exposed_ms(busy, workload=half) == pytest.approx(self.ring_ms(4e8))

    def test_short_micro_batches_hide_less(self) -> None:
        """Weights are gathered in the first micro-batch's forward, gradients reduced in the last one's backward."""
        scaled = self.exposed_ms(cost(2, 3), scale=(0.5, 9.0, 2.0))
        assert scaled == pytest.approx(self.exposed_ms(cost(1, 6)))

    def test_nothing_hides_an_embeddings(self) -> None:
        assert self.exposed_ms(cost(1e3, 1e3), block=EMBEDDING) == self.exposed_ms(cost(0, 0))

    def test_one_replica_has_no_traffic(self) -> None:
        alone = Strategy(pp=2, tp=2, dp=1, mbs=1)
        assert exposed_data_ms(Cover(0, 0), 1e8, data_group(CLUSTER, alone), WORKLOAD, alone) == 0


def test_optimizer_moves_its_shard_through_memory() -> None:
    sharded, whole = Strategy(pp=1, tp=1, cp=2, dp=4, mbs=1), Strategy(pp=1, tp=1, cp=2, dp=4, mbs=1, zero=0)
    moved_bytes = 1e9 * (4 + 12 + 12 + 2)
    assert optimizer_ms(1e9, WORKLOAD, whole, 1e12) == pytest.approx(moved_bytes / 1e12 * 1e3)
    assert optimizer_ms(1e9, WORKLOAD, sharded, 1e12) == pytest.approx(moved_bytes / 8 / 1e12 * 1e3)


def test_a_tied_tables_gradients_are_summed_between_the_ends() -> None:
    near, far = Strategy(pp=2, tp=2, dp=2, mbs=1), Strategy(pp=4, tp=2, dp=4, mbs=1)
    inside = 2 * (0.5 * 4e8 / NODE.bandwidth_bytes_per_s * 1e3 + NODE.latency_ms)
    across = 2 * (0.5 * 4e8 / NETWORK.bandwidth_bytes_per_s * 1e3 + NETWORK.latency_ms)
    assert tied_table_ms(1e8, CLUSTER, WORKLOAD, near) == pytest.approx(inside)
    assert tied_table_ms(1e8, CLUSTER, WORKLOAD, far) == pytest.approx(across)


class TestWaits:
    CHAIN = Chain((EMBEDDING, LAYER))
    WAITING = WORKLOAD.model_copy(update={"overlap_p2p": False})
    CHUNKED = Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2)

    def waits_ms(self, strategy: Strategy, workload: Workload) -> list[float]:
        return waits_ms(self.CHAIN, [10.0, 10.0], strategy, workload, (1.0, 1.0, 4.0), (0.1, 0.1, 0.4))

    def test_the_transfers_of_all_chunks_are_shared_among_the_layers(self) -> None:
        """Four chunks of two layers, each with a hop of 2 + 0.2 · 10 ms on average."""
        assert self.waits_ms(self.CHUNKED, self.WAITING) == [0.0, pytest.approx(4 * (2 + 0.2 * 10) / 8)]

    def test_nothing_waits_where_transfers_overlap_or_the_order_waits_itself(self) -> None:
        assert self.waits_ms(self.CHUNKED, WORKLOAD) == [0.0, 0.0]
        assert self.waits_ms(Strategy(pp=4, tp=1, dp=1, mbs=1), self.WAITING) == [0.0, 0.0]


class TestHops:
    def levels_of(self, strategy: Strategy, cluster: Cluster = CLUSTER) -> list[str]:
        names = {level.latency_ms: level.name for level in cluster.levels}
        p2p_ms, p2p_ms_per_byte = hop_costs(cluster, strategy, WORKLOAD)
        for latency_ms, ms_per_byte in zip(p2p_ms, p2p_ms_per_byte, strict=True):
            level = next(level for level in cluster.levels if level.latency_ms == latency_ms)
            assert ms_per_byte == pytest.approx(1e3 / level.bandwidth_bytes_per_s)
        return [names[latency_ms] for latency_ms in p2p_ms]

    def test_stages_inside_a_node_hop_inside_it(self) -> None:
        assert self.levels_of(Strategy(pp=4, tp=2, dp=1, mbs=1)) == ["node"] * 3
        assert self.levels_of(Strategy(pp=8, tp=2, dp=2, mbs=1)) == ["node", "cluster"] * 3 + ["node"]
        assert self.levels_of(Strategy(pp=4, tp=8, dp=1, mbs=1)) == ["cluster"] * 3

    def test_a_stage_that_straddles_nodes_is_as_slow_as_its_slowest_pair(self) -> None:
        assert self.levels_of(Strategy(pp=4, tp=1, dp=3, mbs=1)) == ["node", "cluster", "cluster"]
        assert self.levels_of(Strategy(pp=2, tp=1, dp=6, mbs=1)) == ["cluster"]

    def test_after_the_last_stage_a_chunk_goes_back_to_the_first(self) -> None:
        hops = self.levels_of(Strategy(pp=4, tp=4, dp=1, mbs=1, vpp=2))
        assert hops == ["node", "cluster", "node", "cluster", "node", "cluster", "node"]

    def test_one_stage_follows_itself(self) -> None:
        assert hop_costs(CLUSTER, Strategy(pp=1, tp=8, dp=4, mbs=1), WORKLOAD) == ((), ())

    def test_scattered_messages_are_a_part_each_and_gathered_on_arrival(self) -> None:
        strategy = Strategy(pp=4, tp=8, dp=1, mbs=1)
        whole = WORKLOAD.model_copy(update={"sequence_parallel": False})
        parts = whole.model_copy(update={"scatter_gather_p2p": True})
        size_bytes = 1e8
        (start_ms, *_), (ms_per_byte, *_) = hop_costs(CLUSTER, strategy, parts)
        gather_ms = 7 / 8 * size_bytes / NODE.bandwidth_bytes_per_s * 1e3 + NODE.latency_ms
        send_ms = size_bytes / 8 / NETWORK.bandwidth_bytes_per_s * 1e3 + NETWORK.latency_ms
        assert start_ms + ms_per_byte * size_bytes == pytest.approx(send_ms + gather_ms)
        assert hop_costs(CLUSTER, strategy, whole) == hop_costs(CLUSTER, strategy, WORKLOAD)
        sequence_parallel = WORKLOAD.model_copy(update={"scatter_gather_p2p": True})
        assert hop_costs(CLUSTER, strategy, sequence_parallel) == hop_costs(CLUSTER, strategy, WORKLOAD)

    def test_three_levels(self) -> None:
        rack = Level(name="rack", num_devices=16, bandwidth_bytes_per_s=40e9, latency_ms=0.015)
        cluster = Cluster(num_nodes=4, devices_per_node=8, device=CLUSTER.device, levels=(NODE, rack, NETWORK))
        hops = self.levels_of(Strategy(pp=8, tp=4, dp=1, mbs=1), cluster)
        assert hops == ["node", "rack", "node", "cluster", "node", "rack", "node"]

    def test_pairwise_links_carry_a_hop_alone(self) -> None:
        mesh = Cluster(num_nodes=1, devices_per_node=8, device=DEVICES["ascend-910b-64g"])
        _, ms_per_byte = hop_costs(mesh, Strategy(pp=2, tp=4, dp=1, mbs=1), WORKLOAD)
        assert ms_per_byte[0] == pytest.approx(1e3 / 28e9)


class TestExperts:
    """Eight ranks, two of them a replica of the same experts: these are summed by pairs, all else by all."""

    STRATEGY = Strategy(pp=1, tp=1, dp=8, ep=4, mbs=1)
    CLUSTER = Cluster(num_nodes=1, devices_per_node=8, device=DEVICES["a100-80g"])

    def exposed_ms(self, expert_count: float, zero: int = 1) -> float:
        strategy = replace(self.STRATEGY, zero=zero)
        groups = data_group(self.CLUSTER, strategy), expert_group(self.CLUSTER, strategy)
        return exposed_data_ms(Cover(0, 0), 1e8, groups[0], WORKLOAD, strategy, expert_count, groups[1])

    def test_each_part_among_its_own_ranks(self) -> None:
        link = self.CLUSTER.levels[0]
        of_all, of_pairs = 7 / 8 * 4e7 * (4 + 2), 1 / 2 * 6e7 * (4 + 2)
        expected_ms = (of_all + of_pairs) / link.bandwidth_bytes_per_s * 1e3 + 4 * link.latency_ms
        assert self.exposed_ms(6e7) == pytest.approx(expected_ms)
        assert self.exposed_ms(6e7, zero=0) == pytest.approx(
            2 * (7 / 8 * 4e7 + 1 / 2 * 6e7) * 4 / link.bandwidth_bytes_per_s * 1e3 + 4 * link.latency_ms
        )

    def test_their_optimizer_state_divides_among_fewer(self) -> None:
        per_count = 4 + 12 + 12 + 2
        found = optimizer_ms(1e8, WORKLOAD, self.STRATEGY, 1e12, expert_count=6e7)
        assert found == pytest.approx((4e7 / 8 + 6e7 / 2) * per_count / 1e12 * 1e3)
