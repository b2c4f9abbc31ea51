"""Problems of arrangements: each module's blocks priced under sizes of its own, with the decoder's in one pipeline.

On ranks of their own encoders are the first stages of a pipeline, one cell of replicas (resharding.py) standing for
all: a stage of one takes what its replica's samples of one decoder micro-batch take, and the hop behind it is the
crossing. Several of them stand there in the order of the chain, each with its own crossing to the decoder: a
micro-batch goes through one after the other, which takes a pass of each longer to fill than if both began at once. On
shared devices and inline encoders lie on the decoder's one stage, or on its stages as in the chain. What runs before,
after or beside the pipeline is away.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mm_autoparallel.model.costs.away import Away, Module, count_per_pass, find_crossing, form_away, handed_on_bytes
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.features import hands_on
from mm_autoparallel.model.costs.held_once import OPEN_SEGMENTS_BYTES, count_communicators
from mm_autoparallel.model.costs.scales import PIPELINE, UNSCALED, CostScales
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import deal_pipelines
from mm_autoparallel.pipeline.footprint import Beside, sum_held_once
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

MOST_KEPT = 256
"""Problems of parts that are kept of a job. Assumed."""
_KEPT: WeakKeyDictionary[CostModel, dict[Strategy, Problem]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _Parts:
    """decoder: the pipeline of the whole chain under the decoder's sizes, of which its own `blocks` count. modules: of
    the arrangement, in their order. factor: on what crosses."""

    known: CostModel
    strategy: Strategy
    decoder: Problem
    blocks: tuple[ChainBlock, ...]
    modules: tuple[Module, ...]
    factor: float

    @property
    def apart(self) -> tuple[Module, ...]:
        """Those on ranks of their own."""
        return tuple(module for module in self.modules if module.arrangement.apart)

    @property
    def inside(self) -> tuple[Module, ...]:
        """Those whose blocks lie on the decoder's stages."""
        staged = (m for m in self.modules if m.arrangement.is_cached or not m.arrangement.away)
        return tuple(m for m in staged if m.blocks and not m.arrangement.apart)

    def communicator_bytes(self) -> float:
        """Of a device in the groups of all modules that it runs, one of all ranks among them; the most of any."""
        ties, own = self.known.has_tied_table, self.strategy.of_decoder()
        apart = [count_communicators(module.own, False) for module in self.apart]
        shared = [m for m in self.modules if not m.arrangement.apart and not m.arrangement.decoder_sized]
        number = count_communicators(own, ties) + sum(count_communicators(m.own, False) - 1 for m in shared)
        return float(max(0, number, *apart) * self.known.cluster.device.communicator_bytes)


def build_arranged(
    known: CostModel, strategy: Strategy, scales: CostScales, build: Callable[[Strategy], Problem]
) -> Problem:
    """The problem of a strategy that has an arrangement. build: that of the whole chain under plain sizes."""
    assert strategy.arrangement is not None
    factor, each = scales.factor(PIPELINE), strategy.arrangement.each
    plain = partial(_build_once, known, build) if scales is UNSCALED else build
    modules = [Module.of(known, strategy.with_only(one), plain) for one in each]
    decoder = plain(strategy.of_decoder())
    blocks = tuple(block for block in decoder.chain if block.modality == known.chain.modalities[-1])
    parts = _Parts(known, strategy, decoder, blocks, tuple(modules), factor)
    if len(modules) > 1 or strategy.arrangement.is_cached:
        parts = replace(parts, modules=tuple(_send_apart(parts)))
    return _add_away(parts, _form_stages(parts))


def _build_once(known: CostModel, build: Callable[[Strategy], Problem], part: Strategy) -> Problem:
    """What a search asks for again and again: few parts make thousands of arrangements."""
    kept = _KEPT.setdefault(known, {})
    if part not in kept:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[part] = build(part)
    return kept[part]


def keep_decoder(known: CostModel, problem: Problem) -> Problem:
    """The decoder's part of a pipeline of the whole chain, and what it holds for itself at least: no groups."""
    blocks = tuple(block for block in problem.chain if block.modality == known.chain.modalities[-1])
    static_bytes = problem.context_bytes + _held_once_bytes(blocks)
    return replace(
        problem, chain=blocks, stage_static_bytes=(static_bytes,) * problem.num_stages, communicator_bytes=0.0
    )


def crossing_document(known: CostModel, strategy: Strategy) -> dict[str, Any]:
    """The crossing of an arrangement as provenance tells it, of several modules each by name: of one micro-batch of a
    decoder's replica, in phases of the whole step, in bubbles of one pass."""
    assert strategy.arrangement is not None
    told = {one.encoder.name: _describe_crossing(known, strategy.with_only(one)) for one in strategy.arrangement.each}
    return told if strategy.arrangement.others else next(iter(told.values()))


