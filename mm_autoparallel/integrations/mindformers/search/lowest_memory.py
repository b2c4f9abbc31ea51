"""The least memory that a division of a MindFormers model needs: every layer recomputed, layers dealt out by room.

Whether a division can run at all is decided by this layout, which one dry run of it would show as well.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mm_autoparallel.errors import NoFeasiblePlan
from mm_autoparallel.integrations.mindformers.layout import Grid, Layout
from mm_autoparallel.integrations.mindformers.memory_causes import format_causes, list_stage_causes
from mm_autoparallel.integrations.mindformers.memory_figures import MemoryFigures
from mm_autoparallel.integrations.mindformers.model_job import strategy_of
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem, placement_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.search.sized_memory import figures_of
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.loads import Floats, overfull_stages, peak_bytes, sum_loads
from mm_autoparallel.records import MAX_LAYERS
from mm_autoparallel.units import format_bytes

_STEADY_PERIODS = 4
"""After so many rounds of the stages what is in flight repeats, so more micro-batches need no more memory."""

_ROUNDING = 1e-9
"""Larger than what sums of a stage's bytes, added up in another order, may differ by, as a share of them."""

_ANY = Ratios(1.0, 1.0, 1.0, 1.0)
"""Memory does not depend on times."""


@dataclass(frozen=True, eq=False)
class LowestMemory:
    """The layout that needs least. reason: why it does not fit (None: it does)."""

    layout: Layout
    stage_peak_bytes: tuple[float, ...]
    stage_limit_bytes: tuple[float, ...]
    reason: str | None

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(self.stage_peak_bytes)


def find_lowest_memory(divided: Pretrain, job: Job, reserve_bytes: float | None = None) -> LowestMemory:
    """Of `divided`, whose job at the same global batch is `job`; its division must be lawful. reserve_bytes: see
    sized_memory.py, reserve_of.
    """
    problem = build_problem(job, strategy_of(divided))
    return lowest_of(divided, figures_of(divided, problem, job.workload, reserve_bytes))


def lowest_of(divided: Pretrain, memory: MemoryFigures) -> LowestMemory:
    """The same from figures of its layers and stages."""
    problem = memory_problem(divided, memory)
    layout, peaks = _make_room(problem, _deal_out(divided, problem))
    over = overfull_stages(problem, peaks)
    reason = None
    if over:
        stage = max(over, key=lambda s: float(peaks[s]) - problem.memory_limit_bytes[s])
        reason = (
            f"with every layer recomputed stage {stage} holds {format_bytes(float(peaks[stage]))} of "
            f"{format_bytes(problem.memory_limit_bytes[stage])}: "
            f"{format_causes(list_stage_causes(problem, memory, layout, peaks)[stage])}"
        )
    return LowestMemory(layout, tuple(float(peak) for peak in peaks), problem.memory_limit_bytes, reason)


def with_causes(error: NoFeasiblePlan, pretrain: Pretrain, memory: MemoryFigures) -> NoFeasiblePlan:
    """`error`, and what the fullest stage holds by cause where even the layout that needs least does not fit."""
    reason = lowest_of(pretrain, memory).reason
    return NoFeasiblePlan(f"{error}; {reason}") if reason else error


def memory_problem(divided: Pretrain, memory: MemoryFigures) -> Problem:
    """Its pipeline without more micro-batches than memory depends on, for `peaks_of`; times in it mean nothing."""
    few = min(divided.num_microbatches, _STEADY_PERIODS * divided.pp)
    return build_pipeline_problem(replace(divided, num_microbatches=few), _ANY, memory, "default")


def peaks_of(problem: Problem, layout: Layout) -> Floats:
    """Bytes that every stage holds at most."""
    return peak_bytes(problem, sum_loads(problem, placement_of(problem, layout)))


