"""What dispatchers, graphs and grouped products add to a layer with experts: counted by hand, and nothing unstated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    PredictionModule,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.stacks import StackFacts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import RecomputeOperator, Workload
from mm_autoparallel.model.operators.analytic import Rates, estimate_block, rates_of
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.host import host_layer_ms
from mm_autoparallel.model.operators.operators import Share, form_share
from mm_autoparallel.model.operators.precision_rates import count_waves
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.collectives import (
    ANY_GROUPS,
    NO_EXCHANGE,
    Exchange,
    ExpertGroups,
    form_exchange,
    reach_domains,
)

N, H, FFN, COUNT, TOP_K = 4096, 2048, 768, 128, 8
TOKENS = TokenCounts(N, N, N, num_spans=1)
ROUTED = TransformerLayer(H, "rms", Attention(32, 4, 128), Experts(COUNT, TOP_K, FeedForward(FFN)))
DENSE = replace(ROUTED, mlp=FeedForward(6144))
LATENT = LatentAttention(16, 0, 512, 128, 64, 128)
DEALT = Strategy(pp=1, tp=1, dp=16, ep=16, mbs=1)
CLUSTER = Cluster(num_nodes=2, devices_per_node=8, device=DEVICES["h100-80g"])
FIGURES = assume_calibration("h100-80g", "megatron-bridge").figures


def share_of(strategy: Strategy = DEALT, operators: tuple[RecomputeOperator, ...] = (), **facts: Any) -> Share:
    workload = Workload(
        global_batch_size=64, seq_length=N, recompute_operators=operators, facts=StackFacts.model_validate(facts)
    )
    return form_share(strategy, workload, 4.0)


def rates() -> Rates:
    calibration = assume_calibration("h100-80g", "megatron-bridge")
    return rates_of(calibration.reached(CLUSTER), calibration, DEALT)


class TestExchange:
    TWO_NODES = Exchange(num_ranks=16, inside=8, node_bytes_per_s=4e11, network_bytes_per_s=5e10, latency_ms=0.0)

    def test_every_copy_by_itself(self) -> None:
        """Of 8 copies 8 · 7/16 go to others of the node, and 8 · 8/16 to the other node."""
        size_bytes = TOP_K * 1e8
        expected_ms = 1e3 * (1e8 * 3.5 / 4e11 + 1e8 * 4 / 5e10)
        assert self.TWO_NODES.one_way_ms(size_bytes, TOP_K, False) == pytest.approx(expected_ms)

    def test_once_to_each_node(self) -> None:
        """A token needs 2 · (1 − (1/2)^8) of two nodes, half of them its own; inside all copies are sent."""
        size_bytes, needed = TOP_K * 1e8, 2 * (1 - 0.5**8)
        expected_ms = 1e3 * (1e8 * 7 / 4e11 + 1e8 * needed / 2 / 5e10)
        assert self.TWO_NODES.one_way_ms(size_bytes, TOP_K, True) == pytest.approx(expected_ms)
        one_node_ms = 1e3 * (1e8 * 7 / 4e11 + 1e8 * 1 / 2 / 5e10)
        assert self.TWO_NODES.one_way_ms(size_bytes, TOP_K, True, ExpertGroups(1)) == pytest.approx(one_node_ms)

    def test_within_one_domain_both_are_the_same(self) -> None:
        inside = replace(self.TWO_NODES, num_ranks=8)
        assert inside.one_way_ms(1e9, TOP_K, True) == inside.one_way_ms(1e9, TOP_K, False) > 0
        assert NO_EXCHANGE.one_way_ms(1e9, TOP_K, True) == 0 == inside.one_way_ms(0.0, TOP_K, True)

    def test_a_domain_of_several_nodes(self) -> None:
        """A level as fast as the node's is the same domain; the network is not."""
        link = DEVICES["gb200-192g"].node_link.bandwidth_bytes_per_s
        levels = [
            Level(name=name, num_devices=size, bandwidth_bytes_per_s=bytes_per_s, latency_ms=0.01)
            for name, size, bytes_per_s in (("node", 4, link), ("domain", 64, link), ("cluster", 128, link / 18))
        ]
        found = form_exchange(levels, Strategy(pp=1, tp=1, dp=128, ep=128, mbs=1))
        assert (found.num_ranks, found.inside, found.num_domains) == (128, 64, 2)
        spread = form_exchange(levels, Strategy(pp=1, tp=4, dp=32, ep=32, mbs=1, etp=4))
        assert (spread.num_ranks, spread.inside) == (32, 16)
        assert form_exchange(levels, Strategy(pp=1, tp=1, dp=128, mbs=1)) == NO_EXCHANGE


