"""Words: what every lane runs in turn, as letters that each name a strand; their step by the simulator's own engine,
and their peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, decoder_on_devices
from mm_autoparallel.pipeline.simulate.engine import play
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes

Floats = NDArray[np.float64]
IntArray = NDArray[np.int32]
Words = NDArray[np.int32]
"""[L, longest]: strands; -1 behind the end of a lane's word."""


@kernel
def play_words(
    words: Words,
    begin: IntArray,
    of_strand: IntArray,
    lane: IntArray,
    dependency: IntArray,
    hop: IntArray,
    duration: IntArray,
    durations_ms: Floats,
    hops_ms: Floats,
    tails_ms: Floats,
    ends_ms: Floats,
    order: IntArray,
) -> float:
    """The step in ms of `words`; infinite where lanes wait for one another for ever.

    begin: [strands] where each begins in of_strand [n], the tasks strand by strand. Overwritten: ends_ms [n], the end
    of each task, and order [n], the tasks so that each follows what it waits for. The rest as Tasks has it.
    """
    n, num_lanes = lane.shape[0], words.shape[0]
    place = np.full(n + 1, -1, np.int32)  # in topological order
    place[n] = n
    head, taken = np.zeros(num_lanes, np.int64), np.zeros(begin.shape[0], np.int64)
    done, progressed = 0, True
    while progressed:
        progressed = False
        for at in range(num_lanes):
            while head[at] < words.shape[1]:
                strand = words[at, head[at]]
                if strand < 0:
                    break
                task = of_strand[begin[strand] + taken[strand]]
                if place[dependency[task]] < 0:
                    break
                place[task] = done
                order[done] = task
                done += 1
                taken[strand] += 1
                head[at] += 1
                progressed = True
    if done < n:
        return np.inf
    sorted_lane, sorted_dependency = np.empty(n, np.int32), np.empty(n, np.int32)
    sorted_hop, sorted_duration = np.empty(n, np.int32), np.empty(n, np.int32)
    for at in range(n):
        task = order[at]
        sorted_lane[at], sorted_dependency[at] = lane[task], place[dependency[task]]
        sorted_hop[at], sorted_duration[at] = hop[task], duration[task]
    ends, free = np.empty(n + 1), np.empty(num_lanes)
    step = play(
        sorted_lane, sorted_dependency, sorted_hop, sorted_duration, durations_ms, hops_ms, tails_ms, ends, free
    )
    for at in range(n):
        ends_ms[order[at]] = ends[at]
    return step


class Player:
    """Plays words of one set of tasks, again and again. allowed_bytes: [L] limits and what sums of bytes may round to.
    is_limited False: memory aside."""

    def __init__(self, tasks: Tasks, is_limited: bool = True) -> None:
        self.tasks = tasks
        lengths = [len(strand) for strand in tasks.strands]
        self.begin = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
        self.of_strand = np.concatenate(tasks.strands).astype(np.int32)
        self.allowed_bytes = np.full(tasks.num_lanes, np.inf)
        if is_limited:  # on the decoder's devices by its own rule of rounding
            self.allowed_bytes[:] = tasks.limit_bytes
            decoder = decoder_on_devices(tasks.problem)
            self.allowed_bytes[: decoder.num_stages] = allowed_bytes(decoder)
        self.ends_ms, self.order = np.empty(tasks.num_tasks), np.empty(tasks.num_tasks, np.int32)

    def step_ms(self, words: Words) -> float:
        """The step of `words`, infinite where they never end; `ends_ms` [n] then holds the ends of tasks, and
        `order` [n] has each behind what it waits for."""
        tasks = self.tasks
        return float(
            play_words(
                words,
                self.begin,
                self.of_strand,
                tasks.lane,
                tasks.dependency,
                tasks.hop,
                tasks.duration,
                tasks.durations_ms,
                tasks.hops_ms,
                tasks.tails_ms,
                self.ends_ms,
                self.order,
            )
        )

    def tasks_of(self, words: Words, lane: int) -> list[int]:
        """What a lane runs, task by task."""
        taken: dict[int, int] = {}
        found = []
        for strand in words[lane].tolist():
            if strand < 0:
                break
            found.append(int(self.tasks.strands[strand][taken.get(strand, 0)]))
            taken[strand] = taken.get(strand, 0) + 1
        return found

    def peak_bytes(self, words: Words, lane: int) -> float:
        """The most that a lane holds: by its word alone, since what is kept begins and ends with its own tasks."""
        tasks = self.tasks
        mine = np.array(self.tasks_of(words, lane), dtype=np.int64)
        return float(max(tasks.fixed_bytes[lane] + self._kept_bytes(mine), tasks.step_bytes[lane]))

    def encoders_bytes(self, words: Words, lane: int) -> float:
        """The most that encoders alone keep of passes in flight."""
        mine = np.array(self.tasks_of(words, lane), dtype=np.int64)
        return self._kept_bytes(mine[self.tasks.owner[mine] >= 0])

    def _kept_bytes(self, mine: NDArray[np.int64]) -> float:
        """The most that tasks of one lane, in their order, keep at once."""
        tasks = self.tasks
        which, column = np.unique(tasks.kept[mine], return_inverse=True)
        change = np.zeros((len(mine), len(which)), dtype=np.int64)
        change[np.arange(len(mine)), column.ravel()] = np.where(tasks.kind[mine] == FORWARD, 1, -1)
        held = np.cumsum(change, axis=0)
        frozen = np.array([tasks.is_frozen(int(owner)) for owner in tasks.owner[mine]], dtype=bool)
        if frozen.any():  # keeps something while it runs alone
            of_frozen = np.where(frozen[:, None], change, 0)
            held -= np.cumsum(of_frozen, axis=0) - of_frozen
        return float(np.max(held @ tasks.kept_bytes[which], initial=0.0))

    def fits(self, words: Words, lanes: Iterable[int] | None = None) -> bool:
        """Whether those lanes, or all, keep their limits."""
        every = range(self.tasks.num_lanes) if lanes is None else lanes
        return all(self.peak_bytes(words, lane) <= self.allowed_bytes[lane] for lane in every)


def write_words(tasks: Tasks, strands_of_lanes: Sequence[Sequence[int]]) -> Words:
    """Words of so many lanes as one array."""
    longest = max(1, *(len(strands) for strands in strands_of_lanes))
    words = np.full((tasks.num_lanes, longest), -1, dtype=np.int32)
    for lane, strands in enumerate(strands_of_lanes):
        words[lane, : len(strands)] = strands
    return words


def words_by_starts(tasks: Tasks, starts_ms: Sequence[float]) -> Words:
    """Words of tasks that start at these times; of those that start together, what takes no time goes first."""
    strand_of = np.empty(tasks.num_tasks, dtype=np.int64)
    place = np.empty(tasks.num_tasks, dtype=np.int64)
    for strand, members in enumerate(tasks.strands):
        strand_of[members], place[members] = strand, np.arange(len(members))
    lasts = tasks.length_ms > 0.0
    lanes: list[list[int]] = [[] for _ in range(tasks.num_lanes)]
    for task in sorted(range(tasks.num_tasks), key=lambda t: (starts_ms[t], bool(lasts[t]), int(place[t]), t)):
        lanes[int(tasks.lane[task])].append(int(strand_of[task]))
    return write_words(tasks, lanes)
