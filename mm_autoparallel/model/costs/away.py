"""What a module of an arrangement adds to a pipeline that holds none of its layers: time, memory, passes.

In phases every device runs the encoder's forwards of the whole step before the pipeline and its backwards behind it,
which lengthens each stage's tail by their sum, and holds the encoder and what it keeps beside the pipeline
(footprint.Beside). In bubbles and as prefetch a pass is made on the ranks of one stage by all encoder replicas there.
What works while the encoder runs is counted as if all that is kept for it were there and a layer's activations of the
decoder: never less than is needed. Of several such modules one runs phases after the other; what each keeps, holds and
takes adds up, and what works does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mm_autoparallel.model.blocks.chain import AudioStem, PatchEmbedding
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.resharding import (
    Crossing,
    cross_between_ranks,
    cross_in_phases,
    cross_inline,
    cross_to_first_stage,
)
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

NOTHING = Crossing(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Module:
    """One module of an arrangement. strategy: with it alone. own: its sizes. problem: the pipeline of the whole chain
    under these, of which `blocks` are the module's, of a cached one projectors that train alone. size_bytes: of one
    decoder replica's micro-batch, what it hands on, whole."""

    strategy: Strategy
    own: Strategy
    problem: Problem
    blocks: tuple[ChainBlock, ...]
    size_bytes: float
    crossing: Crossing

    @classmethod
    def of(cls, known: CostModel, strategy: Strategy, build: Callable[[Strategy], Problem]) -> Module:
        """That of a strategy with one module. build: the pipeline of the whole chain under plain sizes."""
        own, arrangement = strategy.of_encoder(), strategy.arrangement
        assert arrangement is not None
        problem, size_bytes = build(own), handed_on_bytes(known, strategy)
        trained = {block.name for block in known.chain.blocks if block.trainable}
        blocks = tuple(
            block
            for block in problem.chain
            if block.modality in arrangement.encoder.parts and (not arrangement.is_cached or block.name in trained)
        )
        return cls(strategy, own, problem, blocks, size_bytes, find_crossing(known, strategy, size_bytes))

    @property
    def arrangement(self) -> Arrangement:
        """Of the module alone."""
        assert self.strategy.arrangement is not None
        return self.strategy.arrangement

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return any(block.backward_ms for block in self.blocks)

    def phases_ms(self, global_batch_size: int, parts: Collection[str]) -> float:
        """Forwards and backwards of those encoders in the phases of a step."""
        own, again = self.arrangement.encoder, self.arrangement.encoder_run == "recomputed_phases" and self.trains
        mine = [block for block in self.blocks if block.modality in parts]
        # what runs once more is all in front of a block that has a backward, as what it keeps is made of all before it
        each_ms = sum(block.count * (block.forward_ms * (1 + again) + block.backward_ms) for block in mine)
        return global_batch_size // (own.dp * own.mbs) * each_ms * self.problem.time_factors[0]


