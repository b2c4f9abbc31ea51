"""How long a collective takes in a group of ranks that may cross several levels of the network.

Ring algorithms (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"):
an all-gather or reduce-scatter of `size_bytes` (the full tensor) among n ranks moves (n-1)/n · size_bytes past every
rank; an all-reduce is one of each. Latency is that of a short collective, once for every level the group crosses:
that is how the levels state it.

In an all-to-all every rank sends a part to each other one over its own link of the level between them. Where the
dispatcher of experts is known (StackFacts.dispatcher), what it sends whom is counted by domains (Exchange).

Across levels the slowest one decides: of a group with m ranks inside each node every rank drives its own link, so that
the node's m links share what leaves it, and the rings together run at min(inner, m · outer bandwidth). That is what
NCCL's parallel rings do (NCCL tests, doc/PERFORMANCE.md, "bus bandwidth").

Groups of one kind communicate at once, and each device is in one of them: the devices of a network card share it
evenly (Link.devices_per_card). In a ring of single passes only the last ranks inside a node send out of it.

Reductions of many ranks across a network reach less of its bandwidth the more they are (Level.scale_ranks): the slowest
of them sets the pace, and they meet at switches.

Where the network was measured (network.py), its lines take the place of a level's figures, operation by operation: the
line of the very group where there is one, else that of each level that it crosses, put together by the same rule. All
groups of a shape are measured at once, so that what they share is in their lines (profilers/collectives.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.job.ranks import GroupName, Ranks, group_ranks
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.cost import Source
from mm_autoparallel.model.profiles.network import Line, NetworkProfile, Operation, moved_bytes

OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
"""What may be asked of a group."""


@dataclass(frozen=True)
class Group:
    """A communicator of `num_ranks`. bandwidth_bytes_per_s: of its rings together, past each rank.

    hop_bandwidth_bytes_per_s: of the slowest link between two neighbours alone. lines: of the operations of which
    something was measured, which then count in place of the other figures. exchange_bytes_per_s: of an all-to-all, past
    each rank (None: as rings). operation_factor: what times of an operation are multiplied by (missing: 1).
    level: the outermost that it crosses; inside: its ranks in one group of the level below. rank_ms_per_byte: what a
    rank takes beside the network for what passes it in gathers and scatters.
    """

    num_ranks: int
    bandwidth_bytes_per_s: float
    hop_bandwidth_bytes_per_s: float
    latency_ms: float
    lines: Mapping[Operation, Line] = field(default_factory=dict)
    exchange_bytes_per_s: float | None = None
    operation_factor: Mapping[Operation, float] = field(default_factory=dict)
    level: str = ""
    inside: int = 1
    rank_ms_per_byte: float = 0.0

    def all_gather_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of the gathered tensor."""
        return self._ring_ms("all_gather", size_bytes)

    def reduce_scatter_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of the tensor that every rank holds before; by formula it takes what gathering it takes."""
        return self._ring_ms("reduce_scatter", size_bytes)

    def all_reduce_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of the tensor that every rank holds before and after."""
        if "all_reduce" in self.lines:
            return self._ring_ms("all_reduce", size_bytes)
        return self.reduce_scatter_ms(size_bytes) + self.all_gather_ms(size_bytes)

    def all_to_all_ms(self, size_bytes: float) -> float:
        """`size_bytes`: of what every rank holds before, and as much after."""
        return self._ring_ms("all_to_all", size_bytes)

    def pass_on_ms(self, size_bytes: float) -> float:
        """Every rank passes `size_bytes` of its own to the next: one step of ring attention."""
        if self.num_ranks == 1 or size_bytes == 0:
            return 0.0
        factor = self.operation_factor.get("send_recv", 1.0)
        if "send_recv" in self.lines:
            return factor * self.lines["send_recv"].time_ms(size_bytes)
        return factor * (size_bytes / self.hop_bandwidth_bytes_per_s * 1e3 + self.latency_ms)

    @property
    def pass_latency_ms(self) -> float:
        """What of passing on does not depend on its bytes."""
        latency_ms = self.lines["send_recv"].latency_ms if "send_recv" in self.lines else self.latency_ms
        return self.operation_factor.get("send_recv", 1.0) * latency_ms

    def carried_bytes_per_s(self, operation: Operation) -> float:
        """What passes each rank per second in a long operation."""
        if operation in self.lines:
            return self.lines[operation].bandwidth_bytes_per_s
        if operation == "all_to_all" and self.exchange_bytes_per_s is not None:
            return self.exchange_bytes_per_s
        return self.hop_bandwidth_bytes_per_s if operation == "send_recv" else self.bandwidth_bytes_per_s

    def source(self, operation: Operation) -> Source:
        """Where the time of an operation comes from; the weakest of its parts counts."""
        if operation == "all_reduce" and operation not in self.lines and self.lines:
            return _weakest([self.source("reduce_scatter"), self.source("all_gather")], composed=True)
        return self.lines[operation].source if operation in self.lines else "analytic"

    def _ring_ms(self, operation: Operation, size_bytes: float) -> float:
        if self.num_ranks == 1 or size_bytes == 0:
            return 0.0
        passing_bytes = moved_bytes(operation, self.num_ranks, size_bytes)
        factor = self.operation_factor.get(operation, 1.0)
        rank_ms = self.rank_ms_per_byte * passing_bytes
        if operation in self.lines:
            return factor * (self.lines[operation].time_ms(passing_bytes) + rank_ms)
        return factor * (passing_bytes / self.carried_bytes_per_s(operation) * 1e3 + self.latency_ms + rank_ms)


