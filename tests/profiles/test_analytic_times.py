"""Analytic times: closed forms of their flops, what frozen parts save, and laws that must hold for any figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.blocks.chain import (
    Attention,
    AudioStem,
    Block,
    Experts,
    FeedForward,
    OutputHead,
    PatchEmbedding,
    Projector,
    Structure,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.stacks import UNKNOWN
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.analytic import estimate_block, rates_of
from mm_autoparallel.model.operators.attention import count_pairs
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.host import launch_layer
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.cost import BlockCost

LAYER = TransformerLayer(4096, "rms", Attention(32, 8, 128), FeedForward(14336))
DEFAULT = assume_calibration("a device nobody knows", "megatron-core")
TEXT = TokenCounts(8192, 8192, 8192, num_spans=1)
CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"])

STRUCTURES: dict[str, Structure] = {
    "layer": LAYER,
    "experts": replace(LAYER, mlp=Experts(16, 2, FeedForward(2048), shared=FeedForward(4096))),
    "head": OutputHead(128256, 4096, "rms"),
    "embedding": TokenEmbedding(128256, 4096),
    "patches": PatchEmbedding(1176, 1280, num_positions=1024, norm="layer"),
    "audio": AudioStem(128, 1280),
    "projector": Projector("layer", 1280, 4, (5120, 5120, 4096)),
    "replicated projector": Projector("layer", 4096, 4, (4096, 4096), replicated=True),
}


def estimate(
    structure: Structure,
    share: Share,
    cluster: Cluster = CLUSTER,
    tokens: TokenCounts = TEXT,
    trainable: bool = True,
    propagates_gradient: bool = True,
) -> BlockCost:
    block = Block("b", "b", "text", "layer", structure, 1, trainable, propagates_gradient)
    return estimate_block(
        block,
        tokens,
        share,
        rates_of(cluster, DEFAULT, Strategy(pp=1, tp=share.tp, cp=share.cp, dp=1, mbs=share.mbs)),
        gradient_bytes=4.0,
    )


class TestFlops:
    def test_products_are_two_flops_per_parameter_and_token(self) -> None:
        operators = list_operators(LAYER, TEXT, Share())
        flops = sum(product.flops for product in operators.products)
        norms = 2 * 4096
        assert flops == 2 * 8192 * (count_parameters(LAYER) - norms)

    @pytest.mark.parametrize("tp", [1, 2, 8])
    def test_a_rank_computes_its_part(self, tp: int) -> None:
        whole, part = (list_operators(LAYER, TEXT, Share(mbs=2, tp=t, cp=2)) for t in (1, tp))
        assert whole.attention
        assert part.attention
        assert sum(p.flops for p in part.products) * tp == pytest.approx(sum(p.flops for p in whole.products))
        assert part.attention.forward_flops * tp == pytest.approx(whole.attention.forward_flops)

    def test_causal_attention_is_2_s2_h(self) -> None:
        """4·s²·h for both products, of which causal attention needs half; backward has five products instead of two."""
        attention = list_operators(LAYER, TEXT, Share(mbs=3)).attention
        assert attention
        assert attention.forward_flops == 3 * 2 * 8192**2 * 4096
        assert attention.backward_flops == 2.5 * attention.forward_flops

    def test_a_dense_model_is_6_n_t(self) -> None:
        """Kaplan et al. 2020 (arXiv:2001.08361, section 2.1): 6 flops per parameter and token, forward and backward."""
        tokens = TokenCounts(512, 512, 512, num_spans=1)
        blocks = [LAYER] * 32 + [STRUCTURES["head"]]
        operators = [list_operators(block, tokens, Share()) for block in blocks]
        flops = sum(3 * product.flops for listed in operators for product in listed.products)
        flops += sum(o.attention.forward_flops + o.attention.backward_flops for o in operators if o.attention)
        assert flops == pytest.approx(6 * sum(map(count_parameters, blocks)) * 512, rel=0.03)

    @pytest.mark.parametrize(
        ("attention", "tokens", "pairs"),
        [
            (Attention(16, 16, 80, causal=True), TokenCounts(8, 8, 8, 1), 32),
            (Attention(16, 16, 80, causal=False), TokenCounts(8, 8, 8, 1), 64),
            (Attention(16, 16, 80, causal=False), TokenCounts(8, 8, 8, 4), 16),
            (Attention(16, 16, 80, causal=False, span_tokens=4), TokenCounts(8, 8, 8, 1), 32),
            (Attention(16, 16, 80, causal=False, span_tokens=64), TokenCounts(8, 8, 8, 2), 32),
            (Attention(16, 16, 80, causal=True, span_tokens=4), TokenCounts(8, 8, 8, 1), 24),
            (Attention(16, 16, 80, causal=False), TokenCounts(0, 0, 0, 1), 0),
        ],
    )
    def test_pairs(self, attention: Attention, tokens: TokenCounts, pairs: float) -> None:
        assert count_pairs(attention, tokens) == pairs


class TestWhatTrains:
    def test_frozen_layers_have_no_weight_gradients(self) -> None:
        full, frozen = estimate(LAYER, Share()), estimate(LAYER, Share(), trainable=False)
        assert frozen.backward_weight_ms == 0
        assert frozen.backward_input_ms == full.backward_input_ms > 0
        assert 0 < frozen.activation_bytes < full.activation_bytes

    def test_nothing_trains_nothing_is_kept(self) -> None:
        still = estimate(LAYER, Share(), trainable=False, propagates_gradient=False)
        assert still.backward_input_ms == still.backward_weight_ms == 0
        assert still.activation_bytes == still.checkpoint_bytes == 0
        assert still.forward_ms == estimate(LAYER, Share()).forward_ms
        assert still.transient_bytes > 0

    @pytest.mark.parametrize("name", ["patches", "audio", "projector"])
    def test_the_first_product_has_no_input_gradient_where_nothing_before_trains(self, name: str) -> None:
        share = Share(tp=2, sequence_parallel=True)
        first = estimate(STRUCTURES[name], share, propagates_gradient=False)
        inner = estimate(STRUCTURES[name], share)
        assert first.backward_input_ms < inner.backward_input_ms

    @pytest.mark.parametrize("qk_norm", [None, "head", "hidden"])
    def test_without_tokens_without_time(self, qk_norm: Literal["head", "hidden"] | None) -> None:
        layer = replace(LAYER, attention=replace(LAYER.attention, qk_norm=qk_norm))
        idle = estimate(layer, Share(), tokens=TokenCounts(0, 0, 0, num_spans=1))
        assert idle.forward_ms == idle.backward_input_ms == idle.backward_weight_ms == idle.activation_bytes == 0
        assert idle.parameter_count == count_parameters(layer)

    def test_a_tied_head_still_adds_to_the_tables_gradient(self) -> None:
        tied, untied = (estimate(OutputHead(128256, 4096, "rms", tied=tied), Share()) for tied in (True, False))
        assert tied.backward_weight_ms == untied.backward_weight_ms
        assert tied.parameter_count < untied.parameter_count


class TestTensorParallelTraffic:
    SHARE = Share(tp=2, sequence_parallel=True)

    def exposed_ms(self, share: Share, trainable: bool = True) -> tuple[float, float]:
        """Forward and backward of a layer, less the same without any traffic."""
        link = {"bandwidth_bytes_per_s": 1e30, "latency_ms": 0.0}
        levels = tuple(level.model_copy(update=link) for level in CLUSTER.levels)
        still = CLUSTER.model_copy(update={"levels": levels})
        with_traffic, without = (estimate(LAYER, share, c, trainable=trainable) for c in (CLUSTER, still))
        forward_ms = with_traffic.forward_ms - without.forward_ms
        input_ms = with_traffic.backward_input_ms - without.backward_input_ms
        return forward_ms, input_ms + with_traffic.backward_weight_ms - without.backward_weight_ms

    def collective_ms(self) -> float:
        rates = rates_of(CLUSTER, DEFAULT, Strategy(pp=1, tp=2, dp=1, mbs=1))
        return rates.tp_group.all_gather_ms(2 * 8192 * 4096)

    def test_two_gathers_and_two_scatters_forward(self) -> None:
        assert self.exposed_ms(self.SHARE)[0] == pytest.approx(4 * self.collective_ms())

    def test_products_hide_half_of_the_backward(self) -> None:
        """Gradients of the outputs are gathered in the open; sums of the inputs' hide behind the weight gradients."""
        assert self.exposed_ms(self.SHARE)[1] == pytest.approx(2 * self.collective_ms())

    def test_nothing_hides_it_in_a_frozen_layer(self) -> None:
        assert self.exposed_ms(self.SHARE, trainable=False)[1] == pytest.approx(4 * self.collective_ms())

    def test_without_sequence_parallelism_the_volume_is_the_same(self) -> None:
        assert self.exposed_ms(Share(tp=2), trainable=False) == pytest.approx(self.exposed_ms(self.SHARE, False))


