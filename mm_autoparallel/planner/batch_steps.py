"""The step of a plan under one drawn batch, whose micro-batches all differ, layout by layout.

Every replica of the decoder has a pipeline, played with its own micro-batches; the step is the longest of all, which
meet once a step, in the tails of their stages. An encoder with sizes of its own stands with some of them in a cell
(costs/resharding.py): one of its replicas beside several of the decoder's, or several beside one. It takes the samples
of a micro-batch in the order in which the decoder's replicas have them.

On ranks of its own, all pipelines of a cell are played at once, and what they share waits for all of them. Inline on
one stage, ranks wait for one another where the encoder hands on to the decoder, and back. In phases each replica takes
every n-th of the calls that have its cell's samples; the pipeline waits for the longest, and its backwards for the
longest pipeline. In bubbles a pass takes as long as the longest of the encoder's replicas that make it; as prefetch it
is of the batch drawn next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.away import Module, cut_into_pieces
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_part
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.encoders.orders import read_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.step import part_encoders
from mm_autoparallel.pipeline.simulate.encoders.tasks import DECODER, list_tasks
from mm_autoparallel.pipeline.simulate.unequal import list_modalities, prepare
from mm_autoparallel.planner.drawn_batches import DrawnBatches

Floats = NDArray[np.float64]


class BatchSteps(ABC):
    """Of one plan. strategy: its."""

    def __init__(self, strategy: Strategy) -> None:
        self.decoder = strategy.of_decoder()

    @abstractmethod
    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        """Of one of the batches drawn."""

    def at_mean_ms(self, drawn: DrawnBatches) -> float:
        """With the durations that every position expects: never above the true mean of steps."""
        return self.step_ms(drawn.at_mean, 0)


def prepare_steps(costs: CostModel, problem: Problem, placement: Placement, strategy: Strategy) -> BatchSteps:
    """Those of `placement`. costs: on the devices that the strategy uses. problem: its pipeline, as the job has it."""
    arrangement = strategy.arrangement
    if arrangement is None or arrangement.is_cached:
        return _Pipelines(problem, placement, strategy)
    if arrangement.apart:
        return _Cells(problem, placement, strategy, arrangement)
    if arrangement.in_bubbles:
        return _Beside(costs, problem, placement, strategy, arrangement)
    if arrangement.in_phases:
        return _Phases(costs, problem, placement, strategy, arrangement)
    return _Inline(problem, placement, strategy, arrangement)


class _Pipelines(BatchSteps):
    """One of each replica, which share nothing."""

    def __init__(self, problem: Problem, placement: Placement, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.ready, self.modalities = prepare(problem, placement), list_modalities(problem)

    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        return float(self.ready.play(drawn.deal(batch, self.modalities, self.decoder)).max())


@dataclass(frozen=True)
class _Sharing:
    """Of an encoder beside its decoder: `cells`, and in each of them how many replicas of either; one of both is 1."""

    cells: int
    encoders: int
    decoders: int

    @classmethod
    def of(cls, arrangement: Arrangement, decoder: Strategy) -> _Sharing:
        """The two DPs divide one another."""
        cells = min(arrangement.encoder.dp, decoder.dp)
        return cls(cells, arrangement.encoder.dp // cells, decoder.dp // cells)


class _OfMicroBatches(BatchSteps):
    """Of an encoder that runs in every micro-batch."""

    def __init__(self, problem: Problem, placement: Placement, strategy: Strategy, arrangement: Arrangement) -> None:
        super().__init__(strategy)
        self.ready, self.modalities = prepare(problem, placement), list_modalities(problem)
        self.encoder, self.sharing = arrangement.encoder, _Sharing.of(arrangement, self.decoder)
        self.count = problem.num_microbatches

    def deal(self, drawn: DrawnBatches, batch: int, modality: str) -> Floats:
        """[cells, replicas in a cell, M] factors on its times in each micro-batch."""
        encodes = modality in self.encoder.parts
        dp, mbs = (self.encoder.dp, self.encoder.mbs) if encodes else (self.decoder.dp, self.decoder.mbs)
        return drawn.mean_load(batch, modality, (self.count, dp, mbs)).T.reshape(self.sharing.cells, -1, self.count)


class _Cells(_OfMicroBatches):
    """Of an encoder on ranks of its own."""

    def __init__(self, problem: Problem, placement: Placement, strategy: Strategy, arrangement: Arrangement) -> None:
        super().__init__(problem, placement, strategy, arrangement)
        of_encoder = np.arange(problem.num_stages) < arrangement.encoder.pp
        self.shared = of_encoder if self.sharing.decoders > 1 else ~of_encoder

    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        dealt = [self.deal(drawn, batch, name) for name in self.modalities]
        runs = max(self.sharing.encoders, self.sharing.decoders)
        each = [np.broadcast_to(of, (self.sharing.cells, runs, self.count)) for of in dealt]
        return max(self.ready.play_together(factors, self.shared) for factors in np.stack(each, axis=2))


class _Inline(_OfMicroBatches):
    """Of an encoder before and behind a decoder of one stage. Ranks meet where one hands on to the other; under modes
    that move bytes to the host, whose transfers lie beside either, they are played as if they met in every pass too."""

    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        dealt = {name: self.deal(drawn, batch, name) for name in self.modalities}
        if self.ready.host_ms.any():
            slowest = np.stack([of.max(axis=1) for of in dealt.values()], axis=1)
            return float(self.ready.play(slowest).max())
        encoding, decoding = (self._runs_ms(dealt, encodes) for encodes in (True, False))
        edges = np.zeros((*encoding.shape[1:3], 1))
        between = np.concatenate([encoding[0], edges], axis=2) + np.concatenate([edges, encoding[1]], axis=2)
        cells_ms = between.max(axis=1).sum(axis=1) + decoding.sum(axis=0).max(axis=1).sum(axis=1)
        return float(cells_ms.max() + self.ready.tails_ms[0])

    def _runs_ms(self, dealt: dict[str, Floats], encodes: bool) -> Floats:
        """[2, cells, replicas, M] forwards and backwards of the encoder, or of the decoder."""
        mine = [name for name in self.modalities if (name in self.encoder.parts) == encodes]
        times = {name: self.ready.each_ms[:2, self.modalities.index(name), 0] for name in mine}
        total: Floats = sum(times[name][:, None, None, None] * dealt[name] for name in mine)  # type: ignore[assignment]
        return total


class _Phases(_Pipelines):
    """Of an encoder before and behind the pipeline."""

    def __init__(
        self, costs: CostModel, problem: Problem, placement: Placement, strategy: Strategy, arrangement: Arrangement
    ) -> None:
        super().__init__(problem, placement, strategy)
        self.encoder, self.sharing = arrangement.encoder, _Sharing.of(arrangement, self.decoder)
        module, batch = Module.of(costs, strategy, partial(build_part, costs)), costs.workload.global_batch_size
        self.phases_ms = {name: module.phases_ms(batch, (name,)) for name in self.encoder.parts}

    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        cells = self.sharing.cells
        pipelines = self.ready.play(drawn.deal(batch, self.modalities, self.decoder)).reshape(cells, -1).max(axis=1)
        more_ms = np.zeros((cells, self.sharing.encoders))
        samples = np.arange(drawn.batches.shape[1]).reshape(-1, cells, self.decoder.mbs * self.sharing.decoders)
        calls = samples.swapaxes(0, 1).reshape(cells, -1, self.sharing.encoders, self.encoder.mbs)
        for name, phases_ms in self.phases_ms.items():
            loads = drawn.factors(name, self.encoder.mbs)[drawn.batches[batch]]
            more_ms += (loads[calls].mean(axis=(1, 3)) - 1.0) * phases_ms
        return float((pipelines + more_ms.max(axis=1)).max())


class _Beside(BatchSteps):
    """Of an encoder in bubbles or as prefetch, one pipeline of each replica."""

    def __init__(
        self, costs: CostModel, problem: Problem, placement: Placement, strategy: Strategy, arrangement: Arrangement
    ) -> None:
        super().__init__(strategy)
        tasks = list_tasks(part_encoders(problem), replace(placement, orders=()))
        player = Player(tasks)
        player.step_ms(read_orders(tasks, placement.orders))
        place = np.append(np.argsort(player.order), tasks.num_tasks).astype(np.int32)
        order = player.order
        numbers = np.arange(tasks.num_tasks, dtype=np.int32)
        self.tasks = tasks.lane[order], place[tasks.dependency[order]], tasks.hop[order], numbers
        self.lengths_ms, self.hops_ms, self.tails_ms = tasks.length_ms[order], tasks.hops_ms, tasks.tails_ms
        self.owner, self.index = tasks.owner[order], tasks.index[order]
        self.piece = 2 * tasks.part[order] + tasks.kind[order]
        self.shares = self._share(Module.of(costs, strategy, partial(build_part, costs)))
        self.encoder, self.is_ahead = arrangement.encoder, arrangement.encoder_run == "prefetch"
        self.number, self.count = problem.encoders[0].microbatches_per_pass, problem.num_microbatches
        self.text = list_modalities(problem)[-1]

    @staticmethod
    def _share(module: Module) -> dict[str, Floats]:
        """Modality → [2 · pieces] what it takes of each piece's forward and backward."""
        parts, pieces = module.arrangement.encoder.parts, cut_into_pieces(module)
        times = [
            [sum(getattr(block, key) * number for block, number in piece if block.modality == name) for name in parts]
            for piece, key in product(pieces, ("forward_ms", "backward_ms"))
        ]
        return {name: np.array([of[at] / (sum(of) or 1.0) for of in times]) for at, name in enumerate(parts)}

    def step_ms(self, drawn: DrawnBatches, batch: int) -> float:
        own, encodes = self.decoder, self.owner >= 0
        text = drawn.mean_load(batch, self.text, (self.count, own.dp, own.mbs)).T
        fed = (batch + 1) % len(drawn.batches) if self.is_ahead else batch
        samples = drawn.batches[fed].reshape(-1, self.number, own.dp, own.mbs).transpose(2, 0, 1, 3)
        passes = samples.reshape(own.dp, self.count // self.number, -1, self.encoder.mbs)
        loads = sum(  # [DP, passes, encoder replicas, 2 · pieces]
            drawn.factors(name, self.encoder.mbs)[passes].mean(axis=-1)[..., None] * shares
            for name, shares in self.shares.items()
        )
        slowest = np.max(loads, axis=2)
        ends, free = np.empty(len(self.lengths_ms) + 1), np.empty(len(self.tails_ms))
        longest_ms = 0.0
        for replica in range(own.dp):
            factors = np.ones(len(self.lengths_ms))
            factors[encodes] = slowest[replica, self.index[encodes], self.piece[encodes]]
            decodes = self.owner == DECODER
            factors[decodes] = text[replica, self.index[decodes]]
            of_run = self.lengths_ms * factors, self.hops_ms, self.tails_ms, ends, free
            longest_ms = max(longest_ms, engine.play(*self.tasks, *of_run))
        return longest_ms
