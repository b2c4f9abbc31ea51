"""Problems of arrangements: an encoder's blocks and a decoder's, each priced under sizes of their own, in one pipeline.

On ranks of its own the encoder is the first stages of a pipeline, one cell of replicas (resharding.py) standing for
all: a stage of it takes what its replica's samples of one decoder micro-batch take, and the hop behind it is the
crossing. On shared devices and inline both lie on one stage. In phases no stage has encoder layers: every device runs
the encoder's forwards of the whole step before the pipeline and its backwards behind it, which lengthens each stage's
tail by their sum, and holds the encoder and what it keeps beside the pipeline (footprint.Beside). What works while the
encoder runs is counted as if all that is kept for it were there and a layer's activations of the decoder: never less
than is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mm_autoparallel.model.blocks.chain import AudioStem, PatchEmbedding
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import OPEN_SEGMENTS_BYTES, count_communicators
from mm_autoparallel.model.costs.resharding import (
    Crossing,
    cross_between_ranks,
    cross_in_phases,
    cross_inline,
    cross_to_first_stage,
)
from mm_autoparallel.model.costs.scales import PIPELINE, CostScales
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import deal_pipelines
from mm_autoparallel.pipeline.footprint import Beside, sum_held_once
from mm_autoparallel.pipeline.problem import ChainBlock, Problem


@dataclass(frozen=True, eq=False)
class _Parts:
    """encoder, decoder: the pipelines of the whole chain under either's sizes, of which the blocks of one part count.

    size_bytes: of one decoder replica's micro-batch, what the encoder hands on, whole.
    """

    known: CostModel
    strategy: Strategy
    arrangement: Arrangement
    encoder: Problem
    decoder: Problem
    size_bytes: float
    factor: float

    @property
    def blocks(self) -> tuple[tuple[ChainBlock, ...], tuple[ChainBlock, ...]]:
        """The encoder's and the decoder's."""
        decodes = self.known.chain.modalities[-1]
        return (
            tuple(block for block in self.encoder.chain if block.modality != decodes),
            tuple(block for block in self.decoder.chain if block.modality == decodes),
        )

    @property
    def context_bytes(self) -> float:
        return self.decoder.context_bytes

    def communicator_bytes(self) -> float:
        """Of a device in the groups of one module, the larger; of a device in both, those of both, but one of all."""
        ties, own = self.known.has_tied_table, (self.strategy.of_encoder(), self.strategy.of_decoder())
        counts = [count_communicators(each, ties and each is own[1]) for each in own]
        number = max(counts) if self.arrangement.apart else max(0, sum(counts) - 1)
        return float(number * self.known.cluster.device.communicator_bytes)


def build_arranged(
    known: CostModel, strategy: Strategy, scales: CostScales, build: Callable[[Strategy], Problem]
) -> Problem:
    """The problem of a strategy that has an arrangement. build: that of the whole chain under plain sizes."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    encoder, decoder = build(strategy.of_encoder()), build(strategy.of_decoder())
    size_bytes = handed_on_bytes(known, strategy)
    parts = _Parts(known, strategy, arrangement, encoder, decoder, size_bytes, scales.factor(PIPELINE))
    if arrangement.in_phases:
        return _in_phases(parts)
    if arrangement.in_bubbles:
        return _in_bubbles(parts)
    return _apart(parts) if arrangement.apart else _inline(parts)


def keep_decoder(known: CostModel, problem: Problem) -> Problem:
    """The decoder's part of a pipeline of the whole chain, and what it holds for itself at least: no groups."""
    blocks = tuple(block for block in problem.chain if block.modality == known.chain.modalities[-1])
    static_bytes = problem.context_bytes + _held_once_bytes(blocks)
    return replace(
        problem, chain=blocks, stage_static_bytes=(static_bytes,) * problem.num_stages, communicator_bytes=0.0
    )


