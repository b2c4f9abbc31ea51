"""Words by list scheduling: a free lane runs the task whose latest start is the earliest, unless something that arrives
meanwhile would be made later by that than the task by waiting."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import DECODER, Tasks

Floats = NDArray[np.float64]

#: By how much the latest starts of later runs are shifted at random, in parts of a device's mean load.
SPREADS = (0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True, eq=False)
class Windows:
    """Per task what waits for it, and its earliest and latest start for some step, if lanes ran all at once."""

    successors: tuple[tuple[int, ...], ...]
    earliest_ms: tuple[float, ...]
    latest_ms: tuple[float, ...]


def find_windows(tasks: Tasks, lengths_ms: Floats, lags_ms: Floats, tails_ms: Floats, step_ms: float) -> Windows:
    """By longest paths over what waits for what, strands included; lengths and lags [n], tails [L], in any one unit.
    Latest starts may lie before earliest ones: then no order takes step_ms."""
    count = tasks.num_tasks
    lengths, lags, dependency = lengths_ms.tolist(), lags_ms.tolist(), tasks.dependency.tolist()
    before = [-1] * count  # in its strand
    for strand in tasks.strands:
        for first, second in zip(strand[:-1].tolist(), strand[1:].tolist(), strict=True):
            before[second] = first
    successors: list[list[int]] = [[] for _ in range(count)]
    left = [0] * count
    for task in range(count):
        for other in {dependency[task] if dependency[task] < count else -1, before[task]} - {-1}:
            successors[other].append(task)
            left[task] += 1
    order = [task for task in range(count) if not left[task]]
    for task in order:
        for after in successors[task]:
            left[after] -= 1
            if not left[after]:
                order.append(after)
    earliest = [0.0] * count
    latest = (step_ms - tails_ms[tasks.lane] - lengths_ms).tolist()
    for task in order:
        end = earliest[task] + lengths[task]
        for after in successors[task]:
            lag = lags[after] if dependency[after] == task else 0.0
            earliest[after] = max(earliest[after], end + lag)
    for task in reversed(order):
        for after in successors[task]:
            lag = lags[after] if dependency[after] == task else 0.0
            latest[task] = min(latest[task], latest[after] - lag - lengths[task])
    return Windows(tuple(tuple(each) for each in successors), tuple(earliest), tuple(latest))


class _Dispatch:
    """One run: the state of every lane, and what it would start next."""

    def __init__(self, player: Player, windows: Windows, ranks_ms: list[float], ahead: float) -> None:
        tasks, allowed_bytes = player.tasks, player.allowed_bytes
        self.tasks, self.windows, self.ranks, self.ahead = tasks, windows, ranks_ms, ahead
        self.lengths, self.lags = tasks.length_ms.tolist(), tasks.lag_ms.tolist()
        self.dependency, self.lane = tasks.dependency.tolist(), tasks.lane.tolist()
        self.kind, self.owner, self.index = tasks.kind.tolist(), tasks.owner.tolist(), tasks.index.tolist()
        self.kept = tasks.kept_bytes[tasks.kept].tolist()
        self.strands = [strand.tolist() for strand in tasks.strands]
        self.of_lane: list[list[int]] = [[] for _ in range(tasks.num_lanes)]
        for strand, lane in enumerate(tasks.strand_lane):
            self.of_lane[lane].append(strand)
        self.head = [0] * len(self.strands)
        self.starts = [math.nan] * tasks.num_tasks
        self.ends = [math.nan] * tasks.num_tasks + [0.0]
        self.free = [0.0] * tasks.num_lanes
        self.room = (allowed_bytes - tasks.fixed_bytes - _decoder_peaks(tasks)).tolist()
        self.num_begun = 0  # of the decoder's first forwards
        self.first_stage = tasks.problem.first_stage

    def may_begin(self, task: int) -> bool:
        """Whether a forward of an encoder fits its device, and is not too far ahead of the decoder."""
        owner = self.owner[task]
        if owner < 0 or self.kind[task] != FORWARD:
            return True
        encoder = self.tasks.problem.encoders[owner]
        first = self.index[task] * encoder.microbatches_per_pass
        if encoder.run == "bubbles" and first >= self.num_begun + self.ahead:
            return False
        return bool(self.kept[task] <= self.room[self.lane[task]])

    def heads(self, lane: int) -> list[tuple[int, float, bool]]:
        """Of each strand the next task, when it may start or at least when it may not before, and whether that is
        known."""
        found = []
        for strand in self.of_lane[lane]:
            at = self.head[strand]
            if at == len(self.strands[strand]):
                continue
            task = self.strands[strand][at]
            end = self.ends[self.dependency[task]]
            known = end == end
            arrival = end + self.lags[task] if known else self.windows.earliest_ms[task]
            if self.may_begin(task):
                found.append((task, max(arrival, self.free[lane]), known))
        return found

    def choose(self, lane: int) -> tuple[float, int]:
        """When this lane starts what next; infinite where it waits for others."""
        heads = self.heads(lane)
        known = sorted((ready, task) for task, ready, is_known in heads if is_known)
        if not known:
            return math.inf, -1
        now = known[0][0]
        for _, task in sorted((self.ranks[task], task) for ready, task in known if ready <= now):
            end = now + self.lengths[task]
            if not any(
                other != task
                and ready < end
                and end - self.ranks[other] > max(0.0, ready + self.lengths[other] - self.ranks[task])
                for other, ready, _ in heads
            ):
                return now, task
        late = [(ready, task) for ready, task in known if ready > now]
        unknown = [ready for task, ready, is_known in heads if not is_known]
        if late and (not unknown or late[0][0] <= min(unknown)):
            return late[0]
        return math.inf, -1

    def start(self, task: int, at: float) -> None:
        """Let a task run."""
        lane = self.lane[task]
        strand = next(s for s in self.of_lane[lane] if self._is_next(s, task))
        self.head[strand] += 1
        self.starts[task] = at
        self.ends[task] = self.free[lane] = at + self.lengths[task]
        owner = self.owner[task]
        if owner == DECODER:
            self.num_begun += self.kind[task] == FORWARD and self.tasks.part[task] == self.first_stage
        elif owner >= 0 and not self.tasks.is_frozen(owner):
            self.room[lane] -= self.kept[task] if self.kind[task] == FORWARD else -self.kept[task]

    def _is_next(self, strand: int, task: int) -> bool:
        return self.head[strand] < len(self.strands[strand]) and self.strands[strand][self.head[strand]] == task

    def run(self) -> list[float] | None:
        """Starts of all tasks; none where memory leaves nothing to go on with."""
        lanes = range(self.tasks.num_lanes)
        choices = [self.choose(lane) for lane in lanes]
        for _ in range(self.tasks.num_tasks):
            at, task = min(choices, key=lambda each: each[0])
            if task < 0:  # lanes that wait for one another: what is the most urgent goes on
                known = [
                    (self.ranks[task], task, ready) for lane in lanes for task, ready, is_known in self.heads(lane)
                    if is_known
                ]  # fmt: skip
                if not known:
                    return None
                _, task, at = min(known)
            num_begun = self.num_begun
            self.start(task, at)
            touched = {self.lane[task], *(self.lane[after] for after in self.windows.successors[task])}
            for lane in lanes if self.num_begun > num_begun and self.ahead < math.inf else touched:
                choices[lane] = self.choose(lane)
        return self.starts


def _decoder_peaks(tasks: Tasks) -> Floats:
    """[L] the most that the decoder alone keeps in its order."""
    peaks = np.zeros(tasks.num_lanes)
    is_decoder = tasks.owner == DECODER
    for lane in range(tasks.problem.decoder.num_stages):
        (mine,) = np.nonzero(is_decoder & (tasks.lane == lane))  # in the order of the graph, which is the lane's
        change = np.where(tasks.kind[mine] == BACKWARD, -1.0, 1.0) * tasks.kept_bytes[tasks.kept[mine]]
        peaks[lane] = float(np.max(np.cumsum(change), initial=0.0))
    return peaks


def construct(
    player: Player, target_ms: float, num_runs: int, should_stop: Callable[[], bool], seed: int = 0
) -> tuple[float, Words | None]:
    """The best step and words of so many runs, which end at target_ms; infinite where memory lets none end. Strands of
    the decoder are whole orders."""
    tasks = player.tasks
    windows = find_windows(tasks, tasks.length_ms, tasks.lag_ms, tasks.tails_ms, target_ms)
    random_numbers = random.Random(seed)
    num_stages = tasks.problem.decoder.num_stages
    load_ms = float(tasks.length_ms.sum()) / num_stages
    caps = (math.inf, 2.0 * num_stages, float(num_stages), 2.0, 1.0)
    best_ms, best = math.inf, None
    for run in range(num_runs):
        if should_stop() or best_ms <= target_ms * (1.0 + 1e-12):
            break
        spread_ms = 0.0 if run < len(caps) else load_ms * random_numbers.choice(SPREADS)
        ranks = [latest + spread_ms * (random_numbers.random() - 0.5) for latest in windows.latest_ms]
        starts = _Dispatch(player, windows, ranks, caps[run % len(caps)]).run()
        if starts is None:
            continue
        words = words_by_starts(tasks, starts)
        step_ms = player.step_ms(words)
        if step_ms < best_ms and player.fits(words):
            best_ms, best = step_ms, words
    return best_ms, best