class TestReachedDomains:
    @pytest.mark.parametrize(
        ("domains", "groups", "expected"),
        [
            (8, ANY_GROUPS, 8 * (1 - (7 / 8) ** 8)),
            (8, ExpertGroups(4, 8), 4 * (1 - (3 / 4) ** 8)),  # as many domains as groups
            (8, ExpertGroups(4), 4 * (1 - (3 / 4) ** 8)),
            (4, ExpertGroups(4), 4 * (1 - (3 / 4) ** 8)),  # a group a domain, all of which may be chosen
            (4, ExpertGroups(4, 8), 4 * (1 - (15 + 40 * (3 / 4) ** 8 + 15 * (1 / 2) ** 8) / 70)),  # none, one or both
            (2, ExpertGroups(1, 8), 1.0),
            (1, ExpertGroups(4, 8), 1.0),
            (3, ExpertGroups(2, 8), 2 * (1 - (1 / 2) ** 8)),  # 8 groups are not dealt evenly to 3
        ],
    )
    def test_counted_by_hand(self, domains: int, groups: ExpertGroups, expected: float) -> None:
        assert reach_domains(domains, 8, groups) == pytest.approx(expected)

    @pytest.mark.parametrize(("domains", "most", "num_groups"), [(4, 4, 8), (16, 3, 8), (8, 2, 4), (2, 3, 8)])
    def test_drawn(self, domains: int, most: int, num_groups: int) -> None:
        """Tokens that choose groups, then experts of these, of which there are many."""
        drawn = np.random.default_rng(0)
        chosen = drawn.permuted(np.tile(np.arange(num_groups), (20_000, 1)), axis=1)[:, :most]
        groups = np.take_along_axis(chosen, drawn.integers(most, size=(20_000, TOP_K)), axis=1)
        held = ((groups + drawn.random(groups.shape)) * domains / num_groups).astype(int)
        mean = np.mean([len(set(row)) for row in held])
        assert reach_domains(domains, TOP_K, ExpertGroups(most, num_groups)) == pytest.approx(mean, rel=0.01)


class TestOperators:
    def test_nothing_changes_where_nothing_is_stated(self) -> None:
        plain, stated = share_of(), share_of(graphs="partial", drops_tokens=True)
        assert list_operators(ROUTED, TOKENS, plain).streams == list_operators(ROUTED, TOKENS, stated).streams
        block = Block("b", "b", "text", "layer", ROUTED)
        assert estimate_block(block, TOKENS, plain, rates(), 2.0) == estimate_block(block, TOKENS, stated, rates(), 2.0)
        assert host_layer_ms(block, FIGURES, plain) is None

    @pytest.mark.parametrize(("dispatcher", "passes"), [("alltoall", 8), ("deepep", 5), ("hybridep", 4)])
    def test_passes_over_copies_and_scores(self, dispatcher: str, passes: int) -> None:
        streams = {one.name: one for one in list_operators(ROUTED, TOKENS, share_of(dispatcher=dispatcher)).streams}
        assert streams["permute and unpermute"].forward_bytes == passes * 2 * N * TOP_K * H
        assert streams["router's scores"].forward_bytes == 12 * 4 * N * COUNT
        assert streams["router's scores"].backward_bytes == 24 * 4 * N * COUNT

    def test_an_activation_inside_the_products(self) -> None:
        facts = {"elementwise": "fused", "grouped_activation": True}
        (activation,) = [s for s in list_operators(ROUTED, TOKENS, share_of(**facts)).streams if s.name == "activation"]
        assert (activation.forward_bytes, activation.backward_bytes) == (0.0, 2 * N * TOP_K * FFN)
        (dense,) = [s for s in list_operators(DENSE, TOKENS, share_of(**facts)).streams if s.name == "activation"]
        assert dense.forward_bytes == 3 * 2 * N * 6144

    def test_experts_fill_tiles_together(self) -> None:
        products = list_operators(ROUTED, TOKENS, share_of(dispatcher="alltoall")).products
        assert [product.tile_rows for product in products if product.num_weights > 1] == [128, 128]
        # 8 products of 100 by 100 take a wave of 8 units alone and together one wave of 8 tiles
        assert count_waves(100, 100, 8) == pytest.approx(8 * count_waves(100, 100, 8, num_products=8))

    def test_heads_joined_by_one_kernel(self) -> None:
        layer = replace(ROUTED, attention=LATENT)
        joined = [
            next(s for s in list_operators(layer, TOKENS, share).streams if "joined" in s.name)
            for share in (share_of(), share_of(joined_heads=True))
        ]
        assert joined[1].forward_bytes == 2 * N * 16 * (2 * 192 + 256)
        assert joined[1].backward_bytes == 1.5 * joined[1].forward_bytes < joined[0].backward_bytes


