"""Mixes: how many of a stage's layers run in which layout and mode, of each interval those that no other beats.

A group's layers take modes in order, so a mix is how many of them each mode has. Mixes of the first layers grow mode by
mode and layer by layer, as in a knapsack. Of those that end in the same layout only the rows stay that no other
undercuts in every figure that still decides something, and that leave room and time for the layers behind them. One
chunk a stage, so memory ends as one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.laid_out import find_reshard, relaxed
from mm_autoparallel.pipeline.layout import Layout
from mm_autoparallel.pipeline.placement.patterns.intervals import Intervals
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns, undominated_rows
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Comparisons of rows for one stage, some seconds, beyond which the tree hands over.
MAX_COMPARISONS = 2_000_000_000
#: Rounding of sums that are compared with what they are cut off by.
ROUNDING_FRACTION = 1e-9
#: Columns of rows: times of one micro-batch, of the stage's end, bytes at work, in the optimizer's step (static and
#: what each layer passes, shards that limit the largest), then the two that are a largest and no sum.
FORWARD, BACKWARD, TAIL, WORK, STEP, SHARD, TRANSIENT, ONCE = range(8)
_SUMS = slice(0, TRANSIENT)
_LARGEST = slice(TRANSIENT, ONCE + 1)
Found = TypeVar("Found")
Compare = Literal["all", "load", "bytes"]


class Rows(NamedTuple):
    """n mixes: values [n, 8], and counts [n, L] of layers in each lane."""

    values: Floats
    counts: Ints

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def add(self, values: Floats, lane: int | None = None) -> Rows:
        """With one more layer, in `lane` if that is one, of these values [8]."""
        total = np.empty_like(self.values)
        total[:, _SUMS] = self.values[:, _SUMS] + values[_SUMS]
        total[:, _LARGEST] = np.maximum(self.values[:, _LARGEST], values[_LARGEST])
        counts = self.counts.copy()
        if lane is not None:
            counts[:, lane] += 1
        return Rows(total, counts)

    def select(self, chosen: Ints | NDArray[np.bool_]) -> Rows:
        """Those at these indices, or of this mask."""
        return Rows(self.values[chosen], self.counts[chosen])


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one part after another."""
    return Rows(np.concatenate([part.values for part in parts]), np.concatenate([part.counts for part in parts]))