ALONE = Group(1, float("inf"), float("inf"), 0.0)
"""A rank by itself: nothing is communicated."""


@dataclass(frozen=True)
class ExpertGroups:
    """A token's experts lie in `most` groups (0: in any) of `num_groups` (0: as many as domains), which are as large as
    each other and dealt to domains in their order.
    """

    most: int = 0
    num_groups: int = 0


ANY_GROUPS = ExpertGroups()


def reach_domains(num_domains: int, copies: int, groups: ExpertGroups = ANY_GROUPS) -> float:
    """The mean number of domains that a token with so many copies needs, where routers are balanced.

    Without groups d · (1 − (1 − 1/d)^k). With them each choice of `most` groups is as likely as another (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2), and every copy goes to any of their experts: a domain that holds j of the chosen
    ones is missed by (1 − j / most)^k of the tokens. A group that several domains share is chosen for all of them.
    Groups that cannot be dealt evenly count as one for each domain.
    """
    num_groups = groups.num_groups or num_domains
    if num_groups % num_domains and num_domains % num_groups:
        num_groups = num_domains
    if not 0 < groups.most < num_groups:
        return num_domains * (1.0 - (1.0 - 1.0 / num_domains) ** copies)
    held = max(1, num_groups // num_domains)
    part = min(1.0, num_groups / num_domains) / groups.most
    missed = sum(
        math.comb(held, chosen) * math.comb(num_groups - held, groups.most - chosen) * (1.0 - part * chosen) ** copies
        for chosen in range(min(held, groups.most) + 1)
    )
    return num_domains * (1.0 - missed / math.comb(num_groups, groups.most))


@dataclass(frozen=True)
class Exchange:
    """The all-to-all of tokens with their experts' ranks: `num_ranks`, `inside` of them in each domain, whose links are
    as fast as a node's: a device reaches these at node_bytes_per_s, and those beyond at network_bytes_per_s.
    """

    num_ranks: int
    inside: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    latency_ms: float

    @property
    def num_domains(self) -> int:
        return self.num_ranks // self.inside

    def one_way_ms(
        self, size_bytes: float, copies: int, once_a_domain: bool, groups: ExpertGroups = ANY_GROUPS
    ) -> float:
        """`size_bytes`: of all copies of a rank's tokens, which are dealt evenly to the ranks; each token has `copies`.

        once_a_domain: a token crosses the network once to each domain that it needs (reach_domains), and its copies are
        made there; else every copy goes to its rank by itself.
        """
        if self.num_ranks == 1 or size_bytes == 0:
            return 0.0
        token_bytes, domains = size_bytes / copies, self.num_domains
        if once_a_domain:
            reached = reach_domains(domains, copies, groups)
            inside_count, beyond_count = copies * (self.inside - 1) / self.inside, reached * (domains - 1) / domains
        else:
            inside_count = copies * (self.inside - 1) / self.num_ranks
            beyond_count = copies * (self.num_ranks - self.inside) / self.num_ranks
        moved_s = inside_count / self.node_bytes_per_s + beyond_count / self.network_bytes_per_s
        return token_bytes * moved_s * 1e3 + self.latency_ms


NO_EXCHANGE = Exchange(1, 1, float("inf"), float("inf"), 0.0)


def form_exchange(
    levels: Sequence[Level], strategy: Strategy, node_factor: float = 1.0, network_factor: float = 1.0
) -> Exchange:
    """That of the expert parallel ranks of `strategy`. levels: as they are reached in other collectives; the factors
    say how much more of a node's and of the network's bandwidth an all-to-all reaches.
    """
    ranks = group_ranks(strategy, "EP")
    crossings = _crossings(levels, ranks)
    if not crossings:
        return NO_EXCHANGE
    as_fast = [one for one in crossings if one.level.bandwidth_bytes_per_s >= levels[0].bandwidth_bytes_per_s]
    inside = math.prod(crossing.num_peers for crossing in as_fast)
    beyond = [crossing.level for crossing in crossings if crossing not in as_fast]
    return Exchange(
        num_ranks=ranks.num_ranks,
        inside=inside,
        node_bytes_per_s=levels[0].group_bandwidth_bytes_per_s(inside) * node_factor,
        network_bytes_per_s=min(
            (level.group_bandwidth_bytes_per_s(ranks.num_ranks // inside) * network_factor for level in beyond),
            default=float("inf"),
        ),
        latency_ms=sum(crossing.level.latency_ms for crossing in crossings),
    )


@dataclass(frozen=True)
class _Crossing:
    """A level that a group crosses: `num_peers` groups of the level below, `inside` ranks in each."""

    level: Level
    num_peers: int
    inside: int


def form_group(
    levels: Sequence[Level],
    num_ranks: int,
    stride: int,
    network: NetworkProfile | None = None,
    num_runs: int = 1,
    run_stride: int = 0,
) -> Group:
    """The communicator of `num_ranks` ranks that stand `stride` apart, or of num_runs such runs, run_stride apart.

    `levels`: innermost first, the last one spanning the cluster, as they are reached (Calibration.reached). Groups that
    do not divide a level evenly are taken at their worst: as many ranks inside as any of them surely has. network: what
    was measured, as it is.
    """
    ranks = Ranks(num_ranks, stride, num_runs, run_stride)
    num_ranks = ranks.num_ranks
    if num_ranks == 1:
        return ALONE
    ring_bytes_per_s = link_bytes_per_s = float("inf")
    latency_ms = 0.0
    exchange_bytes_per_s = float("inf")
    crossings = _crossings(levels, ranks)
    for crossing in crossings:
        level = crossing.level
        # of what a rank sends to its peers, the part for those beyond the level below goes over its own link
        beyond_fraction = (crossing.num_peers - 1) * crossing.inside / (num_ranks - 1)
        exchange_bytes_per_s = min(
            exchange_bytes_per_s, level.group_bandwidth_bytes_per_s(crossing.num_peers) / beyond_fraction
        )
        scale_factor = 1.0 + num_ranks / level.scale_ranks if level.scale_ranks else 1.0
        ring_bytes_per_s = min(
            ring_bytes_per_s, crossing.inside * level.group_bandwidth_bytes_per_s(crossing.num_peers) / scale_factor
        )
        link_bytes_per_s = min(
            link_bytes_per_s, level.group_bandwidth_bytes_per_s(2, _count_senders(level, ranks, crossing))
        )
        latency_ms += level.latency_ms
    lines: dict[Operation, Line] = {}
    if network:
        found = {op: _measured_line(network, op, num_ranks, crossings) for op in OPERATIONS}
        lines = {operation: line for operation, line in found.items() if line}
    group = Group(num_ranks, ring_bytes_per_s, link_bytes_per_s, latency_ms, lines, exchange_bytes_per_s)
    return replace(group, level=crossings[-1].level.name, inside=crossings[-1].inside)


def find_level(levels: Sequence[Level], ranks: Ranks) -> Level:
    """The outermost level that any group like `ranks` crosses: where they do not divide a level evenly some straddle
    it, and the slowest one sets the pace."""
    crossings = _crossings(levels, ranks)
    return crossings[-1].level if crossings else levels[0]


def group_of(
    levels: Sequence[Level], strategy: Strategy, name: GroupName, network: NetworkProfile | None = None
) -> Group:
    """The communicator that `strategy` calls `name`; levels and network as in `form_group`."""
    ranks = group_ranks(strategy, name)
    return form_group(levels, ranks.size, ranks.stride, network, ranks.num_runs, ranks.run_stride)


def hop_line(level: Level, network: NetworkProfile | None = None, num_sharing: int | None = None) -> Line:
    """What passing something on between two ranks takes whose innermost level in common is `level`.

    num_sharing: how many devices of a network card do so at once; all of them, unless told.
    """
    measured = network.line("send_recv", 2, level) if network else None
    if measured:
        return replace(measured, level=level.name)
    bytes_per_s = level.group_bandwidth_bytes_per_s(2, num_sharing)
    if level.hop_bandwidth_bytes_per_s is not None:
        bytes_per_s = min(bytes_per_s, level.hop_bandwidth_bytes_per_s)
    return Line(level.latency_ms, bytes_per_s, "analytic", level=level.name)


def exposed_ms(traffic_ms: float, cover_ms: float, hidden_fraction: float) -> float:
    """What traffic adds to the `cover_ms` of compute beside it, which hides `hidden_fraction` of their overlap."""
    return max(0.0, traffic_ms - hidden_fraction * min(traffic_ms, cover_ms))


def _crossings(levels: Sequence[Level], ranks: Ranks) -> list[_Crossing]:
    crossings, inside = [], 1  # ranks of the group within one group of the level below: each drives its own link
    for level in levels:
        within = max(1, math.gcd(level.num_devices, ranks.size * ranks.stride) // ranks.stride)
        if ranks.num_runs > 1:
            within *= max(1, math.gcd(level.num_devices, ranks.num_runs * ranks.run_stride) // ranks.run_stride)
        within = max(inside, within)
        if level is levels[-1]:
            within = ranks.num_ranks
        if within > inside:
            crossings.append(_Crossing(level, math.ceil(within / inside), inside))
        inside = within
    return crossings


def _count_senders(level: Level, ranks: Ranks, crossing: _Crossing) -> int:
    """Devices of one card that pass something on out of the level below, the groups all at once: the last rank inside
    of each group, which is `stride` neighbours of every stride · inside."""
    cards, period = level.devices_per_card, ranks.stride * crossing.inside
    return min(cards, ranks.stride * math.ceil(cards / period))


def _measured_line(
    network: NetworkProfile,
    operation: Operation,
    num_ranks: int,
    crossings: Sequence[_Crossing],
) -> Line | None:
    """None where none of the levels was measured."""
    if operation == "send_recv":
        hops = [hop_line(crossing.level, network) for crossing in crossings]
        if all(hop.source == "analytic" for hop in hops):
            return None
        return Line(  # every rank passes on at once, and the slowest pair sets the pace
            latency_ms=max(hop.latency_ms for hop in hops),
            bandwidth_bytes_per_s=min(hop.bandwidth_bytes_per_s for hop in hops),
            source=_weakest([hop.source for hop in hops], composed=False),
        )
    outermost = crossings[-1]
    exact = network.exact_line(operation, num_ranks, outermost.level.name, outermost.inside)
    if exact:
        return exact
    parts = []
    for crossing in crossings:
        level, line = crossing.level, network.line(operation, crossing.num_peers, crossing.level)
        if line is None:
            num_latencies = 2 if operation == "all_reduce" else 1
            bandwidth_bytes_per_s = level.group_bandwidth_bytes_per_s(crossing.num_peers)
            line = Line(num_latencies * level.latency_ms, bandwidth_bytes_per_s, "analytic")
        parts.append(Line(line.latency_ms, crossing.inside * line.bandwidth_bytes_per_s, line.source))
    if all(part.source == "analytic" for part in parts):
        return None
    return Line(
        latency_ms=sum(part.latency_ms for part in parts),
        bandwidth_bytes_per_s=min(part.bandwidth_bytes_per_s for part in parts),
        source=_weakest([part.source for part in parts], composed=len(parts) > 1),
    )


def _weakest(sources: Sequence[Source], composed: bool) -> Source:
    """`composed`: put together of several, so at best interpolated."""
    if "analytic" in sources:
        return "analytic"
    return "interpolated" if composed or "interpolated" in sources else "measured"