def handed_on_bytes(known: CostModel, strategy: Strategy) -> float:
    """Of one decoder replica's micro-batch, all that its encoder hands on."""
    own = strategy.of_encoder()
    total_bytes = 0.0
    for block, cost in zip(known.chain.blocks, known.look_up(own), strict=True):
        if (
            block.modality != known.chain.modalities[-1]
            and block.role == "post"
            and block.kind != f"{block.modality}_norm"
        ):
            share = known.share_of(block, known.strategy_of(block, own))
            total_bytes += block.count * cost.output_bytes * share.sp * own.cp
    return total_bytes * strategy.mbs / own.mbs


def find_crossing(known: CostModel, strategy: Strategy, size_bytes: float) -> Crossing:
    """From the encoder's ranks to the decoder's, in bubbles of one pass. size_bytes: handed_on_bytes."""
    arrangement, basis = strategy.arrangement, (known.cluster, known.network)
    assert arrangement is not None
    if arrangement.in_bubbles:
        return cross_to_first_stage(*basis, strategy, _count_per_pass(strategy) * size_bytes)
    if arrangement.in_phases:
        return cross_in_phases(*basis, known.workload, strategy, size_bytes, _pixel_bytes(known, strategy))
    if arrangement.apart:
        return cross_between_ranks(*basis, known.workload, strategy, size_bytes)
    return cross_inline(*basis, known.workload, strategy, size_bytes, _pixel_bytes(known, strategy))


def crossing_document(known: CostModel, strategy: Strategy) -> dict[str, Any]:
    """The crossing of an arrangement as provenance tells it: of one micro-batch of a decoder's replica, in phases of
    the whole step, in bubbles of one pass."""
    arrangement, size_bytes, count = strategy.arrangement, handed_on_bytes(known, strategy), 1
    assert arrangement is not None
    if arrangement.in_phases:
        count = strategy.num_microbatches(known.workload.global_batch_size)
    elif arrangement.in_bubbles:
        count = _count_per_pass(strategy)
    return {"size_bytes": count * size_bytes, **asdict(find_crossing(known, strategy, size_bytes))}


def _apart(parts: _Parts) -> Problem:
    known, strategy, encoder, decoder = parts.known, parts.strategy, parts.encoder, parts.decoder
    first, second = parts.blocks
    crossing = find_crossing(known, strategy, parts.size_bytes)
    hop_ms = 0.0 if crossing.blocks else parts.factor * crossing.forward_ms
    if crossing.blocks:
        back_ms = parts.factor * crossing.backward_ms if any(block.backward_ms for block in first) else 0.0
        first = _delay(first, -1, parts.factor * crossing.forward_ms, back_ms)
        second = _delay(second, 0, parts.factor * crossing.forward_ms, back_ms)
    chain = (
        *(replace(block, within=(0, encoder.num_stages)) for block in first),
        *(replace(block, within=(encoder.num_stages, strategy.pp)) for block in second),
    )
    communicator_bytes = parts.communicator_bytes()
    static_bytes = [parts.context_bytes + communicator_bytes + _held_once_bytes(blocks) for blocks in (first, second)]
    exchange_ms = known.calibration.figures.shape_exchange_ms if known.workload.variable_seq_lengths else 0.0
    counts = encoder.num_stages, decoder.num_stages
    return replace(
        decoder,
        num_stages=strategy.pp,
        chain=chain,
        memory_limit_bytes=encoder.memory_limit_bytes + decoder.memory_limit_bytes,
        stage_static_bytes=(static_bytes[0],) * counts[0] + (static_bytes[1],) * counts[1],
        stage_tail_ms=tuple(
            tail_ms + 2 * exchange_ms * (strategy.pp - own.num_stages)
            for own in (encoder, decoder)
            for tail_ms in own.stage_tail_ms
        ),
        p2p_ms=(*encoder.p2p_ms, hop_ms, *decoder.p2p_ms),
        p2p_ms_per_byte=(*encoder.p2p_ms_per_byte, 0.0, *decoder.p2p_ms_per_byte),
        communicator_bytes=communicator_bytes,
        host_ms_per_byte=encoder.host_ms_per_byte + decoder.host_ms_per_byte,
        stage_time_factor=_join_factors(encoder, decoder),
        host_limit_bytes=(encoder.host_limit_bytes + decoder.host_limit_bytes)
        if encoder.host_limit_bytes and decoder.host_limit_bytes
        else (),
    )


