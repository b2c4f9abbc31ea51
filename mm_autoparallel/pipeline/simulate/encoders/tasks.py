"""What runs in one step of a placed decoder and its encoders, as tasks for the simulator, and who waits for whom.

Tasks of the decoder are those of its TaskGraph, passes of encoders stand behind them. The engine knows one dependency
a task. Where several encoders feed the decoder, joins are tasks that take no time on a lane of their own, in the order
of the decoder's first forwards, so that the lane is the second dependency. A *strand* keeps one order on its lane,
whatever runs between: passes of one stage and direction, or a named schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import Loads, graph_of, sum_loads

Floats = NDArray[np.float64]
IntArray = NDArray[np.int32]

DECODER, JOIN = -1, -2
"""Whose task it is, where it is no encoder's (from 0 on)."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Arrays [n] over tasks, in no order; L lanes: devices of the decoder, own ones of encoders, that of joins.

    owner: see DECODER. kind: forward or backward. part: virtual stage, or stage of the encoder. index: micro-batch, or
    pass. dependency, hop, duration: as TaskGraph has them; durations_ms, hops_ms, tails_ms [L]: what they index.
    strands: task by task, of strand_lane each. kept: which entry of kept_bytes a task begins (forward) or ends to keep.
    fixed_bytes, step_bytes, limit_bytes: [L] held while at work beside what is kept, in the optimizer's step, at most.
    """

    problem: EncodedProblem
    placement: Placement
    graph: TaskGraph
    loads: Loads
    num_lanes: int
    owner: IntArray
    kind: IntArray
    part: IntArray
    index: IntArray
    lane: IntArray
    dependency: IntArray
    hop: IntArray
    duration: IntArray
    durations_ms: Floats
    hops_ms: Floats
    tails_ms: Floats
    strands: tuple[IntArray, ...]
    strand_lane: tuple[int, ...]
    kept: IntArray
    kept_bytes: Floats
    fixed_bytes: Floats
    step_bytes: Floats
    limit_bytes: Floats

    @property
    def num_tasks(self) -> int:
        return len(self.lane)

    @property
    def length_ms(self) -> Floats:
        """[n] how long each takes."""
        lengths: Floats = self.durations_ms[self.duration]
        return lengths

    @property
    def lag_ms(self) -> Floats:
        """[n] between the end of what a task waits for and its start."""
        lags: Floats = self.hops_ms[self.hop]
        return lags

    def is_frozen(self, owner: int) -> bool:
        """Whether forwards of that owner keep nothing after their end."""
        return owner >= 0 and self.problem.encoders[owner].is_frozen


def decoder_on_devices(problem: EncodedProblem) -> Problem:
    """The decoder with what encoders hold on its devices all the time among what its stages hold."""
    static = np.array(problem.decoder.stage_static_bytes)
    num_microbatches = problem.decoder.num_microbatches
    followed = {encoder.follows for encoder in problem.encoders}
    for encoder in problem.encoders:
        if encoder.run != "cached":
            for pipeline in encoder.pipelines:
                for device, held in zip(pipeline, encoder.static_bytes, strict=True):
                    if device < len(static):
                        static[device] += held
        if encoder.name not in followed:
            static[encoder.first_stage] += encoder.output_bytes * count_outputs(encoder, num_microbatches)
    return replace(problem.decoder, stage_static_bytes=tuple(static.tolist()))


def count_outputs(encoder: Encoder, num_microbatches: int) -> int:
    """Passes whose outputs may lie on the decoder's first device at once."""
    num_passes = encoder.num_passes(num_microbatches)
    if encoder.run == "bubbles":
        return min(encoder.most_ahead or num_passes, num_passes)
    return num_passes * encoder.prefetch_depth if encoder.run == "prefetch" else 1


