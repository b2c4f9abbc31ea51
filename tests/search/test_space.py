"""The space: everything the limits allow, each strategy once, and a reason for everything unlawful."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.layers import Experts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.planner.search.space import describe_strategy, divisors, list_space, strategy_key


def test_every_strategy_uses_the_whole_cluster_and_comes_once(make_job) -> None:
    job = make_job(max_vpp=2)
    space = list_space(job)
    strategies = [entry.strategy for entry in space]
    assert len(set(strategies)) == len(strategies)
    assert {strategy.world_size for strategy in strategies} == {4}
    assert {strategy.vpp for strategy in strategies} == {1, 2}
    assert strategies == sorted(strategies, key=strategy_key)
    for entry in space:
        assert entry.reason == unlawful_reason(job.model, job.cluster, job.workload, entry.strategy)


def test_a_missing_list_means_every_lawful_value(make_job) -> None:
    """Against all sizes up to the devices and the batch, lawful or not."""
    job = make_job()
    lawful = {
        Strategy(pp=pp, tp=tp, cp=cp, dp=dp, mbs=mbs)
        for pp in range(1, 5)
        for tp in range(1, 5)
        for cp in range(1, 5)
        for dp in range(1, 5)
        for mbs in range(1, 17)
        if pp * tp * cp * dp == 4
    }
    lawful = {s for s in lawful if unlawful_reason(job.model, job.cluster, job.workload, s) is None}
    assert {entry.strategy for entry in list_space(job) if entry.reason is None} == lawful


def test_limits_hold(make_job) -> None:
    space = list_space(make_job(pp=(2, 4), tp=(1,), dp=(1, 2), mbs=(2, 3), zero=(0, 1)))
    assert {(e.strategy.pp, e.strategy.cp, e.strategy.dp) for e in space} == {(2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert {e.strategy.mbs for e in space} == {2, 3}
    assert {e.strategy.zero for e in space} == {0, 1}
    reasons = {e.reason for e in space if e.strategy.mbs == 3}
    assert all("no multiple of DP" in reason for reason in reasons)
    assert all(e.reason is None for e in space if e.strategy.mbs == 2)


def test_expert_parallelism_is_tried_where_it_is_asked_for(make_job) -> None:
    assert {entry.strategy.ep for entry in list_space(make_job())} == {1}
    space = list_space(make_job(ep=(1, 2)))
    assert {entry.strategy.ep for entry in space} == {1, 2}
    assert not any(entry.reason is None for entry in space if entry.strategy.ep == 2)
    dense = make_job(ep=(1, 2, 4), tp=(1, 2), cp=(1,), pp=(1,))
    experts = Experts(num_experts=6, top_k=2, ffn_size=64)
    text = dense.model.text
    layers = text.layers.model_copy(update={"experts": experts})
    model = dense.model.model_copy(update={"text": text.model_copy(update={"layers": layers})})
    lawful = {entry.strategy for entry in list_space(replace(dense, model=model)) if entry.reason is None}
    assert {(strategy.tp, strategy.ep) for strategy in lawful} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_chunks_beyond_the_layers_are_not_gone_through(make_job) -> None:
    job = make_job(max_vpp=10**15, pp=(2,), tp=(1,), cp=(1,), mbs=(1,))
    assert {entry.strategy.vpp for entry in list_space(job)} == set(range(1, job.model.num_layers + 1))


def test_limits_that_make_no_cluster_are_refused_by_name(make_job) -> None:
    with pytest.raises(JobError, match=r"search\.pp \[3\].*4 devices"):
        list_space(make_job(pp=(3,)))


def test_a_job_without_a_lawful_strategy_says_which_rule(make_job) -> None:
    with pytest.raises(JobError, match="no multiple of DP"):
        list_space(make_job(mbs=(5,)))


def test_divisors_and_words() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert describe_strategy(Strategy(pp=8, tp=2, dp=4, mbs=1)) == "PP 8 TP 2 DP 4 MBS 1"
    chunked = Strategy(pp=8, tp=2, cp=2, dp=4, mbs=1, vpp=2, zero=0, schedule="interleaved_1f1b_low_memory")
    assert describe_strategy(chunked) == "PP 8 TP 2 CP 2 DP 4 MBS 1 VPP 2 ZeRO 0 interleaved_1f1b_low_memory"
    experts = Strategy(pp=1, tp=2, dp=8, mbs=1, ep=4, etp=1)
    assert describe_strategy(experts) == "PP 1 TP 2 DP 8 MBS 1 EP 4 ETP 1"
    nested = Strategy(pp=8, tp=2, dp=4, mbs=1, rank_order="tp-cp-ep-pp-dp")
    assert describe_strategy(nested) == "PP 8 TP 2 DP 4 MBS 1 ranks tp-cp-ep-pp-dp"


class TestChoices:
    def test_what_means_nothing_for_a_strategy_gives_it_no_second_form(self, make_job) -> None:
        limits = {"zero": (1, 3), "reshard": (True, False), "cp_kind": ("ring", "all_to_all"), "etp": (0, 2)}
        job = make_job(pp=(1,), tp=(1, 2), cp=(1, 2), mbs=(1,), optimizer_offload=(False, True), **limits)
        strategies = [entry.strategy for entry in list_space(job)]
        assert len(set(strategies)) == len(strategies)
        assert all(strategy.reshard for strategy in strategies if strategy.zero == 1)
        assert {strategy.cp_kind for strategy in strategies if strategy.cp == 1} == {""}
        assert {strategy.cp_kind for strategy in strategies if strategy.cp == 2} == {"ring", "all_to_all"}
        assert {(strategy.tp, strategy.etp) for strategy in strategies} == {(1, 0), (1, 2), (2, 0)}
        # ZeRO 1, ZeRO 3 with and without reshard; on the device or the host
        alone = [strategy for strategy in strategies if (strategy.tp, strategy.cp) == (2, 1)]
        assert len(alone) == 3 * 2

    def test_a_shard_of_all_ranks_is_none(self, make_job) -> None:
        job = make_job(pp=(1,), tp=(1,), cp=(1,), mbs=(1,), zero=(1, 3), shard=(0, 2, 10**9))
        num_devices = job.cluster.num_devices
        job = replace(job, search=job.search.model_copy(update={"shard": (0, 2, num_devices)}))
        strategies = [entry.strategy for entry in list_space(job)]
        assert [(strategy.zero, strategy.shard) for strategy in strategies] == [(1, 0), (3, 0), (3, 2)]
        assert describe_strategy(strategies[2]).endswith("ZeRO 3 shards of 2")

    def test_their_words_tell_strategies_apart(self, make_job) -> None:
        job = make_job(
            zero=(0, 1, 2, 3), reshard=(True, False), cp_kind=("ring", "all_to_all"), optimizer_offload=(False, True)
        )
        strategies = [entry.strategy for entry in list_space(job)]
        assert len({describe_strategy(strategy) for strategy in strategies}) == len(strategies)
        assert len({strategy_key(strategy) for strategy in strategies}) == len(strategies)
        told = Strategy(1, 1, 2, 1, cp=2, zero=3, reshard=False, cp_kind="ring", optimizer_offload=True)
        assert describe_strategy(told).endswith("ZeRO 3 CP by ring weights kept optimizer offload")


def test_rank_orders_are_tried_where_they_differ(make_job) -> None:
    job = make_job()
    plain = {entry.strategy for entry in list_space(job)}
    both = job.search.model_copy(update={"rank_order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")})
    added = {entry.strategy for entry in list_space(replace(job, search=both))} - plain
    assert added == {
        replace(strategy, rank_order="tp-cp-ep-pp-dp") for strategy in plain if strategy.pp > 1 and strategy.dp > 1
    }
    assert added
