"""Play one placement of a problem and tell where its step goes. Every step time and peak anyone sees comes from
here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.passes import Way
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.action import FORWARD, INPUT, WEIGHT
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import Loads, graph_of, peak_bytes, peak_host_bytes, sum_loads

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The longest path as counts: how often each time lies on it. step_ms is their dot product plus the last stage's
    tail.

    forward, backward: [K, C] per virtual stage and class of micro-batches. input, weight: the same, [0, C] where the
    schedule parts no backward. pairs: of each pair of the graph, which forward and backward do not count. hop_forward,
    hop_backward: [K - 1].
    end_stage: the stage whose last task (and tail) ends the step. beside_ms: what encoders beside the pipeline, and
    ways to and from them, are of it.
    """

    forward: Ints
    backward: Ints
    input: Ints
    weight: Ints
    pairs: Ints
    hop_forward: Ints
    hop_backward: Ints
    end_stage: int
    beside_ms: float = 0.0


@dataclass(frozen=True, eq=False)
class Passes:
    """What encoders run beside a pipeline, on its stages: arrays [n] over their passes, by stage and start.

    names: of encoders, which `owner` numbers. kind, part, index: forward or backward, which stage of the encoder or
    piece of a pass, and which pass. kept_bytes: what each
    holds from its forward's start to its backward's end, of a frozen encoder to its own. on_path: whether it lies on
    the longest path; path: the pipeline's own tasks that do.
    """

    names: tuple[str, ...]
    stage: Ints
    owner: Ints
    kind: Ints
    part: Ints
    index: Ints
    start_ms: Floats
    end_ms: Floats
    kept_bytes: Floats
    is_frozen: Flags
    on_path: Flags
    path: Ints


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated step.

    graph: its tasks, in topological order; start_ms, end_ms: [n]. loads: what every stage had to do.
    peak_memory_bytes, peak_host_bytes: [P], on the device and on its host. The idle times, all [P], add up with busy
    and tail to step_ms on every stage: idle_warmup_ms before its first task, idle_cooldown_ms after its own tail,
    idle_communication_ms waiting for a transfer, idle_imbalance_ms waiting for another stage's work. passes: of
    encoders beside the pipeline, which busy_ms counts too.
    """

    step_ms: float
    graph: TaskGraph
    loads: Loads
    start_ms: Floats
    end_ms: Floats
    peak_memory_bytes: Floats
    peak_host_bytes: Floats
    busy_ms: Floats
    idle_warmup_ms: Floats
    idle_communication_ms: Floats
    idle_imbalance_ms: Floats
    idle_cooldown_ms: Floats
    critical_path: CriticalPath
    passes: Passes | None = None

    @property
    def encoders_ms(self) -> Floats:
        """[P] what passes of encoders take of each stage's busy time."""
        if self.passes is None:
            return np.zeros(self.graph.num_stages)
        lengths_ms = self.passes.end_ms - self.passes.start_ms
        sums: Floats = np.bincount(self.passes.stage, lengths_ms, self.graph.num_stages)  # type: ignore[assignment]
        return sums

    @property
    def bubble_fraction(self) -> float:
        """Share of all stages' time in which they compute nothing, tails not counted as idle."""
        idle = self.idle_warmup_ms + self.idle_communication_ms + self.idle_imbalance_ms + self.idle_cooldown_ms
        return max(0.0, float(idle.sum() / (self.step_ms * len(idle)))) if self.step_ms > 0 else 0.0

    @property
    def span_ms(self) -> float:
        """The longest that a stage is at work, from the start of its first action to the end of its last, tails left
        out: the cost that zero-bubble papers state (Qi et al. 2024, arXiv:2401.10241)."""
        return float(np.max(self._at_work_ms - self.loads.tail_ms))

    @property
    def post_validated_ms(self) -> float:
        """How far apart steps are at most where no stage waits for the others before its optimizer's step, and checks
        the norm of all gradients afterwards (post-validation, Qi et al. 2024, arXiv:2401.10241, section 4): the longest
        that a stage is at work, its tail included, for steps so far apart keep the times that they have alone."""
        return float(np.max(self._at_work_ms))

    @property
    def _at_work_ms(self) -> Floats:
        return self.step_ms - self.idle_warmup_ms - self.idle_cooldown_ms

    @property
    def recompute_ms(self) -> Floats:
        """[n] what of each task is recompute: at the beginning of a backward, or of that of an input."""
        is_backward = (self.graph.kind != FORWARD) & (self.graph.kind != WEIGHT)
        again: Floats = np.where(is_backward, self.loads.recompute_ms.ravel()[self.graph.place], 0.0)
        return again


