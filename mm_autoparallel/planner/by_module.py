"""By module: what each encoder of a layout, and its decoder, take of every stage's time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.away import Away, Module, form_away, handed_on_bytes
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_part
from mm_autoparallel.model.job.arrangement import ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, parse_order
from mm_autoparallel.pipeline.simulate.encoders.orders import encoders_peak_bytes
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import sum_loads

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ModuleShare:
    """Of one encoder, or of the decoder. layout: how it runs, in words; sizes: its own.

    Per stage: work_ms, its forwards and backwards in a step, recompute included, but nothing behind the last backward
    that is no phase; held_bytes, its weights, gradients and optimizer; kept_bytes, the most activations and outputs of
    it at once.
    """

    name: str
    layout: str
    sizes: ModuleLayout
    work_ms: tuple[float, ...]
    held_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]


def share_by_module(
    known: CostModel, strategy: Strategy, problem: Problem, placement: Placement, graph: TaskGraph
) -> tuple[ModuleShare, ...]:
    """Each encoder's by itself, then the decoder's; nothing of the chain. known: on the devices that the strategy
    uses."""
    if strategy.arrangement is None:
        return ()
    found = list[ModuleShare]()
    for one in strategy.arrangement.each:
        for name in one.encoder.parts:
            figures = _list_staged(name, problem, placement, graph)
            if one.is_cached:
                alone = strategy.with_only(replace(one, encoder=replace(one.encoder, name=name)))
                figures = _add_read(figures, strategy.arrangement.num_stages_apart, handed_on_bytes(known, alone))
            elif one.away:
                figures = _list_away(known, strategy.with_only(one), name, problem, placement)
            found.append(ModuleShare(name, one.words, one.encoder, *_columns(figures)))
    own = strategy.of_decoder()
    decodes = known.chain.modalities[-1]
    sizes = ModuleLayout(decodes, own.pp, own.tp, own.dp, own.mbs, own.cp, strategy.arrangement.decoder_offset)
    figures = _list_staged(decodes, problem, placement, graph)
    return (*found, ModuleShare(decodes, "decoder", sizes, *_columns(figures)))


def _columns(rows: Iterator[tuple[float, float, float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(zip(*rows, strict=True))


def _list_staged(
    name: str, problem: Problem, placement: Placement, graph: TaskGraph
) -> Iterator[tuple[float, float, float]]:
    """Stage by stage what blocks of that modality on it work, hold and keep."""
    chain = tuple(block if block.modality == name else _silence(block) for block in problem.chain)
    loads, virtual = sum_loads(replace(problem, chain=chain), placement), graph.place // graph.num_classes
    kept_bytes = np.where(graph.kind == FORWARD, 1.0, -1.0) * loads.activation_bytes[virtual]
    for stage in range(problem.num_stages):
        tasks = graph.stage == stage
        held_bytes = sum(
            count * block.footprint.static_bytes
            for k in problem.virtual_stages[stage]
            for block, count in zip(chain, placement.layers[k], strict=True)
            if block.footprint and block.modality == name
        )
        most_bytes = np.max(np.cumsum(kept_bytes[tasks]), initial=0.0)
        yield float(loads.durations_ms[graph.duration[tasks]].sum()), held_bytes, float(most_bytes)


def _add_read(
    rows: Iterator[tuple[float, float, float]], first: int, read_bytes: float
) -> Iterator[tuple[float, float, float]]:
    """The same of an encoder whose features are read by the decoder's first stage."""
    for stage, (work_ms, held_bytes, kept_bytes) in enumerate(rows):
        yield work_ms, held_bytes, kept_bytes + (read_bytes if stage == first else 0.0)


def _silence(block: ChainBlock) -> ChainBlock:
    """Without its time and what it keeps."""
    modes = (
        replace(mode, extra_forward_ms=0.0, extra_backward_ms=0.0, activation_bytes=0.0, restored_bytes=0.0)
        for mode in block.modes
    )
    return replace(block, forward_ms=0.0, backward_ms=0.0, activation_bytes=0.0, modes=tuple(modes))


def _list_away(
    known: CostModel, strategy: Strategy, name: str, problem: Problem, placement: Placement
) -> Iterator[tuple[float, float, float]]:
    """The same of an encoder that is on none. strategy: with its module alone."""
    assert strategy.arrangement is not None
    one = strategy.arrangement.encoder
    alone = replace(strategy.arrangement, encoder=replace(one, name=name))
    module, own = (
        Module.of(known, strategy.with_only(each), partial(build_part, known)) for each in (strategy.arrangement, alone)
    )
    away, phases_ms = form_away(known, own, 1.0), module.phases_ms(known.workload.global_batch_size, (name,))
    begun = problem.num_stages - strategy.of_decoder().pp
    held_bytes = away.weight_bytes + away.gradient_bytes + away.optimizer_bytes
    for stage in range(problem.num_stages):
        if stage < begun:
            yield 0.0, 0.0, 0.0
            continue
        kept_bytes = away.kept_bytes if stage > begun else away.kept_on_first_bytes
        if away.encoder is None:
            yield phases_ms, held_bytes, kept_bytes
            continue
        words = [word.partition("@")[0] for word in placement.orders[stage].split() if word.endswith(f"@{one.name}")]
        passes_bytes = encoders_peak_bytes((away.encoder,), " ".join(f"{word}@{name}" for word in words))
        yield _sum_passes(away, words), held_bytes, kept_bytes + passes_bytes


def _sum_passes(away: Away, words: Sequence[str]) -> float:
    assert away.encoder is not None
    of_kind = {FORWARD: away.encoder.forward_ms, BACKWARD: away.encoder.backward_ms}
    return float(sum(of_kind[kind][piece] for kind, piece, _ in parse_order(" ".join(words)).tolist()))
