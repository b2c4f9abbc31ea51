"""Tinker's model of a step: a chain of blocks over stages, times added, messages between stages by a table.

Exactly what its simulation tells (TinkerOptimizer 1.3.0): no gradient traffic, no optimizer step, no overlap. All
times are µs of a micro-batch, sizes MiB; Tinker calls both by thousands (ms, GB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.tinker.profiles import Block, Blocks, Config, Folder

MIB = float(1 << 20)
_MB_PER_GB = 0.001


@dataclass(frozen=True)
class Cluster:
    """Nodes and devices of each."""

    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """In all."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class Choice:
    """A strategy of Tinker's. recompute: of all layers, or none. dist_opt: the optimizer's states are sharded."""

    config: Config
    pp: int
    dist_opt: bool
    recompute: bool
    global_batch_size: int


@dataclass(frozen=True)
class Score:
    """A choice with its layers. Of each stage: µs of a micro-batch, and MiB; step_us: of the step."""

    choice: Choice
    dp: int
    layers: tuple[int, ...]
    stage_us: tuple[float, ...]
    stage_mib: tuple[float, ...]
    step_us: float
    tokens_per_device_s: float

    @property
    def peak_mib(self) -> float:
        """Of the fullest stage."""
        return max(self.stage_mib)


@dataclass(frozen=True)
class Chain:
    """The blocks of a folder under one choice on a cluster: what stages of it cost, by stage and number of layers."""

    folder: Folder
    cluster: Cluster
    choice: Choice

    def __post_init__(self) -> None:
        config, devices = self.choice.config, self.cluster.num_devices
        ranks = config.tp * self.choice.pp
        if config not in self.folder.blocks:
            sizes = f"tp {config.tp}, sp {config.sp}, ep {config.ep}, mbs {config.mbs}"
            raise PlanError(f"{sizes} was not measured in {self.folder.path}")
        if devices % ranks:
            raise PlanError(f"tp {config.tp} x pp {self.choice.pp} does not divide {devices} devices")
        if devices // ranks % config.ep:
            raise PlanError(f"ep {config.ep} does not divide dp {devices // ranks}")
        if self.choice.global_batch_size % (devices // ranks * config.mbs):
            raise PlanError(
                f"a batch of {self.choice.global_batch_size} is no multiple of dp {devices // ranks} x mbs {config.mbs}"
            )

    @cached_property
    def blocks(self) -> Blocks:
        """As measured."""
        return self.folder.blocks[self.choice.config]

    @cached_property
    def dp(self) -> int:
        """Replicas; ranks of EP are some of them."""
        return self.cluster.num_devices // (self.choice.config.tp * self.choice.pp)

    @cached_property
    def num_microbatches(self) -> int:
        """Of one step."""
        return self.choice.global_batch_size // (self.dp * self.choice.config.mbs)

    def stage_us(self, stage: int, layers: int) -> float:
        """Compute of a micro-batch forward and backward, and its messages from and to the neighbours."""
        again = 2.0 if self.choice.recompute else 1.0
        layer = self.blocks.layer
        total = layers * (layer.forward_us * again + layer.backward_us)
        total += sum(block.forward_us + block.backward_us for block in self._others(stage))
        if stage > 0:
            total += self.message_us(layer.input_mib, stage)
        if stage < self.choice.pp - 1:
            sent = layer if layers else self.blocks.pre
            total += self.message_us(sent.output_mib, stage + 1)
        return total

    def stage_mib(self, stage: int, layers: int) -> float:
        """The most that a device of the stage holds."""
        layer, others = self.blocks.layer, self._others(stage)
        weights = layers * layer.weights_mib + sum(block.weights_mib for block in others)
        shards = self.dp if self.choice.dist_opt else 1
        states = 2.0 * weights + (weights if self.folder.is_bf16 else 0.0) + 6.0 * weights / shards
        mask = layers * self.folder.seq_length**2 / MIB
        first = self.blocks.pre if stage == 0 else layer
        kept = layer.input_mib if self.choice.recompute else layer.activations_mib
        of_batch = first.input_mib + layers * kept + sum(block.activations_mib for block in others)
        in_flight = min(self.choice.pp - stage, self.num_microbatches)
        again = layer.activations_mib if self.choice.recompute and layers else 0.0
        return states + mask + in_flight * of_batch + again + self.reserved_mib(stage)

    def reserved_mib(self, stage: int) -> float:
        """What the allocator holds beside."""
        is_first, is_last = stage == 0, stage == self.choice.pp - 1
        held = [self.blocks.layer, *([self.blocks.pre] if is_first else []), *([self.blocks.head] if is_last else [])]
        return max(block.reserved_mib for block in held)

    def score(self, layers: tuple[int, ...]) -> Score:
        """The chain cut so. Raises PlanError where stages or layers are others than the model's."""
        total = self.folder.num_layers
        if len(layers) != self.choice.pp or (total is not None and sum(layers) != total):
            raise PlanError(
                f"layers {','.join(map(str, layers))} are {len(layers)} stages of {sum(layers)} layers; pp is "
                f"{self.choice.pp}, and the model has {total if total is not None else 'any number of'} layers"
            )
        stages = list(enumerate(layers))
        times = tuple(self.stage_us(*stage) for stage in stages)
        step_us = math.fsum(times) + (self.num_microbatches - 1) * max(times)
        samples = self.folder.seq_length * self.choice.global_batch_size / self.cluster.num_devices
        sizes = tuple(self.stage_mib(*stage) for stage in stages)
        return Score(self.choice, self.dp, layers, times, sizes, step_us, samples / step_us * 1e6)

    def _others(self, stage: int) -> list[Block]:
        """Blocks of the stage beside its layers."""
        first = [self.blocks.pre] if stage == 0 else []
        return first + ([self.blocks.norm, self.blocks.head] if stage == self.choice.pp - 1 else [])

    def message_us(self, size_mib: float, stage: int) -> float:
        """µs of a message over the edge in front of `stage`; between nodes where the stage begins one.

        Below half a MB the index of the table is -1, and so its last entry, as in Tinker.
        """
        if size_mib == 0.0:
            return 0.0
        begins = stage * self.choice.config.tp * self.dp
        is_between = begins % self.cluster.devices_per_node == 0 and begins != 0
        table = self.folder.inter_gb_per_s if is_between else self.folder.intra_gb_per_s
        index = int(math.log2(size_mib))
        index = min(index - 1 if index >= 1 else index, len(table) - 1)
        return size_mib / (table[index] * _MB_PER_GB)
