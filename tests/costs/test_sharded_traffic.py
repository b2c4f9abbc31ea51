"""What ZeRO 2 and 3, buckets and an optimizer on the host add to a step: against formulas and a stepwise replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.blocks.chain import Attention, Block, FeedForward, TransformerLayer
from mm_autoparallel.model.costs.communication import (
    Cover,
    Traffic,
    data_group,
    exposed_data_ms,
    exposed_pass_ms,
    host_optimizer_ms,
    last_bucket_ms,
)
from mm_autoparallel.model.costs.stage import block_costs, build_problem
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.footprint import sum_held_once
from mm_autoparallel.pipeline.problem import Problem

WORKLOAD = Workload(global_batch_size=64, seq_length=4096)
BUCKETED = WORKLOAD.model_copy(update={"grad_bucket_parameters": 100})
LAYER = Block("layer", "layer", "text", "layer", TransformerLayer(64, "rms", Attention(1, 1, 64), FeedForward(128)), 8)
TRAFFIC = Traffic(all_reduce_ms=12.0, reduce_ms=8.0, gather_ms=4.0)


def strategy(**sizes: Any) -> Strategy:
    return Strategy(**({"pp": 1, "tp": 1, "dp": 8, "mbs": 1} | sizes))


class TestPasses:
    COVER = Cover(forward_ms=3.0, backward_ms=5.0)

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ({"zero": 1}, (0, 0)),
            ({"zero": 2}, (0, 8 - 5)),
            ({"zero": 3}, (4 - 3, 4 + 8 - 5)),
            ({"zero": 3, "reshard": False}, (4 - 3, 8 - 5)),
        ],
    )
    def test_what_each_micro_batch_waits_for(self, sizes: dict[str, Any], expected: tuple[float, float]) -> None:
        assert exposed_pass_ms(LAYER, [self.COVER], TRAFFIC, strategy(**sizes)) == expected

    def test_frozen_weights_are_gathered_and_nothing_is_reduced(self) -> None:
        frozen = replace(LAYER, trainable=False)
        assert exposed_pass_ms(frozen, [self.COVER], TRAFFIC, strategy(zero=3)) == (1, 0)
        assert exposed_pass_ms(frozen, [Cover(0, 0)], TRAFFIC, strategy(zero=3)) == (4, 4)
        still = replace(frozen, propagates_gradient=False)
        assert exposed_pass_ms(still, [Cover(0, 0)], TRAFFIC, strategy(zero=3)) == (4, 0)

    def test_what_is_added_is_right_in_the_sum_over_micro_batches(self) -> None:
        scale = (0.5, 1.0, 3.0)
        covers = [Cover(3.0 * factor, 5.0 * factor) for factor in scale]
        added = exposed_pass_ms(LAYER, covers, TRAFFIC, strategy(zero=2), scale)[1]
        assert sum(factor * added for factor in scale) == pytest.approx((8 - 2.5) + (8 - 5) + 0)

    def test_what_is_left_after_the_last_backward(self) -> None:
        cluster = Cluster(num_nodes=1, devices_per_node=8, device=DEVICES["a100-80g"])

        def tail_ms(zero: int) -> float:
            group = data_group(cluster, strategy(zero=zero))
            return exposed_data_ms(Cover(0, 0), 1e8, group, WORKLOAD, strategy(zero=zero))

        group = data_group(cluster, strategy())
        assert tail_ms(1) == group.reduce_scatter_ms(4e8) + group.all_gather_ms(2e8)
        assert tail_ms(2) == group.all_gather_ms(2e8)
        assert tail_ms(3) == 0


BLOCKS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8)
"""(traffic, compute) of each block in the order of the backward."""


def replay_ms(blocks: list[tuple[int, int]]) -> float:
    """How long after the last backward the last bucket ends: one bucket a block, one after the other."""
    computed_ms = sent_ms = 0
    for traffic_ms, compute_ms in blocks:
        computed_ms += compute_ms
        sent_ms = max(sent_ms, computed_ms) + traffic_ms
    return sent_ms - computed_ms


class TestBuckets:
    @given(blocks=BLOCKS)
    def test_a_sum_over_blocks_errs_low_by_the_last_bucket_at_most(self, blocks: list[tuple[int, int]]) -> None:
        summed_ms = sum(max(0, traffic_ms - compute_ms) for traffic_ms, compute_ms in blocks)
        assert replay_ms(blocks) <= summed_ms + max(min(pair) for pair in blocks)

    @given(traffic_ms=st.integers(0, 20), compute_ms=st.integers(1, 20), num_blocks=st.integers(1, 8))
    def test_of_equal_blocks_it_is_exact_with_that_bucket(
        self, traffic_ms: int, compute_ms: int, num_blocks: int
    ) -> None:
        cover = Cover(0.0, float(compute_ms))
        traffic = Traffic(float(traffic_ms), float(traffic_ms), 0.0)
        last_ms = last_bucket_ms(LAYER, 100.0, cover, traffic, BUCKETED, strategy())
        summed_ms = num_blocks * max(0, traffic_ms - compute_ms)
        assert replay_ms([(traffic_ms, compute_ms)] * num_blocks) == summed_ms + last_ms

    @pytest.mark.parametrize(("bucket_parameters", "share"), [(0, 0), (25, 0.25), (300, 3), (10**6, 8)])
    def test_buckets_of_parts_and_of_several_blocks(self, bucket_parameters: int, share: float) -> None:
        workload = WORKLOAD.model_copy(update={"grad_bucket_parameters": bucket_parameters})
        found = last_bucket_ms(LAYER, 100.0, Cover(9.0, 5.0), TRAFFIC, workload, strategy())
        assert found == share * (5 + 4)  # of 8 reduced, 5 behind the backward; the gathered 4 behind the forward

    @pytest.mark.parametrize(("zero", "expected"), [(0, 5), (1, 5 + 4), (2, 4), (3, 0)])
    def test_what_moves_once_a_step(self, zero: int, expected: float) -> None:
        assert last_bucket_ms(LAYER, 100.0, Cover(9.0, 5.0), TRAFFIC, BUCKETED, strategy(zero=zero)) == expected


def test_a_step_on_the_host() -> None:
    device = DEVICES["h100-80g"]
    assert device.host_link_bytes_per_s
    assert device.host_memory_bytes_per_s
    link_s = (4 + 2) / device.host_link_bytes_per_s
    memory_s = (4 + 12 + 12 + 2) / device.host_memory_bytes_per_s
    found = host_optimizer_ms(8e8, WORKLOAD, strategy(optimizer_offload=True), device)
    assert found == pytest.approx(1e8 * (link_s + memory_s) * 1e3)


def make_job(**workload: Any) -> Job:
    layers = {
        "num_layers": 8,
        "hidden_size": 2048,
        "ffn_size": 8192,
        "num_heads": 16,
        "num_kv_groups": 8,
        "norm": "rms",
    }
    content = {
        "model": {"text": {"vocab_size": 32000, "layers": layers}},
        "cluster": {"num_nodes": 4, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 64, "seq_length": 4096, "stack": "transformers"} | workload,
    }
    return parse_job(content, Path("job.yaml"))


class TestProblems:
    """A whole job under strategies that differ in one choice."""

    def build(self, job: Job | None = None, **sizes: Any) -> Problem:
        return build_problem(job or make_job(), Strategy(**({"pp": 2, "tp": 1, "dp": 16, "mbs": 1} | sizes)))

    def test_layers_wait_for_what_their_own_pass_does_not_hide(self) -> None:
        job = make_job(overlap_grad_reduce=False, overlap_param_gather=False)
        plain, sharded = (self.build(job, zero=zero).chain[1] for zero in (1, 3))
        count = block_costs(job, Strategy(2, 1, 16, 1))["text_layer"].parameter_count
        group = data_group(job.cluster.model_copy(), Strategy(2, 1, 16, 1))
        # bandwidths as they are reached are a fraction of these, in both passes alike
        forward_ms, backward_ms = sharded.forward_ms - plain.forward_ms, sharded.backward_ms - plain.backward_ms
        gather_ms, reduce_ms = group.all_gather_ms(2 * count), group.reduce_scatter_ms(4 * count)
        assert forward_ms > gather_ms
        assert (backward_ms - forward_ms) / forward_ms == pytest.approx(reduce_ms / gather_ms, rel=0.02)
        assert plain.tail_ms > sharded.tail_ms > 0

    def test_each_stage_of_zero_holds_less_and_its_buffers_once(self) -> None:
        problems = [self.build(zero=zero) for zero in range(4)]
        for lighter, heavier in zip(problems[1:], problems, strict=False):
            assert lighter.chain[1].static_bytes < heavier.chain[1].static_bytes
        names = {name for block in problems[3].chain if block.footprint for name, _ in block.footprint.held_once_bytes}
        assert {"gathered weights", "gradients being reduced"} <= names
        before, after = (
            sum_held_once(block.footprint for block in problem.chain if block.footprint)
            for problem in (problems[1], problems[3])
        )
        costs = block_costs(make_job(), Strategy(2, 1, 16, 1))
        pair_count = costs["text_pre"].parameter_count + costs["text_layer"].parameter_count
        head_count = costs["text_post"].parameter_count + costs["text_layer"].parameter_count
        assert after - before == pytest.approx((2 + 4) * max(pair_count, head_count))
        assert problems[3].stage_static_bytes[0] - problems[1].stage_static_bytes[0] == pytest.approx(after - before)

    def test_states_on_the_host_free_memory_and_take_time(self) -> None:
        here, away = (self.build(optimizer_offload=flag).chain[1] for flag in (False, True))
        assert here.footprint
        assert here.static_bytes - away.static_bytes == pytest.approx(here.footprint.optimizer_bytes)
        assert away.tail_ms > here.tail_ms

    def test_the_last_bucket_is_each_stages_own(self) -> None:
        bucketed = self.build(make_job(grad_bucket_parameters=40_000_000))
        plain_ms = self.build().stage_tail_ms
        first_ms, second_ms = (ms - least_ms for ms, least_ms in zip(bucketed.stage_tail_ms, plain_ms, strict=True))
        assert first_ms == 0  # the embedding's traffic is its last, and counted whole
        assert second_ms > 0
        assert bucketed.chain == self.build().chain

    def test_kinds_of_context_parallelism_move_other_bytes(self) -> None:
        sizes = {"cp": 4, "dp": 4}
        job = make_job()
        ring, dealt = (self.build(job, **sizes, cp_kind=kind).chain[1] for kind in ("ring", "all_to_all"))
        assert self.build(**sizes).chain[1] == ring  # as the workload says
        assert self.build(make_job(context_parallel="all_to_all"), **sizes).chain[1] == dealt
        assert dealt.forward_ms != ring.forward_ms
        output_bytes = 2 * 4096 / 4 * 2048
        assert dealt.activation_bytes - ring.activation_bytes == pytest.approx(output_bytes)  # in both layouts
