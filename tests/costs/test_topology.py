"""Where groups and hops lie, what they share, and how slow stages are: against rank lists gone through one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_autoparallel.model.costs.communication import data_group, hop_costs, tied_table_ms
from mm_autoparallel.model.costs.stage import block_costs, build_problem
from mm_autoparallel.model.costs.topology import (
    expected_maximum_factor,
    hop_lines,
    place_groups,
    replica_factors,
    stage_factors,
    stage_memory_limits,
)
from mm_autoparallel.model.job.cluster import Cluster, Level, NodeGroup, SlowDevice
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.strategy import RANK_ORDERS, Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.collectives import form_group, group_of
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

DEVICE = DEVICES["a100-80g"]
NESTED = "tp-cp-ep-pp-dp"
LAYERS = {"vision": (4, 0, 0, 0), "audio": (2, 0, 0, 0), "text": (2, 2, 2, 2)}
MakeJob = Callable[..., Job]


def make_cluster(num_nodes: int = 4, per_node: int = 8, cards: int = 1, **more: Any) -> Cluster:
    levels = (
        Level(name="node", num_devices=per_node, bandwidth_bytes_per_s=300e9, latency_ms=0.01),
        Level(
            name="cluster",
            num_devices=num_nodes * per_node,
            bandwidth_bytes_per_s=24e9,
            latency_ms=0.02,
            devices_per_card=cards,
        ),
    )
    levels = levels if num_nodes > 1 else levels[:1]
    return Cluster(num_nodes=num_nodes, devices_per_node=per_node, device=DEVICE, levels=levels, **more)


def pipelines(strategy: Strategy) -> list[list[int]]:
    """Ranks of each pipeline, stage by stage, from the coordinates of every rank."""
    order = RANK_ORDERS[strategy.rank_order]
    found: dict[tuple[int, ...], list[int]] = {}
    sizes = [getattr(strategy, name) for name in order]
    for coordinates in itertools.product(*(range(size) for size in sizes)):
        rank = sum(c * math.prod(sizes[:i]) for i, c in enumerate(coordinates))
        others = tuple(c for c, name in zip(coordinates, order, strict=True) if name != "pp")
        found.setdefault(others, []).append(rank)
    return [sorted(ranks) for ranks in found.values()]


@given(
    order=st.sampled_from(list(RANK_ORDERS)),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3),
    pp=st.sampled_from([2, 3, 4]),
    per_node=st.sampled_from([2, 4, 6, 8]),
    num_cards=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
)
@settings(max_examples=200, deadline=None)
def test_hops_cross_what_their_worst_pair_crosses_and_share_what_leaves_a_node(
    order: str, sizes: tuple[int, ...], pp: int, per_node: int, num_cards: int, vpp: int
) -> None:
    tp, cp, dp = sizes
    world = math.lcm(pp * tp * cp * dp, per_node)
    strategy = Strategy(pp=pp, tp=tp, cp=cp, dp=dp * world // (pp * tp * cp * dp), mbs=1, vpp=vpp, rank_order=order)
    cards = per_node // num_cards
    made = make_cluster(world // per_node, per_node, cards if world > per_node else 1)
    lines = hop_lines(made, strategy)
    assert len(lines) == pp * vpp - 1
    for hop, line in enumerate(lines):
        stage, following = hop % pp, (hop + 1) % pp
        pairs = [(pipeline[stage], pipeline[following]) for pipeline in pipelines(strategy)]
        leaving = [pair for pair in pairs if pair[0] // per_node != pair[1] // per_node]
        if not leaving:
            assert (line.latency_ms, line.bandwidth_bytes_per_s) == (0.01, 300e9)
            continue
        senders = Counter(rank // cards for rank, _ in leaving)
        receivers = Counter(rank // cards for _, rank in leaving)
        num_sharing = max(*senders.values(), *receivers.values())
        assert (line.latency_ms, line.bandwidth_bytes_per_s) == (0.02, pytest.approx(24e9 / num_sharing))


@given(
    sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    run_step=st.sampled_from([1, 2, 4]),
    inner=st.sampled_from([(4, 8), (2, 8), (8, 16), (8, 32)]),
)
def test_a_group_of_runs_drives_the_links_of_its_ranks_inside(
    sizes: tuple[int, int, int], run_step: int, inner: tuple[int, int]
) -> None:
    """The ring's bandwidth, from the ranks of one group counted in every node and rack."""
    size, stride, num_runs = sizes
    run_stride = size * stride * run_step
    ranks = sorted(run * run_stride + place * stride for run in range(num_runs) for place in range(size))
    spans = (*inner, 64 * 32)
    levels = [
        Level(name=str(index), num_devices=span, bandwidth_bytes_per_s=bandwidth, latency_ms=10.0**index)
        for index, (span, bandwidth) in enumerate(zip(spans, (300e9, 50e9, 20e9), strict=True))
    ]
    inside, expected, latency_ms = 1, math.inf, 0.0
    for level, span in zip(levels, spans, strict=True):
        within = max(Counter(rank // span for rank in ranks).values())
        if within > inside:
            expected = min(expected, inside * level.bandwidth_bytes_per_s)
            latency_ms += level.latency_ms
        inside = within
    group = form_group(levels, size, stride, None, num_runs, run_stride)
    assert (group.num_ranks, group.latency_ms) == (len(ranks), latency_ms)
    assert group.bandwidth_bytes_per_s == expected


class TestCards:
    """Four devices of a node behind each of two cards."""

    SHARED, OWN = make_cluster(cards=4), make_cluster()

    def test_groups_inside_a_node_know_no_cards(self) -> None:
        assert form_group(self.SHARED.levels, 8, 1) == form_group(self.OWN.levels, 8, 1)

    @pytest.mark.parametrize(("num_ranks", "stride"), [(4, 8), (8, 4), (32, 1)])
    def test_all_groups_of_a_node_at_once_get_a_fourth_each(self, num_ranks: int, stride: int) -> None:
        shared, own = (form_group(made.levels, num_ranks, stride) for made in (self.SHARED, self.OWN))
        assert own.bandwidth_bytes_per_s == min(300e9, 8 // stride * 24e9)
        assert shared.bandwidth_bytes_per_s == 8 // stride * 6e9
        assert shared.exchange_bytes_per_s == pytest.approx((own.exchange_bytes_per_s or 0) / 4)
        assert shared.latency_ms == own.latency_ms

    @pytest.mark.parametrize(("stride", "num_ranks", "senders"), [(1, 16, 1), (2, 8, 2), (4, 4, 4), (8, 4, 4)])
    def test_of_a_ring_only_its_last_ranks_inside_pass_on_over_a_card(
        self, stride: int, num_ranks: int, senders: int
    ) -> None:
        """All rings at once, rank by rank: who of a card hands on to another node."""
        rings = [
            [first + block + place * stride for place in range(num_ranks)]
            for block in range(0, 32, num_ranks * stride)
            for first in range(stride)
        ]
        leaving = Counter(
            rank // 4
            for ring in rings
            for rank, following in zip(ring, ring[1:] + ring[:1], strict=True)
            if rank // 8 != following // 8
        )
        assert max(leaving.values()) == senders
        assert form_group(self.SHARED.levels, num_ranks, stride).hop_bandwidth_bytes_per_s == 24e9 / senders

    def test_ends_of_a_tied_table_share_with_those_of_their_stage(self) -> None:
        workload = Workload(global_batch_size=64, seq_length=4096)
        strategy = Strategy(pp=16, tp=2, dp=1, mbs=1)
        own_ms, shared_ms = (tied_table_ms(1e8, made, workload, strategy) for made in (self.OWN, self.SHARED))
        assert own_ms == pytest.approx(2 * (2e8 / 24e9 * 1e3 + 0.02))
        assert shared_ms == pytest.approx(2 * (2e8 / 12e9 * 1e3 + 0.02))
        nested = Strategy(pp=4, tp=2, dp=4, mbs=1, rank_order=NESTED)
        assert tied_table_ms(1e8, self.SHARED, workload, nested) == pytest.approx(2 * (2e8 / 300e9 * 1e3 + 0.01))


class TestPlaces:
    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            (
                "tp-cp-ep-dp-pp",
                [
                    ("TP", 2, 1, "node", 300e9, 16),
                    ("DP", 4, 2, "node", 300e9, 8),
                    ("PP hop", 2, 8, "cluster", 24e9, 3),
                ],
            ),
            (
                NESTED,
                [
                    ("TP", 2, 1, "node", 300e9, 16),
                    ("DP", 4, 8, "cluster", 24e9, 8),
                    ("PP hop", 2, 2, "node", 300e9, 3),
                ],
            ),
        ],
    )
    def test_every_group_and_hop_is_told(self, order: str, expected: list[tuple[object, ...]]) -> None:
        strategy = Strategy(pp=4, tp=2, dp=4, mbs=1, rank_order=order)
        assert [tuple(vars(place).values()) for place in place_groups(make_cluster(), strategy)] == expected

    def test_groups_of_experts_and_hops_of_two_levels(self) -> None:
        strategy = Strategy(pp=8, tp=2, dp=2, mbs=1, ep=2, etp=1)
        told = {(place.name, place.level): place for place in place_groups(make_cluster(), strategy)}
        assert list(told) == [
            ("TP", "node"),
            ("DP", "node"),
            ("EP", "node"),
            ("expert DP", "node"),
            ("PP hop", "node"),
            ("PP hop", "cluster"),
        ]
        assert (told["expert DP", "node"].size, told["expert DP", "node"].stride) == (2, 2)
        assert (told["PP hop", "node"].num_groups, told["PP hop", "cluster"].num_groups) == (4, 3)

    def test_replicas_of_two_strides_are_one_group(self) -> None:
        """Two context parallel ranks two apart inside a node, in each of two nodes: two links out of a node."""
        strategy = Strategy(pp=2, tp=2, cp=2, dp=2, mbs=1, ep=4, etp=1, rank_order=NESTED)
        group = data_group(make_cluster(2), strategy)
        assert (group.num_ranks, group.bandwidth_bytes_per_s, group.latency_ms) == (4, 48e9, pytest.approx(0.03))

    @pytest.mark.parametrize("name", ["TP", "CP", "DP", "EP"])
    def test_costs_take_the_groups_that_are_told(self, name: Any) -> None:
        strategy = Strategy(pp=1, tp=2, cp=2, dp=8, mbs=1, ep=4)
        place = next(place for place in place_groups(make_cluster(cards=2), strategy) if place.name == name)
        group = group_of(make_cluster(cards=2).levels, strategy, name)
        assert (group.num_ranks, group.latency_ms >= 0.02) == (place.size, place.level == "cluster")


class TestTheOrderThatKeepsHeavyTrafficInside:
    """Four stages of two ranks, four replicas, on four nodes of eight: one kind of traffic has to leave the node."""

    def steps_ms(self, job: Job, **sizes: int) -> dict[str, float]:
        strategy = Strategy(**{"pp": 4, "tp": 2, "dp": 4, "mbs": 1} | sizes)
        recompute = dict.fromkeys(LAYERS, (0,) * 4)
        plans = (Plan(replace(strategy, rank_order=order), LAYERS, recompute, 64) for order in RANK_ORDERS)
        return {plan.strategy.rank_order: evaluate(job, plan).step_ms for plan in plans}

    def test_pipelines_inside_nodes_win_where_hops_are_slow(self, make_job: MakeJob) -> None:
        """Gradients hide behind the backward; hops of one chunk a stage wait at every fill and drain."""
        job = make_job(cluster=make_cluster(cards=8), freeze_text=True)
        steps_ms = self.steps_ms(job)
        assert steps_ms[NESTED] < steps_ms["tp-cp-ep-dp-pp"]

    def test_replicas_inside_nodes_win_where_gradients_are_bare(self, make_job: MakeJob) -> None:
        job = make_job(cluster=make_cluster(cards=8), overlap_grad_reduce=False, overlap_param_gather=False)
        steps_ms = self.steps_ms(job)
        assert steps_ms["tp-cp-ep-dp-pp"] < steps_ms[NESTED]

    def test_the_search_chooses_it(self, make_job: MakeJob) -> None:
        from mm_autoparallel.planner.search.planner import search

        limits = SearchSpace(pp=(4,), tp=(2,), cp=(1,), mbs=(1,), rank_order=tuple(RANK_ORDERS))  # type: ignore[arg-type]
        job = replace(make_job(cluster=make_cluster(cards=8), freeze_text=True), search=limits)
        result = search(job, num_workers=1)
        assert result.plan.strategy.rank_order == NESTED
        assert {candidate.strategy.rank_order for candidate in result.candidates} == set(RANK_ORDERS)


class TestStageFactors:
    MIXED = make_cluster(
        node_groups=(NodeGroup(num_nodes=3), NodeGroup(num_nodes=1, device=DEVICES["h100-80g"], time_factor=0.5))
    )

    def test_equal_devices_have_no_factors(self) -> None:
        strategy = Strategy(pp=4, tp=2, dp=4, mbs=1)
        assert replica_factors(make_cluster(), strategy) == ((1.0,) * 4,)

    def test_stages_have_the_speed_and_the_memory_of_their_devices(self) -> None:
        strategy = Strategy(pp=4, tp=2, dp=4, mbs=1)
        assert stage_factors(self.MIXED, strategy) == (1.0, 1.0, 1.0, 0.5)
        assert stage_factors(self.MIXED, strategy, [1.0, 0.6]) == (1.0, 1.0, 1.0, 0.3)
        own, fast = (DEVICES[name].memory_bytes * 0.95 for name in ("a100-80g", "h100-80g"))
        assert stage_memory_limits(self.MIXED, strategy) == (own, own, own, fast)

    @pytest.mark.parametrize("order", list(RANK_ORDERS))
    def test_a_stage_is_as_slow_as_its_slowest_rank(self, order: str) -> None:
        rng = np.random.default_rng(0)
        strategy = Strategy(pp=4, tp=2, dp=4, mbs=1, rank_order=order)
        factors = rng.uniform(0.8, 1.5, 32).round(3)
        slow = tuple(SlowDevice(rank=rank, time_factor=float(factor)) for rank, factor in enumerate(factors))
        made = make_cluster(slow_devices=slow)
        of_pipelines = [[factors[rank] for rank in pipeline] for pipeline in pipelines(strategy)]
        expected = tuple(max(column) for column in zip(*of_pipelines, strict=True))
        assert stage_factors(made, strategy) == pytest.approx(expected)

    def test_a_slow_node_slows_the_stages_that_lie_on_it(self) -> None:
        made = make_cluster(slow_devices=(SlowDevice(node=1, time_factor=1.25), SlowDevice(rank=8, time_factor=1.2)))
        assert stage_factors(made, Strategy(pp=4, tp=2, dp=4, mbs=1)) == (1.0, 1.5, 1.0, 1.0)
        assert stage_factors(made, Strategy(pp=4, tp=2, dp=4, mbs=1, rank_order=NESTED)) == (1.5, 1.25, 1.25, 1.25)

    def test_replicas_that_exchange_tokens_or_weights_wait_for_each_other(self) -> None:
        made = make_cluster(slow_devices=(SlowDevice(rank=0, time_factor=1.2), SlowDevice(rank=10, time_factor=1.3)))
        apart = Strategy(pp=4, tp=2, dp=4, mbs=1)
        assert set(replica_factors(made, apart)) == {(1.2, 1.0, 1.0, 1.0), (1.0, 1.3, 1.0, 1.0)}
        assert replica_factors(made, replace(apart, ep=4, etp=1)) == ((1.2, 1.3, 1.0, 1.0),)
        assert replica_factors(made, replace(apart, zero=3)) == ((1.2, 1.3, 1.0, 1.0),)

    @pytest.mark.parametrize(
        ("num_ranks", "expected"),
        [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (100, 2.50759)],
    )
    def test_the_expected_slowest_of_several(self, num_ranks: int, expected: float) -> None:
        """Two and three in closed form; of a hundred as tables of order statistics have it."""
        assert expected_maximum_factor(num_ranks) == pytest.approx(expected, abs=5e-6)

    def test_a_spread_slows_every_stage_as_much_as_samples_do(self) -> None:
        made, strategy = make_cluster(device_time_spread_fraction=0.05), Strategy(pp=4, tp=2, dp=4, mbs=1)
        samples = np.random.default_rng(0).normal(1.0, 0.05, (20_000, 8)).max(axis=1)
        assert stage_factors(made, strategy) == pytest.approx(
            (samples.mean(),) * 4, abs=4 * samples.std() / 20_000**0.5
        )


class TestSteps:
    STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)
    PLAN = Plan(STRATEGY, LAYERS, dict.fromkeys(LAYERS, (0,) * 4), 64)

    def test_jobs_on_equal_devices_have_no_factors(self, make_job: MakeJob) -> None:
        job = make_job(cluster=make_cluster())
        assert build_problem(job, self.STRATEGY).stage_time_factor == ()
        assert "devices" not in evaluate(job, self.PLAN).provenance

    def test_another_device_counts_by_the_time_of_the_whole_chain(self, make_job: MakeJob) -> None:
        """As a job that lies on the other device as a whole says, block by block; by its name it has the same
        calibration."""
        faster = DEVICE.model_copy(update={"bf16_flops_per_s": 3 * DEVICE.bf16_flops_per_s})
        mixed = make_job(
            cluster=make_cluster(node_groups=(NodeGroup(num_nodes=2), NodeGroup(num_nodes=2, device=faster)))
        )
        counts = {block.name: block.count for block in build_problem(mixed, self.STRATEGY).chain}
        own, other = (
            block_costs(make_job(cluster=make_cluster().model_copy(update={"device": device})), self.STRATEGY)
            for device in (DEVICE, faster)
        )
        own_ms, other_ms = (
            {name: cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms for name, cost in costs.items()}
            for costs in (own, other)
        )
        expected = sum(counts[name] * other_ms[name] for name in counts) / sum(
            counts[name] * own_ms[name] for name in counts
        )
        assert build_problem(mixed, self.STRATEGY).stage_time_factor == (1.0, 1.0, *[pytest.approx(expected)] * 2)
        assert 1 / 3 < expected < 1
        note = evaluate(mixed, self.PLAN).provenance["devices"]["notes"][0]
        ratios = [other_ms[name] / own_ms[name] for name in counts]
        assert f"counts {expected:.3f} times as long" in note
        assert note.endswith(f"of its blocks {min(ratios):.3f} to {max(ratios):.3f}")

    def test_a_slow_replica_is_the_step(self, make_job: MakeJob) -> None:
        """One replica holds all that is slow: its own pipeline, played alone, is the step."""
        plain, slow = make_cluster(), make_cluster(slow_devices=(SlowDevice(rank=9, time_factor=1.3),))
        undisturbed, estimate = (evaluate(make_job(cluster=made), self.PLAN) for made in (plain, slow))
        assert estimate.problem.stage_time_factor == (1.0, 1.3, 1.0, 1.0)
        assert estimate.replica_step_ms is None
        assert undisturbed.step_ms < estimate.step_ms < 1.3 * undisturbed.step_ms

    def test_of_replicas_that_are_slow_in_different_stages_the_slowest_is_told(self, make_job: MakeJob) -> None:
        apart = tuple(SlowDevice(rank=rank, time_factor=1.3) for rank in (0, 10))
        steps_ms = [evaluate(make_job(cluster=make_cluster(slow_devices=(one,))), self.PLAN).step_ms for one in apart]
        estimate = evaluate(make_job(cluster=make_cluster(slow_devices=apart)), self.PLAN)
        assert estimate.replica_step_ms == max(steps_ms) < estimate.step_ms
        assert f"the slowest replica by itself takes {max(steps_ms):.2f} ms" in estimate.warnings[-1]

    def test_hops_of_a_stage_share_a_card(self, make_job: MakeJob) -> None:
        workload = make_job().workload
        own, shared = (hop_costs(make_cluster(cards=cards), self.STRATEGY, workload)[1] for cards in (1, 4))
        assert shared == pytest.approx([4 * ms_per_byte for ms_per_byte in own])
