"""Thinning: of each module's options beside one decoder, those that another option cannot be worse than.

What a module that is away adds to a pipeline is a few figures (costs/away.py): bytes, times before and after it, passes
beside it. Where every one of them is at least another option's, a plan with it is a plan with the other that is no
slower and no fuller, whatever all other modules do: each figure is added, or the largest of several counts. So of the
two the other alone joins the search, and of thousands of products of options tens are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.away import Away, Module, form_away
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import count_communicators
from mm_autoparallel.model.costs.stage import build_part
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.planner.search.arrangements import Options, combine, is_lawful_beside

Floats = NDArray[np.float64]


class Thinning:
    """Of one job. Problems of modules under their own sizes are built once, whatever decoder they stand beside."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._problems: dict[tuple[int, Strategy], Problem] = {}

    def combine(self, decoder: Strategy, options: Options) -> Iterator[Strategy]:
        """The strategies of such modules beside a decoder, but for those that cannot beat another one of them."""
        job = self._costs.job
        lawful = tuple(tuple(one for one in each if is_lawful_beside(job, decoder, one)) for each in options)
        if not any(one.away for each in lawful for one in each):
            yield from combine(decoder, lawful)
            return
        first = next(combine(decoder, lawful), None)
        if first is None:
            return
        costs = self._costs.used_by(first)
        chain = self._problem(costs, decoder).chain
        text = [block for block in chain if block.layer and block.modality == self._costs.chain.modalities[-1]]
        yield from combine(decoder, tuple(self._thin(costs, decoder, text, _elsewhere(each)) for each in lawful))
        if any(one.in_chain for each in lawful for one in each):  # stages may then hold layers of encoders alone
            layers = [block for block in chain if block.layer]
            wider = tuple(self._thin(costs, decoder, layers, each) for each in lawful)
            for strategy in combine(decoder, wider):
                if strategy.arrangement and any(one.in_chain for one in strategy.arrangement.each):
                    yield strategy

    def _problem(self, costs: CostModel, part: Strategy) -> Problem:
        key = costs.cluster.num_devices, part
        if key not in self._problems:
            self._problems[key] = build_part(costs, part)
        return self._problems[key]

    def _thin(
        self, costs: CostModel, decoder: Strategy, layers: Sequence[ChainBlock], options: Iterable[Arrangement]
    ) -> tuple[Arrangement, ...]:
        """Without those that are away and cannot beat another that is. costs: on all devices that such plans use.
        layers: beside which they may work."""
        kept: list[Arrangement] = []
        known: dict[object, list[tuple[Arrangement, dict[str, float]]]] = {}
        for one in options:
            try:
                weighs = one.away and not one.is_cached  # of which there is one, and projectors may lie on stages
                found = self._figures(costs, decoder, layers, one) if weighs else None
            except ProfileError:  # the search says so when it builds the strategy
                found = None
            if found is None:
                kept.append(one)
            else:
                known.setdefault(found[0], []).append((one, found[1]))
        for alike in known.values():
            kept += _list_best(alike)
        return tuple(kept)

    def _figures(
        self, costs: CostModel, decoder: Strategy, layers: Sequence[ChainBlock], one: Arrangement
    ) -> tuple[object, dict[str, float]]:
        """What must be equal for two options to be compared, and figures by name of which less is never worse."""
        module = Module.of(costs, decoder.with_only(one), partial(self._problem, costs))
        away = form_away(costs, module, 1.0)
        figures = {name: float(value) for name, value in vars(away).items() if isinstance(value, (int, float))}
        del figures["working_bytes"]
        for at, block in enumerate(layers):
            roomy = away.give_room(block)
            figures[f"transient {at}"] = roomy.transient_bytes
            figures[f"working {at}"] = roomy.footprint.working_bytes if roomy.footprint else 0.0
        figures["communicators"] = float(count_communicators(module.own, False))
        for block in module.blocks:
            for name, size_bytes in block.footprint.held_once_bytes if block.footprint else ():
                figures[f"once {name}"] = max(figures.get(f"once {name}", 0.0), size_bytes)
        return _passes(away, figures), figures


def _passes(away: Away, figures: dict[str, float]) -> object:
    """The shape of an option, its passes' figures added to the others."""
    encoder = away.encoder
    if encoder is None:
        return "phases"
    figures["feed"] = encoder.feed_ms
    for name in ("forward_ms", "backward_ms", "activation_bytes"):
        figures |= {f"{name} {piece}": value for piece, value in enumerate(getattr(encoder, name))}
    # a frozen encoder's passes of the next step may lie where those of this one do, and anywhere else
    figures["waits"] = float(encoder.run == "bubbles")
    return encoder.microbatches_per_pass, encoder.num_stages, encoder.is_frozen


def _elsewhere(options: Sequence[Arrangement]) -> list[Arrangement]:
    return [one for one in options if not one.in_chain]


def _list_best(alike: Sequence[tuple[Arrangement, dict[str, float]]]) -> list[Arrangement]:
    """Those that no other is at most in every figure; of equals the first."""
    names = sorted({name for _, figures in alike for name in figures})
    rows: Floats = np.array([[figures.get(name, 0.0) for name in names] for _, figures in alike])
    best = []
    for at, (one, _) in enumerate(alike):
        not_above = np.all(rows <= rows[at], axis=1)
        equal = np.all(rows == rows[at], axis=1)
        if not (np.any(not_above & ~equal) or np.any(equal[:at])):
            best.append(one)
    return best
