"""Galvatron's space, searched exactly: batch sizes, micro-batches, pipeline stages, and a strategy for every layer.

The score is upstream's own (`step.py` of `cost.py`). Its search keeps another sum small and compares scores only after;
here the score itself is as low as it can be, with a proof (`mixes.py`). A space is one batch, number of micro-batches,
pipeline size, and way to divide samples: `tensor+ulysses` may use both and gathers into one buffer as large as its
highest degree, `ulysses` needs no buffer. Upstream's third, of tensor parallelism alone, lies within the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mm_autoparallel.errors import Unfinished
from mm_autoparallel.integrations.galvatron.configuration import Configuration
from mm_autoparallel.integrations.galvatron.cost import Batch
from mm_autoparallel.integrations.galvatron.mix_search import OutOfNodes
from mm_autoparallel.integrations.galvatron.mixes import EQUAL, Mix, Mixing
from mm_autoparallel.integrations.galvatron.profiles import ModelProfile
from mm_autoparallel.integrations.galvatron.score import Planner, Score, even_division, max_dp, min_degree
from mm_autoparallel.integrations.galvatron.step import EndsCost
from mm_autoparallel.integrations.galvatron.strategies import (
    DpType,
    EndsStrategy,
    LayerStrategy,
    dp_type_of,
    powers,
)
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment

MAX_NODES = 300_000
"""Of the search in one space with one way to hold the ends; beyond it a plan is not proven."""


@dataclass(frozen=True)
class Space:
    """One of the spaces; buffer: its highest degree."""

    batch: Batch
    pp: int
    is_ulysses: bool
    buffer: int

    def __str__(self) -> str:
        kind = "ulysses" if self.is_ulysses else "tensor+ulysses"
        return (
            f"batch {self.batch.samples}, {self.batch.chunks} micro-batches, PP {self.pp}, {kind} up to {self.buffer}"
        )


@dataclass(frozen=True)
class Found:
    """What a search came to. searched_s: the step as it was kept small; bound_per_sample_s: no plan is below. left_out:
    spaces and strategies by the reason for which they are none."""

    best: Score | None
    searched_s: float
    bound_per_sample_s: float
    left_out: dict[str, int] = field(default_factory=dict)
    num_spaces: int = 0
    num_nodes: int = 0

    @property
    def gap_fraction(self) -> float:
        """How far the best may be from what no plan is below."""
        if self.best is None:
            return math.inf
        return max(0.0, 1.0 - self.bound_per_sample_s * self.best.plan.num_samples / self.searched_s)

    @property
    def is_proven(self) -> bool:
        """Whether no plan of the space is better."""
        return self.gap_fraction <= 10 * EQUAL


# ------------------------------------------------------------------------------------------------------------- spaces


def list_spaces(config: Configuration, num_layers: int) -> Iterator[Space]:
    """In upstream's order."""
    space, sizes, devices = config.search_space_info, config.batch_size_info, config.hardware_info.num_devices
    most_pp = 1 if space.disable_pp else min(space.max_pp_deg, num_layers, devices)
    for samples in sizes.batches:
        for chunks in [sizes.settle_chunk] if sizes.settle_chunk != -1 else range(1, samples + 1):
            if samples % chunks:
                continue
            batch = Batch(samples, chunks)
            for pp in powers(min(most_pp, chunks)):
                if devices % pp:
                    continue
                most = devices // pp if space.max_tp_deg == -1 else min(devices // pp, space.max_tp_deg)
                least = min_degree(devices, batch, pp)
                yield Space(batch, pp, True, most)
                for buffer in powers(most):
                    if buffer >= least:
                        yield Space(batch, pp, False, buffer)