@dataclass(frozen=True)
class Away:
    """What one module that is away adds to the decoder's devices.

    weight_bytes, gradient_bytes, optimizer_bytes: each device holds. kept_bytes, kept_on_first_bytes: through the step,
    on all stages but the first, and there. step_bytes, step_once_bytes: pass in the optimizer's step (ChainBlock).
    working_bytes: needed while it works, while decoder layers keep nothing where nothing is in flight. tail_ms: before
    and after the pipeline, of which before_ms before it. encoder: its passes beside the pipeline, on no devices yet;
    None in phases.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    kept_bytes: float
    kept_on_first_bytes: float
    step_bytes: float
    step_once_bytes: float
    working_bytes: float
    tail_ms: float
    before_ms: float
    encoder: Encoder | None

    def give_room(self, block: ChainBlock) -> ChainBlock:
        """A layer on a stage, beside which the module may work; in phases it keeps nothing then."""
        spare_bytes = 0.0 if self.encoder else _least_kept(block)
        return _with_room(block, self.working_bytes, spare_bytes)


def form_away(known: CostModel, module: Module, factor: float) -> Away:
    """Of a module that is away. factor: on its crossing."""
    first, arrangement = module.blocks, module.arrangement
    if arrangement.is_cached:  # one micro-batch's features lie on the first stage when they are read
        return Away(0.0, 0.0, 0.0, 0.0, module.size_bytes, 0.0, 0.0, 0.0, 0.0, 0.0, None)
    prints = [(block.footprint, block.count) for block in first if block.footprint]
    weight_bytes, gradient_bytes, optimizer_bytes = (
        sum(count * getattr(held, name) for held, count in prints)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    )
    form = _in_phases if arrangement.in_phases else _in_bubbles
    kept_bytes, kept_on_first_bytes, working_bytes, tail_ms, before_ms, encoder = form(known, module, factor)
    return Away(
        weight_bytes,
        gradient_bytes,
        optimizer_bytes,
        kept_bytes,
        kept_on_first_bytes,
        sum(block.count * block.step_bytes for block in first),
        max(block.step_once_bytes for block in first),
        working_bytes,
        tail_ms,
        before_ms,
        encoder,
    )


def handed_on_bytes(known: CostModel, strategy: Strategy) -> float:
    """Of one decoder replica's micro-batch, all that the strategy's one module hands on; cached, what projectors that
    train take in, which is as wide as a layer's output, and not what they make of it."""
    assert strategy.arrangement is not None
    own, parts = strategy.of_encoder(), strategy.arrangement.encoder.parts
    total_bytes, layer_bytes = 0.0, 0.0
    for block, cost in zip(known.chain.blocks, known.look_up(own), strict=True):
        share = known.share_of(block, known.strategy_of(block, own))
        whole_bytes = cost.output_bytes * share.sp * own.cp
        if block.role == "layer":
            layer_bytes = whole_bytes
        if block.modality in parts and block.role == "post" and block.kind != f"{block.modality}_norm":
            is_input = strategy.arrangement.is_cached and block.trainable
            total_bytes += block.count * (layer_bytes if is_input else whole_bytes)
    return total_bytes * strategy.mbs / own.mbs


def find_crossing(known: CostModel, strategy: Strategy, size_bytes: float) -> Crossing:
    """From the ranks of the strategy's one module to the decoder's, in bubbles of one pass. size_bytes:
    handed_on_bytes."""
    arrangement, basis = strategy.arrangement, (known.cluster, known.network)
    assert arrangement is not None
    if arrangement.decoder_sized:
        return NOTHING
    if arrangement.in_bubbles:
        return cross_to_first_stage(*basis, strategy, count_per_pass(strategy) * size_bytes)
    if arrangement.in_phases:
        return cross_in_phases(*basis, known.workload, strategy, size_bytes, _pixel_bytes(known, strategy))
    if arrangement.apart:
        return cross_between_ranks(*basis, known.workload, strategy, size_bytes)
    return cross_inline(*basis, known.workload, strategy, size_bytes, _pixel_bytes(known, strategy))


def count_per_pass(strategy: Strategy) -> int:
    """Of a decoder replica's micro-batches, those that one pass of the encoder in bubbles takes."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    return arrangement.num_beside(strategy.tp, strategy.cp) * arrangement.encoder.mbs // strategy.mbs


Parted = tuple[float, float, float, float, float, Encoder | None]
"""Of Away, kept_bytes to encoder but for what passes in the optimizer's step."""


def _in_phases(known: CostModel, module: Module, factor: float) -> Parted:
    """Without passes."""
    strategy, encoder, first, trains = module.strategy, module.problem, module.blocks, module.trains
    own, again = module.arrangement.encoder, module.arrangement.encoder_run == "recomputed_phases"
    num_calls = known.workload.global_batch_size // (own.dp * own.mbs)
    crossing = module.crossing
    forward_ms = sum(block.count * block.forward_ms for block in first)
    phases_ms = module.phases_ms(known.workload.global_batch_size, module.arrangement.encoder.parts)
    phases_ms += sum(block.count * block.tail_ms for block in first)
    phases_ms += factor * (crossing.forward_ms + (crossing.backward_ms if trains else 0.0))
    phases_ms += encoder.stage_tail_ms[0] - known.calibration.figures.step_ms
    before_ms = num_calls * forward_ms * encoder.time_factors[0] + factor * crossing.forward_ms

    kept_bytes = sum(block.count * block.activation_bytes for block in first)
    held_bytes = 0.0 if again else num_calls * kept_bytes
    own_bytes = num_calls * own.mbs * module.size_bytes / strategy.mbs / own.cp
    arrived_bytes = strategy.num_microbatches(known.workload.global_batch_size) * module.size_bytes
    working_bytes = max(block.transient_bytes for block in first) + (kept_bytes if again else 0.0)
    kept = held_bytes + own_bytes, held_bytes + max(own_bytes, arrived_bytes)
    return (*kept, working_bytes, phases_ms, before_ms, None)


