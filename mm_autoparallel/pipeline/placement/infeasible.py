"""Why nothing fits, and the least that would have to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import RECOMPUTE, Placement
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.units import GB

#: Deterministic time for the question how much more of the host would do.
HOST_SOLVER_S = 10.0


@dataclass(frozen=True)
class Overflow:
    """The placement whose worst stage exceeds its limit least (0: it fits), and by how much; proven or only the best
    found.

    placement None: stopped before any was found, or (proven, for `reason`) none keeps within the limits of hosts.
    reason: empty where it fits.
    """

    overflow_bytes: float
    placement: Placement | None
    proven: bool
    reason: str


def explain_windows(segments: Segments) -> str:
    """Why no placement exists whatever the memory, or an empty string."""
    problem = segments.problem
    num_virtual, num_layers = problem.num_virtual_stages, problem.num_layers
    chunks = (
        f"{problem.num_stages} stages"
        if problem.num_chunks == 1
        else f"{problem.num_stages} stages · {problem.num_chunks} chunks"
    )
    if num_layers < num_virtual:
        return (
            f"{chunks} need at least {num_virtual} layers, one each, and the chain has {num_layers}: "
            f"use fewer stages or chunks"
        )
    most = problem.max_layers_per_chunk
    if most is not None and num_layers > most * num_virtual:
        needed = -(-num_layers // num_virtual)
        return (
            f"{num_layers} layers do not fit {chunks} of at most max_layers_per_chunk = {most} layers: "
            f"{needed} would do"
        )
    if np.any(segments.first > segments.last):
        k = int(np.argmax(segments.first > segments.last))
        stage = stage_of(k, problem.num_stages, problem.v_shaped)
        return (
            f"the pinned or attached blocks leave no place to begin chunk {k // problem.num_stages} of stage {stage}: "
            f"between them and the end of the chain there are too few or too many layers"
        )
    return ""


def least_overflow(segments: Segments, should_stop: Callable[[], bool], left_s: Callable[[], float]) -> Overflow:
    """Minimise the bytes by which the worst stage exceeds its limit, over all placements that their hosts can hold."""
    from mm_autoparallel.pipeline.placement.cuts import solve as cpsat

    placement, proven = cpsat.minimise_overflow(segments, should_stop, left_s)
    if placement is None:
        reason = _explain_host(segments, should_stop, left_s) if proven else ""
        return Overflow(0.0 if proven else np.inf, None, proven, reason)
    problem = segments.problem
    timeline = simulate(problem, placement)
    excess = timeline.peak_memory_bytes - np.array(problem.memory_limit_bytes)
    stage = int(np.argmax(excess))
    over = float(excess[stage])
    if not overfull_stages(problem, timeline.peak_memory_bytes):
        return Overflow(0.0, placement, proven, "")
    limit = problem.memory_limit_bytes[stage]
    plain = all(mode.name == RECOMPUTE for block in problem.chain for mode in block.modes)
    done = "recomputed" if plain else "in a mode"
    more_host_bytes = _more_host(segments, should_stop, left_s) if segments.limits_host else None
    within = ", and within the limits of its host" if more_host_bytes is not None else ""
    or_host = f"; so would {_size(more_host_bytes)} more on every host" if more_host_bytes is not None else ""
    reason = (
        f"memory: with every layer {done} where that helps{within}, some stage exceeds its limit by at least "
        f"{_size(over)} (stage {stage}: {_size(limit + over)} of {_size(limit)}); limits "
        f"{_size(over)} higher on every stage would do{or_host}"
    )
    return Overflow(over, placement, proven, reason)


def _more_host(segments: Segments, should_stop: Callable[[], bool], left_s: Callable[[], float]) -> float | None:
    """By how much higher limits of hosts would make something fit; None where none does, or it was not found."""
    from mm_autoparallel.pipeline.placement.cuts import solve as cpsat

    placement, _ = cpsat.minimise_overflow(segments, should_stop, left_s, "host", HOST_SOLVER_S)
    return None if placement is None else _host_excess(segments, placement)[0]


def _explain_host(segments: Segments, should_stop: Callable[[], bool], left_s: Callable[[], float]) -> str:
    """Why no placement keeps all hosts within their limits, whatever the devices hold."""
    from mm_autoparallel.pipeline.placement.cuts import solve as cpsat

    placement, proven = cpsat.minimise_overflow(segments, should_stop, left_s, "host alone", HOST_SOLVER_S)
    told = "host memory: with no layer in a mode that moves bytes, some stage keeps more on its host than its limit"
    if placement is None:
        return told
    over, stage = _host_excess(segments, placement)
    limit = segments.problem.host_limit_bytes[stage]
    least = "at least " if proven else ""
    return (
        f"{told}, by {least}{_size(over)} (stage {stage}: {_size(limit + over)} of {_size(limit)}); "
        f"limits of hosts {_size(over)} higher on every stage would do for that"
    )


def _host_excess(segments: Segments, placement: Placement) -> tuple[float, int]:
    """The largest excess of any stage over its host's limit, and that stage."""
    excess = simulate(segments.problem, placement).peak_host_bytes - np.array(segments.problem.host_limit_bytes)
    stage = int(np.argmax(excess))
    return float(excess[stage]), stage


def _size(size_bytes: float) -> str:
    """`3.20 GB`, and less than a hundredth of one in bytes."""
    return f"{size_bytes / GB:.2f} GB" if size_bytes >= 0.01 * GB else f"{size_bytes:,.6g} bytes"