def list_passes(path: CriticalPath, virtual_stage: int) -> list[tuple[Way, Ints]]:
    """The passes of `path` through a virtual stage by their kind, [C] each; those that run in pairs are not counted."""
    found: list[tuple[Way, Ints]] = [
        ("forward", path.forward[virtual_stage]),
        ("backward", path.backward[virtual_stage]),
    ]
    if len(path.input):
        found += [("input", path.input[virtual_stage]), ("weight", path.weight[virtual_stage])]
    return found


def list_pairs(problem: Problem) -> list[tuple[int, int]]:
    """Of each pair that `CriticalPath.pairs` counts the places (see TaskGraph) of its forward and of its backward."""
    graph = graph_of(problem)
    num_places = graph.num_stages * graph.num_chunks * graph.num_classes
    return [(forward, backward - num_places) for forward, backward in graph.pairs.tolist()]


@lru_cache(maxsize=64)
def neighbours(graph: TaskGraph) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each task the one before it on its stage, and each stage's last task."""
    previous, last = engine.stage_neighbours(graph.stage, graph.num_stages)
    return previous, last


def trace_critical_path(
    graph: TaskGraph, durations_ms: Floats, hops_ms: Floats, tails_ms: Floats
) -> tuple[float, CriticalPath]:
    """Play `graph` with the given times; the step in ms and its longest path. Times laid out as `Loads` gives them."""
    ends, free = np.empty(graph.num_tasks + 1), np.empty(graph.num_stages)
    tasks = (graph.stage, graph.dependency, graph.hop, graph.duration)
    step_ms = engine.play(*tasks, durations_ms, hops_ms, tails_ms, ends, free)
    duration_counts, hop_counts = np.empty(len(durations_ms), dtype=np.int64), np.empty(len(hops_ms), dtype=np.int64)
    end_stage = engine.critical_path(
        *tasks, hops_ms, tails_ms, ends, free, *neighbours(graph), duration_counts, hop_counts
    )
    num_virtual = graph.num_stages * graph.num_chunks
    num_alone = graph.num_kinds * num_virtual * graph.num_classes
    alone = duration_counts[:num_alone].reshape(graph.num_kinds, num_virtual, graph.num_classes)
    none = alone[0, :0]
    return float(step_ms), CriticalPath(
        forward=alone[0],
        backward=alone[1],
        input=alone[INPUT] if graph.num_kinds > INPUT else none,
        weight=alone[WEIGHT] if graph.num_kinds > WEIGHT else none,
        pairs=duration_counts[num_alone : num_alone + len(graph.pairs)],
        hop_forward=hop_counts[: num_virtual - 1],
        hop_backward=hop_counts[num_virtual - 1 : -1],
        end_stage=int(end_stage),
    )


def simulate(problem: Problem, placement: Placement) -> Timeline:
    """Play `placement` exactly. Raises PlanError where it does not fit the problem; memory limits are reported, not
    enforced."""
    if problem.encoders:
        from mm_autoparallel.pipeline.simulate.encoders.step import simulate_encoded  # which builds on this file

        return simulate_encoded(problem, placement)
    check_placement(problem, placement)
    graph = graph_of(problem, placement)
    loads = sum_loads(problem, placement)
    durations, hops = loads.durations_ms, loads.hops_ms
    step_ms, path = trace_critical_path(graph, durations, hops, loads.tail_ms)
    ends, free = np.empty(graph.num_tasks + 1), np.empty(graph.num_stages)
    engine.play(graph.stage, graph.dependency, graph.hop, graph.duration, durations, hops, loads.tail_ms, ends, free)
    end_ms = ends[:-1]
    length_ms = durations[graph.duration]
    start_ms = end_ms - length_ms
    previous, last = neighbours(graph)
    first = previous == graph.num_tasks
    wait, on_the_way = _waits(graph, start_ms, ends)
    num_stages = graph.num_stages

    def per_stage(values: Floats, mask: NDArray[np.bool_] | None = None) -> Floats:
        chosen = slice(None) if mask is None else mask
        sums: Floats = np.bincount(graph.stage[chosen], weights=values[chosen], minlength=num_stages)  # type: ignore[assignment]
        return sums

    return Timeline(
        step_ms=step_ms,
        graph=graph,
        loads=loads,
        start_ms=start_ms,
        end_ms=end_ms,
        peak_memory_bytes=peak_bytes(problem, loads, graph),
        peak_host_bytes=peak_host_bytes(problem, loads, graph),
        busy_ms=per_stage(length_ms),
        idle_warmup_ms=per_stage(wait, first),
        idle_communication_ms=per_stage(on_the_way, ~first),
        idle_imbalance_ms=per_stage(wait - on_the_way, ~first),
        idle_cooldown_ms=step_ms - ends[last] - loads.tail_ms,
        critical_path=path,
    )


