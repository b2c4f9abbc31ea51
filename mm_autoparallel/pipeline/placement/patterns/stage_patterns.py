"""Patterns: everything one stage could hold, in the modes that fit its memory, for a step below a known bound.

A pattern fixes the interval of segments of each of the stage's chunks (up to where along equal segments it lies) and
how many layers run in each lane. Of patterns with equal intervals only those are kept that no other beats in every
chunk's forward and backward time, so nothing is lost: the step never falls when a time rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.intervals import Intervals, list_intervals
from mm_autoparallel.pipeline.placement.patterns.mode_choices import ModeChoices, TooManyPatterns, list_mode_choices
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Patterns of one stage beyond which the tree hands over to the solver (memory and time grow with them).
MAX_PATTERNS = 200_000
#: Choices looked at for one stage before giving up likewise (some tenths of a second).
MAX_CHOICES = 10_000_000
#: Far above the rounding noise of summed times, as a fraction of all work; far below what a layer takes.
WORK_NOISE_FRACTION = 1e-9


@dataclass(frozen=True, eq=False)
class StagePatterns:
    """n patterns of one stage with V chunks, L lanes, R runs.

    begin, end: [n, V] segments of each chunk. lanes: [n, V, L] layers in each lane. used: [n, R] segments per run over
    all chunks.
    times_ms: [n, 4V + 1]: forward, backward, hop forward, hop backward per chunk, then the tail.
    """

    begin: Ints
    end: Ints
    lanes: Ints
    used: Ints
    times_ms: Floats

    def __len__(self) -> int:
        return len(self.times_ms)

    def select(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> StagePatterns:
        """The patterns at these indices, or where this mask is true."""
        return StagePatterns(
            self.begin[chosen], self.end[chosen], self.lanes[chosen], self.used[chosen], self.times_ms[chosen]
        )


def list_patterns(
    segments: Segments, graph: TaskGraph, stage: int, max_load_ms: float, min_load_ms: float = 0.0
) -> StagePatterns:
    """All patterns of `stage` whose forward and backward of one micro-batch take at most `max_load_ms` in all chunks.

    min_load_ms bounds the load without modes from below (what the others cannot take). Raises TooManyPatterns.
    """
    problem = segments.problem
    num_chunks = problem.num_chunks
    virtual_stages = range(stage, problem.num_virtual_stages, problem.num_stages)
    held = list_intervals(segments, virtual_stages, max_load_ms)
    offsets = np.append(np.searchsorted(held.stage, virtual_stages), len(held.stage))
    in_flight = graph.in_flight[stage].astype(np.float64)
    host_bytes = float(allowed_host_bytes(problem)[stage]) if segments.limits_host else np.inf
    available_bytes = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]
    host_room_bytes = (host_bytes - held.host_static_bytes) / in_flight.max(axis=0).min()
    choices = list_mode_choices(
        segments,
        stage,
        held.begin,
        held.end,
        held.used,
        held.forward_ms,
        held.backward_ms,
        max_load_ms,
        host_room_bytes,
    )
    chosen, rows, count = enumerate_patterns(
        offsets,
        held.forward_ms + held.backward_ms,
        held.static_bytes,
        held.activation_bytes,
        held.transient_bytes,
        choices.first,
        choices.size,
        choices.forward_ms,
        choices.backward_ms,
        choices.saved_bytes,
        choices.restored_bytes,
        choices.is_ordered,
        segments.limits_host,
        held.host_static_bytes,
        choices.host_bytes,
        host_bytes,
        in_flight,
        available_bytes,
        max_load_ms,
        min_load_ms,
        MAX_PATTERNS,
        MAX_CHOICES,
    )
    if count < 0:
        raise TooManyPatterns
    chosen, rows = chosen[:count], rows[:count].reshape(count, num_chunks, choices.first.shape[1])
    fits = _step_fits(held, chosen, available_bytes)
    return _patterns_of(segments, stage, held, choices, chosen[fits], rows[fits])


def _step_fits(held: Intervals, chosen: Ints, available_bytes: float) -> NDArray[np.bool_]:
    """[n] whether the optimizer's step fits, chosen: [n, V] intervals. It asks nothing of modes: what does not fit
    leaves whole choices of intervals out."""
    each_bytes = held.static_bytes + held.step_bytes
    once_bytes = np.minimum(held.step_once_bytes[chosen].max(axis=1), held.step_shard_bytes[chosen].sum(axis=1))
    fits: NDArray[np.bool_] = each_bytes[chosen].sum(axis=1) + once_bytes <= available_bytes
    return fits


def _patterns_of(
    segments: Segments, stage: int, held: Intervals, choices: ModeChoices, chosen: Ints, rows: Ints
) -> StagePatterns:
    """The patterns that hold intervals chosen [n, V] in the modes of rows [n, V, W]."""
    used = held.used[chosen].sum(axis=1)
    times = np.concatenate(
        [
            held.forward_ms[chosen] + choices.forward_ms[rows].sum(axis=2),
            held.backward_ms[chosen] + choices.backward_ms[rows].sum(axis=2),
            held.hop_forward_ms[chosen],
            held.hop_backward_ms[chosen],
            segments.problem.stage_tail_ms[stage] + held.tail_ms[chosen].sum(axis=1, keepdims=True),
        ],
        axis=1,
    )
    patterns = StagePatterns(held.begin[chosen], held.end[chosen], choices.counts[rows].sum(axis=2), used, times)
    return patterns.select(np.all(used <= segments.run_size, axis=1))


@kernel
def lies_within(in_flight: Floats, each_bytes: Floats, most_bytes: float) -> bool:
    """Whether micro-batches in flight [rows, V] that keep each_bytes [V] keep no more than most_bytes in any row."""
    for row in range(in_flight.shape[0]):
        held = 0.0
        for v in range(each_bytes.shape[0]):
            held += in_flight[row, v] * each_bytes[v]
        if held > most_bytes:
            return False
    return True


@kernel
def enumerate_patterns(
    offsets: Ints,
    load_ms: Floats,
    static_bytes: Floats,
    activation_bytes: Floats,
    transient_bytes: Floats,
    choice_first: Ints,
    choice_size: Ints,
    row_forward_ms: Floats,
    row_backward_ms: Floats,
    row_saved_bytes: Floats,
    row_restored_bytes: Floats,
    is_ordered: bool,
    limits_host: bool,
    host_static_bytes: Floats,
    row_host_bytes: Floats,
    host_limit_bytes: float,
    in_flight: Floats,
    available_bytes: float,
    max_load_ms: float,
    min_load_ms: float,
    max_patterns: int,
    max_choices: int,
) -> tuple[Ints, Ints, int]:
    """Rows of interval indices [., V] and rows of choices [., V · W]; count -1 where there are more than max_patterns,
    or more than max_choices to look at.

    Intervals of chunk c are offsets[c] to offsets[c + 1]. For each choice of intervals the choices run through an
    odometer, and only undominated times are kept. limits_host: what rows keep on the host counts too; ordered ones keep
    nothing there. Where choices are ordered, the last digit stops at the first row that
    fits; where they are not, digits whose memory cannot fit whatever follows are passed over.
    """
    num_chunks, num_each = offsets.shape[0] - 1, choice_first.shape[1]
    digits = num_chunks * num_each
    sides = 1 if is_ordered else 2  # ordered rows change the backward alone
    width = sides * num_chunks
    capacity = 1024
    out_interval = np.empty((capacity, num_chunks), dtype=np.int64)
    out_row = np.empty((capacity, digits), dtype=np.int64)
    count, num_choices = 0, 0
    least_after = np.zeros(num_chunks + 1)
    for c in range(num_chunks - 1, -1, -1):
        if offsets[c] == offsets[c + 1]:
            return out_interval, out_row, 0
        least = np.inf
        for i in range(offsets[c], offsets[c + 1]):
            least = min(least, load_ms[i])
        least_after[c] = least_after[c + 1] + least
    most_saved, least_restored = np.zeros(choice_first.shape), np.zeros(choice_first.shape)
    least_host, moved, host_free = np.zeros(choice_first.shape), np.zeros(num_chunks), np.inf
    if not is_ordered:
        for i in range(choice_first.shape[0]):
            for w in range(num_each):
                rows = slice(choice_first[i, w], choice_first[i, w] + choice_size[i, w])
                most_saved[i, w] = np.max(row_saved_bytes[rows])
                least_restored[i, w] = np.min(row_restored_bytes[rows])
                least_host[i, w] = np.min(row_host_bytes[rows])
    pick = offsets[:num_chunks].copy()
    digit = np.zeros(max(digits, 1), dtype=np.int64)
    chunk_extra = np.zeros(width)
    kept = np.zeros(num_chunks)
    front = np.empty((256, width))
    c = 0
    partial = np.zeros(num_chunks + 1)
    while c >= 0:
        if pick[c] == offsets[c + 1]:
            pick[c] = offsets[c]
            c -= 1
            if c >= 0:
                pick[c] += 1
            continue
        num_choices += 1
        if num_choices > max_choices:
            return out_interval, out_row, -1
        partial[c + 1] = partial[c] + load_ms[pick[c]]
        if partial[c + 1] + least_after[c + 1] > max_load_ms:
            pick[c] += 1
            continue
        if c < num_chunks - 1:
            c += 1
            continue
        load = partial[num_chunks]
        if load >= min_load_ms:
            static, transient = 0.0, 0.0
            for v in range(num_chunks):
                static += static_bytes[pick[v]]
                transient = max(transient, transient_bytes[pick[v]])
            for d in range(digits):
                digit[d] = 0
            num_front = 0
            more = True
            if limits_host:
                host_free = host_limit_bytes
                for v in range(num_chunks):
                    host_free -= host_static_bytes[pick[v]]
                more = host_free >= 0.0
            while more:
                num_choices += 1 + num_front // 16
                if num_choices > max_choices:
                    return out_interval, out_row, -1
                restored, total_extra = 0.0, 0.0
                for v in range(num_chunks):
                    kept[v] = activation_bytes[pick[v]]
                    forward, backward = 0.0, 0.0
                    for w in range(num_each):
                        row = choice_first[pick[v], w] + digit[v * num_each + w]
                        kept[v] -= row_saved_bytes[row]
                        restored += row_restored_bytes[row]
                        forward += row_forward_ms[row]
                        backward += row_backward_ms[row]
                    chunk_extra[v] = backward
                    if sides == 2:
                        chunk_extra[num_chunks + v] = forward
                    total_extra += backward + forward
                fits = load + total_extra <= max_load_ms
                over_time = not fits
                free = available_bytes - static - transient - restored
                if fits:
                    fits = lies_within(in_flight, kept, free)
                if fits and limits_host:
                    for v in range(num_chunks):
                        moved[v] = 0.0
                        for w in range(num_each):
                            moved[v] += row_host_bytes[choice_first[pick[v], w] + digit[v * num_each + w]]
                    fits = lies_within(in_flight, moved, host_free)
                if fits:
                    dominated = False
                    for f in range(num_front):
                        worse = True
                        for v in range(width):
                            if front[f, v] > chunk_extra[v]:
                                worse = False
                                break
                        if worse:
                            dominated = True
                            break
                    if not dominated:
                        # drop the earlier rows of this choice that the new one beats
                        base = count - num_front
                        stay = 0
                        for f in range(num_front):
                            beaten = True
                            for v in range(width):
                                if chunk_extra[v] > front[f, v]:
                                    beaten = False
                                    break
                            if not beaten:
                                for v in range(width):
                                    front[stay, v] = front[f, v]
                                for v in range(num_chunks):
                                    out_interval[base + stay, v] = out_interval[base + f, v]
                                for d in range(digits):
                                    out_row[base + stay, d] = out_row[base + f, d]
                                stay += 1
                        count = base + stay
                        num_front = stay
                        if count == capacity:
                            if capacity >= max_patterns:
                                return out_interval, out_row, -1
                            capacity *= 2
                            wider_interval = np.empty((capacity, num_chunks), dtype=np.int64)
                            wider_row = np.empty((capacity, digits), dtype=np.int64)
                            for i in range(count):
                                for v in range(num_chunks):
                                    wider_interval[i, v] = out_interval[i, v]
                                for d in range(digits):
                                    wider_row[i, d] = out_row[i, d]
                            out_interval, out_row = wider_interval, wider_row
                        if num_front == front.shape[0]:
                            wider_front = np.empty((2 * num_front, width))
                            for f in range(num_front):
                                for v in range(width):
                                    wider_front[f, v] = front[f, v]
                            front = wider_front
                        for v in range(num_chunks):
                            out_interval[count, v] = pick[v]
                            for w in range(num_each):
                                d = v * num_each + w
                                out_row[count, d] = choice_first[pick[v], w] + digit[d]
                        for v in range(width):
                            front[num_front, v] = chunk_extra[v]
                        count += 1
                        num_front += 1
                # next row: where this one is too slow, or fits on an ordered choice, a larger last digit is only slower
                d = digits - 1
                if d >= 0 and (over_time or (fits and is_ordered)):
                    while d >= 0 and digit[d] == 0:
                        d -= 1
                    if d >= 0:
                        digit[d] = 0
                        d -= 1
                elif d >= 0 and not fits and not is_ordered:
                    # one chunk has one choice: from the last chunk back, see whether what follows could make it fit
                    restored = 0.0
                    for v in range(num_chunks):
                        restored += row_restored_bytes[choice_first[pick[v], 0] + digit[v]]
                    for v in range(num_chunks - 1, 0, -1):
                        restored += least_restored[pick[v], 0]
                        restored -= row_restored_bytes[choice_first[pick[v], 0] + digit[v]]
                        kept[v] = activation_bytes[pick[v]] - most_saved[pick[v], 0]
                        hopeless = not lies_within(in_flight, kept, available_bytes - static - transient - restored)
                        if limits_host and not hopeless:
                            for u in range(num_chunks):
                                first = choice_first[pick[u], 0]
                                moved[u] = row_host_bytes[first + digit[u]] if u < v else least_host[pick[u], 0]
                            hopeless = not lies_within(in_flight, moved, host_free)
                        if not hopeless:
                            break
                        digit[v] = 0
                        d = v - 1
                while d >= 0 and digit[d] == choice_size[pick[d // num_each], d % num_each] - 1:
                    digit[d] = 0
                    d -= 1
                if d < 0:
                    more = False
                else:
                    digit[d] += 1
        pick[c] += 1
    return out_interval, out_row, count


def load_limits(problem: Problem, segments: Segments, stage: int, step_ms: float) -> tuple[float, float]:
    """Largest load of any stage in a step of `step_ms` (each micro-batch passes once each way), and the least without
    modes that the others leave to `stage`: in that time another stage of factor f does at most 1 / f of its work.
    """
    most = step_ms / problem.num_microbatches
    work = float(segments.forward_ms[-1] + segments.backward_ms[-1])
    factors = problem.time_factors
    done_by_others = sum(1.0 / factor for s, factor in enumerate(factors) if s != stage)
    # what is compared with it is added up in another order: a stage alone has no less than exactly all
    return most, factors[stage] * max(0.0, work * (1.0 - WORK_NOISE_FRACTION) - done_by_others * most)
