"""Rank orders: the groups of every order against rank lists that are built coordinate by coordinate."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.model.job.layers import Experts, Layers
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.job.ranks import GroupName, Ranks, group_ranks
from mm_autoparallel.model.job.strategy import RANK_ORDERS, Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.collectives import find_level

SIZES = st.sampled_from([1, 2, 3, 4])


def build_groups(order: str, sizes: dict[str, int], varied: tuple[str, ...]) -> set[frozenset[int]]:
    """All groups of ranks that differ in `varied` alone, from the rank of every combination of coordinates."""
    names = order.split("-")
    groups: dict[tuple[int, ...], set[int]] = {}
    for coordinates in itertools.product(*(range(sizes[name]) for name in names)):
        rank = sum(c * math.prod(sizes[inner] for inner in names[:i]) for i, c in enumerate(coordinates))
        fixed = tuple(c for name, c in zip(names, coordinates, strict=True) if name not in varied)
        groups.setdefault(fixed, set()).add(rank)
    return {frozenset(group) for group in groups.values()}


def list_groups(ranks: Ranks, world_size: int) -> set[frozenset[int]]:
    """All groups like the one from rank 0 on: each rank that is in none yet begins another."""
    groups, taken = set(), set[int]()
    for first in range(world_size):
        if first not in taken:
            members = {
                first + run * ranks.run_stride + place * ranks.stride
                for run in range(ranks.num_runs)
                for place in range(ranks.size)
            }
            groups.add(frozenset(members))
            taken |= members
    return groups


def attention_sizes(strategy: Strategy) -> dict[str, int]:
    return {"tp": strategy.tp, "cp": strategy.cp, "ep": 1, "dp": strategy.dp, "pp": strategy.pp}


VARIED: dict[GroupName, tuple[str, ...]] = {"TP": ("tp",), "CP": ("cp",), "DP": ("cp", "dp")}


@given(order=st.sampled_from(list(RANK_ORDERS)), pp=SIZES, tp=SIZES, cp=SIZES, dp=SIZES)
@settings(max_examples=150, deadline=None)
def test_groups_are_those_of_the_order(order: str, pp: int, tp: int, cp: int, dp: int) -> None:
    strategy = Strategy(pp=pp, tp=tp, cp=cp, dp=dp, mbs=1, rank_order=order)
    for name, varied in VARIED.items():
        expected = build_groups(order, attention_sizes(strategy), varied)
        assert list_groups(group_ranks(strategy, name), strategy.world_size) == expected, name


@given(order=st.sampled_from(list(RANK_ORDERS)), pp=SIZES, tp=SIZES, cp=SIZES, dp=SIZES, ep=SIZES, whole=st.booleans())
@settings(max_examples=150, deadline=None)
def test_groups_of_experts_are_those_of_their_own_division(
    order: str, pp: int, tp: int, cp: int, dp: int, ep: int, whole: bool
) -> None:
    strategy = Strategy(pp=pp, tp=tp, cp=cp, dp=dp, mbs=1, ep=ep, etp=1 if whole else 0, rank_order=order)
    assume(tp * cp * dp % (ep * strategy.expert_tp) == 0)
    assume(order == "tp-cp-ep-dp-pp" or pp == 1 or strategy.expert_dp == dp)
    sizes = {"tp": strategy.expert_tp, "cp": 1, "ep": ep, "dp": strategy.expert_dp, "pp": pp}
    for name, varied in (("EP", ("ep",)), ("expert DP", ("dp",))):
        assert list_groups(group_ranks(strategy, name), strategy.world_size) == build_groups(order, sizes, varied)  # type: ignore[arg-type]
    # pipelines of experts and of all else are the same ranks
    assert build_groups(order, sizes, ("pp",)) == build_groups(order, attention_sizes(strategy), ("pp",))


@given(order=st.sampled_from(list(RANK_ORDERS)), pp=SIZES, tp=SIZES, cp=SIZES, dp=SIZES)
@settings(max_examples=100, deadline=None)
def test_a_stage_is_what_its_pipelines_hold_there(order: str, pp: int, tp: int, cp: int, dp: int) -> None:
    strategy = Strategy(pp=pp, tp=tp, cp=cp, dp=dp, mbs=1, rank_order=order)
    pipelines = [sorted(group) for group in build_groups(order, attention_sizes(strategy), ("pp",))]
    for stage in range(pp):
        held = [rank for run in strategy.stage_runs(stage) for rank in run]
        assert held == sorted(pipeline[stage] for pipeline in pipelines)


@pytest.mark.slow
@given(
    order=st.sampled_from(list(RANK_ORDERS)),
    pp=SIZES,
    tp=SIZES,
    cp=SIZES,
    dp=SIZES,
    inner=st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_the_level_of_a_group_is_the_one_that_its_worst_twin_crosses(
    order: str, pp: int, tp: int, cp: int, dp: int, inner: list[int]
) -> None:
    strategy = Strategy(pp=pp, tp=tp, cp=cp, dp=dp, mbs=1, rank_order=order)
    spans = list(itertools.accumulate(inner, operator.mul))
    # the world is as large as levels and strategy ask for together: further replicas
    world_size = math.lcm(strategy.world_size, 2 * spans[-1])
    strategy = replace(strategy, dp=dp * world_size // strategy.world_size)
    spans.append(world_size)
    levels = tuple(
        Level(name=str(index), num_devices=span, bandwidth_bytes_per_s=1e9, latency_ms=0.01)
        for index, span in enumerate(spans)
    )
    num_nodes = world_size // spans[0]
    made = Cluster(num_nodes=num_nodes, devices_per_node=spans[0], device=DEVICES["a100-80g"], levels=levels)
    for name, varied in VARIED.items():
        ranks = group_ranks(strategy, name)
        worst = max(
            next(index for index, span in enumerate(spans) if len({rank // span for rank in group}) == 1)
            for group in build_groups(order, attention_sizes(strategy), varied)
        )
        assert find_level(made.levels, ranks) == made.levels[worst], (name, spans)


LAYERS = Layers(num_layers=8, hidden_size=512, ffn_size=2048, num_heads=8, norm="rms")
DENSE = Model(name="dense", encoders=(), text=Decoder(vocab_size=32000, layers=LAYERS))
SPARSE = DENSE.model_copy(
    update={
        "text": DENSE.text.model_copy(
            update={"layers": LAYERS.model_copy(update={"experts": Experts(num_experts=8, top_k=2, ffn_size=512)})}
        )
    }
)
FOUR_NODES = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"])
WORKLOAD = Workload(global_batch_size=64, seq_length=4096)


@pytest.mark.parametrize(
    ("model", "sizes", "reason"),
    [
        (DENSE, {"pp": 4, "tp": 2, "dp": 4}, None),
        (DENSE, {"pp": 4, "tp": 2, "cp": 2, "dp": 2}, "CP 2, EP 1 and ETP 2 make 4 of them beside DP 2"),
        (DENSE, {"pp": 1, "tp": 2, "cp": 2, "dp": 8}, None),
        (SPARSE, {"pp": 4, "tp": 2, "dp": 4, "ep": 4}, "make 1 of them beside DP 4"),
        (SPARSE, {"pp": 4, "tp": 2, "dp": 4, "ep": 2, "etp": 1}, None),
        (SPARSE, {"pp": 4, "tp": 2, "cp": 2, "dp": 2, "ep": 2}, None),
    ],
)
def test_pipelines_inside_nodes_need_as_many_replicas_of_experts(
    model: Model, sizes: dict[str, int], reason: str | None
) -> None:
    strategy = Strategy(**sizes, mbs=1, rank_order="tp-cp-ep-pp-dp")
    found = unlawful_reason(model, FOUR_NODES, WORKLOAD, strategy)
    assert found is None if reason is None else found is not None and reason in found


def test_an_order_that_nobody_knows_is_told() -> None:
    strategy = Strategy(pp=4, tp=2, dp=4, mbs=1, rank_order="pp-tp-dp")
    assert "known are tp-cp-ep-dp-pp, tp-cp-ep-pp-dp" in str(unlawful_reason(DENSE, FOUR_NODES, WORKLOAD, strategy))
    with pytest.raises(ValueError, match="tp-cp-ep-dp-pp"):
        SearchSpace(rank_order=("pp-tp-dp",))  # type: ignore[arg-type]
