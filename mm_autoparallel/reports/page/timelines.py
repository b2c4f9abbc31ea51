"""The tasks of simulated steps, and the ranks of clusters, packed as whole numbers behind a page's document.

A time is a whole number of ticks of which 2**32 - 1 are the step: a tick of a step of a minute is 14 ns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT
from mm_autoparallel.pipeline.simulate import step
from mm_autoparallel.reports.page.report import Devices, Numbers, TaskKind, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TICKS = 2**32 - 1


class Block:
    """Bytes behind a document, filled array by array; each begins at a multiple of 4, as browsers want it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: NDArray[Any]) -> Numbers:
        """Append whole numbers from 0 to 2**32 - 1 in the fewest bytes that hold the largest."""
        largest = int(values.max(initial=0))
        width = 1 if largest < 2**8 else 2 if largest < 2**16 else 4
        packed = values.astype(f"<u{width}").tobytes()
        numbers = Numbers(offset=self._size, count=len(values), width=width)
        padded = packed + bytes(-len(packed) % 4)
        self._parts.append(padded)
        self._size += len(padded)
        return numbers

    def bytes(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


def pack_timeline(timeline: step.Timeline, block: Block) -> Timeline:
    """The tasks of `timeline`, with what their stages hold and wait for."""
    graph, loads, tasks = timeline.graph, timeline.loads, _list_tasks(timeline)
    tick_ms = timeline.step_ms / _TICKS if timeline.step_ms else 1.0
    peak_bytes = float(timeline.peak_memory_bytes.max(initial=0.0))
    tick_bytes = peak_bytes / _TICKS if peak_bytes else 1.0
    idle_ms = {
        "idle_warmup": timeline.idle_warmup_ms,
        "idle_communication": timeline.idle_communication_ms,
        "idle_imbalance": timeline.idle_imbalance_ms,
        "idle_cooldown": timeline.idle_cooldown_ms,
    }

    def ticks(values: NDArray[np.float64], tick: float) -> NDArray[np.float64]:
        return np.clip(np.rint(values / tick), 0, _TICKS)

    return Timeline(
        step_ms=timeline.step_ms,
        tick_ms=tick_ms,
        tick_bytes=tick_bytes,
        first=tuple(np.searchsorted(tasks.stage, np.arange(graph.num_stages + 1)).tolist()),
        start=block.add(ticks(tasks.start_ms, tick_ms)),
        end=block.add(ticks(tasks.end_ms, tick_ms)),
        idle=block.add(ticks(tasks.wait_ms, tick_ms)),
        transfer=block.add(ticks(tasks.transfer_ms, tick_ms)),
        kind=block.add(tasks.kind),
        micro_batch=block.add(tasks.micro_batch),
        on_path=block.add(tasks.on_path),
        held=block.add(ticks(tasks.held_bytes, tick_bytes)),
        kinds=(*_kinds(timeline), *_kinds_of_passes(timeline)),
        held_first_bytes=tasks.held_first_bytes,
        tail_ms=tuple(loads.tail_ms.tolist()),
        cooldown_ms=tuple(timeline.idle_cooldown_ms.tolist()),
        mean_idle_ms={cause: float(np.mean(of_stages)) for cause, of_stages in idle_ms.items()},
    )


@dataclass(frozen=True, eq=False)
class _Tasks:
    """All that stages do, stage by stage in the order of time: arrays [n]."""

    stage: Ints
    start_ms: Floats
    end_ms: Floats
    wait_ms: Floats
    transfer_ms: Floats
    kind: Ints
    micro_batch: Ints
    on_path: Ints
    held_bytes: Floats
    held_first_bytes: tuple[float, ...]


def _list_tasks(timeline: step.Timeline) -> _Tasks:
    graph = timeline.graph
    order = np.argsort(graph.stage, kind="stable")  # tasks of a stage stand in the order in which it does them
    wait_ms, transfer_ms = step.idle_before(timeline)
    transfer_ms[step.neighbours(graph)[0] == graph.num_tasks] = 0.0  # a stage's first task waits for warm-up alone
    on_path = np.zeros(graph.num_tasks, dtype=np.int64)
    on_path[step.tasks_on_path(timeline)] = 1
    held = [step.memory_timeline(timeline, stage)[1] for stage in range(graph.num_stages)]
    found = _Tasks(
        stage=graph.stage[order].astype(np.int64),
        start_ms=timeline.start_ms[order],
        end_ms=timeline.end_ms[order],
        wait_ms=wait_ms[order],
        transfer_ms=transfer_ms[order],
        kind=graph.duration[order].astype(np.int64),
        micro_batch=graph.micro_batch[order].astype(np.int64),
        on_path=on_path[order],
        held_bytes=np.concatenate([of_stage[1:] for of_stage in held]),
        held_first_bytes=tuple(float(of_stage[0]) for of_stage in held),
    )
    return _merge_passes(timeline, found) if timeline.passes is not None else found


def _merge_passes(timeline: step.Timeline, own: _Tasks) -> _Tasks:
    """With passes of encoders between the pipeline's own tasks: what those wait for is then less."""
    passes = timeline.passes
    assert passes is not None
    stage, start_ms = np.concatenate([own.stage, passes.stage]), np.concatenate([own.start_ms, passes.start_ms])
    order = np.lexsort((np.arange(len(stage)), start_ms, stage))
    stage, start_ms = stage[order], start_ms[order]
    end_ms = np.concatenate([own.end_ms, passes.end_ms])[order]
    first = np.diff(stage, prepend=-1) > 0
    wait_ms = np.maximum(start_ms - np.where(first, 0.0, np.roll(end_ms, 1)), 0.0)
    nothing, begins = np.zeros(len(passes.stage)), np.diff(own.stage, prepend=-1) > 0
    before_bytes = np.where(begins, np.array(own.held_first_bytes)[own.stage], np.roll(own.held_bytes, 1))
    passing_bytes = np.where(passes.is_frozen, passes.kept_bytes, 0.0)
    kept_bytes = (passes.kept_bytes - passing_bytes) * np.where(passes.kind == FORWARD, 1.0, -1.0)
    held_bytes = np.cumsum(np.concatenate([own.held_bytes - before_bytes, kept_bytes])[order])
    starts = np.flatnonzero(first)
    of_others = np.repeat(np.where(starts > 0, held_bytes[starts - 1], 0.0), np.diff(np.append(starts, len(stage))))
    held_bytes += np.array(own.held_first_bytes)[stage] - of_others
    transfer_ms = np.concatenate([own.transfer_ms, nothing])[order]
    return _Tasks(
        stage=stage,
        start_ms=start_ms,
        end_ms=end_ms,
        wait_ms=wait_ms,
        transfer_ms=np.where(first, 0.0, np.minimum(transfer_ms, wait_ms)),
        kind=np.concatenate([own.kind, len(_kinds(timeline)) + _number_kinds(passes)[1]])[order],
        micro_batch=np.concatenate([own.micro_batch, passes.index])[order],
        on_path=np.concatenate([own.on_path, passes.on_path.astype(np.int64)])[order],
        held_bytes=held_bytes + np.concatenate([np.zeros(len(own.stage)), passing_bytes])[order],
        held_first_bytes=own.held_first_bytes,
    )


def _number_kinds(passes: step.Passes) -> tuple[Ints, Ints]:
    """[kinds, 3] owner, part and kind of passes that are alike, and which of these each pass is."""
    rows = np.stack([passes.owner, passes.part, passes.kind], axis=1)
    found, of_pass = np.unique(rows, axis=0, return_inverse=True)
    return found, np.ravel(of_pass)


def _kinds_of_passes(timeline: step.Timeline) -> Iterator[TaskKind]:
    """Of each encoder and piece its forwards and backwards, if there are any."""
    passes = timeline.passes
    if passes is None:
        return
    found, of_pass = _number_kinds(passes)
    for number, (owner, part, kind) in enumerate(found.tolist()):
        one = int(np.flatnonzero(of_pass == number)[0])
        yield TaskKind(
            backward=kind == BACKWARD,
            chunk=part,
            length_ms=float(passes.end_ms[one] - passes.start_ms[one]),
            recompute_ms=0.0,
            encoder=passes.names[owner],
        )


def _kinds(timeline: step.Timeline) -> tuple[TaskKind, ...]:
    """What `graph.duration` numbers: forwards, then backwards, and parts of these where there are any, by virtual stage
    and class of micro-batches; then pairs, which are shown as their backward, and their forward's nothing."""
    graph, recompute_ms = timeline.graph, timeline.loads.recompute_ms.ravel().tolist()
    durations_ms = timeline.loads.durations_ms.tolist()
    alone = [divmod(number, len(recompute_ms)) for number in range(graph.num_kinds * len(recompute_ms))]
    paired = [divmod(backward, len(recompute_ms)) for backward in graph.pairs[:, 1].tolist()]
    kinds = []
    for (kind, place), length_ms in zip([*alone, *paired, (FORWARD, 0)], durations_ms, strict=False):
        backward = kind != FORWARD
        kinds.append(
            TaskKind(
                backward=backward,
                chunk=place // graph.num_classes // graph.num_stages,
                length_ms=length_ms,
                recompute_ms=recompute_ms[place] if kind in (BACKWARD, INPUT) else 0.0,
            )
        )
    return tuple(kinds)


def pack_devices(cluster: Cluster, strategy: Strategy, block: Block) -> Devices:
    """Which stage, and which place in its groups, each rank of `strategy` has."""
    places = _list_places(strategy)
    return Devices(
        nodes=_used_sizes(cluster.node_sizes, strategy.world_size),
        stage=block.add(places["pp"]),
        **{name: block.add(places[name]) for name in ("tp", "cp", "dp")},
    )


def _list_places(strategy: Strategy) -> dict[str, NDArray[np.int64]]:
    """Of each rank its stage and its place in groups; an encoder's ranks of its own have places in its own groups."""
    names: tuple[Literal["pp", "tp", "cp", "dp"], ...] = ("pp", "tp", "cp", "dp")
    arrangement = strategy.arrangement
    apart = [one for one in arrangement.each if one.apart] if arrangement else []
    if arrangement is None or not apart:
        ranks, own = np.arange(strategy.world_size), strategy.of_decoder()
        return {name: ranks // own.stride_of(name) % getattr(own, name) for name in names}
    parts, begun = [], 0
    for one in apart:
        places = _list_places(strategy.with_only(one).of_encoder())
        places["pp"] = places["pp"] + begun
        parts.append((one.encoder.rank_offset, places))
        begun += one.encoder.pp
    places = _list_places(strategy.of_decoder())
    places["pp"] = places["pp"] + begun
    parts.append((arrangement.decoder_offset, places))
    parts.sort(key=lambda part: part[0])
    return {name: np.concatenate([places[name] for _, places in parts]) for name in names}


def _used_sizes(sizes: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """How many of the first `num_ranks` devices lie in each node that has some."""
    ends = np.minimum(np.cumsum(sizes), num_ranks)
    used = np.diff(ends, prepend=0)
    return tuple(used[used > 0].tolist())
