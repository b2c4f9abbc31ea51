"""Caution: what a plan's chance to run out of memory adds to what it is ranked by, and the limits that bound it.

A plan of step T whose fullest device is filled to x (device peak / memory) is ranked by its expected time

    T * g(x),   g = 1 + price * P / (1 - P),   P(x) the chance to run out of memory (planner/chance_to_fit.py),

and g grows with x. So if no placement that is filled to at most y takes less than T(y), those that are filled beyond
some x < y cost T(y) * g(x) at least: a placement problem with one limit bounds all that is fuller, and the limits fall
until what is left cannot win (search/pipeline.py). The fill of a placement is not a sum that placement can limit, but
its least is: what every stage holds through the step and for the micro-batches in flight, fragments included.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.held_once import count_communicator_kinds
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.footprint import Footprint, sum_held_once
from mm_autoparallel.pipeline.laid_out import has_layouts, in_every_layout
from mm_autoparallel.pipeline.layout import Layout
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.memory import list_shelved_bytes, list_stage_memory
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.chance_to_fit import (
    FRAGMENTED_FACTOR,
    device_peak_bytes,
    failure_factor,
    oom_probability,
    outside_bytes,
)

_LEAST_FILL, _MOST_FILL = 1e-3, 10.0
"""Fills between which one is looked for; P is 0 and 1 there to all digits."""
_ROUNDING_FRACTION = 1e-9


class Caution:
    """That of one job's search. most_fill: no plan may be fuller (infinite where nobody says so)."""

    def __init__(self, job: Job) -> None:
        limits = job.search
        self.price = limits.price
        self.most_fill = math.inf
        if limits.fit_probability is not None:
            self.most_fill = _fill_of_probability(1.0 - limits.fit_probability)
        self._memory_fraction = job.cluster.memory_fraction

    @property
    def is_off(self) -> bool:
        """Whether steps alone rank plans, whatever their chance."""
        return self.price == 0.0 and math.isinf(self.most_fill)

    def factor(self, fill: float) -> float:
        """g of the fill, at least 1; infinite where a plan surely fails."""
        return self.price_factor(oom_probability(fill, 1.0))

    def price_factor(self, probability: float) -> float:
        """g of the chance to run out of memory."""
        return failure_factor(probability, self.price)

    def allows(self, probability: float) -> bool:
        """Whether a plan may have this chance to run out of memory."""
        return probability <= oom_probability(min(self.most_fill, _MOST_FILL), 1.0) * (1.0 + 1e-6)

    def fill_at(self, factor: float) -> float:
        """What is fuller costs `factor` times its step at least; infinite where nothing does."""
        if self.price == 0.0 or math.isinf(factor):
            return math.inf
        odds = max(0.0, factor - 1.0) / self.price
        return _fill_of_probability(odds / (1.0 + odds))

    def fill_of(self, problem: Problem, placement: Placement, strategy: Strategy) -> float:
        """Device peak over memory of the fullest stage, as Estimate.device_peak_bytes tells it; infinite where the
        placement does not keep the limits of `problem`, the pipeline of `strategy`, whose chain has footprints."""
        timeline = simulate(problem, placement)
        if find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes):
            return math.inf
        return max(self.list_fills(problem, placement, strategy, timeline.graph, timeline.peak_memory_bytes))

    def list_fills(
        self,
        problem: Problem,
        placement: Placement,
        strategy: Strategy,
        graph: TaskGraph,
        peaks: NDArray[np.float64],
    ) -> tuple[float, ...]:
        """The same of each stage. graph: of the step; peaks: [P] as placement counts them."""
        stages = list_stage_memory(problem, placement, graph, peaks)
        shelved = list_shelved_bytes(problem, placement, graph)
        num_kinds = count_communicator_kinds(strategy)
        return tuple(
            device_peak_bytes(stage, shelved_bytes, num_kinds) * self._memory_fraction / limit
            for stage, shelved_bytes, limit in zip(stages, shelved, problem.memory_limit_bytes, strict=True)
        )

    def rank_ms(self, step_ms: float, fill: float) -> float:
        """What a placement is ranked by; infinite where it is too full."""
        too_full = fill > self.most_fill * (1.0 + _ROUNDING_FRACTION) or math.isinf(fill)
        return math.inf if too_full else step_ms * self.factor(fill)

    def limited(self, problem: Problem, fill: float, strategy: Strategy) -> Problem:
        """The problem whose placements include all those of `problem` that are filled to at most `fill`.

        Its stages hold the least that a device does: static bytes as they are and what lies outside the allocator; what
        is kept for backward, and the optimizer's passing bytes, with fragments; the least working set that a stage with
        such a block needs while all that is kept still is; and what any layer asks to be held once. What `problem`
        counts beyond that, placement counts for every moment at once. strategy: whose pipeline it is.
        """
        if math.isinf(fill):
            return problem
        outside = outside_bytes(problem.communicator_bytes + problem.context_bytes, count_communicator_kinds(strategy))
        needs = _least_needs(problem)
        chain = [_at_least(*of) for of in zip(problem.chain, needs.working_bytes, needs.keeps, strict=True)]
        moved_bytes = FRAGMENTED_FACTOR * needs.moved_bytes
        beside = [held.static_bytes + FRAGMENTED_FACTOR * held.kept_bytes for held in problem.beside]
        if beside:  # which the optimizer's step does not find there, so that moment is not limited
            chain = [replace(block, step_bytes=0.0, step_once_bytes=0.0, step_shard_bytes=None) for block in chain]
        if any(block.step_bytes or block.step_once_bytes for block in chain):
            chain[-1] = replace(chain[-1], step_bytes=chain[-1].step_bytes + moved_bytes)
        encoders = tuple(
            replace(each, activation_bytes=tuple(FRAGMENTED_FACTOR * kept for kept in each.activation_bytes))
            for each in problem.encoders
        )
        return replace(
            problem,
            chain=tuple(chain),
            encoders=encoders,
            memory_limit_bytes=tuple(
                limit / self._memory_fraction * fill * (1.0 + _ROUNDING_FRACTION)
                for limit in problem.memory_limit_bytes
            ),
            stage_static_bytes=tuple(
                outside
                + (beside[stage] if beside else 0.0)
                + FRAGMENTED_FACTOR * _least_held_once(problem, stage)
                - (moved_bytes if stage == problem.stage_of[-1] else 0.0)
                for stage in range(problem.num_stages)
            ),
        )