def _inline(parts: _Parts) -> Problem:
    first, second = parts.blocks
    crossing = find_crossing(parts.known, parts.strategy, parts.size_bytes)
    first = _delay(first, -1, parts.factor * crossing.forward_ms, 0.0)
    returning = max((index for index, block in enumerate(first) if block.backward_ms), default=-1)
    chain = (*_delay(first, returning, 0.0, parts.factor * crossing.backward_ms), *second)
    communicator_bytes = parts.communicator_bytes()
    return replace(
        parts.decoder,
        chain=chain,
        stage_static_bytes=(parts.context_bytes + communicator_bytes + _held_once_bytes(chain),),
        stage_tail_ms=(max(parts.encoder.stage_tail_ms[0], parts.decoder.stage_tail_ms[0]),),
        communicator_bytes=communicator_bytes,
        stage_time_factor=tuple(
            max(pair) for pair in zip(parts.encoder.time_factors, parts.decoder.time_factors, strict=True)
        )
        if parts.encoder.stage_time_factor or parts.decoder.stage_time_factor
        else (),
    )


def _in_phases(parts: _Parts) -> Problem:
    known, strategy, encoder, decoder = parts.known, parts.strategy, parts.encoder, parts.decoder
    first, second = parts.blocks
    own, again = parts.arrangement.encoder, parts.arrangement.encoder_run == "recomputed_phases"
    num_calls = known.workload.global_batch_size // (own.dp * own.mbs)
    crossing = find_crossing(known, strategy, parts.size_bytes)
    trains = any(block.backward_ms for block in first)
    forward_ms, backward_ms = (
        sum(block.count * getattr(block, name) for block in first) for name in ("forward_ms", "backward_ms")
    )
    # what runs once more is all in front of a block that has a backward, as what it keeps is made of all before it
    each_ms = forward_ms + backward_ms + (forward_ms if again and trains else 0.0)
    phases_ms = num_calls * each_ms * encoder.time_factors[0] + sum(block.count * block.tail_ms for block in first)
    phases_ms += parts.factor * (crossing.forward_ms + (crossing.backward_ms if trains else 0.0))
    phases_ms += encoder.stage_tail_ms[0] - known.calibration.figures.step_ms

    kept_bytes = sum(block.count * block.activation_bytes for block in first)
    held_bytes = 0.0 if again else num_calls * kept_bytes
    own_bytes = num_calls * own.mbs * parts.size_bytes / strategy.mbs
    arrived_bytes = strategy.num_microbatches(known.workload.global_batch_size) * parts.size_bytes
    working_bytes = max(block.transient_bytes for block in first) + (kept_bytes if again else 0.0)
    return replace(
        _hold_beside(parts, held_bytes + own_bytes, held_bytes + max(own_bytes, arrived_bytes)),
        chain=tuple(_with_room(block, working_bytes, _least_kept(block)) if block.layer else block for block in second),
        stage_tail_ms=tuple(tail_ms + phases_ms for tail_ms in decoder.stage_tail_ms),
    )


