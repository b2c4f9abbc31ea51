"""Intervals: the stretches of segments that one virtual stage could hold, and what they cost in no mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.loads import allowed_host_bytes, hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Pairs of a begin and an end beyond which none are listed: some hundred MB. Two thousand segments that may lie
# anywhere.
MAX_INTERVALS = 4_000_000


@dataclass(frozen=True, eq=False)
class Intervals:
    """What virtual stages could hold, one row each: representative segment interval and its sums.

    stage: the virtual one. begin, end: segment indices; with several chunks equal stretches of equal segments are
    listed once. used: [n, R] segments per run.
    """

    stage: Ints
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
    step_bytes: Floats
    step_once_bytes: Floats
    step_shard_bytes: Floats
    host_static_bytes: Floats

    def select(self, chosen: NDArray[np.bool_]) -> Intervals:
        """Those of a mask."""
        return Intervals(**{f.name: getattr(self, f.name)[chosen] for f in fields(Intervals)})


def list_intervals(segments: Segments, virtual_stages: Sequence[int], max_load_ms: float) -> Intervals:
    """Every interval that each of `virtual_stages` may hold with one forward and backward of at most `max_load_ms`, one
    stage after another; times without modes. Raises TooManyPatterns.
    """
    problem = segments.problem
    windows = zip(*(_windows(segments, k) for k in virtual_stages), strict=True)
    stage, begin, end = (np.concatenate(each) for each in windows)
    device = stage % problem.num_stages
    factor = np.array(problem.time_factors)[device]
    a, b = segments.start[begin], segments.start[end]
    num_layers = segments.layers[b] - segments.layers[a]
    load = (
        segments.forward_ms[b] - segments.forward_ms[a] + segments.backward_ms[b] - segments.backward_ms[a]
    ) * factor
    lawful = ((num_layers >= 1) | (end == 0)) & (load <= max_load_ms)
    if problem.max_layers_per_chunk is not None:
        lawful &= num_layers <= problem.max_layers_per_chunk
    if segments.limits_host:
        of_host = segments.host_static_bytes[b] - segments.host_static_bytes[a]
        lawful &= of_host <= allowed_host_bytes(problem)[device]
    stage, begin, end = stage[lawful], begin[lawful], end[lawful]
    at_run = np.concatenate(
        [
            np.zeros((1, len(segments.run_size)), dtype=np.int64),
            np.cumsum(np.eye(len(segments.run_size), dtype=np.int64)[segments.run], axis=0),
        ]
    )
    used = at_run[end] - at_run[begin]
    if problem.num_chunks > 1 and len(begin):
        _, once = np.unique(np.column_stack([stage, used]), axis=0, return_index=True)
        once.sort()
        stage, begin, end, used = stage[once], begin[once], end[once], used[once]
    a, b, factor = (
        segments.start[begin],
        segments.start[end],
        np.array(problem.time_factors)[stage % problem.num_stages],
    )
    hops = _hops(segments, stage, end)
    return Intervals(
        stage=stage,
        begin=begin,
        end=end,
        used=used,
        forward_ms=(segments.forward_ms[b] - segments.forward_ms[a]) * factor,
        backward_ms=(segments.backward_ms[b] - segments.backward_ms[a]) * factor,
        hop_forward_ms=hops[:, 0],
        hop_backward_ms=hops[:, 1],
        tail_ms=segments.tail_ms[b] - segments.tail_ms[a],
        static_bytes=segments.static_bytes[b] - segments.static_bytes[a],
        activation_bytes=segments.activation_bytes[b] - segments.activation_bytes[a],
        transient_bytes=_largest(segments.transient_bytes, a, b),
        step_bytes=segments.step_bytes[b] - segments.step_bytes[a],
        step_once_bytes=_largest(segments.step_once_bytes, a, b),
        step_shard_bytes=segments.step_shard_bytes[b] - segments.step_shard_bytes[a],
        host_static_bytes=segments.host_static_bytes[b] - segments.host_static_bytes[a],
    )


def count_pairs(segments: Segments) -> Ints:
    """[K] of each virtual stage, how many pairs of a begin and an end its windows have."""
    width = segments.last - segments.first + 1
    pairs: Ints = width[:-1] * width[1:]
    return pairs


def _windows(segments: Segments, virtual_stage: int) -> tuple[Ints, Ints, Ints]:
    """The pairs of a begin and an end that its windows have: stage, begin and end of each."""
    k = virtual_stage
    if int(count_pairs(segments)[k]) > MAX_INTERVALS:
        raise TooManyPatterns
    begins = np.arange(segments.first[k], segments.last[k] + 1)
    ends = np.arange(segments.first[k + 1], segments.last[k + 1] + 1)
    begin, end = np.repeat(begins, len(ends)), np.tile(ends, len(begins))
    may_be_spare = k < segments.num_spare
    held = (begin < end) | ((begin == 0) & (end == 0) & may_be_spare)
    begin, end = begin[held], end[held]
    return np.full(len(begin), k), begin, end


def _hops(segments: Segments, stage: Ints, end: Ints) -> Floats:
    """[n, 2]: the hops behind each, forward and backward; none behind the last stage, or one that holds nothing."""
    problem, hops = segments.problem, np.zeros((len(stage), 2))
    hop = (stage < problem.num_virtual_stages - 1) & (end > 0)
    last_block = segments.flat[segments.start[end[hop]] - 1]
    pairs, at = np.unique(stage[hop] * len(problem.chain) + last_block, return_inverse=True)
    if len(pairs):
        behind = (divmod(pair, len(problem.chain)) for pair in pairs.tolist())
        hops[hop] = np.array([hop_ms(problem, k, problem.chain[e]) for k, e in behind])[at]
    return hops


def _largest(values: Floats, begin: Ints, end: Ints) -> Floats:
    """[n]: the largest of the values between each begin and end."""
    largest = np.zeros(len(begin))
    if len(begin) and values.any():
        order = np.argsort(begin, kind="stable")
        firsts, at = np.unique(begin[order], return_index=True)
        for first, here in zip(firsts.tolist(), np.split(order, at[1:]), strict=True):
            most = np.concatenate([[0.0], np.maximum.accumulate(values[first:])])
            largest[here] = most[end[here] - first]
    return largest