def _deal_out(divided: Pretrain, problem: Problem) -> list[int]:
    """Layers of each stage: one in each chunk, then one after the other to the stage that has most room with it."""
    num_stages, num_chunks = divided.pp, divided.vp
    one = _peaks_of_alike(problem, _kinds(problem)[-1])
    slopes = [(peak - static) / num_chunks for peak, static in zip(one, problem.stage_static_bytes, strict=True)]
    counts = [num_chunks] * num_stages
    heap = [(one[s] + slopes[s] - problem.memory_limit_bytes[s], s) for s in range(num_stages)]
    heapq.heapify(heap)
    for _ in range(divided.num_layers - num_stages * num_chunks):
        over_bytes, stage = heapq.heappop(heap)
        counts[stage] += 1
        heapq.heappush(heap, (over_bytes + slopes[stage], stage))
    return counts


def most_layers(problem: Problem, num_kept: int) -> int:
    """How many layers at most fit on stages of one chunk: `num_kept` of the last kind on the last stage, which are not
    recomputed, and others of the lightest kind, which are.
    """
    kinds, last = _kinds(problem), problem.num_stages - 1
    kept_bytes = _peaks_of_alike(problem, kinds[-1], recomputed=False)[last] - problem.stage_static_bytes[last]
    most = [0] * problem.num_stages
    for kind in kinds:
        one = _peaks_of_alike(problem, kind)
        for stage, static_bytes in enumerate(problem.stage_static_bytes):
            num, bytes_of_kept = (num_kept, num_kept * kept_bytes) if stage == last else (0, 0.0)
            room_bytes = problem.memory_limit_bytes[stage] * (1.0 + _ROUNDING) - static_bytes - bytes_of_kept
            layer_bytes = one[stage] - static_bytes
            num += math.floor(room_bytes / layer_bytes * (1.0 + _ROUNDING)) if layer_bytes > 0 else MAX_LAYERS
            most[stage] = max(most[stage], num)
    return sum(most)


def _kinds(problem: Problem) -> list[ChainBlock]:
    return [block for block in problem.chain if block.layer]


def _peaks_of_alike(problem: Problem, kind: ChainBlock, recomputed: bool = True) -> list[float]:
    """Bytes of every stage with one layer of `kind` in each chunk; what each holds besides is static."""
    ends = tuple(block for block in problem.chain if not block.layer)
    alike = replace(problem, chain=(replace(kind, count=problem.num_virtual_stages), *ends))
    grid = ((1,) * problem.num_stages,) * problem.num_chunks
    none = ((0,) * problem.num_stages,) * problem.num_chunks
    return [float(peak) for peak in peaks_of(alike, Layout(grid, grid if recomputed else none))]


def _recomputed(counts: Sequence[int], num_chunks: int) -> Layout:
    """Stages' layers dealt out over their chunks, all recomputed; later chunks keep fewer micro-batches, and get more
    layers.
    """
    layers: Grid = tuple(tuple((count + chunk) // num_chunks for count in counts) for chunk in range(num_chunks))
    return Layout(layers, layers)


def _make_room(problem: Problem, counts: list[int]) -> tuple[Layout, Floats]:
    """The layout of `counts`, layers moved from the fullest stage to the emptiest as long as that helps what overflows.

    Layers of another kind than the last are lighter or heavier than `_deal_out` takes them to be.
    """
    layout = _recomputed(counts, problem.num_chunks)
    peaks = peaks_of(problem, layout)
    while overfull_stages(problem, peaks):
        over = [float(peak) - limit for peak, limit in zip(peaks, problem.memory_limit_bytes, strict=True)]
        fullest, emptiest = over.index(max(over)), over.index(min(over))
        if counts[fullest] <= problem.num_chunks or sum(over) > 0:  # all stages together have no room
            break
        moved = [count + (s == emptiest) - (s == fullest) for s, count in enumerate(counts)]
        moved_layout = _recomputed(moved, problem.num_chunks)
        moved_peaks = peaks_of(problem, moved_layout)
        if max(float(p) - limit for p, limit in zip(moved_peaks, problem.memory_limit_bytes, strict=True)) >= max(over):
            break
        counts, layout, peaks = moved, moved_layout, moved_peaks
    return layout, peaks