def test_ring_attention_hides_behind_long_attention_only() -> None:
    span = TokenCounts(65536, 65536, 65536, num_spans=1)
    short = TokenCounts(512, 512, 512, num_spans=1)
    slow = Cluster(num_nodes=32, devices_per_node=1, device=DEVICES["a100-80g"])
    hiding = UNKNOWN.model_copy(update={"open_ring_fraction": 0.0})

    def times_more_than_a_part(tokens: TokenCounts) -> float:
        """Attention alone: a layer with it, less one whose attention sees a window of one token."""
        windowed = replace(LAYER, attention=replace(LAYER.attention, span_tokens=1))
        whole, part = (
            estimate(LAYER, share, slow, tokens).forward_ms - estimate(windowed, share, slow, tokens).forward_ms
            for share in (Share(facts=hiding), Share(cp=8, facts=hiding))
        )
        return part / (whole / 8)

    assert times_more_than_a_part(span) == pytest.approx(1.0)
    assert times_more_than_a_part(short) > 2


def test_images_that_lie_on_one_rank_exchange_nothing() -> None:
    layer = replace(LAYER, attention=replace(LAYER.attention, causal=False))
    many, one = (list_operators(layer, TokenCounts(8192, 8192, 2048, n), Share(cp=4)).attention for n in (4, 1))
    assert many
    assert many.ring_bytes == 0
    assert one
    assert one.ring_bytes == 2 * 2 * 2048 * 8 * 128