class TestHost:
    BLOCK = Block("b", "b", "text", "layer", ROUTED)

    def test_of_local_experts_graphs_and_dispatchers(self) -> None:
        """8 of 128 experts a rank: half as much again as the constant."""

        def host(**facts: Any) -> tuple[float, float] | None:
            return host_layer_ms(self.BLOCK, FIGURES, share_of(**facts))

        whole_ms = 1.5 * FIGURES.expert_host_ms
        assert host(dispatcher="alltoall", graphs="none") == pytest.approx((whole_ms, 2.0))
        assert host(dispatcher="hybridep", graphs="none") == pytest.approx((0.5 * whole_ms, 2.0))
        assert host(dispatcher="deepep", graphs="partial") == pytest.approx((0.6 * whole_ms, 0.5))
        assert host(dispatcher="alltoall", graphs="none", drops_tokens=True) == pytest.approx((whole_ms, 0.0))
        assert host(dispatcher="alltoall", graphs="partial", drops_tokens=True) == pytest.approx((0.3 * whole_ms, 0.0))
        assert host(dispatcher="alltoall", graphs="full") == (0.0, 0.0)

    def test_operators_that_run_once_more_are_launched_once_more(self) -> None:
        plain, more = (
            host_layer_ms(self.BLOCK, FIGURES, share_of(operators=operators, dispatcher="alltoall", graphs="none"))
            for operators in ((), ("core_attn", "moe_act", "mla_up_proj", "mlp"))
        )
        assert plain
        assert more == pytest.approx((1.06 * plain[0], plain[1]))  # it has neither latent attention nor a dense half

    def test_of_dense_layers_and_of_modules_that_hold_one(self) -> None:
        facts = {"dispatcher": "alltoall", "graphs": "none"}
        dense_ms = 3 * FIGURES.layer_launch_ms
        assert host_layer_ms(replace(self.BLOCK, structure=DENSE), FIGURES, share_of(**facts)) == (dense_ms, 0.0)
        latent = replace(self.BLOCK, structure=replace(DENSE, attention=LATENT))
        assert host_layer_ms(latent, FIGURES, share_of(**facts)) == (1.5 * dense_ms, 0.0)
        module = replace(self.BLOCK, structure=PredictionModule(ROUTED, 1000))
        assert host_layer_ms(module, FIGURES, share_of(**facts)) == host_layer_ms(
            self.BLOCK, FIGURES, share_of(**facts)
        )


def test_an_overlapped_exchange_leaves_its_part_open() -> None:
    block, found = Block("b", "b", "text", "layer", ROUTED), {}
    for overlap in ("none", "micro_batches"):
        strategy = replace(DEALT, overlap_all_to_all=overlap)
        share = share_of(strategy, dispatcher="hybridep")
        cost = estimate_block(block, TOKENS, share, rates(), 2.0)
        found[overlap] = cost.forward_ms
    operators = list_operators(ROUTED, TOKENS, share_of(dispatcher="hybridep"))
    exchange_ms = 2 * rates().exchange.one_way_ms(operators.all_to_all_bytes, TOP_K, True)
    hidden_ms = found["none"] - found["micro_batches"]
    assert hidden_ms == pytest.approx((1 - FIGURES.exposed_exchange_fraction) * exchange_ms)


def test_room_for_tokens_in_a_graph_of_a_whole_step() -> None:
    """Half as much again of what experts keep, unless they drop tokens; nothing of a dense layer."""

    def kept_bytes(layer: TransformerLayer, **facts: Any) -> float:
        return list_operators(layer, TOKENS, share_of(dispatcher="hybridep", **facts)).kept_bytes(trainable=True)

    copies = 2 * N * TOP_K * (H + 3 * FFN)
    assert kept_bytes(ROUTED, graphs="full") - kept_bytes(ROUTED) == 0.5 * copies
    assert kept_bytes(ROUTED, graphs="full", drops_tokens=True) == kept_bytes(ROUTED, graphs="partial")
    assert kept_bytes(DENSE, graphs="full") == kept_bytes(DENSE)


def test_a_host_that_nobody_knows_is_as_its_calibration_has_it() -> None:
    block, unknown = Block("b", "b", "text", "layer", ROUTED), FIGURES.model_copy(update={"expert_host_ms": 0.0})
    assert host_layer_ms(block, unknown, share_of(graphs="none")) is None
    assert host_layer_ms(block, unknown, share_of(graphs="full")) == (0.0, 0.0)
    assert host_layer_ms(replace(block, modality="vision"), FIGURES, share_of(graphs="full")) is None


def test_what_a_product_writes_is_counted_once() -> None:
    """Where edges stand for what products move, a gradient that is added to costs a result less."""
    block, share = Block("b", "b", "text", "layer", DENSE), share_of()
    there = rates()
    assert there.edges_move
    told, apart = (
        estimate_block(block, TOKENS, share, replace(there, edges_move=moves), 2.0).backward_weight_ms
        for moves in (True, False)
    )
    num_parameters = count_parameters(DENSE)
    assert apart - told == pytest.approx(2 * num_parameters / there.memory_bytes_per_s * 1e3)
