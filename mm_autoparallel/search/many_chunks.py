"""Bounds for pipelines of several chunks a stage: how many layers of the main kind each stage takes.

Which chunk of a stage holds a layer is left open: every layer counts with the least number of micro-batches in flight
that any chunk has, and with the least weight that any chunk has on the paths. The other blocks may lie anywhere, but
their time has to find room somewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class MainKind(NamedTuple):
    """N layers of the kind with the most work, on P stages.

    static_bytes, activation_bytes, saved_bytes, restored_bytes, transient_bytes: of one of them. in_flight: [P].
    available_bytes: [P] what blocks pinned to a stage leave.
    """

    num_layers: int
    static_bytes: float
    activation_bytes: float
    saved_bytes: float
    restored_bytes: float
    transient_bytes: float
    in_flight: Floats
    available_bytes: Floats


@kernel
def least_recompute(of: MainKind) -> Ints:
    """[P, N + 1] how many of n layers a stage recomputes at least to fit; -1 where it cannot."""
    num_stages = of.in_flight.shape[0]
    recomputed = np.full((num_stages, of.num_layers + 1), -1, dtype=np.int64)
    for s in range(num_stages):
        freed = of.in_flight[s] * of.saved_bytes - of.restored_bytes
        for n in range(of.num_layers + 1):
            need = n * (of.static_bytes + of.in_flight[s] * of.activation_bytes) - of.available_bytes[s]
            if n > 0:
                need += of.transient_bytes
            count = 0.0
            if need > 0.0:
                if freed <= 0.0:
                    break
                count = np.ceil(need / freed * (1.0 - 1e-9))
                if count > n:
                    break
            recomputed[s, n] = np.int64(count)
    return recomputed


@kernel
def least_total(costs_ms: Floats, works_ms: Floats, most_ms: Floats) -> float:
    """The least sum of costs_ms[s, n_s] over all counts that sum to N, with works_ms[s, n_s] ≤ most_ms[s]; both [P, N + 1]."""
    num_stages, num_layers = costs_ms.shape[0], costs_ms.shape[1] - 1
    least = np.full(num_layers + 1, np.inf)
    least[0] = 0.0
    for s in range(num_stages):
        following = np.full(num_layers + 1, np.inf)
        for n in range(num_layers + 1):
            if works_ms[s, n] > most_ms[s]:
                break  # work only grows with n
            for before in range(num_layers + 1 - n):
                following[before + n] = min(following[before + n], least[before] + costs_ms[s, n])
        least = following
    return least[num_layers]


@kernel
def least_excess(of: MainKind) -> float:
    """Bytes by which some stage exceeds its memory in every placement (0: unknown), all layers recomputed if that helps."""
    low, high = 0.0, 1.0
    if can_hold(of, 0.0):
        return 0.0
    while not can_hold(of, high):
        low, high = high, high * 2.0
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if can_hold(of, middle):
            high = middle
        else:
            low = middle
    return low


@kernel
def can_hold(of: MainKind, excess_bytes: float) -> bool:
    """Whether limits that much higher could hold all layers."""
    total = 0.0
    for s in range(of.in_flight.shape[0]):
        freed = max(0.0, of.in_flight[s] * of.saved_bytes - of.restored_bytes)
        layer = of.static_bytes + of.in_flight[s] * of.activation_bytes - freed
        room = of.available_bytes[s] + excess_bytes - of.transient_bytes
        if room >= 0.0:
            total += min(float(of.num_layers), np.floor(room / max(layer, 1e-9) * (1.0 + 1e-9)))
    return total >= of.num_layers