def _describe_crossing(known: CostModel, strategy: Strategy) -> dict[str, Any]:
    """Of its one module."""
    arrangement, size_bytes, count = strategy.arrangement, handed_on_bytes(known, strategy), 1
    assert arrangement is not None
    if arrangement.in_phases:
        count = strategy.num_microbatches(known.workload.global_batch_size)
    elif arrangement.in_bubbles:
        count = count_per_pass(strategy)
    crossing = find_crossing(known, strategy, size_bytes)
    blocks = (block for block in known.chain.blocks if block.modality in arrangement.encoder.parts)
    if not any(block.has_backward for block in blocks):  # nothing goes back
        crossing = replace(crossing, backward_ms=0.0)
    return {"size_bytes": count * size_bytes, **asdict(crossing)}


def _send_apart(parts: _Parts) -> list[Module]:
    """All modules, of each block what crosses a cut behind it: what its own module has made ready and, on the
    decoder's stages, what came there from all that are elsewhere; and gradients where such features need them."""
    known, modules, names = parts.known, list[Module](), [block.name for block in parts.known.chain.blocks]
    staged = {block.name for m in parts.inside if m.arrangement.decoder_sized for block in m.blocks}
    pairs = list(zip(known.chain.blocks, known.look_up(parts.strategy.of_decoder()), strict=True))
    encoders = ((b, cost) for b, cost in pairs if b.modality != known.chain.modalities[-1])
    elsewhere = [(b, cost) for b, cost in encoders if b.name not in staged]
    there_bytes = sum(block.count * cost.output_bytes for block, cost in elsewhere if hands_on(block))
    there_returns = any(block.trainable for block, _ in elsewhere)
    apart_returns = False
    for module in parts.modules:
        on_stages = module.arrangement.decoder_sized
        ready_bytes, returns = (there_bytes, there_returns) if on_stages else (0.0, apart_returns)
        costs, changed = known.look_up(module.own), []
        for block in module.blocks:
            index = names.index(block.name)
            returns, out_bytes = returns or known.chain.blocks[index].trainable, costs[index].output_bytes
            if hands_on(known.chain.blocks[index]):
                ready_bytes, out_bytes = ready_bytes + out_bytes * block.count, 0.0
            changed.append(replace(block, output_bytes=ready_bytes + out_bytes, sends_gradient=returns))
        if on_stages:
            there_bytes, there_returns = ready_bytes, returns
        elif module.arrangement.apart:
            apart_returns = returns
        modules.append(replace(module, blocks=tuple(changed)))
    return modules


def _form_stages(parts: _Parts) -> Problem:
    """The pipeline of all that lies on stages."""
    known, strategy, decoder = parts.known, parts.strategy, parts.decoder
    second, crossings = parts.blocks, [module.crossing for module in parts.apart]
    apart = [module.blocks for module in parts.apart]
    hops_ms = [parts.factor * each.forward_ms for each in crossings]
    for at in reversed(range(len(hops_ms) - 1)):  # what comes later is on its way no longer than what came before
        hops_ms[at] = max(0.0, hops_ms[at] - hops_ms[at + 1])
    if len(apart) == 1 and crossings[0].blocks:
        back_ms = parts.factor * crossings[0].backward_ms if parts.apart[0].trains else 0.0
        apart = [_delay(apart[0], -1, parts.factor * crossings[0].forward_ms, back_ms)]
        second = _delay(second, 0, parts.factor * crossings[0].forward_ms, back_ms)
        hops_ms = [0.0]
    inside = [_delay_inline(parts, module) for module in parts.inside]
    on_decoder = (*(block for blocks in inside for block in blocks), *second)
    if not apart and not inside:
        return replace(decoder, chain=second)
    pipelines = [*(module.problem for module in parts.apart), decoder]
    exchange_ms = known.calibration.figures.shape_exchange_ms if known.workload.variable_seq_lengths else 0.0
    tails_ms = [
        tuple(tail_ms + 2 * exchange_ms * (strategy.pp - own.num_stages) for tail_ms in own.stage_tail_ms)
        for own in pipelines
    ]
    factors = [own.time_factors for own in pipelines]
    for module in parts.inside:
        if not module.arrangement.decoder_sized:
            tails_ms[-1] = (max(module.problem.stage_tail_ms[0], tails_ms[-1][0]),)
            factors[-1] = tuple(max(pair) for pair in zip(module.problem.time_factors, factors[-1], strict=True))
    communicator_bytes = parts.communicator_bytes()
    chain, static_bytes, at = list[ChainBlock](), list[float](), 0
    for own, blocks in zip(pipelines, [*apart, on_decoder], strict=True):
        end = at + own.num_stages
        chain += (replace(block, within=(at, end)) if apart else block for block in blocks)
        held_bytes = decoder.context_bytes + communicator_bytes + _held_once_bytes(blocks)
        static_bytes, at = static_bytes + [held_bytes] * own.num_stages, end
    has_factors = any(own.stage_time_factor for own in [*pipelines, *(m.problem for m in parts.inside)])
    limited = all(own.host_limit_bytes for own in pipelines)
    return replace(
        decoder,
        num_stages=strategy.pp,
        chain=tuple(chain),
        memory_limit_bytes=tuple(limit for own in pipelines for limit in own.memory_limit_bytes),
        stage_static_bytes=tuple(static_bytes),
        stage_tail_ms=tuple(tail_ms for tails in tails_ms for tail_ms in tails),
        p2p_ms=_join_hops([own.p2p_ms for own in pipelines], hops_ms),
        p2p_ms_per_byte=_join_hops([own.p2p_ms_per_byte for own in pipelines], [0.0] * len(hops_ms)),
        communicator_bytes=communicator_bytes,
        host_ms_per_byte=tuple(each for own in pipelines for each in own.host_ms_per_byte),
        stage_time_factor=tuple(each for of in factors for each in of) if has_factors else (),
        host_limit_bytes=tuple(limit for own in pipelines for limit in own.host_limit_bytes) if limited else (),
    )


