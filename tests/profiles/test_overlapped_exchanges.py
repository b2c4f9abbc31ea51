"""Busiest ranks, exchanges of tokens behind compute, fused matrix products: against what each scales or hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mm_autoparallel.model.blocks.chain import Attention, Block, Experts, FeedForward, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.analytic import Rates, estimate_block, rates_of
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share, form_share
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.cost import BlockCost

CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"])
TOKENS = TokenCounts(8192, 8192, 8192, num_spans=1)
SHARED = FeedForward(4096)
ROUTED = TransformerLayer(4096, "rms", Attention(32, 8, 128), Experts(16, 2, FeedForward(2048), shared=SHARED))
DENSE = TransformerLayer(4096, "rms", Attention(32, 8, 128), FeedForward(14336))
DEALT = Strategy(pp=1, tp=1, dp=8, ep=8, mbs=1)


def share_of(strategy: Strategy, **workload: Any) -> Share:
    return form_share(strategy, Workload(**({"global_batch_size": 64, "seq_length": 8192} | workload)), 4.0)


def rates(strategy: Strategy, slowed_factor: float = 1.0) -> Rates:
    """slowed_factor: how much slower tokens are exchanged."""
    found = rates_of(CLUSTER, assume_calibration("a device nobody knows", "megatron-core"), strategy)
    group = found.ep_group
    if group.exchange_bytes_per_s is None:
        return found
    return replace(found, ep_group=replace(group, exchange_bytes_per_s=group.exchange_bytes_per_s / slowed_factor))


def estimate(
    layer: TransformerLayer, strategy: Strategy, slowed_factor: float = 1.0, trainable: bool = True, **workload: Any
) -> BlockCost:
    block = Block("b", "b", "text", "layer", layer, trainable=trainable)
    return estimate_block(block, TOKENS, share_of(strategy, **workload), rates(strategy, slowed_factor), 4.0)


def exchanges_ms(slowed_factor: float = 1.0) -> float:
    """Two all-to-alls: tokens · top_k · hidden · bytes, of which 7/8 leaves a rank."""
    group = rates(DEALT, slowed_factor).ep_group
    assert group.exchange_bytes_per_s
    return 2 * (8192 * 2 * 4096 * 2 * 7 / 8 / group.exchange_bytes_per_s * 1e3 + group.latency_ms)


class TestImbalance:
    def test_the_busiest_rank_computes_keeps_and_gets_more(self) -> None:
        even, busy = (
            list_operators(ROUTED, TOKENS, share_of(DEALT, expert_imbalance_factor=factor)) for factor in (1.0, 1.5)
        )
        assert busy.all_to_all_bytes == 1.5 * even.all_to_all_bytes
        of_experts = [
            (one, other) for one, other in zip(even.products, busy.products, strict=True) if one.num_weights > 1
        ]
        assert len(of_experts) == 2
        assert all(other.flops == 1.5 * one.flops for one, other in of_experts)
        # permuted inputs, both halves of the first product, the activation: of two copies a token
        copies = 2 * 8192 * 2 * (4096 + 2 * 2048 + 2048)
        assert busy.kept_bytes(trainable=True) - even.kept_bytes(trainable=True) == 0.5 * copies

    def test_one_rank_alone_is_not_busier_than_itself(self) -> None:
        alone = replace(DEALT, ep=1)
        assert share_of(alone, expert_imbalance_factor=3.0) == share_of(alone)
        assert share_of(replace(DEALT, ep=2), expert_imbalance_factor=3.0).imbalance_factor == 2


class TestExchanges:
    @pytest.mark.parametrize("slowed_factor", [1.0, 20.0])
    def test_behind_the_shared_expert(self, slowed_factor: float) -> None:
        bare, hidden = (
            estimate(ROUTED, DEALT, slowed_factor, overlap_all_to_all=kind) for kind in ("none", "shared_experts")
        )
        without = replace(ROUTED, mlp=replace(ROUTED.mlp, shared=None))
        shared_forward_ms = bare.forward_ms - estimate(without, DEALT, slowed_factor).forward_ms
        covered_ms = min(exchanges_ms(slowed_factor), shared_forward_ms)
        assert bare.forward_ms - hidden.forward_ms == pytest.approx(covered_ms)
        assert bare.backward_input_ms > hidden.backward_input_ms
        assert bare.backward_weight_ms == hidden.backward_weight_ms

    def test_without_a_shared_expert_nothing_is_beside_them(self) -> None:
        layer = replace(ROUTED, mlp=replace(ROUTED.mlp, shared=None))
        assert estimate(layer, DEALT, overlap_all_to_all="shared_experts") == estimate(layer, DEALT)

    @pytest.mark.parametrize("slowed_factor", [1.0, 20.0])
    def test_behind_the_other_pass_of_another_micro_batch(self, slowed_factor: float) -> None:
        bare, hidden = (
            estimate(ROUTED, DEALT, slowed_factor, overlap_all_to_all=kind) for kind in ("none", "micro_batches")
        )
        exchange_ms = exchanges_ms(slowed_factor)
        backward_ms = bare.backward_input_ms + bare.backward_weight_ms
        covered = min(exchange_ms, backward_ms - exchange_ms), min(exchange_ms, bare.forward_ms - exchange_ms)
        assert bare.forward_ms - hidden.forward_ms == pytest.approx(covered[0])
        assert bare.backward_input_ms - hidden.backward_input_ms == pytest.approx(covered[1])
        assert bare.recompute_ms is None
        assert hidden.recompute_ms == pytest.approx(bare.forward_ms)  # a layer that runs once more runs by itself

    def test_nothing_changes_where_nothing_is_sent(self) -> None:
        for kind in ("shared_experts", "micro_batches"):
            assert estimate(DENSE, DEALT, overlap_all_to_all=kind) == estimate(DENSE, DEALT)
            alone = replace(DEALT, ep=1)
            assert estimate(ROUTED, alone, overlap_all_to_all=kind) == estimate(ROUTED, alone)


@pytest.mark.parametrize("trainable", [True, False])  # where nothing trains, no weight gradient hides a sum
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_fused_products_hide_their_part_of_what_is_exposed(sequence_parallel: bool, trainable: bool) -> None:
    divided = Strategy(pp=1, tp=4, dp=2, mbs=1)
    given = {"sequence_parallel": sequence_parallel, "trainable": trainable}
    costs = [estimate(DENSE, divided, fused_matmul_fraction=fraction, **given) for fraction in (0.0, 0.25, 1.0)]
    for name in ("forward_ms", "backward_input_ms", "backward_weight_ms"):
        bare_ms, quarter_ms, none_ms = (getattr(cost, name) for cost in costs)
        assert quarter_ms == pytest.approx(0.75 * bare_ms + 0.25 * none_ms)
    group = rates(divided).tp_group
    traffic_ms = 2 * group.all_reduce_ms(2 * 8192 * 4096)  # of both halves of a layer
    assert costs[0].forward_ms - costs[2].forward_ms == pytest.approx(traffic_ms)
    if not trainable:
        assert costs[0].backward_input_ms - costs[2].backward_input_ms == pytest.approx(traffic_ms)