def _in_bubbles(parts: _Parts) -> Problem:
    """A pass is made on the ranks of one stage by all encoder replicas there, passes are dealt to stages in turn."""
    known, strategy, encoder, decoder = parts.known, parts.strategy, parts.encoder, parts.decoder
    first, second = parts.blocks
    own, run = parts.arrangement.encoder, parts.arrangement.encoder_run
    number = _count_per_pass(strategy)
    pass_bytes = number * parts.size_bytes
    crossing = find_crossing(known, strategy, parts.size_bytes)
    trains = any(block.backward_ms for block in first)
    forward_ms, backward_ms = (
        encoder.time_factors[0] * sum(block.count * getattr(block, name) for block in first)
        for name in ("forward_ms", "backward_ms")
    )
    arrived_bytes = strategy.num_microbatches(known.workload.global_batch_size) * parts.size_bytes
    after_ms = sum(block.count * block.tail_ms for block in first) + encoder.stage_tail_ms[0]
    after_ms -= known.calibration.figures.step_ms
    working_bytes = max(block.transient_bytes for block in first)
    beside = Encoder(
        own.name,
        (forward_ms,),
        (backward_ms,),
        deal_pipelines(decoder.num_stages, 1),
        "prefetch" if run == "prefetch" else "bubbles",
        number,
        feed_ms=parts.factor * (max(crossing.forward_ms, crossing.backward_ms) if trains else crossing.forward_ms),
        static_bytes=(0.0,),  # in stage_static_bytes
        activation_bytes=(sum(block.count * block.activation_bytes for block in first),),
    )
    return replace(
        _hold_beside(parts, pass_bytes, arrived_bytes),
        chain=tuple(_with_room(block, working_bytes, 0.0) if block.layer else block for block in second),
        stage_tail_ms=tuple(tail_ms + after_ms for tail_ms in decoder.stage_tail_ms),
        encoders=(beside,),
    )


def _count_per_pass(strategy: Strategy) -> int:
    """Of a decoder replica's micro-batches, those that one pass of the encoder in bubbles takes."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    return arrangement.num_beside(strategy.tp, strategy.cp) * arrangement.encoder.mbs // strategy.mbs


def _hold_beside(parts: _Parts, kept_bytes: float, kept_on_first_bytes: float) -> Problem:
    """The decoder's problem, whose devices hold the encoder's weights too, and what of it is kept through the step."""
    first, second = parts.blocks
    prints = [(block.footprint, block.count) for block in first if block.footprint]
    weight_bytes, gradient_bytes, optimizer_bytes = (
        sum(count * getattr(held, name) for held, count in prints)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    )
    beside = tuple(
        Beside(weight_bytes, gradient_bytes, optimizer_bytes, kept_bytes if stage else kept_on_first_bytes)
        for stage in range(parts.decoder.num_stages)
    )
    step_bytes = sum(block.count * block.step_bytes for block in first)
    step_bytes += max(block.step_once_bytes for block in first)
    communicator_bytes = parts.communicator_bytes()
    once_bytes = _held_once_bytes([*first, *second])
    return replace(
        parts.decoder,
        stage_static_bytes=tuple(
            parts.context_bytes
            + communicator_bytes
            + once_bytes
            + held.static_bytes
            + max(held.kept_bytes, step_bytes)  # the optimizer's step comes when nothing is kept
            for held in beside
        ),
        communicator_bytes=communicator_bytes,
        beside=beside,
    )


def _pixel_bytes(known: CostModel, strategy: Strategy) -> float:
    """What the encoder reads of one decoder replica's micro-batch, in BF16; of audio what its first layer does."""
    for block, tokens in zip(known.chain.blocks, known.tokens, strict=True):
        if isinstance(block.structure, PatchEmbedding):
            return ELEMENT_BYTES * strategy.mbs * tokens.layer_tokens * block.structure.in_features
        if isinstance(block.structure, AudioStem):
            return ELEMENT_BYTES * strategy.mbs * tokens.layer_tokens * block.structure.hidden_size
    return 0.0


def _delay(blocks: Sequence[ChainBlock], index: int, forward_ms: float, backward_ms: float) -> tuple[ChainBlock, ...]:
    """With what a crossing adds to one of them, which is no layer; backward where it has one."""
    changed = list(blocks)
    block = changed[index]
    more_ms = backward_ms if block.backward_ms else 0.0
    changed[index] = replace(block, forward_ms=block.forward_ms + forward_ms, backward_ms=block.backward_ms + more_ms)
    return tuple(changed)


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


def _held_once_bytes(blocks: Sequence[ChainBlock]) -> float:
    return sum_held_once(block.footprint for block in blocks if block.footprint) + OPEN_SEGMENTS_BYTES


def _join_factors(encoder: Problem, decoder: Problem) -> tuple[float, ...]:
    if not (encoder.stage_time_factor or decoder.stage_time_factor):
        return ()
    return encoder.time_factors + decoder.time_factors
