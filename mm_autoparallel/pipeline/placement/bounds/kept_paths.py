"""The paths that bounds of one chunk a stage keep, and the placements whose kept paths are all short enough.

L = F + B of a stage for one of M micro-batches, what comes before a stage and after it as in `step`.

    stage, turn   as `step` names them: M of L, or the first micro-batch's pass through the later stages at one end.
    both turns    where each stage runs k = P - s forwards and then a backward and a forward in turn (1F1B): the pass
                  through the later stages in place of k - 1 forwards at the beginning, and of as many backwards at the
                  end:                     before + 2 (L + after) + (M - 1 - k) L
    winding       in between a path may leave stage s behind a forward, go on to stage e, and come back with the
                  gradient that e makes next: j = e - s + 1 micro-batches later it is where it was, after one pass of
                  the j stages and their hops, W. So its rounds, and the rest of the M - 1 - k in stage s alone:
                  before + 2 (L + after) + floor((M - 1 - k) / j) W + ((M - 1 - k) mod j) L

Under a step, `winding` says of each stage how long the stages from it on may take in the mean of any number of them,
hops included: its pace. What the stages from a unit on exceed a pace by, at the least over their placements, is kept
for some paces, and a pace is rounded up to one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.simulate.compiled import kernel

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.bounds.one_chunk import OneChunk

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NUM_PACES, LEAST_PACE, MOST_PACE = 32, 0.8, 1.1
"""How many are kept, the least at least as a part of the largest, and the largest as a part of the step over all
micro-batches. Assumed."""
NUM_ROUNDS = 2
"""How often placements are left out for what is left of the others."""
ROUNDING_FRACTION = 1e-9


def least_rest(of: OneChunk, loads: Floats) -> Floats:
    """[P + 1, N + 1] least time of one micro-batch through stages s … P - 1 that begin at a unit, forth and back."""
    num_stages, num_units = len(of.in_flight), len(of.transient_bytes)
    rest = np.full((num_stages + 1, num_units + 1), np.inf)
    rest[num_stages, num_units] = 0.0
    for s in range(num_stages - 1, -1, -1):
        rest[s] = np.min(of.least_scale * loads[s] + of.hop_ms[s] + rest[s + 1], axis=1)
    return rest


def can_take(of: OneChunk, loads: Floats, rest: Floats, step_ms: float) -> bool:
    """Whether some placement has none of its kept paths longer than `step_ms`."""
    is_open = np.isfinite(loads)
    for _ in range(NUM_ROUNDS if of.winds else 1):
        least = _go_forth(of, loads, rest, step_ms, is_open)
        if np.isinf(least[-1, -1]):
            return False
        if of.winds:
            rest = _go_back(of, loads, rest, step_ms, is_open, least)
            if np.isinf(rest[0, 0]):
                return False
    return True


@kernel
def _go_forth(of: OneChunk, loads: Floats, rest: Floats, step_ms: float, is_open: Bools) -> Floats:
    """[P + 1, N + 1] least time of one micro-batch through the stages before each, forth and back, by where they end;
    stages that no path within step_ms goes through are closed."""
    num_stages, num_units = of.in_flight.shape[0], of.transient_bytes.shape[0]
    num_microbatches = of.num_microbatches
    least = np.full((num_stages + 1, num_units + 1), np.inf)
    least[0, 0] = 0.0
    for s in range(num_stages):
        in_turn = num_microbatches - 2 - of.num_warmup[s]
        for begin in range(of.first[s], of.last[s] + 1):
            if least[s, begin] == np.inf:
                continue
            forward_before = of.least_scale * of.forward_ms[begin] * of.least_factor[s] + of.latency_ms[s]
            for end in range(max(begin + 1, of.first[s + 1]), of.last[s + 1] + 1):
                load = loads[s, begin, end]
                forward = (of.forward_ms[end] - of.forward_ms[begin]) * of.time_factor[s]
                backward = (of.backward_ms[end] - of.backward_ms[begin]) * of.time_factor[s]
                if num_microbatches * (forward + backward) > step_ms:
                    is_open[s, begin, end:] = False
                    break
                if not is_open[s, begin, end]:
                    continue
                tail = of.stage_tail_ms[s] + of.tail_ms[end] - of.tail_ms[begin]
                used = least[s, begin] + (tail if s == 0 else 0.0)
                whole = num_microbatches * load
                onward = of.hop_ms[s, end] + rest[s + 1, end]
                # what of `load` is not known to be backward may be forward, and the other way round
                most_forward = forward if of.is_plain else load - backward
                spared = min(of.num_warmup[s] * most_forward, of.num_cooldown[s] * (load - forward))
                longest = max(used + whole, forward_before + whole + tail)
                longest = max(longest, used + whole - of.most_scale * spared + onward)
                if of.winds and in_turn >= 0:
                    longest = max(longest, used + 2.0 * (load + onward) + in_turn * load)
                if longest > step_ms:
                    is_open[s, begin, end] = False
                    continue
                least[s + 1, end] = min(least[s + 1, end], used + of.least_scale * load + of.hop_ms[s, end])
    return least


@kernel
def _go_back(of: OneChunk, loads: Floats, rest: Floats, step_ms: float, is_open: Bools, least: Floats) -> Floats:
    """`rest` of what is open, after winding paths have closed what they take longer through."""
    num_stages, num_units = of.in_flight.shape[0], of.transient_bytes.shape[0]
    least_ms, most_ms = np.inf, 0.0
    for s in range(num_stages):
        in_turn = of.num_microbatches - 2 - of.num_warmup[s]
        for begin in range(of.first[s], of.last[s] + 1):
            if in_turn > 0 and least[s, begin] + rest[s, begin] < np.inf:
                pace = (step_ms - least[s, begin] - 2.0 * rest[s, begin]) / in_turn
                least_ms, most_ms = min(least_ms, pace), max(most_ms, pace)
    most_ms = min(most_ms, MOST_PACE * step_ms / of.num_microbatches)
    paces = np.linspace(max(least_ms, LEAST_PACE * most_ms), most_ms, NUM_PACES)
    excess = np.full((num_stages + 1, num_units + 1, NUM_PACES), np.inf)
    excess[num_stages, num_units] = -np.inf
    left = np.full((num_stages + 1, num_units + 1), np.inf)
    left[num_stages, num_units] = 0.0
    for s in range(num_stages - 1, -1, -1):
        in_turn = of.num_microbatches - 2 - int(of.num_warmup[s])
        most_apart = 0  # micro-batches that no whole round takes
        for length in range(1, num_stages - s + 1):
            most_apart = max(most_apart, in_turn % length)
        for begin in range(of.first[s], of.last[s] + 1):
            if least[s, begin] == np.inf:
                continue
            for end in range(max(begin + 1, of.first[s + 1]), of.last[s + 1] + 1):
                if not is_open[s, begin, end]:
                    continue
                load, onward = loads[s, begin, end], of.hop_ms[s, end] + left[s + 1, end]
                if in_turn >= num_stages - s:
                    room = step_ms - least[s, begin] - 2.0 * (load + onward)
                    pace = max(room / in_turn, (room - most_apart * load) / (in_turn - most_apart))
                    at = np.searchsorted(paces, pace)
                    if at < NUM_PACES:
                        over = load - paces[at] + max(0.0, excess[s + 1, end, at] + of.hop_ms[s, end])
                        if over > ROUNDING_FRACTION * step_ms:
                            onward = np.inf
                if onward == np.inf:
                    is_open[s, begin, end] = False
                    continue
                left[s, begin] = min(left[s, begin], load + onward)
                for at in range(NUM_PACES):
                    over = load - paces[at] + max(0.0, excess[s + 1, end, at] + of.hop_ms[s, end])
                    excess[s, begin, at] = min(excess[s, begin, at], over)
    return left
