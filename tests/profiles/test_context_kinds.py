"""What context parallel ranks send and hold of attention, kind by kind, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import Attention, Block, FeedForward, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.held_once import count_communicators
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.stacks import StackFacts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import ContextParallel, Workload
from mm_autoparallel.model.operators.analytic import Rates, estimate_block, rates_of
from mm_autoparallel.model.operators.context_traffic import exposed_ring_ms
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share, form_share
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.cost import BlockCost

LAYER = TransformerLayer(4096, "rms", Attention(32, 8, 128), FeedForward(14336))
BLOCK = Block("b", "b", "text", "layer", LAYER)
TEXT = TokenCounts(65536, 65536, 65536, num_spans=1)
CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["h100-80g"])
KEYS = 2 * 65536 // 16 * 2 * 8 * 128
"""Bytes of keys and values of one of sixteen ranks."""


FEWER: dict[str, object] = {"stack": "mindspeed", "facts": {"repeated_groups": "fewer"}}


def cost_of(kind: ContextParallel, **workload: object) -> tuple[BlockCost, Share, Rates]:
    strategy = Strategy(pp=1, tp=1, dp=1, mbs=1, cp=16, cp_kind=kind)
    told = Workload.model_validate({"global_batch_size": 32, "seq_length": 65536} | workload)
    share = form_share(strategy, told, 4.0, node_devices=8)
    rates = rates_of(CLUSTER, assume_calibration("a device nobody knows", "megatron-core"), strategy, None, told)
    return estimate_block(BLOCK, TEXT, share, rates, 4.0), share, rates


def attention_of(share: Share) -> tuple[float, float, float]:
    found = list_operators(LAYER, TEXT, share).attention
    assert found
    return found.ring_bytes, found.gathered_bytes, found.dealt_bytes


def test_each_kind_sends_what_it_must() -> None:
    heads = 2 * 4096 * 4096 * 2 + KEYS  # query and output of 4,096 tokens, keys and values
    assert attention_of(cost_of("ring")[1]) == (KEYS, 0, 0)
    assert attention_of(cost_of("all_gather")[1]) == (0, 16 * KEYS, 0)
    assert attention_of(cost_of("all_to_all")[1]) == (0, 0, heads)
    assert attention_of(cost_of("hierarchical")[1]) == (KEYS, 0, heads)


def test_groups_fewer_than_ranks_that_deal_are_repeated_for_every_head() -> None:
    """MindSpeed's: 8 groups of 32 heads among 16 ranks, so that four times the keys and values travel and stay."""
    (plain, one, rates), (cost, share, _) = cost_of("all_to_all"), cost_of("all_to_all", **FEWER)
    heads = 2 * 4096 * 4096 * 2
    assert attention_of(share) == (0, 0, heads + 4 * KEYS)
    assert attention_of(cost_of("hierarchical", **FEWER, dealing_ranks=4)[1]) == (KEYS, 0, heads + KEYS)
    far = cost_of("hierarchical", **FEWER, dealing_ranks=16)[1]  # a rank has then two groups in eight
    assert attention_of(far) == (0, 0, heads + 4 * KEYS)
    kept = [list_operators(LAYER, TEXT, each) for each in (share, replace(share, facts=_never(share)))]
    assert kept[0].kept_bytes(True) - kept[1].kept_bytes(True) == 3 * KEYS
    held = [next(p.size_bytes for p in each.forward_only if "query, key and value" in p.moment) for each in kept]
    assert held[0] - held[1] == 4 * KEYS + 4 * KEYS - KEYS
    (stream,) = [each for each in kept[0].streams if "repeated" in each.name]
    assert stream.forward_bytes == stream.backward_bytes == 5 * KEYS
    assert {one.facts.repeated_groups, share.facts.repeated_groups} == {"never", "fewer"}
    whole, divided = (
        estimate_block(BLOCK, TEXT, each, rates, 4.0) for each in (share, replace(share, facts=_never(share)))
    )
    more_ms = rates.cp_group.all_to_all_ms(heads + 4 * KEYS) - rates.cp_group.all_to_all_ms(heads + KEYS)
    assert whole.forward_ms - divided.forward_ms > more_ms
    assert cost.activation_bytes > plain.activation_bytes


def _never(share: Share) -> StackFacts:
    return share.facts.model_copy(update={"repeated_groups": "never"})


def test_gathered_keys_wait_in_the_open_and_their_gradients_are_summed() -> None:
    (cost, _, rates), (dealt, _, _) = cost_of("all_gather"), cost_of("all_to_all")
    still = replace(rates.cp_group, bandwidth_bytes_per_s=1e30, latency_ms=0.0)
    without = estimate_block(BLOCK, TEXT, cost_of("all_gather")[1], replace(rates, cp_group=still), 4.0)
    gather_ms = rates.cp_group.all_gather_ms(16 * KEYS)
    assert cost.forward_ms - without.forward_ms == pytest.approx(gather_ms)
    assert cost.backward_input_ms - without.backward_input_ms == pytest.approx(2 * gather_ms)
    assert cost.transient_bytes >= dealt.transient_bytes


