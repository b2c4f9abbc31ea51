"""What the stages of a pipeline hold at their peaks, by cause."""

from __future__ import annotations

from collections.abc import Iterable

from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.memory_figures import Causes, MemoryFigures
from mm_autoparallel.integrations.mindformers.pipeline_problem import placement_of
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.units import GIB

KEPT, MASKS = "kept activations", "attention masks"
LAYERS, BESIDE = "layers", "beside layers"
"""Where nothing finer is known: what layers hold always, and what their stage does."""

_SMALLEST_BYTES = 0.05 * GIB
"""Less is not worth a word."""


def list_stage_causes(
    problem: Problem, memory: MemoryFigures, layout: Layout, peaks: Iterable[float]
) -> tuple[Causes, ...]:
    """Of each stage its peak by cause. peaks: bytes of each stage of `problem`, made of `memory`, with `layout`."""
    placement = placement_of(problem, layout)
    found = []
    for stage, peak in enumerate(peaks):
        causes: Causes = {}
        for position, sign in _positions(stage, problem.num_stages):
            of_stage = memory.stage_causes[position] or {BESIDE: memory.stage_static_bytes[position]}
            _add(causes, of_stage, sign)
        counts = [
            sum(placement.layers[chunk * problem.num_stages + stage][index] for chunk in range(problem.num_chunks))
            for index in range(len(problem.chain))
        ]
        kinds = [kind for kind in (memory.dense, memory.expert) if kind is not None]
        for kind, count in zip(kinds, counts, strict=False):  # the head is behind them
            _add(causes, kind.causes or {LAYERS: kind.static_bytes}, count)
        if memory.stage_kept_bytes:
            causes[MASKS] = memory.stage_kept_bytes[stage]
        causes[KEPT] = float(peak) - sum(causes.values())
        found.append(causes)
    return tuple(found)


def format_causes(causes: Causes) -> str:
    """`weights 12.1, gradients 24.2, kept activations 9.8 GiB`, the largest first."""
    told = sorted(((size, name) for name, size in causes.items() if size >= _SMALLEST_BYTES), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" for size, name in told) + " GiB"


def _positions(stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Which of (first, any, last) a stage is; a single one is first and last, with what any has counted once."""
    if num_stages == 1:
        return (0, 1), (2, 1), (1, -1)
    return ((0 if stage == 0 else 2 if stage == num_stages - 1 else 1, 1),)


def _add(causes: Causes, more: Causes, times: int) -> None:
    for name, size_bytes in more.items():
        causes[name] = causes.get(name, 0.0) + times * size_bytes
