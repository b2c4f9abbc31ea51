"""A placement of a decoder with encoders beside it, played: what `simulate` tells of problems that have encoders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.encoders.orders import read_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, list_tasks
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import peak_host_bytes
from mm_autoparallel.pipeline.simulate.step import CriticalPath, Passes, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def part_encoders(problem: Problem) -> EncodedProblem:
    """The decoder by itself, and its encoders."""
    return EncodedProblem(replace(problem, encoders=()), problem.encoders)


def simulate_encoded(problem: Problem, placement: Placement) -> Timeline:
    """As `simulate`. The tasks told are the decoder's; stages are busy with those of encoders too."""
    check_placement(problem, placement)
    encoded = part_encoders(problem)
    tasks = list_tasks(encoded, replace(placement, orders=()))
    player = Player(tasks)
    words = read_orders(tasks, placement.orders)
    step_ms = player.step_ms(words)
    if not np.isfinite(step_ms):
        raise PlanError("the orders never end: devices wait for one another's encoder passes")
    count, num_stages = tasks.graph.num_tasks, tasks.graph.num_stages
    length_ms, starts_ms = tasks.length_ms, player.ends_ms - tasks.length_ms
    path, idle_ms, on_path = _trace(player, step_ms)
    return Timeline(
        step_ms=step_ms,
        graph=tasks.graph,
        loads=tasks.loads,
        start_ms=starts_ms[:count],
        end_ms=player.ends_ms[:count],
        peak_memory_bytes=np.array([player.peak_bytes(words, stage) for stage in range(num_stages)]),
        peak_host_bytes=peak_host_bytes(encoded.decoder, tasks.loads, tasks.graph),
        busy_ms=_sum_lanes(tasks.lane, length_ms, tasks.num_lanes)[:num_stages],
        idle_warmup_ms=idle_ms[0],
        idle_communication_ms=idle_ms[1],
        idle_imbalance_ms=idle_ms[2],
        idle_cooldown_ms=idle_ms[3],
        critical_path=path,
        passes=_list_passes(tasks, starts_ms, player.ends_ms, on_path),
    )


def _list_passes(tasks: Tasks, starts_ms: Floats, ends_ms: Floats, on_path: Ints) -> Passes:
    """Those on the decoder's stages."""
    (mine,) = np.nonzero((tasks.owner >= 0) & (tasks.lane < tasks.graph.num_stages))
    mine = mine[np.lexsort((starts_ms[mine], tasks.lane[mine]))]
    frozen = np.array([encoder.is_frozen for encoder in tasks.problem.encoders])
    return Passes(
        names=tuple(encoder.name for encoder in tasks.problem.encoders),
        stage=tasks.lane[mine].astype(np.int64),
        owner=tasks.owner[mine].astype(np.int64),
        kind=tasks.kind[mine].astype(np.int64),
        part=tasks.part[mine].astype(np.int64),
        index=tasks.index[mine].astype(np.int64),
        start_ms=starts_ms[mine],
        end_ms=ends_ms[mine],
        kept_bytes=tasks.kept_bytes[tasks.kept[mine]],
        is_frozen=frozen[tasks.owner[mine]],
        on_path=np.isin(mine, on_path),
        path=on_path[on_path < tasks.graph.num_tasks],
    )


def _trace(player: Player, step_ms: float) -> tuple[CriticalPath, tuple[Floats, Floats, Floats, Floats], Ints]:
    """The longest path through what was played last; how long stages wait: for their first task, for transfers, for
    others' work, after their tails; and the path's tasks, from the last to the first."""
    tasks, order = player.tasks, player.order
    n, graph = tasks.num_tasks, tasks.graph
    place = np.append(np.argsort(order), n).astype(np.int32)
    lane, dependency = tasks.lane[order], place[tasks.dependency[order]]
    hop, duration = tasks.hop[order], tasks.duration[order]
    ends = np.append(player.ends_ms[order], 0.0)
    previous, last = engine.stage_neighbours(lane, tasks.num_lanes)
    free = ends[last]
    counts = np.empty(len(tasks.durations_ms), dtype=np.int64), np.empty(len(tasks.hops_ms), dtype=np.int64)
    of_hops = tasks.hops_ms, tasks.tails_ms
    end = engine.critical_path(lane, dependency, hop, duration, *of_hops, ends, free, previous, last, *counts)
    path = _count_path(tasks, *counts, int(end), step_ms)
    starts = ends[:-1] - tasks.length_ms[order]
    wait = starts - ends[previous]
    on_the_way = np.minimum(np.maximum(starts - ends[dependency], 0.0), wait)
    on_the_way[dependency == n] = 0.0
    first, stages = previous == n, slice(0, graph.num_stages)

    def per_stage(values: Floats, mask: NDArray[np.bool_]) -> Floats:
        return _sum_lanes(lane[mask], values[mask], tasks.num_lanes)[stages]

    idle = per_stage(wait, first), per_stage(on_the_way, ~first), per_stage(wait - on_the_way, ~first)
    found, task = [], int(last[int(end)])
    while task < n:
        found.append(int(order[task]))
        task = engine.before_on_path(task, dependency, hop, tasks.hops_ms, ends, previous)
    return path, (*idle, (step_ms - free - tasks.tails_ms)[stages]), np.array(found, dtype=np.int64)


def _sum_lanes(lane: NDArray[np.int32], values: Floats, num_lanes: int) -> Floats:
    sums: Floats = np.bincount(lane, weights=values, minlength=num_lanes)  # type: ignore[assignment]
    return sums


def _count_path(
    tasks: Tasks, durations: NDArray[np.int64], hops: NDArray[np.int64], end_stage: int, step_ms: float
) -> CriticalPath:
    graph, loads = tasks.graph, tasks.loads
    num_virtual = graph.num_stages * graph.num_chunks
    num_alone = 2 * num_virtual * graph.num_classes
    alone = durations[:num_alone].reshape(2, num_virtual, graph.num_classes)
    own = hops[: 2 * num_virtual - 1]
    decoder_ms = durations[:num_alone] @ tasks.durations_ms[:num_alone] + own @ tasks.hops_ms[: len(own)]
    return CriticalPath(
        forward=alone[0],
        backward=alone[1],
        input=alone[0, :0],
        weight=alone[0, :0],
        pairs=durations[:0],
        hop_forward=own[: num_virtual - 1],
        hop_backward=own[num_virtual - 1 : -1],
        end_stage=end_stage,
        beside_ms=max(0.0, step_ms - float(decoder_ms) - float(loads.tail_ms[end_stage])),
    )