def test_gathered_keys_and_their_gradients_are_held_while_attention_runs() -> None:
    for kind, held in (("ring", (0.0, 0.0)), ("all_gather", (15.0 * KEYS, 30.0 * KEYS))):
        operators = list_operators(LAYER, TEXT, cost_of(kind)[1])  # type: ignore[arg-type]
        of_others = [p for p in operators.forward_only if "other ranks" in p.moment]
        in_backward = [p for p in operators.with_backward if "other ranks" in p.moment]
        plain = [p for p in operators.forward_only if "query, key and value, before" in p.moment]
        passing_query = 2 * 2 * 4096 * 48 * 128
        rest = plain[0].size_bytes - passing_query
        assert sum(p.size_bytes - rest for p in of_others) == held[0]
        assert len(in_backward) == bool(held[1])
        # beside the residual's gradient; what the feed-forward kept of its first product is free by then
        beyond = 2 * 4096 * 4096 - 2 * 4096 * 2 * 14336
        assert all(p.size_bytes == held[1] + beyond for p in in_backward)


def test_near_ranks_deal_heads_and_far_ones_pass_on() -> None:
    _, share, rates = cost_of("hierarchical")
    assert share.passing_ranks == 2
    assert rates.dealing_group
    assert rates.passing_group
    assert (rates.dealing_group.num_ranks, rates.dealing_group.level) == (8, CLUSTER.levels[0].name)
    assert (rates.passing_group.num_ranks, rates.passing_group.level) == (2, CLUSTER.levels[1].name)
    _, share, rates = cost_of("hierarchical", dealing_ranks=4)
    assert rates.dealing_group
    assert rates.passing_group
    assert (share.passing_ranks, rates.dealing_group.num_ranks, rates.passing_group.num_ranks) == (4, 4, 4)


def test_near_and_far_ranks_have_communicators_of_their_own() -> None:
    strategy = Strategy(pp=1, tp=1, dp=2, mbs=1, cp=16)
    plain = count_communicators(strategy, False)
    assert [count_communicators(strategy, False, dealing) - plain for dealing in (1, 8, 16)] == [0, 2, 0]


def test_windows_that_lie_with_near_ranks_do_not_travel() -> None:
    windowed = replace(LAYER, attention=replace(LAYER.attention, span_tokens=16384))  # type: ignore[arg-type]
    tokens = TokenCounts(65536, 65536, 16384, num_spans=4)
    travelling = {}
    for kind in ("ring", "all_gather", "hierarchical"):
        found = list_operators(windowed, tokens, cost_of(kind)[1]).attention  # type: ignore[arg-type]
        assert found
        travelling[kind] = (found.ring_bytes > 0, found.gathered_bytes > 0)
    # sixteen ranks hold 4,096 tokens each, a quarter of a window; eight of them that deal heads two whole ones
    assert travelling == {"ring": (True, False), "all_gather": (False, True), "hierarchical": (False, False)}


def test_a_part_of_the_ring_stays_open() -> None:
    """0.15 of it where attention is long, what attention leaves where it is short, and each step's latency."""
    _, share, rates = cost_of("ring")
    group = rates.cp_group
    traffic_ms = 15 * (group.pass_on_ms(KEYS) - group.latency_ms)
    latency_ms = 15 * group.latency_ms
    assert share.facts.open_ring_fraction == 0.15
    assert exposed_ring_ms(1e6, KEYS, share, rates) == pytest.approx(0.15 * traffic_ms + latency_ms)
    assert exposed_ring_ms(0.25 * traffic_ms, KEYS, share, rates) == pytest.approx(0.75 * traffic_ms + latency_ms)
    hiding = replace(share, facts=share.facts.model_copy(update={"open_ring_fraction": 0.0}))
    assert exposed_ring_ms(1e6, KEYS, hiding, rates) == 0.0
    assert exposed_ring_ms(0.0, KEYS, hiding, rates) == pytest.approx(traffic_ms + latency_ms)


def test_attention_to_gathered_keys_takes_longer_where_a_stack_says_so() -> None:
    """From four ranks on, and of attention alone."""
    _, share, rates = cost_of("all_gather")
    slow = replace(share, facts=share.facts.model_copy(update={"split_attention_factor": 1.4}))
    usual, slower = (estimate_block(BLOCK, TEXT, one, rates, 4.0) for one in (share, slow))
    attention = list_operators(LAYER, TEXT, share).attention
    assert attention
    assert slower.forward_ms - usual.forward_ms == pytest.approx(0.4 * rates.core_ms(attention, backward=False))
    two = [list_operators(LAYER, TEXT, replace(one, cp=2)).attention for one in (share, slow)]
    assert two[0] == two[1]


def test_every_other_matrix_runs_again_and_attention_does_not() -> None:
    """Of Llama 8B's seven matrices key, output and up: 19,456 of 53,248 columns of 4,096."""
    share = Share(recompute_operators=("second_products",))
    plain, policy = list_operators(LAYER, TEXT, Share()), list_operators(LAYER, TEXT, share)
    assert policy.rerun
    assert policy.rerun.attention is None
    again, all_flops = (sum(p.flops for p in part.products) for part in (policy.rerun, plain))
    assert again / all_flops == pytest.approx(19456 / 53248)
    kept = 2 * 65536 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 65536 * 32
    assert policy.kept_bytes(trainable=True) == kept
    assert policy.kept_bytes(trainable=True) < plain.kept_bytes(trainable=True)
    assert policy.working_bytes(True, True) > plain.working_bytes(True, True)


def test_sums_of_tensor_parallel_ranks_stay_and_gathers_are_repeated() -> None:
    share = Share(tp=8, sequence_parallel=True, recompute_operators=("second_products",))
    rerun = list_operators(LAYER, TEXT, share).rerun
    assert rerun
    assert sum(p.gathered_bytes for p in rerun.products) == 2 * 2 * 65536 * 4096
    assert [(p.input_count, p.output_count) for p in rerun.products if p.flops] == [(4096, 128), (4096, 1792)]
