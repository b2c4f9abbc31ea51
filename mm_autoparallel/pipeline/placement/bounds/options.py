"""Options: what n equal layers on one stage cost at least, when each may lie in any of its chunks and run in any mode.

A layer in chunk c and mode m costs time, and bytes of the device and of its host for every micro-batch that chunk has
in flight. With any prices of bytes (Lagrange) the cost of all layers is at least

    Σ over chunks that need a layer of the cheapest option there + the others at the cheapest of all − the room's price,

bytes at their price included; the largest over some prices counts. Prices of the device's bytes are those at which two
options cost the same, for between them the bound is linear; each with prices of the host's at which a mode that moves
bytes there costs as much as the best other way in its chunk. Chunks that need a layer keep it from laying all where the
fewest micro-batches are in flight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import ChainBlock
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.stage_memory import held_by

Floats = NDArray[np.float64]

#: Far above the rounding of sums.
ROUNDING_FRACTION = 1e-9
#: Far above the rounding of a sum of terms that cancel, as a fraction of their sizes.
CANCELLED_FRACTION = 1e-12


class Options(NamedTuple):
    """Of one layer, [M] by mode, its own way first: time beside its own in forward and backward, and bytes.

    forward_ms, backward_ms: its passes. kept_bytes, host_kept_bytes: for each micro-batch in flight, always_bytes
    through the whole step.
    """

    forward_ms: Floats
    backward_ms: Floats
    always_bytes: Floats
    kept_bytes: Floats
    host_kept_bytes: Floats


def options_of(block: ChainBlock) -> Options:
    """Those of a layer of `block`."""
    held = [held_by(block), *(held_by(block, mode) for mode in block.modes)]
    return Options(
        np.array([block.forward_ms, *(block.forward_ms + mode.extra_forward_ms for mode in block.modes)]),
        np.array([block.backward_ms, *(block.backward_ms + mode.extra_backward_ms for mode in block.modes)]),
        np.array([each.always_bytes for each in held]),
        np.array([each.kept_bytes for each in held]),
        np.array([each.host_kept_bytes for each in held]),
    )


@kernel
def most_layers(
    of: Options, in_flight: Floats, is_allowed: NDArray[np.bool_], is_needed: NDArray[np.bool_], room_bytes: float
) -> float:
    """How many layers fit at most, each in the chunk and mode that hold least; -1 where not even those that must be.

    The arguments are those of `least_cost`.
    """
    each, needed, num_needed = np.inf, 0.0, 0
    for c in range(len(in_flight)):
        if not is_allowed[c]:
            continue
        least = np.inf
        for m in range(len(of.forward_ms)):
            least = min(least, of.always_bytes[m] + in_flight[c] * of.kept_bytes[m])
        each = min(each, least)
        if is_needed[c]:
            needed += least
            num_needed += 1
    left = room_bytes - needed + ROUNDING_FRACTION * (abs(room_bytes) + needed)
    if left < 0.0:
        return -1.0 if num_needed else 0.0
    if each == np.inf:
        return 0.0
    return np.inf if each <= 0.0 else num_needed + np.floor(left / each * (1.0 + ROUNDING_FRACTION))


@kernel
def least_cost(
    of: Options,
    forward_count: Floats,
    backward_count: Floats,
    in_flight: Floats,
    is_allowed: NDArray[np.bool_],
    is_needed: NDArray[np.bool_],
    room_bytes: float,
    host_room_bytes: float,
    most: int,
) -> Floats:
    """[most + 1] the least time of n layers, infinite where that many cannot be.

    forward_count, backward_count, in_flight: [C] of each chunk, how often passes count and how many micro-batches are
    there at some moment. is_allowed, is_needed: [C] where a layer may lie, and where one must. host_room_bytes:
    infinite where nothing limits it.
    """
    num_chunks, num_modes = len(in_flight), len(of.forward_ms)
    num = num_chunks * num_modes
    cost, held, host = np.empty(num), np.empty(num), np.empty(num)
    chunk = np.empty(num, dtype=np.int64)
    size, num_needed = 0, 0
    for c in range(num_chunks):
        if is_needed[c]:
            num_needed += 1
        if not is_allowed[c]:
            continue
        for m in range(num_modes):
            cost[size] = forward_count[c] * of.forward_ms[m] + backward_count[c] * of.backward_ms[m]
            held[size] = of.always_bytes[m] + in_flight[c] * of.kept_bytes[m]
            host[size] = in_flight[c] * of.host_kept_bytes[m]
            chunk[size] = c
            size += 1
    least = np.full(most + 1, np.inf)
    if num_needed == 0:
        least[0] = 0.0
    if size == 0:
        return least
    first = max(1, num_needed)
    for n in range(first, most + 1):
        least[n] = 0.0
    cheapest = np.empty(num_chunks)
    for i in range(size + 1):
        for j in range(size):
            price = 0.0
            if i == size:
                if j > 0:
                    break
            else:
                if held[i] <= held[j] or cost[j] <= cost[i]:
                    continue
                price = (cost[j] - cost[i]) / (held[i] - held[j])
            for k in range(-1, size):
                host_price = 0.0
                if k >= 0:
                    if host[k] <= 0.0 or np.isinf(host_room_bytes):
                        continue
                    other = np.inf
                    for o in range(size):
                        if chunk[o] == chunk[k] and host[o] <= 0.0:
                            other = min(other, cost[o] + price * held[o])
                    host_price = (other - cost[k] - price * held[k]) / host[k]
                    if not 0.0 < host_price < np.inf:
                        continue
                cheapest[:] = np.inf
                for o in range(size):
                    cheapest[chunk[o]] = min(cheapest[chunk[o]], cost[o] + price * held[o] + host_price * host[o])
                fixed, each = -price * room_bytes, np.inf
                if host_price > 0.0:
                    fixed -= host_price * host_room_bytes
                for c in range(num_chunks):
                    if is_needed[c]:
                        fixed += cheapest[c]
                    each = min(each, cheapest[c])
                size_ms = abs(fixed) + price * (2.0 * abs(room_bytes))
                if host_price > 0.0:
                    size_ms += 2.0 * host_price * abs(host_room_bytes)
                for n in range(first, most + 1):
                    ms = fixed + (n - num_needed) * each
                    least[n] = max(least[n], ms - CANCELLED_FRACTION * (size_ms + n * abs(each)))
    return least
