"""The vector of times that a step depends on: one entry for each that a stage, a hop or a tail takes.

Placement fills it and plays it, and the weights of a mixture of paths have the same layout. Micro-batches are equal:
where they are not, `Loads` has a time for each class of them.
"""

from __future__ import annotations

from typing import NamedTuple

from mm_autoparallel.pipeline.simulate.compiled import kernel


class TimesLayout(NamedTuple):
    """Where the parts of the vector begin, for K virtual stages on P stages and D durations; `num_times` = D + 2K - 1
    + P.

    forward, backward: [K]; behind them the parts of backwards [K] and those of pairs, where the schedule has some, so
    that D is more than 2K (Loads.durations_ms has the same order). hop_forward, hop_backward: [K - 1], of the hop after
    each virtual stage but the last. zero: the time of what is no hop. tail: [P].
    """

    forward: int
    backward: int
    hop_forward: int
    hop_backward: int
    zero: int
    tail: int
    num_times: int


@kernel
def wide_layout(num_durations: int, num_virtual: int, num_stages: int) -> TimesLayout:
    """The layout for so many durations."""
    tail = num_durations + 2 * num_virtual - 1
    hop_backward = num_durations + num_virtual - 1
    return TimesLayout(0, num_virtual, num_durations, hop_backward, tail - 1, tail, tail + num_stages)


@kernel
def times_layout(num_virtual: int, num_stages: int) -> TimesLayout:
    """The layout for so many virtual stages and stages, where backwards are whole and nothing is paired."""
    return wide_layout(2 * num_virtual, num_virtual, num_stages)
