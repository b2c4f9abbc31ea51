"""A folder of Tinker's planned by this package's own search: stages are simulated, and layers recompute by stage.

Beside what Tinker's model has, a step ends when the last stage has ended its 1F1B order, each stage takes its own
number of layers that recompute, and gradients are exchanged at the end: a ring's two passes over the 2-byte gradients
of a stage, at the folder's bandwidth for its largest message, between nodes where replicas lie on several. The folder
tells nothing of the optimizer's own step, which is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.tinker.cost import MIB, Chain, Cluster, Score
from mm_autoparallel.integrations.tinker.profiles import Block, Folder
from mm_autoparallel.integrations.tinker.search import list_choices
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import PlacementResult
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Mode, Problem, place_in_modes
from mm_autoparallel.pipeline.simulate.step import simulate

_US_PER_MS = 1000.0
_BYTES_PER_GB = 1e9
_LAYER = 1
"""Where the layers stand in the chain: behind the embedding."""


@dataclass(frozen=True)
class Planned:
    """A strategy of the folder with its best placement. recompute: layers of each stage that run again. tinker: what
    Tinker's model says of the same layers, all or none recomputing."""

    chain: Chain
    result: PlacementResult
    layers: tuple[int, ...]
    recompute: tuple[int, ...]
    tinker: Score

    @property
    def step_ms(self) -> float:
        """Simulated."""
        return self.result.step_ms

    @property
    def tokens_per_device_s(self) -> float:
        """Of a step."""
        samples = self.chain.folder.seq_length * self.chain.choice.global_batch_size
        return samples / self.chain.cluster.num_devices / self.step_ms * _US_PER_MS


def plan_folder(
    folder: Folder,
    cluster: Cluster,
    global_batch_size: int,
    memory_limit_mib: float,
    *,
    best: int = 10,
    look: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Planned, ...]:
    """The `best` strategies of the folder, the fastest first; one that cannot be among them is not placed.

    look: called for each strategy, to raise what should end it. should_stop: ends the placement at work too.

    Raises PlanError where the folder does not say how many layers the model has.
    """
    if folder.num_layers is None:
        raise PlanError(f"{folder.path} does not say how many layers the model has; give it model_info_seq*.json")
    choices = [each for each in list_choices(folder, cluster, global_batch_size) if not each.recompute]
    chains = [Chain(folder, cluster, choice) for choice in choices]
    found: list[Planned] = []
    for chain in sorted(chains, key=lambda chain: least_ms(chain, folder.num_layers or 0)):
        look()
        if len(found) == best and least_ms(chain, folder.num_layers) >= found[-1].step_ms:
            continue
        planned = place_chain(chain, folder.num_layers, memory_limit_mib, should_stop)
        found = sorted([*found, *([planned] if planned else [])], key=lambda each: each.step_ms)[:best]
    return tuple(found)


def place_chain(
    chain: Chain, num_layers: int, memory_limit_mib: float, should_stop: Callable[[], bool] = lambda: False
) -> Planned | None:
    """The fastest placement of one choice's layers, of which each stage recomputes what it must; None: nothing fits."""
    problems = [build_problem(chain, num_layers, memory_limit_mib, again) for again in (False, True)]
    results = [place(problem, should_stop=should_stop) for problem in problems]
    placed = [result for result in results if result.placement is not None]
    return _describe(chain, min(placed, key=lambda result: result.step_ms)) if placed else None


def least_ms(chain: Chain, num_layers: int) -> float:
    """No placement is faster: the work of all stages, dealt out evenly."""
    blocks = chain.blocks
    work = num_layers * (blocks.layer.forward_us + blocks.layer.backward_us)
    work += sum(block.forward_us + block.backward_us for block in (blocks.pre, blocks.norm, blocks.head))
    return work * chain.num_microbatches / chain.choice.pp / _US_PER_MS


