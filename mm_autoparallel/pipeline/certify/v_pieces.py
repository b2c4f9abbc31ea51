"""What each virtual stage of a V could hold, and bounds of a stage that holds two of them, for `verify`.

Of virtual stage k of K the way there is k < K / 2, and stage K - 1 - k holds the way back. Of one stage: `head` is the
least time before its first forward, `above` the least after its last gradient of an input on the stages before; a
micro-batch is `out` between its two forwards, `far` between the second and its gradient, `home` between the gradients.
At most A micro-batches are in flight in the first chunk. What runs before the first forward of the second chunk, before
its first gradient, and before the first of the first chunk is bounded by what memory lets begin by then; all else comes
after, and then what ends the step. Bytes times how long they are held fit into the stage's room times its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.stage_options import list_mode_choices, may_follow, undominated
from mm_autoparallel.pipeline.problem import Problem, list_host_links
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes, hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Figures = NDArray[np.float64]
"""Columns of several units, which the constants below name."""

#: Columns of a piece's figures: times of one micro-batch, hops behind its forward and before its backward, what follows
#: the last action; bytes of a micro-batch in flight and pending; bytes held throughout, at work, and the largest of any
#: block; those of the optimizer's step; on the host of a micro-batch in flight, and throughout.
(
    FORWARD,
    INPUT,
    WEIGHT,
    WHOLE,
    HOP_FORWARD,
    HOP_BACKWARD,
    TAIL,
    KEPT,
    PENDING,
    STATIC,
    RESTORED,
    TRANSIENT,
    STEP,
    ONCE,
    SHARD,
    ON_HOST,
    HOST_STATIC,
) = range(17)
ROUNDING_FRACTION, MAX_PIECES = 1e-11, 300_000


@dataclass(frozen=True, eq=False)
class Pieces:
    """n ways to fill one virtual stage: begin, end [n] in the flat chain, layers [n, E], modes [n, D], figures
    [n, 17]."""

    begin: Ints
    end: Ints
    layers: Ints
    modes: Ints
    figures: Figures


@dataclass(frozen=True, eq=False)
class Stage:
    """Limits of a stage in bytes, less what is its own, and what follows its last action."""

    bytes: float
    host_bytes: float
    tail_ms: float


def list_stages(problem: Problem) -> list[Stage]:
    """All stages."""
    device = allowed_bytes(problem) - np.array(problem.stage_static_bytes)
    host = allowed_host_bytes(problem)
    return [Stage(float(d), float(h), t) for d, h, t in zip(device, host, problem.stage_tail_ms, strict=True)]


def list_pieces(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> list[Pieces]:
    """Of every virtual stage, those with which its own work ends before bound_ms. Raises Unconfirmed where they are
    too many."""
    chain, num_virtual = problem.chain, problem.num_virtual_stages
    flat = [e for e, block in enumerate(chain) for _ in range(block.count)]
    follows = may_follow(problem)
    most_layers = problem.max_layers_per_chunk or problem.num_layers
    found: list[Pieces] = []
    num_found = 0
    known: dict[tuple[int, bytes], tuple[Ints, Floats]] = {}
    for k in range(num_virtual):
        stage = problem.stage_of[k]
        rows: list[tuple[int, int, Ints, Ints, Floats]] = []
        for begin in range(len(flat)):
            if (k == 0) != (begin == 0) or (begin and not follows[flat[begin - 1], flat[begin]]):
                continue
            held = np.zeros(len(chain), dtype=np.int64)
            num_layers = 0
            for end in range(begin + 1, len(flat) + 1):
                block = chain[flat[end - 1]]
                held[flat[end - 1]] += 1
                num_layers += block.layer
                if not block.may_lie_on(k, num_virtual) or num_layers > most_layers:
                    break
                load_ms = problem.time_factors[stage] * float(
                    held @ np.array([b.forward_ms + b.backward_ms for b in chain])
                )
                if load_ms * problem.num_microbatches > bound_ms * (1.0 + 1e-9):
                    break
                is_last = end == len(flat)
                cuts = is_last or follows[flat[end - 1], flat[end]]
                if not cuts or not num_layers or is_last != (k == num_virtual - 1):
                    continue
                key = (stage * num_virtual + k, held.tobytes())
                if key not in known:
                    known[key] = _ways(problem, k, held)
                rows.append((begin, end, held.copy(), *known[key]))
                num_found += len(known[key][0])
            if should_stop() or num_found > MAX_PIECES:
                raise Unconfirmed("the stages could hold more than can be listed")
        found.append(_join(rows, len(chain), sum(len(block.modes) for block in chain)))
    return found


def _join(rows: list[tuple[int, int, Ints, Ints, Floats]], num_blocks: int, num_modes: int) -> Pieces:
    sizes = [len(modes) for _, _, _, modes, _ in rows]
    if not rows:
        none = np.zeros(0, dtype=np.int64)
        return Pieces(
            none,
            none,
            np.zeros((0, num_blocks), np.int64),
            np.zeros((0, num_modes), np.int64),
            np.zeros((0, HOST_STATIC + 1)),
        )
    return Pieces(
        np.repeat([row[0] for row in rows], sizes),
        np.repeat([row[1] for row in rows], sizes),
        np.repeat(np.array([row[2] for row in rows]), sizes, axis=0),
        np.concatenate([row[3] for row in rows]),
        np.concatenate([row[4] for row in rows]),
    )


def _ways(problem: Problem, k: int, held: Ints) -> tuple[Ints, Floats]:
    """How the held blocks may run [n, D], and what that takes and keeps [n, 17]."""
    chain, stage = problem.chain, problem.stage_of[k]
    factor, link = problem.time_factors[stage], list_host_links(problem)[stage]
    modes = list_mode_choices(problem, held)
    each = np.array(
        [
            (
                mode.extra_forward_ms,
                mode.extra_backward_ms,
                mode.activation_bytes - block.activation_bytes,
                mode.restored_bytes,
                mode.host_bytes,
            )
            for block in chain
            for mode in block.modes
        ]
    ).reshape(-1, 5)
    forward, backward, kept, restored, moved = (modes @ each).T

    def total(name: str) -> float:
        return float(sum(n * getattr(block, name) for block, n in zip(chain, held.tolist(), strict=True)))

    def largest(name: str) -> float:
        return float(max(getattr(block, name) for block, n in zip(chain, held.tolist(), strict=True) if n))

    figures = np.zeros((len(modes), HOST_STATIC + 1))
    weight_ms = total("backward_weight_ms")
    figures[:, FORWARD] = np.maximum(factor * (total("forward_ms") + forward), link * moved)
    figures[:, INPUT] = np.maximum(factor * (total("backward_ms") - weight_ms + backward), link * moved)
    figures[:, WHOLE] = np.maximum(factor * (total("backward_ms") + backward), link * moved)
    figures[:, WEIGHT] = factor * (weight_ms + total("split_extra_ms")) if weight_ms > 0.0 else 0.0
    if k not in (problem.num_stages - 1, problem.num_virtual_stages - 1):
        figures[:, HOP_FORWARD : HOP_BACKWARD + 1] = hop_ms(problem, k, chain[int(np.flatnonzero(held)[-1])])
    figures[:, TAIL] = total("tail_ms")
    figures[:, KEPT] = np.maximum(total("activation_bytes") + kept, 0.0)
    figures[:, PENDING] = total("pending_bytes") if weight_ms > 0.0 else 0.0
    figures[:, STATIC], figures[:, RESTORED], figures[:, TRANSIENT] = (
        total("static_bytes"),
        restored,
        largest("transient_bytes"),
    )
    figures[:, STEP], figures[:, ONCE], figures[:, SHARD] = (
        total("step_bytes"),
        largest("step_once_bytes"),
        total("shard_bytes"),
    )
    figures[:, ON_HOST], figures[:, HOST_STATIC] = moved, total("host_static_bytes")
    best = undominated(np.zeros(len(figures), dtype=np.int64), figures)
    return modes[best], figures[best]


def extra_ms(figures: Floats) -> Floats:
    """What a backward takes beyond its gradient of an input at least, whole or split."""
    least: Floats = np.maximum(np.minimum(figures[..., WEIGHT], figures[..., WHOLE] - figures[..., INPUT]), 0.0)
    return least


def rooms(a: Floats, z: Floats, stage: Stage) -> tuple[Floats, Floats]:
    """Bytes left for micro-batches of pieces a and z [..., 17] on the device and the host; -1 where the optimizer's
    step does not fit."""
    static = a[..., STATIC] + z[..., STATIC]
    once = np.minimum(np.maximum(a[..., ONCE], z[..., ONCE]), a[..., SHARD] + z[..., SHARD])
    room = stage.bytes - static - a[..., RESTORED] - z[..., RESTORED] - np.maximum(a[..., TRANSIENT], z[..., TRANSIENT])
    fits = static + a[..., STEP] + z[..., STEP] + once <= stage.bytes
    return np.where(fits, room, -1.0), stage.host_bytes - a[..., HOST_STATIC] - z[..., HOST_STATIC]


def fit(space: Floats, each: Floats, most: float) -> Floats:
    """[...] how often `each` bytes go into a space, at most `most`; rounding lets one more in rather than fewer."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times: Floats = np.where(each > 0.0, np.floor(space / each * (1.0 + 1e-12)), most)
    return np.clip(times, 0.0, most)


