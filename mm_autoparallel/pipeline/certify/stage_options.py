"""All that one stage could hold in a step below a known time, listed from the problem's own words for `verify`.

A virtual stage's content is how many of each chain block it holds: a stretch of the chain, whole but for its first and
last block. Where in the chain the stretch lies follows from what the other stages hold. Of equal contents only the
choices of modes remain that no other beats in every chunk's forward and backward time: a step never falls when a time
rises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import combinations
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.problem import Problem, list_host_links
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes, hop_ms, sum_step_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Choices listed at once for one stage; beyond them memory, not time, would end the check (about a gigabyte).
MAX_CHOICES = 3_000_000


@dataclass(frozen=True, eq=False)
class ChunkOptions:
    """n things one virtual stage could hold, of E chain blocks; `content` numbers those with equal blocks.

    layers: [n, E]. modes: [n, D] how many in each mode, of the D modes of all blocks in turn. first, last: its first
    and last block. All others: [n], sums over its blocks; fixed_bytes is static and restored, plain_ms forward and
    backward in no mode, moved_bytes what each micro-batch in flight keeps on the host. Times include the stage's factor
    and its host link.
    """

    content: Ints
    layers: Ints
    modes: Ints
    first: Ints
    last: Ints
    forward_ms: Floats
    backward_ms: Floats
    plain_ms: Floats
    tail_ms: Floats
    activation_bytes: Floats
    fixed_bytes: Floats
    transient_bytes: Floats
    moved_bytes: Floats
    host_static_bytes: Floats

    def __len__(self) -> int:
        return len(self.content)

    @property
    def load_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, eq=False)
class StageOptions:
    """n things one stage could hold in its V chunks.

    layers: [n, V, E]. modes: [n, V, D]. used: [n, E], layers over all chunks. first, last: [n, V] blocks.
    times_ms: [n, 4V + 1], forward, backward, hop forward, hop backward of each chunk, then the stage's tail.
    """

    layers: Ints
    modes: Ints
    used: Ints
    first: Ints
    last: Ints
    times_ms: Floats

    def __len__(self) -> int:
        return len(self.used)

    def select(self, chosen: NDArray[np.bool_] | Ints) -> StageOptions:
        """Those of a mask or of indices."""
        return StageOptions(*(getattr(self, field.name)[chosen] for field in fields(self)))


def may_follow(problem: Problem) -> NDArray[np.bool_]:
    """[E, E]: whether a virtual stage may begin with the second block where the one before it ends with the first."""
    chain = problem.chain
    allowed = np.zeros((len(chain), len(chain)), dtype=np.bool_)
    for e, block in enumerate(chain):
        allowed[e, e] = block.attach is None
        if e + 1 < len(chain):
            allowed[e, e + 1] = block.attach != "next" and chain[e + 1].attach != "previous"
    return allowed


def list_contents(problem: Problem, virtual_stage: int, max_load_ms: float) -> Ints:
    """[n, E]: the blocks `virtual_stage` could hold with a forward and backward of at most max_load_ms."""
    chain, k, last_k = problem.chain, virtual_stage, problem.num_virtual_stages - 1
    count = np.array([block.count for block in chain])
    is_layer = np.array([block.layer for block in chain])
    factor = problem.time_factors[k % problem.num_stages]
    load_ms = np.array([(block.forward_ms + block.backward_ms) * factor for block in chain])
    most_layers = problem.max_layers_per_chunk or problem.num_layers
    outside = [b.within is not None and not b.within[0] <= k < b.within[1] for b in chain]
    pinned = [(b.pinned == "first" and k > 0) or (b.pinned == "last" and k < last_k) for b in chain]
    barred = np.array(outside, dtype=np.bool_) | np.array(pinned, dtype=np.bool_)
    found = []
    for first in range(len(chain)):
        for last in range(first, len(chain)):
            if barred[first : last + 1].any() or (k == 0 and first > 0) or (k == last_k and last < len(chain) - 1):
                continue
            whole = [block.attach is not None for block in chain]
            if first < last:  # the rest of its first block must lie before it, of its last block behind it
                whole[first] |= k == 0
                whole[last] |= k == last_k
            at_first, at_last = np.meshgrid(
                *(np.array([count[e]]) if whole[e] else np.arange(1, count[e] + 1) for e in (first, last)),
                indexing="ij",
            )
            held = np.zeros((at_first.size, len(chain)), dtype=np.int64)
            held[:, first:last] = count[first:last]
            held[:, last] = at_last.ravel()
            held[:, first] = at_first.ravel()
            if first == last:
                held = held[at_first.ravel() == at_last.ravel()]
            before = (count * is_layer)[:first].sum() + (count[first] - held[:, first]) * is_layer[first]
            after = (count * is_layer)[last + 1 :].sum() + (count[last] - held[:, last]) * is_layer[last]
            num_layers = held @ is_layer
            lawful = (num_layers >= 1) & (num_layers <= most_layers) & (held @ load_ms <= max_load_ms)
            lawful &= (before >= k) & (after >= last_k - k)  # every other chunk needs a layer
            found.append(held[lawful])
    return np.concatenate(found) if found else np.zeros((0, len(chain)), dtype=np.int64)


def list_stage_options(
    problem: Problem, graph: TaskGraph, stage: int, below_ms: float, should_stop: Callable[[], bool]
) -> StageOptions:
    """Everything that `stage` could hold in a step below `below_ms`. Raises Unconfirmed where that is too much."""
    num_stages, num_chunks = problem.num_stages, problem.num_chunks
    in_flight = graph.in_flight[stage].astype(np.float64)
    available_bytes = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]
    # A stage does all its work one after the other, and what it leaves undone the others must do likewise, each in the
    # time that its factor leaves it.
    factors = problem.time_factors
    most_ms = (below_ms - problem.stage_tail_ms[stage]) / problem.num_microbatches
    work_ms = sum(block.count * (block.forward_ms + block.backward_ms) for block in problem.chain)
    speed = sum(1.0 / factors[s] for s in range(num_stages) if s != stage)
    others_ms = speed * below_ms / problem.num_microbatches if num_stages > 1 else 0.0
    chunks = [
        _list_chunk_options(problem, c * num_stages + stage, in_flight[:, c], available_bytes, most_ms, should_stop)
        for c in range(num_chunks)
    ]
    chosen = _combine(
        chunks, in_flight, available_bytes, float(allowed_host_bytes(problem)[stage]), most_ms, should_stop
    )
    plain_ms = sum(chunk.plain_ms[i] for chunk, i in zip(chunks, chosen.T, strict=True))
    chosen = chosen[plain_ms >= factors[stage] * (work_ms * (1.0 - 1e-9) - others_ms)]
    chosen = _drop_beaten(chunks, chosen)

    def joined(name: str) -> NDArray[np.generic]:
        return np.stack([getattr(chunk, name)[i] for chunk, i in zip(chunks, chosen.T, strict=True)], axis=1)

    layers, last = joined("layers").astype(np.int64), joined("last").astype(np.int64)
    hops_ms = np.zeros((len(chosen), 2 * num_chunks))
    for c in range(num_chunks):
        k = c * num_stages + stage
        if k < problem.num_virtual_stages - 1 and len(chosen):
            of_block = np.array([hop_ms(problem, k, block) for block in problem.chain])
            hops_ms[:, c], hops_ms[:, num_chunks + c] = of_block[last[:, c]].T
    tail_ms = problem.stage_tail_ms[stage] + joined("tail_ms").sum(axis=1, keepdims=True)
    used = layers.sum(axis=1)
    options = StageOptions(
        layers=layers,
        modes=joined("modes").astype(np.int64),
        used=used,
        first=joined("first").astype(np.int64),
        last=last,
        times_ms=np.concatenate([joined("forward_ms"), joined("backward_ms"), hops_ms, tail_ms], axis=1),
    )
    static_bytes = used @ np.array([block.static_bytes for block in problem.chain])
    return options.select(static_bytes + sum_step_bytes(problem, used) <= available_bytes)


def _list_chunk_options(
    problem: Problem,
    virtual_stage: int,
    in_flight: Floats,
    available_bytes: float,
    max_load_ms: float,
    should_stop: Callable[[], bool],
) -> ChunkOptions:
    """The options of one virtual stage, as if its stage held nothing else."""
    chain = problem.chain
    names = ("forward_ms", "backward_ms", "tail_ms", "static_bytes", "activation_bytes", "host_static_bytes")
    columns = [np.array([getattr(block, name) for block in chain], dtype=np.float64) for name in names]
    transients = np.array([block.transient_bytes for block in chain])
    stage = virtual_stage % problem.num_stages
    factor, link = problem.time_factors[stage], list_host_links(problem)[stage]
    host_room_bytes = float(allowed_host_bytes(problem)[stage])
    of_modes = np.array(
        [
            (
                mode.extra_forward_ms,
                mode.extra_backward_ms,
                block.activation_bytes - mode.activation_bytes,
                mode.restored_bytes,
                mode.host_bytes,
            )
            for block in chain
            for mode in block.modes
        ]
    ).reshape(-1, 5)  # of one layer: ms added, bytes saved of each micro-batch in flight, restored once, moved
    parts: list[ChunkOptions] = []
    for number, held in enumerate(list_contents(problem, virtual_stage, max_load_ms)):
        if should_stop():
            raise Unconfirmed("it was stopped while listing what the stages could hold")
        modes = list_mode_choices(problem, held)
        extra_forward_ms, extra_backward_ms, saved_bytes, restored_bytes, moved_bytes = (modes @ of_modes).T
        forward_ms, backward_ms, tail_ms, static_bytes, whole_bytes, host_static_bytes = (
            float(held @ column) for column in columns
        )
        forwards_ms = np.maximum(factor * (forward_ms + extra_forward_ms), link * moved_bytes)
        backwards_ms = np.maximum(factor * (backward_ms + extra_backward_ms), link * moved_bytes)
        transient_bytes = float(transients[held > 0].max())
        kept_bytes = whole_bytes - saved_bytes
        fixed_bytes = static_bytes + restored_bytes
        fits = fixed_bytes + transient_bytes + in_flight.max() * kept_bytes <= available_bytes
        fits &= forwards_ms + backwards_ms <= max_load_ms
        fits &= host_static_bytes + in_flight.max() * moved_bytes <= host_room_bytes
        chosen = np.flatnonzero(fits)
        rivals = [forwards_ms, backwards_ms]
        if problem.num_chunks > 1:  # with one, memory is decided
            rivals += [kept_bytes, restored_bytes, *([moved_bytes] if problem.host_limit_bytes else [])]
        chosen = chosen[undominated(np.zeros(len(chosen), dtype=np.int64), np.stack(rivals, axis=1)[chosen])]
        n = len(chosen)
        block = np.flatnonzero(held)
        parts.append(
            ChunkOptions(
                content=np.full(n, number),
                layers=np.tile(held, (n, 1)),
                modes=modes[chosen],
                first=np.full(n, block[0]),
                last=np.full(n, block[-1]),
                forward_ms=forwards_ms[chosen],
                backward_ms=backwards_ms[chosen],
                plain_ms=np.full(n, factor * (forward_ms + backward_ms)),
                tail_ms=np.full(n, tail_ms),
                activation_bytes=kept_bytes[chosen],
                fixed_bytes=fixed_bytes[chosen],
                transient_bytes=np.full(n, transient_bytes),
                moved_bytes=moved_bytes[chosen],
                host_static_bytes=np.full(n, host_static_bytes),
            )
        )
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        rows, modes = (np.zeros((0, width), dtype=np.int64) for width in (len(chain), len(of_modes)))
        return ChunkOptions(none, rows, modes, none, none, *([np.zeros(0)] * 9))
    return ChunkOptions(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(ChunkOptions)))


def list_mode_choices(problem: Problem, held: Ints) -> Ints:
    """[n, D]: how many of the held blocks run in which mode: along each group the first modes first.

    Groups whose layers have all the same modes and activations are chosen from as one: only their numbers matter.
    """
    chain = problem.chain
    groups: dict[tuple[str, str], list[int]] = {}
    for e, block in enumerate(chain):
        if held[e] and block.modes:
            groups.setdefault(block.group, []).append(e)
    alike: dict[object, list[int]] = {}
    for name, members in groups.items():
        kinds = {(chain[e].modes, chain[e].activation_bytes) for e in members}
        alike.setdefault(kinds.pop() if len(kinds) == 1 else name, []).extend(members)
    column = np.cumsum([0, *(len(block.modes) for block in chain)])
    lists: list[Ints] = []
    for members in alike.values():
        num_layers, num_modes = int(held[members].sum()), len(chain[members[0]].modes)
        if comb(num_layers + num_modes, num_modes) > MAX_CHOICES:
            raise Unconfirmed("the layers of a stage could run in more ways than can be listed")
        lists.append(_parts(num_layers, num_modes + 1))
    num_choices = prod(len(rows) for rows in lists)
    if num_choices > MAX_CHOICES:
        raise Unconfirmed("the layers of a stage could run in more ways than can be listed")
    choices = np.zeros((num_choices, column[-1]), dtype=np.int64)
    numbers = np.indices([len(rows) for rows in lists]).reshape(len(lists), num_choices)
    for members, rows, number in zip(alike.values(), lists, numbers, strict=True):
        left = rows[number]
        for e in members:
            room = np.full(num_choices, held[e])
            for m in range(left.shape[1]):
                taken = np.minimum(left[:, m], room)
                left[:, m] -= taken
                room -= taken
                if m < len(chain[e].modes):
                    choices[:, column[e] + m] = taken
    return choices


def _parts(total: int, length: int) -> Ints:
    """[., length] every way to write `total` as a sum of that many whole numbers."""
    bars = np.array(list(combinations(range(total + length - 1), length - 1)), dtype=np.int64)
    edges = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), total + length - 1)], axis=1)
    return np.diff(edges, axis=1) - 1


def _combine(
    chunks: list[ChunkOptions],
    in_flight: Floats,
    available_bytes: float,
    host_room_bytes: float,
    max_load_ms: float,
    should_stop: Callable[[], bool],
) -> Ints:
    """[n, V] which option of each chunk, for all combinations that fit memory and load."""
    if any(len(chunk) == 0 for chunk in chunks):
        return np.zeros((0, len(chunks)), dtype=np.int64)
    rest_load_ms = np.cumsum([0.0, *(chunk.load_ms.min() for chunk in chunks[::-1])])[::-1]
    rest_bytes = np.cumsum([0.0, *(chunk.fixed_bytes.min() for chunk in chunks[::-1])])[::-1]
    rest_held = np.zeros((len(chunks) + 1, len(in_flight)))
    for c in range(len(chunks) - 1, -1, -1):
        rest_held[c] = rest_held[c + 1] + in_flight[:, c] * chunks[c].activation_bytes.min()
    chosen = np.zeros((1, 0), dtype=np.int64)
    load_ms, fixed_bytes, transient_bytes = np.zeros(1), np.zeros(1), np.zeros(1)
    held_bytes = np.zeros((1, len(in_flight)))
    for c, chunk in enumerate(chunks):
        rows, options = [], []
        num_found = 0
        at_once = max(1, MAX_CHOICES // len(chunk) // len(in_flight))
        for begin in range(0, max(len(chosen), 1), at_once):
            if should_stop():
                raise Unconfirmed("it was stopped while listing what the stages could hold")
            some = slice(begin, begin + at_once)
            fits = load_ms[some, None] + chunk.load_ms + rest_load_ms[c + 1] <= max_load_ms
            if c > 0:
                fits &= chunks[c - 1].last[chosen[some, c - 1]][:, None] <= chunk.first
            free_bytes = available_bytes - rest_bytes[c + 1] - (fixed_bytes[some, None] + chunk.fixed_bytes)
            free_bytes -= np.maximum(transient_bytes[some, None], chunk.transient_bytes)
            for row, held in zip(in_flight, (held_bytes[some] + rest_held[c + 1]).T, strict=True):
                fits &= held[:, None] + row[c] * chunk.activation_bytes <= free_bytes
            row_index, option = np.nonzero(fits)
            rows.append(row_index + begin)
            options.append(option)
            num_found += len(option)
            if num_found > MAX_CHOICES:
                raise Unconfirmed("a stage could hold more than can be listed")
        at, option = np.concatenate(rows), np.concatenate(options)
        chosen = np.concatenate([chosen[at], option[:, None]], axis=1)
        if np.isfinite(host_room_bytes):
            kept = _keep_on_host(chunks, chosen, in_flight) <= host_room_bytes
            chosen, at, option = chosen[kept], at[kept], option[kept]
        load_ms = load_ms[at] + chunk.load_ms[option]
        fixed_bytes = fixed_bytes[at] + chunk.fixed_bytes[option]
        transient_bytes = np.maximum(transient_bytes[at], chunk.transient_bytes[option])
        held_bytes = held_bytes[at] + chunk.activation_bytes[option, None] * in_flight[:, c]
    return chosen


def _keep_on_host(chunks: list[ChunkOptions], chosen: Ints, in_flight: Floats) -> Floats:
    """[n] the most that the first chunks, which are chosen, keep on their stage's host."""
    held_bytes = np.zeros((len(chosen), len(in_flight)))
    for c, (chunk, i) in enumerate(zip(chunks[: chosen.shape[1]], chosen.T, strict=True)):
        held_bytes += chunk.host_static_bytes[i, None] + chunk.moved_bytes[i, None] * in_flight[:, c]
    most: Floats = held_bytes.max(axis=1)
    return most


def _drop_beaten(chunks: list[ChunkOptions], chosen: Ints) -> Ints:
    """The combinations that no other of equal blocks beats in the forward and backward of every chunk."""
    contents = np.stack([chunk.content[i] for chunk, i in zip(chunks, chosen.T, strict=True)], axis=1)
    times_ms = [
        of[i] for chunk, i in zip(chunks, chosen.T, strict=True) for of in (chunk.forward_ms, chunk.backward_ms)
    ]
    _, equal = np.unique(contents, axis=0, return_inverse=True)
    return chosen[undominated(equal.ravel(), np.stack(times_ms, axis=1))]


def undominated(group: Ints, values: Floats) -> Ints:
    """Indices of the rows of `values` that no other row of their group equals or undercuts in every column.

    Of equal rows one stays.
    """
    left = np.lexsort((values.sum(axis=1), group))
    kept = []
    while len(left):
        # The least sum of each group is beaten by none; it drops what it beats, and the next least is the next to stay.
        of_group = group[left]
        is_first = np.concatenate([[True], of_group[1:] != of_group[:-1]])
        firsts = left[is_first]
        kept.append(firsts)
        champion = firsts[np.cumsum(is_first) - 1]
        left = left[np.any(values[left] < values[champion], axis=1)]
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)
