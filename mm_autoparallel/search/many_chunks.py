"""Bounds for pipelines of several chunks a stage: how many layers of the main kind each stage takes.

Which chunk of a stage holds a layer is left open: every layer counts with the least number of micro-batches in flight
that any chunk has. The other blocks may lie anywhere, but their time has to find room somewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.simulate.compiled import kernel

Floats = NDArray[np.float64]


class MainKind(NamedTuple):
    """N layers of the kind with the most work, on P stages; times are of all micro-batches together.

    layer_ms, layer_tail_ms, extra_ms, static_bytes, activation_bytes, saved_bytes, restored_bytes, transient_bytes: of
    one of them. other_ms: of all blocks that are neither of that kind nor pinned. pinned_ms, in_flight: [P].
    available_bytes: [P] what pinned blocks leave. path_ms: [P] what a stage's first forward and last backward wait for.
    forward_path_ms: [P] the former alone. total_tail_ms: of all blocks and stages.
    """

    num_layers: int
    layer_ms: float
    extra_ms: float
    static_bytes: float
    activation_bytes: float
    saved_bytes: float
    restored_bytes: float
    transient_bytes: float
    other_ms: float
    total_tail_ms: float
    pinned_ms: Floats
    in_flight: Floats
    available_bytes: Floats
    path_ms: Floats
    forward_path_ms: Floats


@kernel
def least_works(of: MainKind) -> Floats:
    """[P, N + 1] time in ms of a stage with n layers and the least recompute that fits; infinite where none does."""
    num_stages = of.in_flight.shape[0]
    works = np.full((num_stages, of.num_layers + 1), np.inf)
    for s in range(num_stages):
        freed = of.in_flight[s] * of.saved_bytes - of.restored_bytes
        for n in range(of.num_layers + 1):
            need = n * (of.static_bytes + of.in_flight[s] * of.activation_bytes) - of.available_bytes[s]
            if n:
                need += of.transient_bytes
            recomputed = 0.0
            if need > 0.0:
                if freed <= 0.0:
                    break
                recomputed = np.ceil(need / freed * (1.0 - 1e-9))
                if recomputed > n:
                    break
            works[s, n] = of.pinned_ms[s] + n * of.layer_ms + recomputed * of.extra_ms
    return works


@kernel
def has_room(of: MainKind, works: Floats, step_ms: float) -> bool:
    """Whether the stages can take all work within `step_ms`."""
    num_stages = of.in_flight.shape[0]
    least = np.full(of.num_layers + 1, np.inf)
    least[0] = 0.0
    for s in range(num_stages):
        following = np.full(of.num_layers + 1, np.inf)
        for n in range(of.num_layers + 1):
            if of.path_ms[s] + works[s, n] > step_ms:
                break
            for before in range(of.num_layers + 1 - n):
                following[before + n] = min(following[before + n], least[before] + works[s, n])
        least = following
    work = least[of.num_layers] + of.other_ms
    room = min(num_stages * step_ms - of.path_ms.sum(), num_stages * step_ms - of.forward_path_ms.sum() - of.total_tail_ms)
    return work <= room


@kernel
def least_excess(of: MainKind) -> float:
    """Bytes by which some stage exceeds its memory in every placement (zero: unknown), all layers recomputed if that helps."""
    num_stages = of.in_flight.shape[0]

    def taken(excess_bytes: float) -> float:
        total = 0.0
        for s in range(num_stages):
            freed = max(0.0, of.in_flight[s] * of.saved_bytes - of.restored_bytes)
            layer = of.static_bytes + of.in_flight[s] * of.activation_bytes - freed
            room = of.available_bytes[s] + excess_bytes - of.transient_bytes
            if room > 0.0:
                total += min(float(of.num_layers), np.floor(room / max(layer, 1.0) * (1.0 + 1e-9)))
        return total

    if taken(0.0) >= of.num_layers:
        return 0.0
    low, high = 0.0, 1.0
    while taken(high) < of.num_layers:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if taken(middle) < of.num_layers:
            low = middle
        else:
            high = middle
    return low