class StageMixes:
    """The mixes of one stage.

    in_flight: micro-batches at most. room_bytes: of all that its layers hold. weights, budgets: what forward and
    backward of one micro-batch cost on each of some paths [paths, 2], and what each interval may cost there
    [intervals, paths]: times without the stage's factor. compare: by all that decides something; by `load`, forward and
    backward together, and bytes at work, of which the largest passing ones count as the least that any layer has; or by
    `bytes` alone. Beside paths, sums of a path and a price of bytes are held against what both may be.
    """

    def __init__(
        self,
        segments: Segments,
        held: Intervals,
        stage: int,
        in_flight: float,
        room_bytes: float,
        weights: Floats,
        budgets: Floats,
        compare: Compare,
    ) -> None:
        self.segments, self.in_flight = segments, in_flight
        self.factor = segments.problem.time_factors[stage]
        self.room_bytes = room_bytes
        self.compare = compare
        self.passing_bytes = min(block.transient_bytes for block in relaxed(segments.problem).chain)
        self.num_left = MAX_COMPARISONS
        self.chain = segments.problem.chain
        self._values = {id(block): self._list_values(block) for block in self.chain}
        a, b = segments.start[held.begin], segments.start[held.end]
        self.low, self.high = segments.before[:, a].T, segments.before[:, b].T  # [intervals, G]
        self.constants = self._list_constants(a, b)
        self.layers = [
            [block for block in self.chain if block.modes and block.group == name for _ in range(block.count)]
            for name in segments.groups
        ]
        self.weights, self.budgets = self._add_prices(weights, budgets)
        self.least = [self._least_sums(layers) for layers in self.layers]

    def _values_of(self, block: ChainBlock, mode: Mode | None) -> Floats:
        """[8] of one layer of `block` in `mode`; None: in none."""
        own: ChainBlock | Layout = mode.layout if mode is not None and mode.layout is not None else block
        shard_bytes = own.step_once_bytes if own.step_shard_bytes is None else own.step_shard_bytes
        kept_bytes = own.activation_bytes if mode is None else mode.activation_bytes
        more = (mode.extra_forward_ms, mode.extra_backward_ms, mode.restored_bytes) if mode else (0.0, 0.0, 0.0)
        return np.array(
            [
                own.forward_ms + more[0],
                own.backward_ms + more[1],
                own.tail_ms,
                own.static_bytes + self.in_flight * kept_bytes + more[2],
                own.static_bytes + own.step_bytes,
                shard_bytes,
                own.transient_bytes,
                own.step_once_bytes,
            ]
        )

    def _add_prices(self, weights: Floats, budgets: Floats) -> tuple[Floats, Floats]:
        """The paths as they are, then each at prices of bytes: weights [paths, 3] of forward, backward and work.

        Prices are the slopes of the lower hull of what a layer's modes cost on the path and need, of the most frequent
        block: layers behind a row, each in whatever mode, cost that much at least.
        """
        blocks = [block for block in self.chain if block.modes]
        all_weights, all_budgets = [np.append(weights, np.zeros((len(weights), 1)), axis=1)], [budgets]
        if blocks and np.isfinite(self.room_bytes):
            block = max(blocks, key=lambda block: block.count)
            values = self._values[id(block)]
            for path, of in enumerate(weights):
                prices = _hull_slopes(values[:, WORK], values[:, [FORWARD, BACKWARD]] @ of)
                all_weights.append(np.column_stack([np.tile(of, (len(prices), 1)), prices]))
                all_budgets.append(budgets[:, [path]] + prices * self.room_bytes)
        return np.concatenate(all_weights), np.concatenate(all_budgets, axis=1)

    @cached_property
    def _may_step(self) -> bool:
        """Whether the optimizer's step could be what does not fit, of all that an interval may hold."""
        most_bytes = np.array([constant[STEP] for constant in self.constants])
        once_bytes = max((constant[ONCE] for constant in self.constants), default=0.0)
        for group, layers in enumerate(self.layers):
            most = {name: values[:, [STEP, ONCE]].max(axis=0) for name, values in self._values.items()}
            sums = np.cumsum([0.0, *(most[id(block)][0] for block in layers)])
            most_bytes = most_bytes + sums[self.high[:, group]] - sums[self.low[:, group]]
            once_bytes = max([once_bytes, *(most[id(block)][1] for block in layers)])
        return bool(np.any(most_bytes + once_bytes > self.room_bytes))

    def _list_values(self, block: ChainBlock) -> Floats:
        """[modes + 1, 8] of one layer of the block, in none first."""
        return np.array([self._values_of(block, mode) for mode in (None, *block.modes)])

    def _list_constants(self, begin: Ints, end: Ints) -> list[Floats]:
        """[8] of the blocks without modes among the flat ones begin to end, of each interval."""
        bare = [e for e, number in enumerate(self.segments.flat.tolist()) if not self.chain[number].modes]
        found: dict[tuple[int, int], Floats] = {}
        ranges = list(zip(*np.searchsorted(bare, [begin, end]).tolist(), strict=True))
        for first, last in set(ranges):
            rows = Rows(np.zeros((1, 8)), np.zeros((1, 0), dtype=np.int64))
            for e in bare[first:last]:
                rows = rows.add(self._values[id(self.chain[self.segments.flat[e]])][0])
            found[first, last] = rows.values[0]
        return [found[each] for each in ranges]

    def _least_sums(self, layers: Sequence[ChainBlock]) -> Floats:
        """[layers + 1, paths + 2] prefix sums of the least that each layer costs on a path, needs at work, and at the
        step."""
        least = {}
        for name, values in self._values.items():
            least[name] = np.column_stack([self._costs(values), values[:, [WORK, STEP]]]).min(axis=0)
        sums = np.zeros((len(layers) + 1, len(self.weights) + 2))
        np.cumsum([least[id(block)] for block in layers], axis=0, out=sums[1:])
        return sums

    def _costs(self, values: Floats) -> Floats:
        """[n, paths] what rows cost on each path."""
        return values[:, [FORWARD, BACKWARD, WORK]] @ self.weights.T

    def _measure(self, values: Floats) -> Floats:
        """[n, paths + 2] the same, and what rows need at work and at the step."""
        passing_bytes = self.passing_bytes if self.compare == "load" else values[:, TRANSIENT]
        return np.column_stack([self._costs(values), values[:, WORK] + passing_bytes, values[:, STEP]])

    def keep(self, rows: Rows, limits: Floats) -> Rows:
        """Those within limits [paths + 2] that no other undercuts. Raises TooManyPatterns, comparisons spent."""
        return self._front(rows.select(_keeps(self._measure(rows.values), limits)), is_final=False)

    def _front(self, rows: Rows, is_final: bool) -> Rows:
        """is_final: nothing is added any more, so that bytes decide nothing.

        A stage's tail comes behind a backward of it, so that less of both together and of the backward is never worse.
        """
        if rows.num_rows < 2:
            return rows
        values, problem = rows.values, self.segments.problem
        forward_ms, backward_ms, tail_ms = (values[:, [column]] for column in (FORWARD, BACKWARD, TAIL))
        if self.compare == "load":
            columns = [forward_ms + backward_ms, values[:, [WORK]]]
        elif self.compare == "bytes":
            columns = []
        elif problem.num_stages == 1:
            columns = [problem.num_microbatches * self.factor * (forward_ms + backward_ms) + tail_ms]
        else:
            columns = [forward_ms, backward_ms, self.factor * backward_ms + tail_ms]
        if self.compare == "bytes" or (self.compare == "all" and not is_final):
            columns += [values[:, [WORK, TRANSIENT]], *([values[:, [STEP, SHARD, ONCE]]] if self._may_step else [])]
        kept, self.num_left = undominated_rows(np.concatenate(columns, axis=1), self.num_left)
        if self.num_left < 0:
            raise TooManyPatterns
        return rows.select(kept)

    # ------------------------------------------------------------------------------------------------------ one group

    def _limits(self, group: int, chosen: Ints) -> Floats:
        """[n + 1, paths + 2] what the first layers of a group may cost and need where any of the intervals `chosen`,
        which begin with the same layer, is to be filled within its limits; -inf where none has so many.
        """
        low, high = self.low[chosen, group], self.high[chosen, group]
        constants = np.array([self.constants[i] for i in chosen])
        constants[:, _LARGEST] = 0.0  # no sums: the largest of all parts counts once
        beside = self._measure(constants)
        beside[:, -2] -= self.passing_bytes if self.compare == "load" else 0.0
        for other in range(len(self.segments.groups)):
            if other != group:
                least = self.least[other]
                beside = beside + least[self.high[chosen, other]] - least[self.low[chosen, other]]
        rooms = np.full((len(chosen), 2), self.room_bytes)
        if self.compare == "load":  # of rows that differ in it any one stays, so that it may leave none out
            rooms[:, 1] = np.inf
        open_to = np.concatenate([self.budgets[chosen], rooms], axis=1) - beside
        size = int((high - low).max())
        limits = np.full((size + 1, open_to.shape[1]), -np.inf)
        least = self.least[group]
        for i, most in enumerate((high - low).tolist()):
            behind = least[high[i]] - least[low[i] : high[i] + 1]
            limits[: most + 1] = np.maximum(limits[: most + 1], open_to[i] - behind)
        return limits

    def fill(self, group: int, chosen: Ints) -> list[Rows]:
        """Of each number of layers, the mixes of so many of a group, for intervals that begin with the same one."""
        first, num_lanes = int(self.segments.lane_offset[group]), self.segments.num_lanes
        limits = self._limits(group, chosen)
        size, low = len(limits), int(self.low[chosen[0], group])
        layers = self.layers[group][low : low + size - 1]
        block = layers[0]
        nothing = Rows(np.zeros((0, 8)), np.zeros((0, num_lanes), dtype=np.int64))
        begin = Rows(np.zeros((1, 8)), np.zeros((1, num_lanes), dtype=np.int64))

        def merged(parts: Sequence[list[Rows]]) -> list[Rows]:
            return [self.keep(join_rows([part[n] for part in parts]), limits[n]) for n in range(size)]

        def changed(rows: list[Rows], source: str, target: str) -> list[Rows]:
            return [each.add(_change(block, source, target)) for each in rows]

        def extended(base: list[Rows], mode: int | None) -> list[Rows]:
            """Mixes whose last layers run in one more mode, one of them at least."""
            grown = [nothing]
            for n in range(1, size):
                own = layers[n - 1]
                values = self._values[id(own)][0 if mode is None else mode + 1]
                longer = join_rows([base[n - 1], grown[n - 1]]).add(values, None if mode is None else first + mode)
                grown.append(self.keep(longer, limits[n]))
            return grown

        by_layout = {"": [begin, *([nothing] * (size - 1))]}
        for name, modes in _modes_by_layout(block):
            entered = merged([changed(rows, last, name) for last, rows in by_layout.items()])
            there = [nothing] * size
            for mode in modes:
                there = merged([there, extended(merged([entered, there]), mode)])
            by_layout[name] = there
        own = merged([changed(rows, last, "") for last, rows in by_layout.items()])
        for mode, each in enumerate(block.modes):
            if each.layout is None:
                own = merged([own, extended(own, mode)])
        return merged([own, extended(own, None)])

    # ------------------------------------------------------------------------------------------------- whole intervals

    def _fill_all(self) -> list[dict[int, Rows]]:
        """Of each interval the mixes of each group's layers."""
        held: list[dict[int, Rows]] = [{} for _ in self.constants]  # group → its mixes
        for group, layers in enumerate(self.layers):
            same = all(block is layers[0] for block in layers)

            def begins_with(i: int, group: int = group, same: bool = same) -> int:
                return 0 if same else int(self.low[i, group])

            able = sorted((i for i in range(len(held)) if self.high[i, group] > self.low[i, group]), key=begins_with)
            for _, members in groupby(able, begins_with):
                chosen = np.array(list(members))
                rows = self.fill(group, chosen)
                for i in chosen.tolist():
                    held[i][group] = rows[self.high[i, group] - self.low[i, group]]
        return held

    def list_rows(self) -> list[Rows]:
        """Of each interval its mixes within the limits; of those the fastest, whatever their bytes."""
        found = zip(self._each(self._finish), self.budgets, strict=True)
        return [rows.select(_keeps(self._costs(rows.values), budgets)) for rows, budgets in found]

    def least_loads(self) -> Floats:
        """[intervals] the least forward and backward of mixes whose sums of bytes fit; infinite where none does."""

        def least(rows: Rows) -> float:
            fits = rows.values[:, WORK] + self.passing_bytes <= self.room_bytes
            loads_ms = rows.values[fits, FORWARD] + rows.values[fits, BACKWARD]
            return float(loads_ms.min()) if len(loads_ms) else np.inf

        return np.array(self._each(least))

    def relaxed_loads(self) -> Floats:
        """[intervals] no more than `least_loads`: each layer runs in parts in whatever modes, resharding left out."""
        constants = np.reshape(self.constants, (-1, 8))
        sums = np.column_stack([self._costs(constants), constants[:, [WORK, STEP]]])
        for group, least in enumerate(self.least):
            sums += least[self.high[:, group]] - least[self.low[:, group]]
        is_load = np.all(self.weights[:, :2] == 1.0, axis=1)  # in whole, and at prices of bytes
        room_bytes, prices = self.room_bytes - self.passing_bytes, self.weights[is_load, 2]
        loads_ms = sums[:, :-2][:, is_load] - np.where(prices, prices * room_bytes, 0.0)
        return np.where(sums[:, -2] <= room_bytes, loads_ms.max(axis=1), np.inf)

    def _each(self, finish: Callable[[Rows], Found]) -> list[Found]:
        """Of each interval what `finish` makes of all its mixes; once for those that hold the same."""
        known: dict[tuple[object, ...], Found] = {}
        found = []
        held = self._fill_all()
        for constant, parts in zip(self.constants, held, strict=True):
            key = (constant.tobytes(), *(id(rows) for rows in parts.values()))
            if key not in known:
                alone = Rows(constant[None], np.zeros((1, self.segments.num_lanes), dtype=np.int64))
                known[key] = finish(reduce(self._cross, parts.values(), alone))
            found.append(known[key])
        return found

    def _finish(self, rows: Rows) -> Rows:
        """Of mixes of all that an interval holds those that fit, and of those the fastest."""
        values = rows.values
        fits = values[:, WORK] + values[:, TRANSIENT] <= self.room_bytes
        fits &= values[:, STEP] + np.minimum(values[:, ONCE], values[:, SHARD]) <= self.room_bytes
        return self._front(rows.select(fits), is_final=True)

    def _cross(self, left: Rows, right: Rows) -> Rows:
        """Every mix of `left` with every one of `right`, but for those that others undercut."""
        self.num_left -= left.num_rows * right.num_rows
        if self.num_left < 0:
            raise TooManyPatterns
        i, j = (axis.ravel() for axis in np.indices((left.num_rows, right.num_rows)))
        values = left.values[i] + right.values[j]
        values[:, _LARGEST] = np.maximum(left.values[i][:, _LARGEST], right.values[j][:, _LARGEST])
        return self._front(Rows(values, left.counts[i] + right.counts[j]), is_final=False)