def list_strategies(
    planner: Planner, space: Space, left_out: Counter[str]
) -> tuple[list[LayerStrategy], list[EndsStrategy]]:
    """Of layers, and of embedding and head, in the order of preference among equals."""
    config, devices = planner.config.search_space_info, planner.num_devices
    profile: ModelProfile = planner.search.profile
    states, activations = profile.ends_degrees(space.pp)
    layers: list[LayerStrategy] = []
    ends: list[EndsStrategy] = []
    default, pp = planner.default_dp_type, space.pp
    for degree in powers(min(space.buffer, devices // pp)):
        if devices % (pp * degree):
            continue
        dp = devices // pp // degree
        if dp > max_dp(devices, space.batch, pp) or (config.disable_dp and dp > 1):
            continue
        if space.batch.samples % dp:
            left_out[f"the batch is no multiple of DP {dp}, which Galvatron's runtime refuses"] += 1
            continue
        if planner.extensions.needs_whole_samples and space.batch.samples // space.batch.chunks % dp:
            left_out[f"a micro-batch is no multiple of DP {dp}"] += 1
            continue
        for is_sp in (False, True) if degree > 1 else (False,):
            tp, sp = (1, degree) if is_sp else (degree, 1)
            most = config.max_sp_deg if is_sp else config.max_tp_deg
            if (space.is_ulysses and tp > 1) or (config.disable_sp if is_sp else config.disable_tp and tp > 1):
                continue
            if most != -1 and degree > most:
                continue
            fully = (False,) if dp == 1 or config.disable_fsdp else (False, True)
            kinds = [EndsStrategy(pp, tp, sp, dp, dp_type_of(dp, each, default)) for each in fully]
            if degree in profile.layer_degrees:
                again = (False,) if config.disable_ckpt else (False, True)
                layers += [LayerStrategy(pp, tp, sp, dp, kind.dp_type, each) for kind in kinds for each in again]
            else:
                left_out[f"layers were not measured at degree {degree}"] += 1
            if tp not in states or degree not in activations:
                left_out[f"embedding and head were not measured at degree {degree} with PP {pp}"] += 1
            elif tp > 1 and not planner.config.common_train_info.sequence_parallel:
                left_out["embedding and head in tensor parallelism need sequence_parallel"] += 1
            elif not (config.disable_embedding_lmhead_tp and tp > 1) and not (
                config.disable_embedding_lmhead_sp and is_sp
            ):
                ends += kinds
    return layers, ends


@dataclass(frozen=True)
class Part:
    """A space with one way to hold the ends: where the exact search works. limit_mib: of every stage, without what the
    space's buffer takes."""

    space: Space
    mixing: Mixing
    layers: Sequence[LayerStrategy]
    ends: EndsStrategy
    ends_cost: EndsCost
    limit_mib: int
    bound_s: float


@dataclass(frozen=True)
class Best:
    """Of several parts the fastest, and what no plan of any is below."""

    part: Part | None
    mix: Mix | None
    bound_per_sample_s: float
    num_nodes: int


def search_spaces(
    spaces: Iterable[Space],
    parts_of: Callable[[Space, Counter[str]], Iterable[Part]],
    score: Callable[[Part, Mix], Score],
    should_stop: Callable[[], bool],
) -> Found:
    """The plan of the most samples a second. parts_of: what fits of a space, and what is left out; score: of what was
    found. Raises Unfinished where it should stop before anything was visited."""
    left_out: Counter[str] = Counter()
    parts: list[Part] = []
    num_spaces = 0
    for space in spaces:
        if should_stop():
            raise Unfinished(f"stopped after {num_spaces} spaces were listed, before any was searched")
        num_spaces += 1
        found = [*parts_of(space, left_out)]
        if not found:
            left_out["nothing of the space fits or is left"] += 1
        parts += found
    best = _search_parts(parts, should_stop)
    if best.part is None or best.mix is None:
        return Found(None, math.inf, best.bound_per_sample_s, dict(left_out), num_spaces, best.num_nodes)
    scored = score(best.part, best.mix)
    return Found(scored, best.mix.step_s, best.bound_per_sample_s, dict(left_out), num_spaces, best.num_nodes)


def _search_parts(parts: Sequence[Part], should_stop: Callable[[], bool]) -> Best:
    """The best of what was visited, where it should stop."""

    def look() -> None:
        if should_stop():
            raise OutOfNodes

    best: tuple[float, Part, Mix] | None = None
    bound = math.inf
    for part in sorted(parts, key=lambda part: part.bound_s / part.space.batch.samples):
        samples = part.space.batch.samples
        ceiling = best[0] if best else math.inf
        if part.bound_s / samples >= ceiling * (1.0 - EQUAL):
            break
        if should_stop():
            bound = min(bound, part.bound_s / samples)
            break
        limits = [part.limit_mib] * part.space.pp
        mix, own_bound = part.mixing.solve(part.ends_cost, limits, ceiling * samples, MAX_NODES, look)
        bound = min(bound, own_bound / samples)
        if mix is not None:
            best = (mix.step_s / samples, part, mix)
    num_nodes = sum({id(part.mixing): part.mixing.num_nodes for part in parts}.values())
    if best is None:
        return Best(None, None, bound, num_nodes)
    return Best(best[1], best[2], min(bound, best[0]), num_nodes)


def search(planner: Planner, should_stop: Callable[[], bool] = lambda: False) -> Found:
    """The best plan of upstream's space. Raises JobError where a profile lacks what a strategy needs, Unfinished as
    `search_spaces`."""
    pipeline_type = planner.config.parallelism_info.pipeline_type
    return search_spaces(
        list_spaces(planner.config, planner.search.num_layers),
        lambda space, left_out: _parts_of(planner, space, left_out),
        lambda part, mix: planner.score(assign(part, mix, pipeline_type, planner.default_dp_type)),
        should_stop,
    )


def _parts_of(planner: Planner, space: Space, left_out: Counter[str]) -> Iterator[Part]:
    layers, ends = list_strategies(planner, space, left_out)
    if not planner.config.options_info.fine_grained_mode:  # one strategy for all layers, and for the ends
        for layer in layers:
            if layer.of_ends in ends:
                yield from _parts_with(planner, space, [layer], [layer.of_ends])
    elif layers:
        yield from _parts_with(planner, space, layers, ends)


def _parts_with(
    planner: Planner, space: Space, layers: Sequence[LayerStrategy], ends: Sequence[EndsStrategy]
) -> Iterator[Part]:
    batch, pp, extensions = space.batch, space.pp, planner.extensions
    mixing = Mixing(
        [planner.cost.layer(strategy, batch) for strategy in layers],
        even_division(planner.search.num_layers, pp),
        batch.chunks,
        extensions.spread,
        extensions.counts_every_stage or extensions.spread > 0,
        planner.resharding(layers, batch) if extensions.counts_resharding else None,
    )
    limit = planner.limit_mib - planner.buffer_mib(batch, pp, space.buffer, space.is_ulysses)
    for each in ends:
        cost = planner.cost.ends(each, batch)
        bound_s = mixing.quick_bound_s(cost, [limit] * pp)
        if bound_s < math.inf:
            yield Part(space, mixing, layers, each, cost, limit, bound_s)


def assign(part: Part, mix: Mix, pipeline_type: str, default_dp_type: DpType) -> Assignment:
    """Layers in an order: on each stage degrees ascend, the checkpointed first, as upstream's bias has it."""

    def key(layer: LayerStrategy) -> tuple[int, bool, bool, bool, bool]:
        return layer.degree, layer.strided, layer.sp > 1, not layer.checkpoint, layer.dp_type != "zero3"

    layers: list[LayerStrategy] = []
    for held in mix.counts:
        layers += sorted((part.layers[place] for place, count in enumerate(held) for _ in range(count)), key=key)
    return Assignment(
        tuple(layers),
        part.ends,
        tuple(sum(held) for held in mix.counts),
        part.space.batch.samples,
        part.space.batch.chunks,
        pipeline_type,
        default_dp_type,
    )