def _at_least(block: ChainBlock, working_bytes: float, keeps: bool) -> ChainBlock:
    factor = FRAGMENTED_FACTOR if keeps else 0.0
    modes = tuple(
        replace(
            mode,
            activation_bytes=factor * mode.activation_bytes,
            restored_bytes=0.0,
            layout=_fragmented(mode.layout, 0.0) if mode.layout else None,
        )
        for mode in block.modes
    )
    least = replace(_fragmented(block, working_bytes), modes=modes)
    return least if keeps else replace(least, activation_bytes=0.0, kept_for_weight_bytes=0.0)


Figures = TypeVar("Figures", ChainBlock, Layout)


def _fragmented(noun: Figures, working_bytes: float) -> Figures:
    """What it keeps and passes with fragments, and a working set of working_bytes."""
    factor, shard_bytes = FRAGMENTED_FACTOR, noun.step_shard_bytes
    return replace(
        noun,
        activation_bytes=factor * noun.activation_bytes,
        transient_bytes=factor * working_bytes,
        step_bytes=factor * noun.step_bytes,
        step_once_bytes=factor * noun.step_once_bytes,
        step_shard_bytes=None if shard_bytes is None else factor * shard_bytes,
    )


@dataclass(frozen=True)
class _Needs:
    """working_bytes: of each block, what a stage that holds it needs at work beside all that it keeps; keeps: whether
    what the block keeps is counted there. moved_bytes: how much less the stage of the last block needs than that says,
    which is to be taken off its static bytes."""

    working_bytes: list[float]
    keeps: list[bool]
    moved_bytes: float = 0.0