def most_in_flight(a: Floats, z: Floats, stage: Stage, m: float) -> Floats:
    """[...] of m micro-batches, how many may be in flight in piece a beside z."""
    room, host_room = rooms(a, z, stage)
    most: Floats = np.minimum(fit(room, a[..., KEPT], m), fit(host_room, a[..., ON_HOST], m))
    return most


def bound_pairs(
    a: Floats, z: Floats, stage: Stage, m: float, head: Floats, above: Floats, way: tuple[Floats, Floats, Floats]
) -> Floats:
    """[..., ] a step of m micro-batches in which a stage has these pieces is no shorter; infinite where none fits.

    way: from the end of the first forward to the begin of the second, on to its gradient, and back to the first's.
    """
    room, host_room = rooms(a, z, stage)
    alone = (room >= a[..., KEPT] + z[..., KEPT]) & (host_room >= a[..., ON_HOST] + z[..., ON_HOST])
    extra_a, extra_z = extra_ms(a), extra_ms(z)
    f_a, i_a, f_z, i_z = a[..., FORWARD], a[..., INPUT], z[..., FORWARD], z[..., INPUT]
    tail = stage.tail_ms + a[..., TAIL] + z[..., TAIL]
    pending_a, pending_z = (np.minimum(of[..., PENDING], of[..., KEPT]) for of in (a, z))
    out, far, home = way
    most = most_in_flight(a, z, stage, m)
    with np.errstate(divide="ignore", invalid="ignore"):
        # whole backwards keep nothing; of split ones no more than fit wait when a gradient of an input has ended
        left_a, left_z = (fit(room, of[..., PENDING], m) for of in (a, z))
        done = (m - left_a) * extra_a + (m - left_z) * extra_z
        work = m * (f_a + f_z + i_a + i_z)
        after = work + np.maximum(m * (extra_a + extra_z) + tail, done + np.maximum(extra_a + tail, above))
        forwards = np.zeros_like(room)
        for n in range(1, int(m) + 1):
            left = np.maximum(room * (1.0 + 1e-12) - n * a[..., KEPT], 0.0)
            second = np.minimum(fit(left, z[..., KEPT], m), n)
            forwards = np.where(n <= most, np.maximum(forwards, n * f_a + second * f_z), forwards)
        first_z = head + f_a + out
        first_gradient = first_z + f_z + far
        second_gradient = first_gradient + i_z + home
        once = second_gradient + i_a - head
        held = a[..., KEPT] * once + z[..., KEPT] * (f_z + far + i_z) + pending_a * extra_a + pending_z * extra_z
        turns = np.ceil(m / np.maximum(most, 1.0)) - 1.0
        bounds = [
            head + after,
            first_z + after - most * f_a,
            first_gradient + after - forwards,
            second_gradient + after - most * (f_a + f_z + i_z + extra_z),
            np.where(room > 0.0, head + m * held / room + tail, 0.0),
            head + (turns + 1.0) * once + (m - 1.0 - turns * most) * f_a + np.maximum(extra_a + tail, above),
        ]
    largest: Floats = np.where(alone, np.max(bounds, axis=0) * (1.0 - ROUNDING_FRACTION), np.inf)
    return largest