def _join_hops(inner: Sequence[tuple[float, ...]], between: Sequence[float]) -> tuple[float, ...]:
    """Of one pipeline after the other, with what leads from each to the next."""
    joined = list(inner[0])
    for hop, after in zip(between, inner[1:], strict=True):
        joined += (hop, *after)
    return tuple(joined)


def _delay_inline(parts: _Parts, module: Module) -> tuple[ChainBlock, ...]:
    """The blocks of a module on the decoder's one stage, with its crossing; with the decoder's sizes it has none."""
    if module.arrangement.decoder_sized:
        return module.blocks
    first = _delay(module.blocks, -1, parts.factor * module.crossing.forward_ms, 0.0)
    returning = max((index for index, block in enumerate(first) if block.backward_ms), default=-1)
    return _delay(first, returning, 0.0, parts.factor * module.crossing.backward_ms)


def _add_away(parts: _Parts, stages: Problem) -> Problem:
    """The pipeline, whose devices also hold the modules that are away, and what of them is kept through the step. Ranks
    of other encoders begin with the pipeline, when forwards of phases on the decoder's are over."""
    away = [form_away(parts.known, m, parts.factor) for m in parts.modules if m.arrangement.away]
    if not away:
        return stages
    once = [b for m in parts.modules if not m.arrangement.apart for b in m.blocks] + list(parts.blocks)
    begun = stages.num_stages - parts.decoder.num_stages
    communicator_bytes, once_bytes = parts.communicator_bytes(), _held_once_bytes(once)
    step_bytes = sum(one.step_bytes for one in away) + max(one.step_once_bytes for one in away)
    beside = tuple(
        Beside(
            sum(one.weight_bytes for one in away),
            sum(one.gradient_bytes for one in away),
            sum(one.optimizer_bytes for one in away),
            sum(one.kept_bytes if stage else one.kept_on_first_bytes for one in away),
        )
        for stage in range(parts.decoder.num_stages)
    )
    chain, tails_ms = stages.chain, stages.stage_tail_ms
    alone = {name for m in parts.modules if not m.arrangement.in_chain for name in m.arrangement.encoder.parts}
    for one in away:
        chain = tuple(one.give_room(b) if b.layer and b.modality not in alone else b for b in chain)
        more_ms = (one.before_ms,) * begun + (one.tail_ms,) * parts.decoder.num_stages
        tails_ms = tuple(map(sum, zip(tails_ms, more_ms, strict=True)))
    return replace(
        stages,
        chain=chain,
        stage_static_bytes=stages.stage_static_bytes[:begun]
        + tuple(
            parts.decoder.context_bytes
            + communicator_bytes
            + once_bytes
            + held.static_bytes
            + max(held.kept_bytes, step_bytes)  # the optimizer's step comes when nothing is kept
            for held in beside
        ),
        stage_tail_ms=tails_ms,
        communicator_bytes=communicator_bytes,
        beside=(Beside(0.0, 0.0, 0.0, 0.0),) * begun + beside,
        encoders=_deal(parts.decoder.num_stages, begun, away),
    )


def _deal(num_stages: int, begun: int, away: Sequence[Away]) -> tuple[Encoder, ...]:
    """Encoders that take turns on the decoder's stages, which come behind `begun` others, each one's first pass a stage
    before that of the one before."""
    return tuple(
        replace(
            one,
            pipelines=tuple(each * one.num_stages for each in deal_pipelines(num_stages, 1, turn, begun)),
            first_stage=begun,
        )
        for turn, one in enumerate(one.encoder for one in away if one.encoder)
    )


def _delay(blocks: Sequence[ChainBlock], index: int, forward_ms: float, backward_ms: float) -> tuple[ChainBlock, ...]:
    """With what a crossing adds to one of them, which is no layer; backward where it has one."""
    changed = list(blocks)
    block = changed[index]
    more_ms = backward_ms if block.backward_ms else 0.0
    changed[index] = replace(block, forward_ms=block.forward_ms + forward_ms, backward_ms=block.backward_ms + more_ms)
    return tuple(changed)


def _held_once_bytes(blocks: Sequence[ChainBlock]) -> float:
    return sum_held_once(block.footprint for block in blocks if block.footprint) + OPEN_SEGMENTS_BYTES