def _keeps(costs: Floats, limits: Floats) -> NDArray[np.bool_]:
    """[n] whether costs [n, limits] are within limits, but for rounding."""
    noise = ROUNDING_FRACTION * np.where(np.isfinite(limits), np.abs(limits), 0.0)
    within: NDArray[np.bool_] = np.all(costs <= limits + noise, axis=1)
    return within


def _hull_slopes(bytes_: Floats, costs: Floats) -> Floats:
    """What a byte less costs at least along the lower hull of modes that need so many bytes and cost so much."""
    hull: list[tuple[float, float]] = []
    for need, cost in sorted(zip(bytes_.tolist(), costs.tolist(), strict=True)):
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], (need, cost)) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((need, cost))
    return np.array([_slope(*pair) for pair in pairwise(hull)])


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (left[1] - right[1]) / (right[0] - left[0]) if right[0] > left[0] else np.inf


def _change(block: ChainBlock, source: str, target: str) -> Floats:
    """[8] what going from one layout to another adds."""
    values = np.zeros(8)
    if source != target:
        change = find_reshard(block, source, target)
        values[FORWARD], values[BACKWARD] = change.forward_ms, change.backward_ms
    return values


def _modes_by_layout(block: ChainBlock) -> Iterator[tuple[str, list[int]]]:
    """Of each layout but the block's own its name and the numbers of its modes, in their order."""
    laid_out = [(mode.layout.name, m) for m, mode in enumerate(block.modes) if mode.layout is not None]
    for name, members in groupby(laid_out, lambda pair: pair[0]):
        yield name, [m for _, m in members]
