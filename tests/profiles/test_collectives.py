"""Collectives against the ring formulas, on one level and across several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.profiles.collectives import ALONE, form_group

NODE = Level(name="node", num_devices=8, bandwidth_bytes_per_s=200e9, latency_ms=0.01)
NETWORK = Level(name="cluster", num_devices=64, bandwidth_bytes_per_s=25e9, latency_ms=0.02)


def test_one_rank_communicates_nothing() -> None:
    assert form_group((NODE, NETWORK), 1, 1) == ALONE
    assert ALONE.all_gather_ms(1e9) == ALONE.all_reduce_ms(1e9) == ALONE.pass_on_ms(1e9) == 0.0


def test_inside_a_node_the_ring_formulas_hold() -> None:
    group = form_group((NODE, NETWORK), 4, 2)
    assert group.all_gather_ms(1e9) == pytest.approx(3 / 4 * 1e9 / 200e9 * 1e3 + 0.01)
    assert group.reduce_scatter_ms(1e9) == group.all_gather_ms(1e9)
    assert group.all_reduce_ms(1e9) == pytest.approx(2 * group.all_gather_ms(1e9))
    assert group.pass_on_ms(1e9) == pytest.approx(1e9 / 200e9 * 1e3 + 0.01)
    assert group.all_gather_ms(0.0) == 0.0


@pytest.mark.parametrize(
    ("num_ranks", "stride", "links_out_of_a_node"),
    [(16, 1, 8), (16, 2, 4), (8, 4, 2), (8, 8, 1), (2, 32, 1), (6, 2, 2), (3, 3, 1)],
)
def test_across_nodes_every_rank_of_a_node_drives_its_own_link(
    num_ranks: int, stride: int, links_out_of_a_node: int
) -> None:
    group = form_group((NODE, NETWORK), num_ranks, stride)
    assert group.bandwidth_bytes_per_s == min(200e9, links_out_of_a_node * 25e9)
    assert group.hop_bandwidth_bytes_per_s == 25e9
    assert group.latency_ms == pytest.approx(0.03 if links_out_of_a_node > 1 else 0.02)


@pytest.mark.parametrize(("num_ranks", "stride", "outside"), [(16, 1, 8), (64, 1, 56), (4, 8, 3), (8, 4, 6)])
def test_in_an_exchange_a_rank_drives_its_own_link_alone(num_ranks: int, stride: int, outside: int) -> None:
    """What goes to ranks of other nodes goes over one port of the network; a ring would share all ports of the node."""
    group = form_group((NODE, NETWORK), num_ranks, stride)
    assert group.all_to_all_ms(1e9) == pytest.approx(outside / num_ranks * 1e9 / 25e9 * 1e3 + group.latency_ms)


def test_an_exchange_inside_a_node_is_like_a_ring() -> None:
    group = form_group((NODE, NETWORK), 8, 1)
    assert group.all_to_all_ms(1e9) == group.all_gather_ms(1e9)


def test_a_fast_network_does_not_outrun_the_node() -> None:
    fast = NETWORK.model_copy(update={"bandwidth_bytes_per_s": 100e9})
    assert form_group((NODE, fast), 16, 1).bandwidth_bytes_per_s == 200e9


def test_pairwise_links_serve_small_groups_slowly() -> None:
    mesh = NODE.model_copy(update={"pair_bandwidth_bytes_per_s": 28e9})
    assert form_group((mesh,), 2, 1).bandwidth_bytes_per_s == 28e9
    assert form_group((mesh,), 8, 1).bandwidth_bytes_per_s == pytest.approx(7 * 28e9)
    assert form_group((mesh,), 8, 1).hop_bandwidth_bytes_per_s == 28e9


def test_the_middle_of_three_levels_can_be_the_slowest() -> None:
    rack = Level(name="rack", num_devices=32, bandwidth_bytes_per_s=10e9, latency_ms=0.015)
    group = form_group((NODE, rack, NETWORK), 64, 1)
    assert group.bandwidth_bytes_per_s == 8 * 10e9
    assert group.latency_ms == pytest.approx(0.01 + 0.015 + 0.02)


@given(
    num_ranks=st.integers(2, 64),
    stride=st.integers(1, 16),
    factors=st.tuples(st.floats(1, 10), st.floats(1, 10)),
    size_bytes=st.floats(1, 1e12),
)
def test_more_bandwidth_is_never_slower(
    num_ranks: int, stride: int, factors: tuple[float, float], size_bytes: float
) -> None:
    levels = (NODE, NETWORK)
    faster = tuple(
        level.model_copy(update={"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor})
        for level, factor in zip(levels, factors, strict=True)
    )
    slow, fast = form_group(levels, num_ranks, stride), form_group(faster, num_ranks, stride)
    assert fast.all_reduce_ms(size_bytes) <= slow.all_reduce_ms(size_bytes)
    assert fast.pass_on_ms(size_bytes) <= slow.pass_on_ms(size_bytes)
