"""Where a strategy's groups and stages lie on the cluster: which level each crosses, what they share, whose devices.

Groups of one kind work at once on all devices, and the sends of one stage boundary are made at once by all ranks of the
stage: whoever of them leaves a node over the same network card gets an equal part of it (Link.devices_per_card). Sends
of different boundaries, and groups of different kinds, are not taken to meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.ranks import GroupName, group_ranks
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.collectives import ALONE, Group, find_level, form_group, group_of, hop_line
from mm_autoparallel.model.profiles.network import Line, NetworkProfile, Operation

Ints = NDArray[np.int64]

_OPERATIONS: dict[GroupName, Operation] = {
    "TP": "all_gather",
    "CP": "send_recv",
    "DP": "reduce_scatter",
    "shard": "reduce_scatter",
    "copies": "all_reduce",
    "EP": "all_to_all",
    "expert DP": "reduce_scatter",
}
"""What each group mostly does."""


@dataclass(frozen=True)
class GroupPlace:
    """Where the groups called `name` lie: `size` ranks, `stride` apart (of several strides the innermost one).

    level: the outermost that any of them crosses. bandwidth_bytes_per_s: past each rank, of what it mostly does, with
    what it shares. num_groups: communicators of this kind, or hops of this level in one pass through the pipeline.
    """

    name: str
    size: int
    stride: int
    level: str
    bandwidth_bytes_per_s: float
    num_groups: int

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))


def place_groups(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> tuple[GroupPlace, ...]:
    """A row for every kind of group of several ranks, then one for each level that hops between stages cross.

    cluster: its levels as they are reached (Calibration.reached). network: what was measured of it. Where an encoder
    has sizes of its own, they are the decoder's.
    """
    places: list[GroupPlace] = []
    strategy = strategy.of_decoder()
    for kind, operation in _OPERATIONS.items():
        ranks = group_ranks(strategy, kind)
        if ranks.num_ranks == 1 or (kind == "expert DP" and strategy.ep == 1 and strategy.expert_tp == strategy.tp):
            continue
        if kind == ("DP" if strategy.shard else "shard"):
            continue
        level = find_level(cluster.levels, ranks)
        group = group_of(cluster.levels, strategy, kind, network)
        num_groups = strategy.world_size // ranks.num_ranks
        bytes_per_s = group.carried_bytes_per_s(operation)
        places.append(GroupPlace(kind, ranks.num_ranks, ranks.stride, level.name, bytes_per_s, num_groups))
    lines = hop_lines(cluster, strategy, network)
    names = [level.name for level, _ in _hop_levels(cluster, strategy)] * strategy.vpp
    for crossed in dict.fromkeys(names[: len(lines)]):
        found = [line.bandwidth_bytes_per_s for line, name in zip(lines, names, strict=False) if name == crossed]
        places.append(GroupPlace("PP hop", 2, strategy.stride_of("pp"), crossed, min(found), len(found)))
    return tuple(places)


def tied_group(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> Group:
    """The two ranks, one on the first and one on the last stage, that hold a copy of a tied table; alone with one."""
    if strategy.pp == 1:
        return ALONE
    level, num_sharing = _hop_levels(cluster, strategy)[-1]
    return form_group((level.model_copy(update={"devices_per_card": num_sharing}),), 2, 1, network)


def hop_lines(cluster: Cluster, strategy: Strategy, network: NetworkProfile | None = None) -> tuple[Line, ...]:
    """The hops between virtual stages, by the outermost level any of their pairs of ranks crosses; none with one stage.

    After its last stage a chunk goes on to the first stage again. Each rank sends its own part to the rank in its place
    of the next stage.
    """
    lines = [hop_line(level, network, num_sharing) for level, num_sharing in _hop_levels(cluster, strategy)]
    return tuple((lines * strategy.vpp)[: max(0, strategy.pp * strategy.vpp - 1)])


def _hop_levels(cluster: Cluster, strategy: Strategy) -> list[tuple[Level, int]]:
    """Of the hop out of each stage, the last one's leading to the first stage again: its level, and how many ranks
    share a card there; none with one stage."""
    if strategy.pp == 1:
        return []
    spans = tuple((level.num_devices, level.devices_per_card) for level in cluster.levels)
    found = _find_hops(spans, strategy.stride_of("pp"), strategy.pp, strategy.world_size)
    return [(cluster.levels[index], num_sharing) for index, num_sharing in found]


@lru_cache(maxsize=1024)
def _find_hops(
    spans: tuple[tuple[int, int], ...], length: int, num_stages: int, num_ranks: int
) -> tuple[tuple[int, int], ...]:
    """For the hop out of each stage the index of the outermost level that any pair of its ranks crosses, and the most
    ranks of one card that cross it.

    spans: devices of each level, and of its cards. length: ranks of a stage that stand side by side.
    """
    shared = any(per_card > 1 for _, per_card in spans)
    # if any pair of a run straddles a boundary of a level, its first or its last pair does
    places = np.arange(length) if shared else np.unique([0, length - 1])
    ranks = _stage_ranks(length, num_stages, num_ranks, places)
    others = np.roll(ranks, -1, axis=0)
    crossed, leaving = np.zeros(num_stages, dtype=np.int64), np.ones(ranks.shape, dtype=bool)
    for index, (num_devices, _) in enumerate(spans[:-1], start=1):
        beyond = ranks // num_devices != others // num_devices
        reach = beyond.any(axis=1)
        crossed[reach], leaving[reach] = index, beyond[reach]
    return tuple(
        (int(level), max(_most_of_a_card(side[stage, leaving[stage]], spans[level][1]) for side in (ranks, others)))
        for stage, level in enumerate(crossed)
    )


def _stage_ranks(length: int, num_stages: int, num_ranks: int, places: Ints) -> Ints:
    """[stages, ranks of each in rising order]: of every run of `length` side by side those at `places` in it."""
    firsts = np.arange(0, num_ranks, length * num_stages)
    ranks: Ints = np.arange(num_stages)[:, None] * length + (firsts[:, None] + places).ravel()
    return ranks


def _most_of_a_card(ranks: Ints, per_card: int) -> int:
    return int(np.bincount(ranks // per_card).max()) if per_card > 1 else 1


# ------------------------------------------------------------------------------------------------------- whose devices


def stage_memory_bytes(cluster: Cluster, strategy: Strategy) -> tuple[int, ...]:
    """Bytes of every device of each stage."""
    if not cluster.node_groups:
        return (cluster.device.memory_bytes,) * strategy.pp
    kinds = cluster.kinds
    firsts = (strategy.stage_runs(stage)[0][0] for stage in range(strategy.pp))
    return tuple(next(kind.device.memory_bytes for kind in kinds if first in kind.ranks) for first in firsts)


def stage_memory_limits(cluster: Cluster, strategy: Strategy) -> tuple[float, ...]:
    """Bytes that a plan may fill on every device of each stage."""
    return tuple(held * cluster.memory_fraction for held in stage_memory_bytes(cluster, strategy))


def stage_host_limits(cluster: Cluster, strategy: Strategy) -> tuple[float, ...]:
    """Bytes that a plan may keep on the host for every device of each stage; empty where that is not limited."""
    known = [(kind.ranks, cluster.host_limit_bytes(kind)) for kind in cluster.kinds]
    limits = [(ranks, limit_bytes) for ranks, limit_bytes in known if limit_bytes is not None]
    if len(limits) < 2:
        return tuple(limit_bytes for _, limit_bytes in limits) * strategy.pp
    return tuple(
        min(
            limit_bytes
            for ranks, limit_bytes in limits
            if any(run.start < ranks.stop and ranks.start < run.stop for run in strategy.stage_runs(stage))
        )
        for stage in range(strategy.pp)
    )


def stage_factors(cluster: Cluster, strategy: Strategy, kind_factors: Sequence[float] = ()) -> tuple[float, ...]:
    """How much longer each stage's blocks take than on an undisturbed device of the cluster.

    kind_factors: of the devices of each of cluster.node_groups, without its own time_factor; 1 where left out.
    A tensor parallel group waits for its slowest rank, and the step for its slowest replica, so a stage counts as slow
    as the slowest of its ranks. That is an upper bound where no replica has the slowest ranks of all stages
    (`replica_factors` tells each). A spread of speeds counts as the expected slowest of the ranks of a stage.
    """
    rows = replica_factors(cluster, strategy, kind_factors)
    return tuple(max(column) for column in zip(*rows, strict=True))


def replica_factors(
    cluster: Cluster, strategy: Strategy, kind_factors: Sequence[float] = ()
) -> tuple[tuple[float, ...], ...]:
    """The factors of each stage, of those replicas that no other one is as slow as in every stage.

    Replicas that wait for each other in every layer count as one: those that deal out tokens to each other's experts,
    and all where weights are gathered layer by layer (ZeRO 3).
    """
    if not (cluster.node_groups or cluster.slow_devices or cluster.device_time_spread_fraction):
        return ((1.0,) * strategy.pp,)
    length = strategy.stride_of("pp")
    ranks = _stage_ranks(length, strategy.pp, strategy.world_size, np.arange(length))
    per_rank = _rank_factors(cluster, kind_factors)[ranks]
    unit = strategy.tp * strategy.cp
    if strategy.ep > 1:
        unit = math.lcm(unit, strategy.ep * strategy.expert_tp)
    if strategy.zero == 3:
        unit = per_rank.shape[1]
    slowest = per_rank.reshape(strategy.pp, -1, unit).max(axis=2).T
    spread_factor = 1.0 + cluster.device_time_spread_fraction * expected_maximum_factor(per_rank.shape[1])
    rows = sorted({tuple(float(factor) for factor in row * spread_factor) for row in slowest}, reverse=True)
    return tuple(row for row in rows if not any(_covers(other, row) for other in rows if other != row))


def _covers(row: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine >= theirs for mine, theirs in zip(row, other, strict=True))


def _rank_factors(cluster: Cluster, kind_factors: Sequence[float]) -> NDArray[np.float64]:
    """[ranks of the cluster]"""
    factors = np.ones(cluster.num_devices)
    for index, kind in enumerate(cluster.kinds):
        factors[kind.ranks.start : kind.ranks.stop] = kind.time_factor * (kind_factors[index] if kind_factors else 1.0)
    for slow, time_factor in cluster.slow_ranks():
        factors[slow.start : slow.stop] *= time_factor
    return factors


@lru_cache(maxsize=256)
def expected_maximum_factor(num_ranks: int) -> float:
    """Expected largest of `num_ranks` independent standard normal variables.

    ∫ x n φ(x) Φ(x)^(n−1) dx (David & Nagaraja 2003, Order Statistics, 3rd edition, section 3.1), by the trapezoidal
    rule, which is exact to rounding for such smooth integrands.
    """
    xs = np.linspace(-12.0, 12.0, 4097)  # assumed enough for any number of ranks: beyond lies 2e-33 of the density
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in xs])
    log_below = np.where(xs < 0, np.log(below), np.log1p(-np.minimum(below[::-1], 0.5)))
    density = num_ranks * np.exp(-xs * xs / 2.0 + (num_ranks - 1) * log_below) / math.sqrt(2.0 * math.pi)
    return float((xs * density).sum() * (xs[1] - xs[0]))