def total_ms(cost: BlockCost) -> float:
    return cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms


@given(
    name=st.sampled_from(sorted(STRUCTURES)),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    trains=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    flops_factor=st.floats(1, 8),
    memory_factor=st.floats(1, 8),
    level_factors=st.tuples(st.floats(1, 100), st.floats(1, 100)),
)
def test_a_better_device_is_never_slower(
    name: str,
    tp: int,
    cp: int,
    trains: tuple[bool, bool],
    flops_factor: float,
    memory_factor: float,
    level_factors: tuple[float, float],
) -> None:
    device = CLUSTER.device.model_copy(
        update={
            "bf16_flops_per_s": CLUSTER.device.bf16_flops_per_s * flops_factor,
            "memory_bytes_per_s": CLUSTER.device.memory_bytes_per_s * memory_factor,
        }
    )
    levels = tuple(
        level.model_copy(update={"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor})
        for level, factor in zip(CLUSTER.levels, level_factors, strict=True)
    )
    better = CLUSTER.model_copy(update={"device": device, "levels": levels})
    share = Share(tp=tp, cp=cp, sequence_parallel=tp > 1)
    before, after = (
        estimate(STRUCTURES[name], share, c, trainable=trains[0], propagates_gradient=trains[1])
        for c in (CLUSTER, better)
    )
    assert total_ms(after) <= total_ms(before) * (1 + 1e-12)
    assert after.forward_ms <= before.forward_ms * (1 + 1e-12)
    assert replace(after, forward_ms=0, backward_input_ms=0, backward_weight_ms=0) == replace(
        before, forward_ms=0, backward_input_ms=0, backward_weight_ms=0
    )


@given(
    name=st.sampled_from(sorted(STRUCTURES)),
    tp=st.sampled_from([1, 2, 8]),
    mbs=st.integers(1, 4),
    tokens=st.integers(1, 64),
)
def test_more_tokens_are_never_faster_or_smaller(name: str, tp: int, mbs: int, tokens: int) -> None:
    def cost(samples: int, per_sample: int) -> BlockCost:
        counts = TokenCounts(4 * per_sample, 4 * per_sample, per_sample, num_spans=1)
        return estimate(STRUCTURES[name], Share(mbs=samples, tp=tp, sequence_parallel=tp > 1), tokens=counts)

    base = cost(mbs, 64 * tokens)
    for more in (cost(mbs + 1, 64 * tokens), cost(mbs, 64 * (tokens + 1))):
        assert total_ms(more) >= total_ms(base)
        assert more.activation_bytes >= base.activation_bytes
        # what a head keeps is freed while it works, so only the sum of both must grow
        assert more.activation_bytes + more.transient_bytes >= base.activation_bytes + base.transient_bytes
        assert more.parameter_count == base.parameter_count


class TestRates:
    RATES = rates_of(CLUSTER, DEFAULT, Strategy(pp=1, tp=1, dp=1, mbs=1))

    def test_a_product_takes_the_longer_of_computing_and_moving(self) -> None:
        device, figures = CLUSTER.device, DEFAULT.figures
        computing_ms = 1e12 / (device.bf16_flops_per_s * figures.matrix_fraction) * 1e3
        moving_ms = 1e9 / (device.memory_bytes_per_s * figures.memory_fraction) * 1e3
        assert self.RATES.matrix_ms(1e12, 1e9) == pytest.approx(max(computing_ms, moving_ms))
        assert self.RATES.matrix_ms(1e6, 1e9) == pytest.approx(moving_ms) == self.RATES.memory_ms(1e9)

    def test_every_class_of_operator_has_its_own_fraction(self) -> None:
        changed = {"grouped_matrix_fraction": 0.1, "attention_forward_fraction": 0.2, "unfused_attention_fraction": 0.3}
        figures = DEFAULT.figures.model_copy(update=changed | {"attention_backward_fraction": 0.4})
        rates = rates_of(CLUSTER, DEFAULT.model_copy(update={"figures": figures}), Strategy(pp=1, tp=1, dp=1, mbs=1))
        whole_ms = 1e12 / CLUSTER.device.bf16_flops_per_s * 1e3
        assert rates.matrix_ms(1e12, 0.0, grouped=True) == pytest.approx(whole_ms / 0.1)
        assert rates.attention_ms(1e12, backward=False) == pytest.approx(whole_ms / 0.2)
        assert rates.attention_ms(1e12, backward=False, fused=False) == pytest.approx(whole_ms / 0.3)
        assert rates.attention_ms(1e12, backward=True, fused=False) == pytest.approx(whole_ms / 0.3)
        assert rates.attention_ms(1e12, backward=True) == pytest.approx(whole_ms / 0.4)

    def test_a_stack_that_runs_sums_one_after_the_other_hides_nothing(self) -> None:
        share = Share(tp=2, sequence_parallel=True)
        figures = DEFAULT.figures.model_copy(update={"hidden_fraction": 0.0})
        block = Block("b", "b", "text", "layer", LAYER)
        hidden, bare = (
            estimate_block(block, TEXT, share, rates_of(CLUSTER, one, Strategy(pp=1, tp=2, dp=1, mbs=1)), 4.0)
            for one in (DEFAULT, DEFAULT.model_copy(update={"figures": figures}))
        )
        assert bare.forward_ms == hidden.forward_ms
        collective_ms = self.collective_ms()
        behind_ms = bare.backward_input_ms + bare.backward_weight_ms
        behind_ms -= hidden.backward_input_ms + hidden.backward_weight_ms
        # two sums of input gradients, two gathers of inputs
        assert behind_ms == pytest.approx(4 * collective_ms)

    def collective_ms(self) -> float:
        rates = rates_of(CLUSTER, DEFAULT, Strategy(pp=1, tp=2, dp=1, mbs=1))
        return rates.tp_group.all_gather_ms(2 * 8192 * 4096)


def test_experts_of_other_ranks_cost_two_exchanges_a_pass() -> None:
    layer = replace(LAYER, mlp=Experts(16, 2, FeedForward(2048)))
    strategy = Strategy(pp=1, tp=1, dp=8, ep=8, mbs=1)
    block = Block("b", "b", "text", "layer", layer)
    rates = rates_of(CLUSTER, DEFAULT, strategy)
    still = replace(rates, ep_group=replace(rates.ep_group, exchange_bytes_per_s=1e30, latency_ms=0.0))
    with_traffic, without = (estimate_block(block, TEXT, Share(ep=8), one, 4.0) for one in (rates, still))
    exchange_ms = rates.ep_group.all_to_all_ms(2 * 8192 * 2 * 4096)
    assert with_traffic.forward_ms - without.forward_ms == pytest.approx(2 * exchange_ms)
    assert with_traffic.backward_input_ms - without.backward_input_ms == pytest.approx(2 * exchange_ms)
    assert with_traffic.backward_weight_ms == without.backward_weight_ms


def test_heads_dealt_among_ranks_are_exchanged_in_the_open() -> None:
    """Query, key, value and output of a quarter of the tokens, once in each pass."""
    strategy = Strategy(pp=1, tp=1, cp=4, dp=1, mbs=1)
    rates = rates_of(CLUSTER, DEFAULT, strategy)
    still = replace(rates, cp_group=replace(rates.cp_group, exchange_bytes_per_s=1e30, latency_ms=0.0))
    block = Block("b", "b", "text", "layer", LAYER)
    share = Share(cp=4, exchanged_heads=True)
    with_traffic, without = (estimate_block(block, TEXT, share, one, 4.0) for one in (rates, still))
    dealt_bytes = 2 * 2048 * (32 + 8 + 8 + 32) * 128
    exchange_ms = rates.cp_group.all_to_all_ms(dealt_bytes)
    assert with_traffic.forward_ms - without.forward_ms == pytest.approx(exchange_ms)
    assert with_traffic.backward_input_ms - without.backward_input_ms == pytest.approx(exchange_ms)


class TestLaunch:
    COST = BlockCost(1.0, 0.5, 0.7, 0, 0, 0, 0, 0, "analytic", "analytic")

    def test_a_small_layer_waits_for_its_host(self) -> None:
        found = launch_layer(self.COST, 2.0, trainable=True, has_backward=True)
        assert found.forward_ms == 2.0
        assert found.backward_input_ms + found.backward_weight_ms == pytest.approx(4.0)

    def test_a_measured_backward_is_longer_or_shorter(self) -> None:
        """Half of it is for the gradients of inputs, which alone are left of a frozen layer."""
        found = launch_layer(self.COST, 2.0, trainable=True, has_backward=True, backward_factor=5.0)
        assert found.forward_ms == 2.0
        assert found.backward_input_ms + found.backward_weight_ms == 10.0
        frozen = replace(self.COST, backward_weight_ms=0.0)
        assert launch_layer(frozen, 2.0, False, True, backward_factor=5.0).backward_input_ms == 5.0

    def test_a_frozen_one_launches_less(self) -> None:
        frozen = replace(self.COST, backward_weight_ms=0.0)
        found = launch_layer(frozen, 2.0, trainable=False, has_backward=True)
        assert (found.backward_input_ms, found.backward_weight_ms) == (2.0, 0.0)
        idle = replace(frozen, backward_input_ms=0.0)
        assert launch_layer(idle, 2.0, trainable=False, has_backward=False).backward_input_ms == 0.0

    def test_what_runs_again_is_launched_again(self) -> None:
        """A quarter of the forward runs in the backward too, so that recomputing the layer adds three quarters."""
        found = launch_layer(replace(self.COST, recompute_ms=0.75), 2.0, trainable=True, has_backward=True)
        assert found.backward_input_ms + found.backward_weight_ms == pytest.approx(2.25 * 2.0)
        assert found.recompute_ms == pytest.approx(0.75 * 2.0)

    def test_a_large_layer_does_not_notice(self) -> None:
        assert launch_layer(self.COST, 0.5, trainable=True, has_backward=True) == self.COST
        nothing = replace(self.COST, forward_ms=0.0, backward_input_ms=0.0, backward_weight_ms=0.0)
        assert launch_layer(nothing, 5.0, trainable=True, has_backward=True) == nothing
