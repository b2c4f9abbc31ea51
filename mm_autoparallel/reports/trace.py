"""A simulated step as a trace that Perfetto and chrome://tracing open: one process per stage, one slice per task.

Format: Trace Event Format (the JSON object form), times in microseconds. Slices are forwards, backwards (the recompute
inside them as a slice of its own), passes of encoders beside the pipeline and the tail; arrows are the transfers
between stages; a counter shows memory held.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.action import format_action
from mm_autoparallel.pipeline.simulate.step import Timeline, memory_timeline, part_pairs
from mm_autoparallel.units import GIB, format_bytes

_US_PER_MS = 1000.0
_INSIDE_US = 0.001  # an arrow belongs to the slice that is open at its time, so it leaves just before the slice ends
_KINDS = ("forward", "backward", "input gradient", "weight gradient")
_TASKS, _TAIL = 0, 1  # thread rows of a stage


def render_trace(problem: Problem, timeline: Timeline) -> dict[str, Any]:
    """The trace document of `timeline`, which `simulate(problem, …)` made."""
    events = _stage_names(problem, timeline)
    events += _tasks(timeline)
    events += _passes(timeline)
    events += _tails(timeline)
    events += _transfers(timeline)
    for stage in range(problem.num_stages):
        events += _memory(timeline, stage)
    return {"displayTimeUnit": "ms", "otherData": {"step_ms": timeline.step_ms}, "traceEvents": events}


def write_trace(path: Path, problem: Problem, timeline: Timeline) -> None:
    """Write the trace to `path` in one step. Raises OSError where it cannot be written."""
    write_text_atomically(path, json.dumps(render_trace(problem, timeline), separators=(",", ":"), allow_nan=False))


def _stage_names(problem: Problem, timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for stage in range(problem.num_stages):
        peak, limit = timeline.peak_memory_bytes[stage], problem.memory_limit_bytes[stage]
        label = f"peak {format_bytes(peak)} of {format_bytes(limit)}"
        for name, key, value in (
            ("process_name", "name", f"stage {stage}"),
            ("process_sort_index", "sort_index", stage),
            ("process_labels", "labels", label),
        ):
            events.append({"ph": "M", "pid": stage, "name": name, "args": {key: value}})
        for row, name in ((_TASKS, "compute"), (_TAIL, "after the last backward")):
            events.append({"ph": "M", "pid": stage, "tid": row, "name": "thread_name", "args": {"name": name}})
    return events


def _tasks(timeline: Timeline) -> list[dict[str, Any]]:
    graph = timeline.graph
    recompute_ms = timeline.recompute_ms.tolist()
    start_ms, end_ms = part_pairs(timeline)
    start_us = (start_ms * _US_PER_MS).tolist()
    length_us = ((end_ms - start_ms) * _US_PER_MS).tolist()
    events: list[dict[str, Any]] = []
    for task, (stage, kind, chunk, micro_batch) in enumerate(
        zip(graph.stage.tolist(), graph.kind.tolist(), graph.chunk.tolist(), graph.micro_batch.tolist(), strict=True)
    ):
        place = {"pid": stage, "tid": _TASKS, "ts": start_us[task]}
        args = {"micro_batch": micro_batch, "chunk": chunk}
        name = format_action(kind, chunk, micro_batch)
        events.append({"ph": "X", "name": name, "cat": _KINDS[kind], **place, "dur": length_us[task], "args": args})
        extra_us = recompute_ms[task] * _US_PER_MS
        if extra_us > 0:
            events.append({"ph": "X", "name": "recompute", "cat": "recompute", **place, "dur": extra_us, "args": args})
    return events


def _passes(timeline: Timeline) -> list[dict[str, Any]]:
    """What encoders beside the pipeline run on its stages."""
    passes = timeline.passes
    if passes is None:
        return []
    columns = passes.stage, passes.owner, passes.kind, passes.part, passes.index
    events = []
    for at, (stage, owner, kind, part, index) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        start_ms, end_ms = float(passes.start_ms[at]), float(passes.end_ms[at])
        place = {"pid": stage, "tid": _TASKS, "ts": start_ms * _US_PER_MS, "dur": (end_ms - start_ms) * _US_PER_MS}
        name, of = format_action(kind, part, index), passes.names[owner]
        args = {"pass": index, "encoder": of}
        events.append({"ph": "X", "name": f"{name}@{of}", "cat": f"encoder {_KINDS[kind]}", **place, "args": args})
    return events


def _tails(timeline: Timeline) -> list[dict[str, Any]]:
    """What follows a stage's last backward: gradient reduction, optimizer, parameter gather."""
    events = []
    for stage, tail_ms in enumerate(timeline.loads.tail_ms.tolist()):
        if tail_ms > 0:
            ends_ms = float(timeline.end_ms[timeline.graph.stage == stage].max())
            place = {"pid": stage, "tid": _TAIL, "ts": ends_ms * _US_PER_MS, "dur": tail_ms * _US_PER_MS}
            events.append({"ph": "X", "name": "tail", "cat": "tail", **place, "args": {}})
    return events


def _transfers(timeline: Timeline) -> list[dict[str, Any]]:
    """An arrow from the end of the task that sends to the start of the one that waits for it."""
    graph = timeline.graph
    events: list[dict[str, Any]] = []
    for task, sender in enumerate(graph.dependency.tolist()):
        if sender == graph.num_tasks or graph.stage[sender] == graph.stage[task]:
            continue
        common = {"cat": "transfer", "name": "transfer", "id": task, "tid": _TASKS}
        sent, received = float(timeline.end_ms[sender]), float(timeline.start_ms[task])
        events.append({"ph": "s", **common, "pid": int(graph.stage[sender]), "ts": sent * _US_PER_MS - _INSIDE_US})
        events.append({"ph": "f", "bp": "e", **common, "pid": int(graph.stage[task]), "ts": received * _US_PER_MS})
    return events


def _memory(timeline: Timeline, stage: int) -> list[dict[str, Any]]:
    times_ms, held_bytes = memory_timeline(timeline, stage)
    return [
        {"ph": "C", "pid": stage, "name": "memory, GiB", "ts": time_ms * _US_PER_MS, "args": {"held": held / GIB}}
        for time_ms, held in zip(times_ms.tolist(), held_bytes.tolist(), strict=True)
    ]