class _Builder:
    """Rows of tasks as they are added; the decoder's are there already, numbered as in its graph."""

    def __init__(self, problem: EncodedProblem, placement: Placement) -> None:
        self.problem, decoder = problem, problem.decoder
        self.graph, self.loads = graph_of(decoder, placement), sum_loads(decoder, placement)
        graph = self.graph
        num_classes, count = graph.num_classes, graph.num_tasks
        virtual = graph.place // num_classes
        none = np.where(graph.dependency == count, -1, graph.dependency)
        columns = (np.full(count, DECODER), graph.kind, virtual, graph.micro_batch, graph.stage, none, graph.hop)
        self.rows: list[list[int]] = np.stack([*columns, graph.duration, virtual], axis=1).tolist()
        self.hops, self.durations = self.loads.hops_ms.tolist(), self.loads.durations_ms.tolist()
        self.kept = self.loads.activation_bytes.tolist()
        self.no_hop = len(self.hops) - 1
        self.strands: list[list[int]] = []
        self.strand_lane: list[int] = []
        first = problem.first_stage
        self.first_forward = self._of_decoder(FORWARD, first)
        self.last_backward = self._of_decoder(BACKWARD, first)
        end = graph.num_stages * graph.num_chunks - 1
        turns = self._of_decoder(FORWARD, end)
        for m, task in self._of_decoder(BACKWARD, end).items():
            self.rows[task][5] = turns[m]
        self.turn = {task: at for at, task in enumerate(np.flatnonzero(graph.stage == first).tolist())}

    def _of_decoder(self, kind: int, virtual: int = 0) -> dict[int, int]:
        """The task of that kind of each micro-batch in a virtual stage."""
        (found,) = np.nonzero((self.graph.kind == kind) & (self.graph.place // self.graph.num_classes == virtual))
        return {int(self.graph.micro_batch[task]): int(task) for task in found}

    def add(self, *row: int) -> int:
        """A task with the columns owner, kind, part, index, lane, dependency (-1: none), hop, duration, kept."""
        self.rows.append(list(row))
        return len(self.rows) - 1

    def strand(self, lane: int, tasks: list[int]) -> None:
        """Tasks that keep this order on their lane."""
        if tasks:
            self.strands.append(tasks)
            self.strand_lane.append(lane)


def list_tasks(problem: EncodedProblem, placement: Placement, moves_decoder: bool = False) -> Tasks:
    """The tasks of one step. moves_decoder: a stage's forwards and backwards are strands of their own, else its order
    is one. Raises PlanError where `placement` is none of the decoder's."""
    check_placement(problem.decoder, placement)
    built = _Builder(problem, placement)
    _strand_decoder(built, moves_decoder)
    fed: dict[str, list[int]] = {}  # of each encoder its last forwards, pass by pass
    for owner, encoder in enumerate(problem.encoders):
        if encoder.run != "cached":
            fed[encoder.name] = _add_forwards(built, owner, encoder)
    _connect_forwards(built, fed)
    taken: dict[str, list[int]] = {}  # of each encoder its last backwards
    for owner in _from_the_decoder(problem.encoders):
        encoder = problem.encoders[owner]
        if encoder.run == "bubbles" and not encoder.is_frozen:
            taken[encoder.name] = _add_backwards(built, owner, encoder, taken)
    return _finish(built, placement)


def _strand_decoder(built: _Builder, moves: bool) -> None:
    graph = built.graph
    for stage in range(graph.num_stages):
        mine = np.flatnonzero(graph.stage == stage)
        for part in [mine[graph.kind[mine] == kind] for kind in (FORWARD, BACKWARD)] if moves else [mine]:
            built.strand(stage, part.tolist())


def _add(values: tuple[float, ...], of: list[float]) -> list[int]:
    """Entries behind those there are; the indices of theirs."""
    of.extend(values)
    return list(range(len(of) - len(values), len(of)))


def _add_forwards(built: _Builder, owner: int, encoder: Encoder) -> list[int]:
    lengths = _add(encoder.forward_ms, built.durations)
    kept = _add(encoder.activation_bytes, built.kept)
    (hop,) = _add((encoder.stage_hop_ms,), built.hops)
    last = []
    of_stage: dict[tuple[int, int], list[int]] = {}
    for index in range(encoder.num_passes(built.problem.decoder.num_microbatches)):
        turn = index % len(encoder.pipelines)
        before = -1
        for part, device in enumerate(encoder.pipelines[turn]):
            at = hop if part else built.no_hop
            before = built.add(owner, FORWARD, part, index, device, before, at, lengths[part], kept[part])
            of_stage.setdefault((device, part), []).append(before)
        last.append(before)
    for (device, _), tasks in of_stage.items():
        built.strand(device, tasks)
    return last


def _connect_forwards(built: _Builder, fed: dict[str, list[int]]) -> None:
    """Let first forwards of encoders wait for those they follow or, where they may not be ahead, for the decoder; and
    the decoder's for the encoders that feed it."""
    problem = built.problem
    num_microbatches = problem.decoder.num_microbatches
    followed = {encoder.follows for encoder in problem.encoders}
    hops = {e.name: _add((e.feed_ms,), built.hops)[0] for e in problem.encoders}
    feeding = []
    for owner, encoder in enumerate(problem.encoders):
        if encoder.run != "bubbles":
            continue
        if encoder.name not in followed:
            feeding.append(encoder)
        firsts = [at for at, row in enumerate(built.rows) if row[0] == owner and row[1] == FORWARD and row[2] == 0]
        for index, task in enumerate(firsts):
            if encoder.follows:
                built.rows[task][5:7] = fed[encoder.follows][index], hops[encoder.follows]
            elif encoder.most_ahead is not None and index >= encoder.most_ahead:
                waits = encoder.microbatches_of(index - encoder.most_ahead, num_microbatches)
                built.rows[task][5] = max((built.first_forward[m] for m in waits), key=built.turn.__getitem__)
    lane = problem.num_devices
    (nothing,) = _add((0.0,), built.durations)
    joins: list[int] = []
    for m, forward in sorted(built.first_forward.items(), key=lambda each: built.turn[each[1]]):
        arrive = [(fed[each.name][m // each.microbatches_per_pass], hops[each.name]) for each in feeding]
        before, hop = built.rows[forward][5:7]  # of the stage before, where the decoder's first is another
        arrive += [(before, hop)] if before >= 0 else []
        if len(arrive) == 1:
            built.rows[forward][5:7] = arrive[0]
        elif arrive:
            for which, (task, hop) in enumerate(arrive):
                joins.append(built.add(JOIN, FORWARD, which, m, lane, task, hop, nothing, 0))
            built.rows[forward][5:7] = joins[-1], built.no_hop
    built.strand(lane, joins)


def _from_the_decoder(encoders: tuple[Encoder, ...]) -> list[int]:
    """Encoders in the order gradients reach them: each after those that follow it."""
    left, ordered = list(range(len(encoders))), []
    while left:
        waited = {encoders[owner].follows for owner in left}
        ready = [owner for owner in left if encoders[owner].name not in waited]
        ordered += ready
        left = [owner for owner in left if owner not in ready]
    return ordered


def _add_backwards(built: _Builder, owner: int, encoder: Encoder, taken: dict[str, list[int]]) -> list[int]:
    lengths = _add(encoder.backward_ms, built.durations)
    hop, feed = _add((encoder.stage_hop_ms, encoder.feed_ms), built.hops)
    num_microbatches = built.problem.decoder.num_microbatches
    kept = {row[2]: row[8] for row in built.rows if row[0] == owner}
    followers = [each.name for each in built.problem.encoders if each.follows == encoder.name]
    of_stage: dict[tuple[int, int], list[int]] = {}
    last = []
    for index in range(encoder.num_passes(num_microbatches)):
        if len(followers) == 1:
            before = taken[followers[0]][index]
        else:
            ends = (built.last_backward[m] for m in encoder.microbatches_of(index, num_microbatches))
            before = max(ends, key=built.turn.__getitem__)
        at = feed
        for part, device in reversed(list(enumerate(encoder.pipelines[index % len(encoder.pipelines)]))):
            before = built.add(owner, BACKWARD, part, index, device, before, at, lengths[part], kept[part])
            of_stage.setdefault((device, part), []).append(before)
            at = hop
        last.append(before)
    for (device, _), tasks in of_stage.items():
        built.strand(device, tasks)
    return last


def _finish(built: _Builder, placement: Placement) -> Tasks:
    problem, decoder, loads = built.problem, built.problem.decoder, built.loads
    columns = np.ascontiguousarray(np.array(built.rows, dtype=np.int32).T)
    owner, kind, part, index, lane, dependency, hop, duration, kept = columns
    num_devices, num_stages = problem.num_devices, decoder.num_stages
    num_lanes = num_devices + 1
    on_devices = np.array(decoder_on_devices(problem).stage_static_bytes) - decoder.stage_static_bytes
    fixed, step = np.zeros(num_lanes), np.zeros(num_lanes)
    limits, tails = np.full(num_lanes, np.inf), np.zeros(num_lanes)
    fixed[:num_stages] = loads.static_bytes + on_devices + loads.restored_bytes + loads.transient_bytes
    step[:num_stages] = loads.static_bytes + on_devices + loads.step_bytes
    limits[:num_stages] = decoder.memory_limit_bytes
    tails[:num_stages] = loads.tail_ms
    for encoder in problem.encoders:
        for pipeline in encoder.pipelines if encoder.run != "cached" else ():
            for device, held in zip(pipeline, encoder.static_bytes, strict=True):
                if device >= num_stages:
                    fixed[device] = step[device] = held
                    limits[device] = encoder.limit_bytes
    return Tasks(
        problem=problem,
        placement=placement,
        graph=built.graph,
        loads=loads,
        num_lanes=num_lanes,
        owner=owner,
        kind=kind,
        part=part,
        index=index,
        lane=lane,
        dependency=np.where(dependency < 0, len(lane), dependency).astype(np.int32),
        hop=hop,
        duration=duration,
        durations_ms=np.array(built.durations),
        hops_ms=np.array(built.hops),
        tails_ms=tails,
        strands=tuple(np.array(strand, dtype=np.int32) for strand in built.strands),
        strand_lane=tuple(built.strand_lane),
        kept=kept,
        kept_bytes=np.array(built.kept),
        fixed_bytes=fixed,
        step_bytes=step,
        limit_bytes=limits,
    )
