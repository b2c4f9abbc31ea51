"""Cluster: how many devices, what each can do, and the levels of network between them.

Ranks are numbered as Megatron numbers them: tensor parallel fastest, then context, then data, pipeline slowest
(Megatron-LM, megatron/core/parallel_state.py, order "tp-cp-ep-dp-pp"), and fill one node after the other.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from mm_autoparallel.errors import JobError
from mm_autoparallel.job.fields import Bytes, Count, Few, Flag, Fraction, Name, NonNegative, Noun, Positive


class Link(Noun):
    """What one device gets out of a network in one direction, all its links together.

    latency_ms: of the smallest message. pair_bandwidth_bytes_per_s: between two devices, where they are joined pairwise
    and not by a switch; a group of k devices then gets k − 1 times as much, at most `bandwidth_bytes_per_s`.
    """

    bandwidth_bytes_per_s: Positive
    latency_ms: NonNegative
    pair_bandwidth_bytes_per_s: Positive | None = None

    def group_bandwidth_bytes_per_s(self, size: int) -> float:
        """What each of `size` devices sends to the others in a collective, one direction."""
        if self.pair_bandwidth_bytes_per_s is None:
            return self.bandwidth_bytes_per_s
        return min(self.bandwidth_bytes_per_s, max(size - 1, 1) * self.pair_bandwidth_bytes_per_s)


class Level(Link):
    """One level of the network. `num_devices`: how many devices one group of this level spans, inner levels included.

    tensor_parallel: tensor parallel groups may span this level although it is wider than a node.
    """

    name: Name
    num_devices: Count
    tensor_parallel: Flag = False
    source: str = "job file"


class Device(Noun):
    """One accelerator. `sources` says for each figure where it came from.

    memory_bytes: what a program sees. bf16_flops_per_s: peak of dense matrix products. context_bytes: what the runtime
    keeps beside the tensors, and communicators too where communicator_bytes, which each of them takes, is not given.
    matrix_workspace_bytes: what PyTorch takes for matrix products, for each thread that runs some (0: in the context).
    node_link, network_link: levels of a cluster that names none. host_link_bytes_per_s: between device and host, one
    way. host_memory_bytes_per_s: a device's share of what the host's memory reads and writes. None: not known.
    """

    name: Name
    memory_bytes: Bytes
    bf16_flops_per_s: Positive
    memory_bytes_per_s: Positive
    context_bytes: Bytes
    communicator_bytes: Bytes = 0
    matrix_workspace_bytes: Bytes = 0
    node_link: Link
    network_link: Link
    host_link_bytes_per_s: Positive | None = None
    host_memory_bytes_per_s: Positive | None = None
    sources: dict[str, str] = Field(default_factory=dict)


class Cluster(Noun):
    """`num_nodes` × `devices_per_node` equal devices. `levels` innermost first; by default the node and the network.

    memory_fraction: the part of a device's memory that a plan may fill; 0.95 is assumed (fragmentation takes the rest).
    """

    num_nodes: Few
    devices_per_node: Few
    device: Device
    levels: tuple[Level, ...] = ()
    memory_fraction: Fraction = 0.95

    @model_validator(mode="after")
    def _complete_and_check_levels(self) -> Cluster:
        if not self.levels:
            object.__setattr__(self, "levels", self._default_levels())
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
            spanned = level.num_devices
        if spanned != self.num_devices:
            raise ValueError(
                f"the outermost level {self.levels[-1].name} spans {spanned} devices and the cluster has "
                f"{self.num_nodes} x {self.devices_per_node}; its num_devices must be {self.num_devices}"
            )
        return self

    def _default_levels(self) -> tuple[Level, ...]:
        levels: list[Level] = []
        for name, link, num_devices in (
            ("node", self.device.node_link, self.devices_per_node),
            ("cluster", self.device.network_link, self.num_devices),
        ):
            if not levels or num_devices > levels[-1].num_devices:
                source = self.device.sources.get("node_link" if name == "node" else "network_link", "job file")
                levels.append(Level(name=name, num_devices=num_devices, source=source, **link.model_dump()))
        return tuple(levels)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def memory_limit_bytes(self) -> float:
        return self.device.memory_bytes * self.memory_fraction

    @property
    def max_tensor_parallel(self) -> int:
        """Devices of the widest level a tensor parallel group may span: the node, or wider where a level says so."""
        return max([self.devices_per_node, *(level.num_devices for level in self.levels if level.tensor_parallel)])

    def level_of(self, size: int, stride: int = 1) -> Level:
        """The outermost level that communicators of `size` ranks, `stride` apart, cross.

        A communicator stays inside a level if its `size · stride` ranks divide the level's groups evenly; where they do
        not, some communicator straddles two groups, and the slowest one sets the pace.
        """
        for level in self.levels:
            if level.num_devices % (size * stride) == 0:
                return level
        return self.levels[-1]

    def level_between(self, rank: int, other_rank: int) -> Level:
        """The innermost level that holds both ranks in one group."""
        for level in self.levels:
            if rank // level.num_devices == other_rank // level.num_devices:
                return level
        return self.levels[-1]

    def resized(self, num_devices: int) -> Cluster:
        """The part of this cluster with `num_devices` devices: a part of one node, or whole nodes.

        Raises JobError where there are not as many, or where they make no whole nodes.
        """
        if num_devices > self.num_devices:
            raise JobError(
                f"{num_devices} devices are asked for and the cluster has {self.num_nodes} x {self.devices_per_node} = "
                f"{self.num_devices}"
            )
        if num_devices > self.devices_per_node and num_devices % self.devices_per_node:
            raise JobError(
                f"{num_devices} devices are no whole nodes of {self.devices_per_node}; use a part of one node or a "
                f"multiple of {self.devices_per_node}"
            )
        levels = []
        for level in self.levels:
            levels.append(level.model_copy(update={"num_devices": min(level.num_devices, num_devices)}))
            if level.num_devices >= num_devices:
                break
        return Cluster(
            num_nodes=max(1, num_devices // self.devices_per_node),
            devices_per_node=min(self.devices_per_node, num_devices),
            device=self.device,
            levels=tuple(levels),
            memory_fraction=self.memory_fraction,
        )