def _waits(graph: TaskGraph, start_ms: Floats, ends_ms: Floats) -> tuple[Floats, Floats]:
    """How long the stage of each task is idle before it, and for how much of that a transfer to it is on its way, in
    ms. ends_ms: [n + 1], the last is 0, from which a stage's first task waits."""
    wait = start_ms - ends_ms[neighbours(graph)[0]]
    on_the_way = np.minimum(np.maximum(start_ms - ends_ms[graph.dependency], 0.0), wait)
    on_the_way[graph.dependency == graph.num_tasks] = 0.0
    return wait, on_the_way


def part_pairs(timeline: Timeline) -> tuple[Floats, Floats]:
    """Start and end of each task in ms, of those that run together one after the other: the backward as long as
    it takes alone, before it the forward, as long as it makes the pair."""
    graph, start_ms, end_ms = timeline.graph, timeline.start_ms.copy(), timeline.end_ms.copy()
    num_alone = graph.num_kinds * graph.num_stages * graph.num_chunks * graph.num_classes
    (backwards,) = np.nonzero((graph.duration >= num_alone) & (graph.duration < num_alone + len(graph.pairs)))
    forwards = neighbours(graph)[0][backwards]
    start_ms[forwards] = start_ms[backwards]
    start_ms[backwards] = end_ms[backwards] - timeline.loads.backward_ms.ravel()[graph.place[backwards]]
    end_ms[forwards] = start_ms[backwards]
    return start_ms, end_ms


def idle_before(timeline: Timeline) -> tuple[Floats, Floats]:
    """For each task how long its stage is idle before it, and for how much of that a transfer is on its way, in ms."""
    return _waits(timeline.graph, timeline.start_ms, np.append(timeline.end_ms, 0.0))


def tasks_on_path(timeline: Timeline) -> Ints:
    """The pipeline's tasks of the longest path, the last one first: those that `Timeline.critical_path` counts."""
    if timeline.passes is not None:
        return timeline.passes.path
    graph, ends_ms = timeline.graph, np.append(timeline.end_ms, 0.0)
    previous, last = neighbours(graph)
    found, task = [], int(last[timeline.critical_path.end_stage])
    while task < graph.num_tasks:
        found.append(task)
        task = engine.before_on_path(task, graph.dependency, graph.hop, timeline.loads.hops_ms, ends_ms, previous)
    return np.array(found, dtype=np.int64)


def memory_timeline(timeline: Timeline, stage: int) -> tuple[Floats, Floats]:
    """Times in ms and bytes held on `stage` from each on: its fixed part and the activations in flight.

    An activation lives from the start of its forward to the end of its backward, or of its input gradient, from which
    on what is kept for the weights' gradient lives to the end of that; the optimizer's step follows the last one. The
    maximum is the stage's peak.
    """
    graph, loads = timeline.graph, timeline.loads
    mine = graph.stage == stage
    virtual, kind = graph.place[mine] // graph.num_classes, graph.kind[mine]
    activation, pending = loads.activation_bytes[virtual], loads.pending_bytes[virtual]
    forward = kind == FORWARD
    times = np.where(forward, timeline.start_ms[mine], timeline.end_ms[mine])
    change = np.where(forward, activation, -activation)  # program order: a backward ends before the next forward starts
    change = np.where(kind == INPUT, pending - activation, np.where(kind == WEIGHT, -pending, change))
    fixed = loads.static_bytes[stage] + loads.restored_bytes[stage] + loads.transient_bytes[stage]
    held = fixed + np.concatenate([[0.0], np.cumsum(change)])
    held[-1] = max(held[-1], loads.static_bytes[stage] + loads.step_bytes[stage])
    return np.concatenate([[0.0], times]), held