def _in_bubbles(known: CostModel, module: Module, factor: float) -> Parted:
    """The same where passes are dealt to stages in turn."""
    strategy, encoder, first, trains = module.strategy, module.problem, module.blocks, module.trains
    number, crossing, pieces = count_per_pass(strategy), module.crossing, cut_into_pieces(module)
    time_factor = encoder.time_factors[0]
    arrived_bytes = strategy.num_microbatches(known.workload.global_batch_size) * module.size_bytes
    after_ms = sum(block.count * block.tail_ms for block in first) + encoder.stage_tail_ms[0]
    after_ms -= known.calibration.figures.step_ms
    beside = Encoder(
        module.arrangement.encoder.name,
        tuple(time_factor * sum(n * block.forward_ms for block, n in piece) for piece in pieces),
        tuple(time_factor * sum(n * block.backward_ms for block, n in piece) for piece in pieces),
        (),
        "prefetch" if module.arrangement.encoder_run == "prefetch" else "bubbles",
        number,
        feed_ms=factor * (max(crossing.forward_ms, crossing.backward_ms) if trains else crossing.forward_ms),
        static_bytes=(0.0,) * len(pieces),  # in stage_static_bytes
        activation_bytes=tuple(sum(n * block.activation_bytes for block, n in piece) for piece in pieces),
    )
    working_bytes = max(block.transient_bytes for block in first)
    return number * module.size_bytes, arrived_bytes, working_bytes, after_ms, 0.0, beside


def cut_into_pieces(module: Module) -> list[list[tuple[ChainBlock, int]]]:
    """The module's blocks, and how many of each, piece by piece: layers in equal numbers, as far as they go, and what
    is no layer with the layer before it, or with the first."""
    number = module.arrangement.encoder.pieces
    found: list[list[tuple[ChainBlock, int]]] = [[] for _ in range(number)]
    num_layers, passed, at = sum(block.count for block in module.blocks if block.layer), 0, 0
    for block in module.blocks:
        if not block.layer:
            found[at].append((block, block.count))
            continue
        of_layers = [(passed + layer) * number // num_layers for layer in range(block.count)]
        found_there = ((piece, of_layers.count(piece)) for piece in dict.fromkeys(of_layers))
        for at, count in found_there:
            found[at].append((block, count))
        passed += block.count
    return found


def _pixel_bytes(known: CostModel, strategy: Strategy) -> float:
    """What the encoder reads of one decoder replica's micro-batch, in BF16; of audio what its first layer does. Only
    MindSpeed-MM gathers it, under which an arrangement has one encoder."""
    for block, tokens in zip(known.chain.blocks, known.tokens, strict=True):
        if isinstance(block.structure, PatchEmbedding):
            return ELEMENT_BYTES * strategy.mbs * tokens.layer_tokens * block.structure.in_features
        if isinstance(block.structure, AudioStem):
            return ELEMENT_BYTES * strategy.mbs * tokens.layer_tokens * block.structure.hidden_size
    return 0.0


def _least_kept(block: ChainBlock) -> float:
    """What one of these layers keeps in any mode at least, of each micro-batch in flight."""
    return min([block.activation_bytes, *(mode.activation_bytes for mode in block.modes)])


def _with_room(block: ChainBlock, working_bytes: float, spare_bytes: float) -> ChainBlock:
    """A layer of the decoder beside which an encoder may work that needs working_bytes. spare_bytes: what the decoder
    then keeps less of than at its peak, at least: in phases nothing is in flight."""
    more_bytes, held = working_bytes - spare_bytes, block.footprint
    return replace(
        block,
        transient_bytes=max(block.transient_bytes, more_bytes),
        footprint=held and replace(held, working_bytes=max(held.working_bytes, more_bytes)),
    )