def build_problem(chain: Chain, num_layers: int, memory_limit_mib: float, can_recompute: bool) -> Problem:
    """The pipeline of one choice, its layers free, and how many of them run again where any may."""
    pp, blocks = chain.choice.pp, chain.blocks
    in_flight = [min(pp - stage, chain.num_microbatches) for stage in range(pp)]
    inputs = [blocks.pre.input_mib, *[blocks.layer.input_mib] * (pp - 1)]
    return Problem(
        num_stages=pp,
        num_chunks=1,
        num_microbatches=chain.num_microbatches,
        schedule="1f1b",
        chain=(
            _block(chain, "pre", blocks.pre, 1, can_recompute, "first"),
            _block(chain, "layer", blocks.layer, num_layers, can_recompute, None),
            _block(chain, "norm", blocks.norm, 1, can_recompute, "last"),
            _block(chain, "head", blocks.head, 1, can_recompute, "last"),
        ),
        stage_tail_ms=(0.0,) * pp,
        p2p_ms_per_byte=(0.0,) * (pp - 1),
        p2p_ms=tuple(chain.message_us(blocks.layer.input_mib, stage) / _US_PER_MS for stage in range(1, pp)),
        memory_limit_bytes=(memory_limit_mib * MIB,) * pp,
        stage_static_bytes=tuple(math.ceil(of * size * MIB) for of, size in zip(in_flight, inputs, strict=True)),
        max_layers_per_chunk=num_layers,
    )


def _block(
    chain: Chain, name: str, block: Block, count: int, can_recompute: bool, pinned: Literal["first", "last"] | None
) -> ChainBlock:
    shards = chain.dp if chain.choice.dist_opt else 1
    states = 2.0 + (1.0 if chain.folder.is_bf16 else 0.0) + 6.0 / shards
    is_layer = pinned is None
    mask = chain.folder.seq_length**2 / MIB if is_layer else 0.0
    may_recompute = can_recompute and is_layer
    restored_mib = block.activations_mib if may_recompute else 0.0  # of the one layer that runs again
    again = Mode(
        RECOMPUTE,
        extra_backward_ms=block.forward_us / _US_PER_MS,
        activation_bytes=math.ceil(block.input_mib * MIB),
    )
    return ChainBlock(
        name=name,
        modality="text",
        count=count,
        pinned=pinned,
        layer=is_layer,
        forward_ms=block.forward_us / _US_PER_MS,
        backward_ms=block.backward_us / _US_PER_MS,
        static_bytes=math.ceil((states * block.weights_mib + mask) * MIB),
        activation_bytes=math.ceil(block.activations_mib * MIB),
        transient_bytes=math.ceil((block.reserved_mib + restored_mib) * MIB),
        tail_ms=_exchange_ms(chain, block.weights_mib),
        modes=(again,) if may_recompute else (),
    )


def _exchange_ms(chain: Chain, weights_mib: float) -> float:
    """Of a block's gradients among replicas, by a ring."""
    dp, cluster = chain.dp, chain.cluster
    if dp == 1:
        return 0.0
    is_between = chain.choice.config.tp * dp > cluster.devices_per_node
    table = chain.folder.inter_gb_per_s if is_between else chain.folder.intra_gb_per_s
    return 2.0 * (dp - 1) / dp * weights_mib * MIB / (table[-1] * _BYTES_PER_GB) * _US_PER_MS


def _describe(chain: Chain, result: PlacementResult) -> Planned:
    assert result.placement is not None
    layers = tuple(counts[_LAYER] for counts in result.placement.layers)
    recompute = tuple(sum(modes[_LAYER]) for modes in result.placement.modes)
    return Planned(chain, result, layers, recompute, chain.score(layers))


def simulate_layers(chain: Chain, layers: tuple[int, ...]) -> float:
    """ms of a step with these layers, all of them recomputing or none as the choice says. Raises PlanError."""
    again = chain.choice.recompute
    problem = build_problem(chain, sum(layers), math.inf, again)
    last = len(layers) - 1
    counts = [(int(stage == 0), held, int(stage == last), int(stage == last)) for stage, held in enumerate(layers)]
    in_modes = {RECOMPUTE: [(0, held, 0, 0) for held in layers]} if again else {}
    placement = place_in_modes(problem, counts, in_modes)
    return simulate(problem, placement).step_ms
