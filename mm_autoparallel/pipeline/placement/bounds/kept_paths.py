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

Beside encoders all this lies behind their lead, and their way back follows it. Their passes on the devices of stage s
may lie where that stage waits, but on some paths it does not:

    early        their forwards there precede the last forward, from which the path goes on through the later stages:
                     early + M L - c B + after + back before,   c backwards from the last forward to the last backward
    late         their backwards there follow the first backward, which waits for the later stages:
                     forward before + M L - w F + after + late,   w forwards from the first one to the first backward
    all          M L and all their passes there

Under a step, `winding` says of each stage how long the stages from it on may take in the mean of any number of them,
hops included: its pace. What the stages from a segment on exceed a pace by, at the least over their placements, is kept
for some paces, and a pace is rounded up to one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


class Beside(NamedTuple):
    """What encoders run beside the stages, in ms, as paths count it.

    lead_ms: before the first forward of the first stage; return_ms: after the last backward there. early_ms, late_ms,
    any_ms: [P] on the devices of each stage: passes that precede the decoder's last backward there, and in an order of
    micro-batches its last forward; passes that follow its first backward; and passes at any time.
    """

    lead_ms: float
    return_ms: float
    early_ms: Floats
    late_ms: Floats
    any_ms: Floats


def nothing_beside(num_stages: int) -> Beside:
    """A decoder by itself."""
    return Beside(0.0, 0.0, *np.zeros((3, num_stages)))


def least_rest(of: OneChunk, loads: Floats) -> Floats:
    """[P + 1, N + 1] least time of one micro-batch through stages s … P - 1 that begin at a segment, forth and back."""
    num_stages, num_segments = len(of.in_flight), len(of.transient_bytes)
    rest = np.full((num_stages + 1, num_segments + 1), np.inf)
    rest[num_stages, num_segments] = 0.0
    for s in range(num_stages - 1, -1, -1):
        rest[s] = np.min(of.least_scale * loads[s] + of.hop_ms[s] + rest[s + 1], axis=1)
    return rest


def can_take(of: OneChunk, loads: Floats, rest: Floats, step_ms: float) -> bool:
    """Whether some placement has none of its kept paths longer than `step_ms`."""
    return open_stretches(of, loads, rest, step_ms) is not None


def open_stretches(of: OneChunk, loads: Floats, rest: Floats, step_ms: float) -> Bools | None:
    """[P, N + 1, N + 1] which stretches of segments stages may hold in such placements; None where there is none."""
    is_open = np.isfinite(loads)
    for _ in range(NUM_ROUNDS if of.winds else 1):
        least = _go_forth(of, loads, rest, step_ms, is_open)
        if np.isinf(least[-1, -1]):
            return None
        if of.winds:
            rest = _go_back(of, loads, rest, step_ms, is_open, least)
            if np.isinf(rest[0, 0]):
                return None
    return is_open


@kernel
def _go_forth(of: OneChunk, loads: Floats, rest: Floats, step_ms: float, is_open: Bools) -> Floats:
    """[P + 1, N + 1] least time of one micro-batch through the stages before each, forth and back, by where they end;
    stages that no path within step_ms goes through are closed."""
    num_stages, num_segments = of.in_flight.shape[0], of.transient_bytes.shape[0]
    num_microbatches, beside = of.num_microbatches, of.beside
    least = np.full((num_stages + 1, num_segments + 1), np.inf)
    least[0, 0] = beside.lead_ms
    back = np.full((num_stages + 1, num_segments + 1), np.inf)  # the same of backwards alone, and of what follows them
    back[0, 0] = 0.0
    for s in range(num_stages):
        in_turn = num_microbatches - 2 - of.num_warmup[s]
        early, late = beside.early_ms[s], beside.late_ms[s]
        for begin in range(of.first[s], of.last[s] + 1):
            if least[s, begin] == np.inf:
                continue
            forward_before = of.least_scale * of.forward_ms[begin] * of.least_factor[s] + of.latency_ms[s]
            forward_before += beside.lead_ms
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
                after = max(tail, beside.return_ms) if s == 0 else 0.0
                used, back_used = least[s, begin] + after, back[s, begin] + after
                whole = num_microbatches * load
                onward = of.hop_ms[s, end] + rest[s + 1, end]
                # what of `load` is not known to be backward may be forward, and the other way round
                most_forward = forward if of.is_plain else load - backward
                at_begin, at_end = of.num_warmup[s] * most_forward, of.num_cooldown[s] * (load - forward)
                longest = max(used + whole, forward_before + whole + late + tail)
                longest = max(longest, used + whole - of.most_scale * min(at_begin, at_end) + onward)
                longest = max(longest, early + whole + max(back_used, beside.any_ms[s] + late + tail))
                if early > 0.0 and at_end < np.inf:
                    longest = max(longest, early + whole - at_end + onward + back_used)
                if late > 0.0 and at_begin < np.inf:
                    longest = max(longest, forward_before + whole - at_begin + onward + late + tail)
                if of.winds and in_turn >= 0:
                    longest = max(longest, used + 2.0 * (load + onward) + in_turn * load)
                if longest > step_ms:
                    is_open[s, begin, end] = False
                    continue
                least[s + 1, end] = min(least[s + 1, end], used + of.least_scale * load + of.hop_ms[s, end])
                back_used += of.least_scale * (load - most_forward) + of.hop_back_ms[s, end]
                back[s + 1, end] = min(back[s + 1, end], back_used)
    return least


@kernel
def _go_back(of: OneChunk, loads: Floats, rest: Floats, step_ms: float, is_open: Bools, least: Floats) -> Floats:
    """`rest` of what is open, after winding paths have closed what they take longer through."""
    num_stages, num_segments = of.in_flight.shape[0], of.transient_bytes.shape[0]
    least_ms, most_ms = np.inf, 0.0
    for s in range(num_stages):
        in_turn = of.num_microbatches - 2 - of.num_warmup[s]
        for begin in range(of.first[s], of.last[s] + 1):
            if in_turn > 0 and least[s, begin] + rest[s, begin] < np.inf:
                pace = (step_ms - least[s, begin] - 2.0 * rest[s, begin]) / in_turn
                least_ms, most_ms = min(least_ms, pace), max(most_ms, pace)
    most_ms = min(most_ms, MOST_PACE * step_ms / of.num_microbatches)
    paces = np.linspace(max(least_ms, LEAST_PACE * most_ms), most_ms, NUM_PACES)
    excess = np.full((num_stages + 1, num_segments + 1, NUM_PACES), np.inf)
    excess[num_stages, num_segments] = -np.inf
    left = np.full((num_stages + 1, num_segments + 1), np.inf)
    left[num_stages, num_segments] = 0.0
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