def _least_needs(problem: Problem) -> _Needs:
    """What stages need at work, as blocks tell it.

    With one chunk that is the working set of the stage's last block, whose backward is the first after the forward that
    filled the stage: one of those from this block on. With more it is that of the last block of any chunk. A block
    without a backward works when less is kept, and counts as nothing. What comes before the first layer with a backward
    (a projector behind a frozen tower) may end a chunk, and work with little: where it keeps less than a layer works
    with it is left out whole. For after the forward that fills a stage with what layers keep, all of that is there
    until a layer's backward begins.

    The chain's last block lies on one stage, so that no other ends with it, nor with one pinned there, however little
    these work with: a problem tells blocks apart and not stages, so the last block counts as much as any, and its stage
    has that much less. Where kinds of layers hold unequal bytes once, what a kind holds beyond the least of any counts
    here too.
    """
    chain, count = problem.chain, len(problem.chain)
    if has_layouts(problem):  # what works with least is a question of its layout, and nothing is counted
        return _Needs([0.0] * count, [True] * count)
    prints = [_footprint(block) for block in chain]
    has_chunks = problem.num_chunks > 1
    without = math.inf if has_chunks else 0.0
    working = [held.working_bytes if held.has_backward else without for held in prints]
    on_last = [block.pinned == "last" for block in chain[:-1]]
    is_alone = problem.num_stages == 1 or chain[-1].count > 1 or all(on_last)
    ends = working if is_alone else [math.inf if no else each for no, each in zip(on_last, working, strict=False)]
    if has_chunks:
        start = _first_that_counts(problem, ends)
        least_bytes, of_last = min(ends[start:]), min(working[start:])
        least = [least_bytes if k >= start and held.has_backward else 0.0 for k, held in enumerate(prints)]
    else:
        start, least, of_last = 0, _least_from_here(ends), working[-1] + _least_shelved_bytes(problem)
    keeps = [k >= start for k in range(count)]
    if is_alone:
        return _Needs([*least[: count - 1], of_last], keeps)
    more = _more_held_once(problem, prints)
    least = [0.0 if pinned else each + once for pinned, each, once in zip(on_last, least, more, strict=False)]
    moved_bytes = max(0.0, max(least) - of_last)
    return _Needs([*least, of_last + moved_bytes], keeps, moved_bytes)


def _first_that_counts(problem: Problem, ends: list[float]) -> int:
    """The first block of `_least_needs`, with chunks; ends: working sets of blocks with a backward, which chunks may
    end with, infinite for others."""
    start = next((k for k, of in enumerate(ends) if problem.chain[k].layer and math.isfinite(of)), 0)
    kept_bytes = sum(block.activation_bytes for block in problem.chain[:start]) * problem.num_virtual_stages
    return start if min(ends[start:]) - min(ends) > kept_bytes else 0


def _more_held_once(problem: Problem, prints: list[Footprint]) -> list[float]:
    """Of each block, what a stage without the chain's last block holds once where it holds this one, beyond
    `_least_held_once` of the stage."""
    layers = [held for held, block in zip(prints, problem.chain, strict=True) if block.layer]
    stages = [stage for stage in range(problem.num_stages) if stage != problem.stage_of[-1]]
    beside: list[list[Footprint]] = [[prints[0]]] * (0 in stages) + [[]] * any(stages)
    least = [min(sum_held_once([held, *ends]) for held in layers) for ends in beside]
    return [
        max(0.0, min(sum_held_once([held, *ends]) - known for ends, known in zip(beside, least, strict=True)))
        for held in prints
    ]


def _least_from_here(values: list[float]) -> list[float]:
    """The least of each value and all after it."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


def _least_shelved_bytes(problem: Problem) -> float:
    """What is shelved (pipeline/simulate/memory.py) wherever the last block of the chain works, with one chunk a stage:
    what the last layer of the chain, which lies there too, works with."""
    last, layers = problem.chain[-1], [block for block in problem.chain if block.layer]
    is_another = not (last.layer or last.modes) and _footprint(last).has_backward
    return _footprint(layers[-1]).working_bytes if is_another else 0.0


def _least_held_once(problem: Problem, stage: int) -> float:
    """What the stage holds once, whichever layers it has: one at least, and the ends of the chain at its own."""
    prints = [_footprint(block) for block in problem.chain]
    if problem.num_stages == 1 and not has_layouts(problem):
        return sum_held_once(prints)
    ends = [prints[0]] * (stage == 0) + [prints[-1]] * (stage == problem.stage_of[-1])
    every = in_every_layout(problem).chain
    return min(sum_held_once([_footprint(block), *ends]) for block in every if block.layer)


def _footprint(block: ChainBlock) -> Footprint:
    assert block.footprint is not None  # blocks of a job's model have one
    return block.footprint


def _fill_of_probability(probability: float) -> float:
    """The least fill of at least this chance to run out of memory, by halving: the chance grows with the fill."""
    low, high = math.log(_LEAST_FILL), math.log(_MOST_FILL)
    for _ in range(60):
        middle = (low + high) / 2
        if oom_probability(math.exp(middle), 1.0) >= probability:
            high = middle
        else:
            low = middle
    return math.exp(high)
