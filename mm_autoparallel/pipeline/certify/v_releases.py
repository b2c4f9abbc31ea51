"""A stage of a V as one machine whose actions have earliest begins, for `verify`.

Micro-batch j of M, from 0 on, begins on the stage no sooner than the stages before have run its own forward and those
of all micro-batches before it; comes back for its second forward no sooner than the stages behind have; and so on for
both gradients of inputs. Of stages that have run so much, one has run at least their mean. Nor does it begin sooner
than what memory asks to be through before it, or than the action before it of its kind ends. A gradient of weights
begins after that of its input. In whatever order the machine runs its actions, after any moment it still runs all that
cannot begin sooner:

    step >= r + Σ of all actions with earliest begin >= r + tail                       for each r
    step >= r + Σ of those that are no gradient of weights + max(extra_a + tail, above)

where `extra_a` and `above` follow the last gradient of an input, that of the first piece. (The one machine of Carlier,
An algorithm for the one-machine sequencing problem, 1982, without tails of single actions.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.v_pieces import (
    FORWARD,
    HOP_FORWARD,
    INPUT,
    ROUNDING_FRACTION,
    TAIL,
    Stage,
    extra_ms,
    most_in_flight,
)

Floats = NDArray[np.float64]

#: Actions of all pairs that are looked at together.
MOST_ACTIONS = 2_000_000


def bound_released(
    a: Floats,
    z: Floats,
    stage: Stage,
    m: int,
    ends: tuple[float, float],
    way: tuple[Floats, Floats, Floats],
    rates: tuple[Floats, Floats, Floats, Floats],
) -> Floats:
    """[n] in ms: a step of m micro-batches in which a stage has pieces a and z [n, 17] is no shorter.

    ends: the least time before the stage's first forward, and after its last gradient of an input on the stages before.
    way: [n] from the end of the first forward to the begin of the second, on to its gradient, and to the first's.
    rates: [n] what each micro-batch adds at least before its first forward, its second, its gradient, and the first's,
    the second and the last counted from the end of the stage's first forward on.
    """
    size = max(1, MOST_ACTIONS // (6 * m))
    found = []
    for first in range(0, len(a), size):
        part = slice(first, first + size)
        of_way, of_rates = [each[part] for each in way], [each[part] for each in rates]
        found.append(_bound(a[part], z[part], stage, m, ends, of_way, of_rates))
    return np.concatenate([np.zeros(0), *found])


def _bound(
    a: Floats, z: Floats, stage: Stage, m: int, ends: tuple[float, float], way: list[Floats], rates: list[Floats]
) -> Floats:
    head, above = ends
    lasting = np.stack([a[:, FORWARD], z[:, FORWARD], z[:, INPUT], a[:, INPUT]])  # in a micro-batch's own order
    entered = head + a[:, FORWARD] + a[:, HOP_FORWARD]
    counted_from = (np.zeros_like(entered), entered, np.zeros_like(entered), entered)
    in_flight = np.maximum(1, most_in_flight(a, z, stage, float(m)).astype(np.int64))
    begins = np.zeros((4, len(a), m))  # of each kind, pair and micro-batch
    pairs = np.arange(len(a))
    for j in range(m):
        before = np.full(len(a), head)
        waits = in_flight <= j  # for the last gradient of one that must be through
        through = begins[3, pairs[waits], j - in_flight[waits]] + lasting[3, waits]
        before[waits] = np.maximum(before[waits], through)
        for kind in range(4):
            least = np.maximum(before, counted_from[kind] + (j + 1) * rates[kind])
            if j:
                least = np.maximum(least, begins[kind, :, j - 1] + lasting[kind])
            begins[kind, :, j] = least
            before = least + lasting[kind] + (way[kind] if kind < 3 else 0.0)
    extra_a, extra_z = extra_ms(a), extra_ms(z)
    tail = stage.tail_ms + a[:, TAIL] + z[:, TAIL]
    passing = _last_end(list(begins), list(lasting)) + np.maximum(extra_a + tail, above)
    of_weights = [begins[2] + lasting[2][:, None], begins[3] + lasting[3][:, None]]
    all_work = _last_end([*begins, *of_weights], [*lasting, extra_z, extra_a]) + tail
    largest: Floats = np.maximum(passing, all_work) * (1.0 - ROUNDING_FRACTION)
    return largest


def _last_end(begins: list[Floats], lasting: list[Floats]) -> Floats:
    """[n] when a machine is through at the earliest. begins: of each kind [n, m]; lasting: [n]."""
    at = np.concatenate(begins, axis=1)
    each = np.concatenate([np.broadcast_to(of[:, None], b.shape) for of, b in zip(lasting, begins, strict=True)], 1)
    order = np.argsort(at, axis=1, kind="stable")
    at, each = np.take_along_axis(at, order, 1), np.take_along_axis(each, order, 1)
    still_to_run = np.cumsum(each[:, ::-1], axis=1)[:, ::-1]
    latest: Floats = np.max(at + still_to_run, axis=1)
    return latest
