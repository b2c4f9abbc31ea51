"""Patterns: everything one stage could hold, with its least recompute, for a step below a known bound.

A pattern fixes the interval of units of each of the stage's chunks (up to where along equal units it lies) and how many
layers of each group recompute. Of patterns with equal intervals only those are kept that no other beats in every
chunk's backward time, so nothing is lost: the step never falls when a time rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.units import Units
from mm_autoparallel.problem import Problem
from mm_autoparallel.simulate.compiled import kernel
from mm_autoparallel.simulate.graph import TaskGraph
from mm_autoparallel.simulate.loads import allowed_bytes, hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Patterns of one stage beyond which the tree hands over to the solver (memory and time grow with them).
MAX_PATTERNS = 200_000
#: Choices looked at for one stage before giving up likewise (some tenths of a second).
MAX_CHOICES = 10_000_000


@dataclass(frozen=True, eq=False)
class Intervals:
    """What one virtual stage could hold, one row each: representative unit interval and its sums.

    begin, end: unit indices; with several chunks equal stretches of equal units are listed once. used: [n, R] units
    per run.
    """

    begin: Ints
    end: Ints
    used: Ints
    forward_ms: Floats
    backward_ms: Floats
    hop_forward_ms: Floats
    hop_backward_ms: Floats
    tail_ms: Floats
    static_bytes: Floats
    activation_bytes: Floats
    transient_bytes: Floats


@dataclass(frozen=True, eq=False)
class StagePatterns:
    """n patterns of one stage with V chunks, G recompute groups, R runs.

    begin, end: [n, V] units of each chunk. recompute: [n, V, G]. used: [n, R] units per run over all chunks.
    times_ms: [n, 4V + 1]: forward, backward, hop forward, hop backward per chunk, then the tail.
    """

    begin: Ints
    end: Ints
    recompute: Ints
    used: Ints
    times_ms: Floats

    def __len__(self) -> int:
        return len(self.times_ms)

    def select(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> StagePatterns:
        """The patterns at these indices, or where this mask is true."""
        return StagePatterns(
            self.begin[chosen], self.end[chosen], self.recompute[chosen], self.used[chosen], self.times_ms[chosen]
        )


class TooManyPatterns(Exception):
    """The stage has more than MAX_PATTERNS patterns; another method must take over."""


def list_intervals(units: Units, virtual_stage: int, max_load_ms: float) -> Intervals:
    """Every interval that `virtual_stage` may hold with one forward and backward of at most `max_load_ms`."""
    problem = units.problem
    k, num_virtual = virtual_stage, problem.num_virtual_stages
    begin, end = (
        axis.ravel()
        for axis in np.meshgrid(
            np.arange(units.first[k], units.last[k] + 1),
            np.arange(units.first[k + 1], units.last[k + 1] + 1),
            indexing="ij",
        )
    )
    lawful = begin < end
    begin, end = begin[lawful], end[lawful]
    a, b = units.start[begin], units.start[end]
    num_layers = units.layers[b] - units.layers[a]
    load = units.forward_ms[b] - units.forward_ms[a] + units.backward_ms[b] - units.backward_ms[a]
    lawful = (num_layers >= 1) & (load <= max_load_ms)
    if problem.max_layers_per_chunk is not None:
        lawful &= num_layers <= problem.max_layers_per_chunk
    begin, end = begin[lawful], end[lawful]
    used = np.zeros((len(begin), len(units.run_size)), dtype=np.int64)
    at_run = np.concatenate(
        [
            np.zeros((1, len(units.run_size)), dtype=np.int64),
            np.cumsum(np.eye(len(units.run_size), dtype=np.int64)[units.run], axis=0),
        ]
    )
    used = at_run[end] - at_run[begin]
    if problem.num_chunks > 1 and len(begin):
        _, once = np.unique(used, axis=0, return_index=True)
        once.sort()
        begin, end, used = begin[once], end[once], used[once]
    a, b = units.start[begin], units.start[end]
    hops = np.zeros((len(begin), 2))
    if k < num_virtual - 1:
        last_block = units.flat[b - 1]
        for e in np.unique(last_block).tolist():
            hops[last_block == e] = hop_ms(problem, k, problem.chain[e])
    transient = np.zeros(len(begin))
    if units.transient_bytes.any():
        for first in np.unique(a).tolist():
            here = a == first
            transient[here] = np.maximum.accumulate(units.transient_bytes[first:])[b[here] - first - 1]
    return Intervals(
        begin=begin,
        end=end,
        used=used,
        forward_ms=units.forward_ms[b] - units.forward_ms[a],
        backward_ms=units.backward_ms[b] - units.backward_ms[a],
        hop_forward_ms=hops[:, 0],
        hop_backward_ms=hops[:, 1],
        tail_ms=units.tail_ms[b] - units.tail_ms[a],
        static_bytes=units.static_bytes[b] - units.static_bytes[a],
        activation_bytes=units.activation_bytes[b] - units.activation_bytes[a],
        transient_bytes=transient,
    )


def list_patterns(
    units: Units, graph: TaskGraph, stage: int, max_load_ms: float, min_load_ms: float = 0.0
) -> StagePatterns:
    """All patterns of `stage` whose forward and backward of one micro-batch take at most `max_load_ms` in all chunks.

    min_load_ms bounds the load without recompute from below (what the others cannot take). Raises TooManyPatterns.
    """
    problem = units.problem
    num_chunks, num_groups = problem.num_chunks, len(units.groups)
    per_chunk = [list_intervals(units, c * problem.num_stages + stage, max_load_ms) for c in range(num_chunks)]
    offsets = np.cumsum([0, *(len(i.begin) for i in per_chunk)])
    begin, end = (np.concatenate([getattr(i, f) for i in per_chunk]) for f in ("begin", "end"))
    a, b = units.start[begin], units.start[end]
    join = {
        f: np.concatenate([getattr(i, f) for i in per_chunk])
        for f in (
            "forward_ms",
            "backward_ms",
            "hop_forward_ms",
            "hop_backward_ms",
            "tail_ms",
            "static_bytes",
            "activation_bytes",
            "transient_bytes",
        )
    }
    chosen, recompute, count = enumerate_patterns(
        offsets,
        join["forward_ms"] + join["backward_ms"],
        join["static_bytes"],
        join["activation_bytes"],
        join["transient_bytes"],
        units.before[:, a].T.copy(),
        units.before[:, b].T.copy(),
        units.extra_ms,
        units.saved_bytes,
        units.restored_bytes,
        graph.in_flight[stage].astype(np.float64),
        float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage],
        max_load_ms,
        min_load_ms,
        MAX_PATTERNS,
        MAX_CHOICES,
    )
    if count < 0:
        raise TooManyPatterns
    chosen, recompute = chosen[:count], recompute[:count].reshape(count, num_chunks, num_groups)
    first_layer = units.before[:, a].T[chosen]  # [n, V, G] index of the first layer of each group in each chunk
    extra_ms = np.zeros((count, num_chunks))
    for g, extra in enumerate(units.extra_ms):
        extra_ms += extra[first_layer[:, :, g] + recompute[:, :, g]] - extra[first_layer[:, :, g]]
    used = np.concatenate([i.used for i in per_chunk])[chosen].sum(axis=1)
    times = np.concatenate(
        [
            join["forward_ms"][chosen],
            join["backward_ms"][chosen] + extra_ms,
            join["hop_forward_ms"][chosen],
            join["hop_backward_ms"][chosen],
            problem.stage_tail_ms[stage] + join["tail_ms"][chosen].sum(axis=1, keepdims=True),
        ],
        axis=1,
    )
    patterns = StagePatterns(begin[chosen], end[chosen], recompute, used, times)
    return patterns.select(np.all(used <= units.run_size, axis=1))


@kernel
def enumerate_patterns(
    offsets: Ints,
    load_ms: Floats,
    static_bytes: Floats,
    activation_bytes: Floats,
    transient_bytes: Floats,
    first_layer: Ints,
    end_layer: Ints,
    extra_ms: Floats,
    saved_bytes: Floats,
    restored_bytes: Floats,
    in_flight: Floats,
    available_bytes: float,
    max_load_ms: float,
    min_load_ms: float,
    max_patterns: int,
    max_choices: int,
) -> tuple[Ints, Ints, int]:
    """Rows of interval indices [., V] and recompute counts [., V · G]; count -1 where there are more than
    max_patterns, or more
    than max_choices to look at.

    Intervals of chunk c are offsets[c] to offsets[c + 1]. For each choice of intervals the recompute counts run through
    an odometer whose last digit stops at the first count that fits, and only undominated extra times are kept.
    """
    num_chunks, num_groups = offsets.shape[0] - 1, extra_ms.shape[0]
    digits = num_chunks * num_groups
    capacity = 1024
    out_interval = np.empty((capacity, num_chunks), dtype=np.int64)
    out_recompute = np.empty((capacity, digits), dtype=np.int64)
    count, num_choices = 0, 0
    least_after = np.zeros(num_chunks + 1)
    for c in range(num_chunks - 1, -1, -1):
        if offsets[c] == offsets[c + 1]:
            return out_interval, out_recompute, 0
        least = np.inf
        for i in range(offsets[c], offsets[c + 1]):
            least = min(least, load_ms[i])
        least_after[c] = least_after[c + 1] + least
    pick = offsets[:num_chunks].copy()
    digit = np.zeros(max(digits, 1), dtype=np.int64)
    limit = np.zeros(max(digits, 1), dtype=np.int64)
    chunk_extra = np.zeros(num_chunks)
    kept = np.zeros(num_chunks)
    front = np.empty((256, num_chunks))
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
                for g in range(num_groups):
                    limit[v * num_groups + g] = end_layer[pick[v], g] - first_layer[pick[v], g]
            for d in range(digits):
                digit[d] = 0
            num_front = 0
            more = True
            while more:
                num_choices += 1
                if num_choices > max_choices:
                    return out_interval, out_recompute, -1
                restored, total_extra = 0.0, 0.0
                for v in range(num_chunks):
                    kept[v] = activation_bytes[pick[v]]
                    chunk_extra[v] = 0.0
                    for g in range(num_groups):
                        low = first_layer[pick[v], g]
                        high = low + digit[v * num_groups + g]
                        kept[v] -= saved_bytes[g, high] - saved_bytes[g, low]
                        restored += restored_bytes[g, high] - restored_bytes[g, low]
                        chunk_extra[v] += extra_ms[g, high] - extra_ms[g, low]
                    total_extra += chunk_extra[v]
                fits = load + total_extra <= max_load_ms
                over_time = not fits
                free = available_bytes - static - transient - restored
                if fits:
                    for row in range(in_flight.shape[0]):
                        held = 0.0
                        for v in range(num_chunks):
                            held += in_flight[row, v] * kept[v]
                        if held > free:
                            fits = False
                            break
                if fits:
                    dominated = False
                    for f in range(num_front):
                        worse = True
                        for v in range(num_chunks):
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
                            for v in range(num_chunks):
                                if chunk_extra[v] > front[f, v]:
                                    beaten = False
                                    break
                            if not beaten:
                                for v in range(num_chunks):
                                    front[stay, v] = front[f, v]
                                    out_interval[base + stay, v] = out_interval[base + f, v]
                                for d in range(digits):
                                    out_recompute[base + stay, d] = out_recompute[base + f, d]
                                stay += 1
                        count = base + stay
                        num_front = stay
                        if count == capacity:
                            if capacity >= max_patterns:
                                return out_interval, out_recompute, -1
                            capacity *= 2
                            wider_interval = np.empty((capacity, num_chunks), dtype=np.int64)
                            wider_recompute = np.empty((capacity, digits), dtype=np.int64)
                            for i in range(count):
                                for v in range(num_chunks):
                                    wider_interval[i, v] = out_interval[i, v]
                                for d in range(digits):
                                    wider_recompute[i, d] = out_recompute[i, d]
                            out_interval, out_recompute = wider_interval, wider_recompute
                        if num_front == front.shape[0]:
                            wider_front = np.empty((2 * num_front, num_chunks))
                            for f in range(num_front):
                                for v in range(num_chunks):
                                    wider_front[f, v] = front[f, v]
                            front = wider_front
                        for v in range(num_chunks):
                            out_interval[count, v] = pick[v]
                        for d in range(digits):
                            out_recompute[count, d] = digit[d]
                        for v in range(num_chunks):
                            front[num_front, v] = chunk_extra[v]
                        count += 1
                        num_front += 1
                # next count: where this one fits or is too slow already, a larger last digit is only slower
                d = digits - 1
                if d >= 0 and (fits or over_time):
                    while d >= 0 and digit[d] == 0:
                        d -= 1
                    if d >= 0:
                        digit[d] = 0
                        d -= 1
                while d >= 0 and digit[d] == limit[d]:
                    digit[d] = 0
                    d -= 1
                if d < 0:
                    more = False
                else:
                    digit[d] += 1
        pick[c] += 1
    return out_interval, out_recompute, count


def load_limits(problem: Problem, units: Units, step_ms: float) -> tuple[float, float]:
    """Largest load of a stage in a step of `step_ms` (each micro-batch passes once each way), and the least without
    recompute that the others leave to it.
    """
    most = step_ms / problem.num_microbatches
    work = float(units.forward_ms[-1] + units.backward_ms[-1])
    return most, max(0.0, work - (problem.num_stages - 1) * most)
