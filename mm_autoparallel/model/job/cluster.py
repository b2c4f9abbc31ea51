"""Cluster: how many devices, what each can do, and the levels of network between them.

Ranks fill one node after the other, and nodes stand in the order of `node_groups`; which rank has which part of a job
is the strategy's to say (model/job/strategy.py, RANK_ORDERS).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.domains import domain_reason, list_default_levels
from mm_autoparallel.records import (
    Bytes,
    Count,
    Factor,
    Few,
    Flag,
    Fraction,
    Name,
    Noun,
    Number,
    PositiveBytes,
    Rate,
    Time,
)

SlowdownFactor = Annotated[float, Field(strict=True, ge=1, le=1e3, allow_inf_nan=False)]
"""How many times as long something takes: at least 1."""
USUAL_DEVICES_PER_NODE = 8
"""Where nobody says how many devices a node has. Assumed."""

UNKNOWN_SLOWDOWN = "assumed: none, until it is measured or stated"
"""What the catalog says of slowdown_factors."""


class Link(Noun):
    """What one device gets out of a network in one direction, all its links together.

    latency_ms: of the smallest message. pair_bandwidth_bytes_per_s: between two devices, where they are joined pairwise
    and not by a switch; a group of k devices then gets k − 1 times as much, at most `bandwidth_bytes_per_s`.
    devices_per_card: so many neighbours share one network card. The figures above are then the card's, and what one
    device gets when it alone uses it; when k of them send at once, each gets 1/k.
    """

    bandwidth_bytes_per_s: Rate
    latency_ms: Time
    pair_bandwidth_bytes_per_s: Rate | None = None
    devices_per_card: Few = 1

    def group_bandwidth_bytes_per_s(self, size: int, num_sharing: int | None = None) -> float:
        """What each of `size` devices sends to the others in a collective, one direction.

        num_sharing: how many devices of a card send at once; all of them, unless told.
        """
        num_sharing = num_sharing or self.devices_per_card
        if self.pair_bandwidth_bytes_per_s is None:
            return self.bandwidth_bytes_per_s / num_sharing
        return min(self.bandwidth_bytes_per_s, max(size - 1, 1) * self.pair_bandwidth_bytes_per_s) / num_sharing


class Level(Link):
    """One level of the network. `num_devices`: how many devices one group of this level spans, inner levels included.

    tensor_parallel: tensor parallel groups may span this level although it is wider than a node. scale_ranks: n ranks
    of one collective across this level reach 1/(1 + n / scale_ranks) of its bandwidth (None: all of it).
    hop_bandwidth_bytes_per_s: of what one stage sends the next (None: the same). of_node_link: the node's link makes
    this level too, and it is reached as the node is.
    """

    name: Name
    num_devices: Count
    tensor_parallel: Flag = False
    of_node_link: Flag = False
    scale_ranks: Count | None = None
    hop_bandwidth_bytes_per_s: Rate | None = None
    source: str = "job file"


class Device(Noun):
    """One accelerator. `sources` says for each figure where it came from.

    memory_bytes: what a program sees. bf16_flops_per_s: peak of dense matrix products. context_bytes: what the runtime
    keeps beside the tensors, and communicators too where communicator_bytes, which each of them takes, is not given.
    matrix_workspace_bytes: what PyTorch takes for matrix products, for each thread that runs some (0: in the context).
    node_link, network_link: levels of a cluster that names none. host_link_bytes_per_s: between device and host, one
    way. host_memory_bytes_per_s: a device's share of what the host's memory reads and writes. matrix_units:
    multiprocessors or cores of which each multiplies tiles of matrices. None: not known.
    fp8_flops_per_s, fp4_flops_per_s: peaks of dense matrix products in eight and in four bits (None: it has no such
    units). clock_fraction: what power leaves of the clock of all its peaks under load (None: all). domain_devices: the
    most devices that its node link joins (None: not known). slowdown_factors: how many times as long computation and
    traffic take while both run, by what the traffic is for: `data` parallel ranks, `tensor` parallel ranks or `experts`
    (model/profiles/lanes.py); what was measured counts before it.
    """

    name: Name
    memory_bytes: PositiveBytes
    bf16_flops_per_s: Rate
    memory_bytes_per_s: Rate
    context_bytes: Bytes
    communicator_bytes: Bytes = 0
    matrix_workspace_bytes: Bytes = 0
    node_link: Link
    network_link: Link
    host_link_bytes_per_s: Rate | None = None
    host_memory_bytes_per_s: Rate | None = None
    matrix_units: Few | None = None
    fp8_flops_per_s: Rate | None = None
    fp4_flops_per_s: Rate | None = None
    clock_fraction: Fraction | None = None
    domain_devices: Few | None = None
    slowdown_factors: dict[Literal["data", "tensor", "experts"], SlowdownFactor] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)


class NodeGroup(Noun):
    """Consecutive nodes of one kind. What is left out is the cluster's.

    time_factor: how much longer a block takes there than on the cluster's device; on another device, than its own
    figures say.
    """

    num_nodes: Few
    devices_per_node: Few | None = None
    device: Device | None = None
    host_memory_bytes: Bytes | None = None
    time_factor: Factor = 1.0


@dataclass(frozen=True)
class NodeKind:
    """The ranks on consecutive nodes of one kind, and what those nodes are."""

    ranks: range
    devices_per_node: int
    device: Device
    time_factor: float
    host_memory_bytes: int | None


class SlowDevice(Noun):
    """One rank, or all of one node, both counted from 0, on which a block takes `time_factor` times as long."""

    rank: Number | None = None
    node: Number | None = None
    time_factor: Factor

    @model_validator(mode="after")
    def _check_one_is_named(self) -> SlowDevice:
        if (self.rank is None) == (self.node is None):
            raise ValueError("a slow device is named by its `rank` or by its `node`; give one of the two")
        return self


class Cluster(Noun):
    """`num_nodes` × `devices_per_node` equal devices. `levels` innermost first; by default the node and the network,
    and between them the domain of a node link that joins several nodes (model/job/domains.py).

    memory_fraction: the part of a device's memory that a plan may fill; 0.95 is assumed (fragmentation takes the rest).
    host_memory_bytes: of one node, which its devices share evenly (None: it is not limited). host_memory_fraction: the
    part of it that a plan may fill; 0.8 is assumed (processes, loaders of data and the system take the rest).
    node_groups: nodes of several kinds, in order, together num_nodes; the levels are the same for all. Where nodes
    differ in size, a level inside a node spans devices that divide every node.
    slow_devices: stragglers. device_time_spread_fraction: devices differ in speed, their times normally distributed
    with this standard deviation, relative to the mean.
    """

    num_nodes: Few
    devices_per_node: Few
    device: Device
    levels: tuple[Level, ...] = ()
    memory_fraction: Fraction = 0.95
    node_groups: tuple[NodeGroup, ...] = ()
    slow_devices: tuple[SlowDevice, ...] = ()
    device_time_spread_fraction: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    host_memory_bytes: Bytes | None = None
    host_memory_fraction: Fraction = 0.8

    @model_validator(mode="after")
    def _complete_and_check_levels(self) -> Cluster:
        self._check_node_groups()
        for kind in self.kinds:
            reason = domain_reason(kind.device, kind.devices_per_node)
            if reason:
                raise ValueError(reason)
        if not self.levels:
            usual = list_default_levels(self.device, self.node_span, self.num_devices)
            object.__setattr__(self, "levels", tuple(Level(**fields) for fields in usual))
        names = [level.name for level in self.levels]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f'two levels are called "{twice}"; groups and measurements are told by a level\'s name')
        spanned = 1
        for level in self.levels:
            if level is not self.levels[0] and level.num_devices <= spanned:
                raise ValueError(
                    f"level {level.name} spans {level.num_devices} devices and the one inside it {spanned}; levels "
                    "stand innermost first, and each spans more devices than the one before"
                )
            if level.num_devices % spanned:
                raise ValueError(
                    f"level {level.name} spans {level.num_devices} devices, which is no multiple of the {spanned} of "
                    "the level inside it"
                )
            if self.node_span % level.devices_per_card:
                raise ValueError(
                    f"level {level.name} has devices_per_card {level.devices_per_card}, which does not divide the "
                    f"{self.node_span} devices of a node; a card belongs to one node"
                )
            spanned = level.num_devices
        if spanned != self.num_devices:
            raise ValueError(
                f"the outermost level {self.levels[-1].name} spans {spanned} devices and the cluster has "
                f"{self._size_in_words()}; its num_devices must be {self.num_devices}"
            )
        self._check_slow_devices()
        return self

    def _check_node_groups(self) -> None:
        held = [group.num_nodes for group in self.node_groups]
        if held and sum(held) != self.num_nodes:
            raise ValueError(
                f"node_groups hold {' + '.join(map(str, held))} = {sum(held)} nodes and num_nodes is {self.num_nodes}; "
                "they must be equal"
            )
        unlimited = [index for index, kind in enumerate(self.kinds) if kind.host_memory_bytes is None]
        if held and 0 < len(unlimited) < len(held):
            raise ValueError(
                f"node_groups[{unlimited[0]}] has no host_memory_bytes and others have some; give it for every group, "
                "or once for the cluster"
            )

    def _check_slow_devices(self) -> None:
        for index, slow in enumerate(self.slow_devices):
            for name, found, number in (("rank", slow.rank, self.num_devices), ("node", slow.node, self.num_nodes)):
                if found is not None and found >= number:
                    raise ValueError(
                        f"slow_devices[{index}] names {name} {found}, and the cluster's {name}s are 0 to {number - 1}"
                    )

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """node_groups with everything filled in, and the ranks on each; one kind where there are none."""
        kinds, end = [], 0
        for group in self.node_groups or (NodeGroup(num_nodes=self.num_nodes),):
            per_node = group.devices_per_node or self.devices_per_node
            first, end = end, end + group.num_nodes * per_node
            host_bytes = self.host_memory_bytes if group.host_memory_bytes is None else group.host_memory_bytes
            device = group.device or self.device
            kinds.append(NodeKind(range(first, end), per_node, device, group.time_factor, host_bytes))
        return tuple(kinds)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices of each node, in order."""
        kinds = self.kinds
        return tuple(kind.devices_per_node for kind in kinds for _ in range(len(kind.ranks) // kind.devices_per_node))

    @property
    def num_devices(self) -> int:
        if not self.node_groups:
            return self.num_nodes * self.devices_per_node
        return self.kinds[-1].ranks.stop

    @property
    def node_span(self) -> int:
        """Devices of a node; where nodes differ in size, as many as divide every node."""
        if not self.node_groups:
            return self.devices_per_node
        return math.gcd(*(kind.devices_per_node for kind in self.kinds))

    @property
    def memory_limit_bytes(self) -> float:
        """Of the cluster's device; where nodes are of several kinds, costs/topology.py tells that of each stage."""
        return self.device.memory_bytes * self.memory_fraction

    def host_limit_bytes(self, kind: NodeKind) -> float | None:
        """What a plan may keep on the host for each device of such a node; None where that is not limited."""
        if kind.host_memory_bytes is None:
            return None
        return kind.host_memory_bytes * self.host_memory_fraction / kind.devices_per_node

    @property
    def max_tensor_parallel(self) -> int:
        """Devices of the widest level a tensor parallel group may span: the node, or wider where a level says so."""
        return max([self.node_span, *(level.num_devices for level in self.levels if level.tensor_parallel)])

    def _size_in_words(self) -> str:
        if not self.node_groups:
            return f"{self.num_nodes} x {self.devices_per_node}"
        sizes = ((len(kind.ranks) // kind.devices_per_node, kind.devices_per_node) for kind in self.kinds)
        return " + ".join(f"{num_nodes} x {per_node}" for num_nodes, per_node in sizes)

    def uneven_reason(self, num_devices: int) -> str | None:
        """Why the first `num_devices` devices are neither whole nodes nor a part of the first one, or leave a group of
        an inner level unfinished; None where they can be used alone."""
        kinds = self.kinds
        if num_devices > kinds[0].devices_per_node:
            last = next((kind for kind in kinds if num_devices <= kind.ranks.stop), kinds[-1])
            if (num_devices - last.ranks.start) % last.devices_per_node:
                sizes = " or ".join(map(str, dict.fromkeys(kind.devices_per_node for kind in kinds)))
                return f"{num_devices} devices are no whole nodes of {sizes}"
        for level in self.levels:
            if num_devices > level.num_devices and num_devices % level.num_devices:
                return f"{num_devices} devices are no whole groups of level {level.name}, {level.num_devices} each"
        return None

    def slow_ranks(self) -> tuple[tuple[range, float], ...]:
        """The ranks of each slow device or node, and their time factor."""
        found = []
        for slow in self.slow_devices:
            first = slow.rank if slow.rank is not None else sum(self.node_sizes[: slow.node])
            num_ranks = 1 if slow.node is None else self.node_sizes[slow.node]
            found.append((range(first, first + num_ranks), slow.time_factor))
        return tuple(found)

    def resized(self, num_devices: int) -> Cluster:
        """The part of this cluster with `num_devices` devices: a part of the first node, or whole nodes.

        A part of a node has that part of its host's memory. Raises JobError where there are not as many devices, or
        where they are uneven.
        """
        if num_devices > self.num_devices:
            raise JobError(
                f"{num_devices} devices are asked for and the cluster has {self._size_in_words()} = {self.num_devices}"
            )
        reason = self.uneven_reason(num_devices)
        if reason:
            raise JobError(f"{reason}; use a part of one node or whole nodes of the {self._size_in_words()}")
        num_nodes = 1 + sum(end < num_devices for end in itertools.accumulate(self.node_sizes))
        levels = []
        for level in self.levels:
            cards = math.gcd(level.devices_per_card, num_devices)
            spans = min(level.num_devices, num_devices)
            levels.append(level.model_copy(update={"num_devices": spans, "devices_per_card": cards}))
            if level.num_devices >= num_devices:
                break
        return Cluster(
            num_nodes=num_nodes,
            devices_per_node=min(self.devices_per_node, num_devices),
            device=self.device,
            levels=tuple(levels),
            memory_fraction=self.memory_fraction,
            node_groups=self._first_groups(num_nodes, num_devices),
            slow_devices=tuple(
                slow
                for slow, (ranks, _) in zip(self.slow_devices, self.slow_ranks(), strict=True)
                if ranks.start < num_devices
            ),
            device_time_spread_fraction=self.device_time_spread_fraction,
            host_memory_bytes=_share(self.host_memory_bytes, self.devices_per_node, num_devices),
            host_memory_fraction=self.host_memory_fraction,
        )

    def _first_groups(self, num_nodes: int, num_devices: int) -> tuple[NodeGroup, ...]:
        """The node groups of the first `num_nodes` nodes, which hold `num_devices` devices."""
        kept: list[NodeGroup] = []
        for group, kind in zip(self.node_groups, self.kinds, strict=False):  # without groups there is one kind
            if num_nodes:
                taken = min(num_nodes, group.num_nodes)
                part = {
                    "num_nodes": taken,
                    "devices_per_node": min(kind.devices_per_node, num_devices),
                    "host_memory_bytes": _share(kind.host_memory_bytes, kind.devices_per_node, num_devices),
                }
                kept.append(group.model_copy(update=part))
                num_nodes -= taken
        return tuple(kept)


def _share(host_bytes: int | None, devices_per_node: int, num_devices: int) -> int | None:
    """What `num_devices` devices of a node have of its host's memory."""
    if host_bytes is None or num_devices >= devices_per_node:
        return host_bytes
    return host_bytes * num_devices // devices_per_node
