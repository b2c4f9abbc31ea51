"""Every lawful placement of a small PROBLEM.json, and the best of them: no bound, no search.

Ways to cut the chain come first; then, for each stage of each cut, what its chunks may hold in modes, of which only
what its memory takes is kept; then all of these together, played. For larger problems choices are left out that another
undercuts: neither a step nor a peak gets less if a pass takes longer or more is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import numpy as np
from semantics import (
    Document,
    content,
    fits,
    group_of,
    hops,
    in_flight,
    limits,
    modes_of,
    num_virtual_stages,
    play,
    spread,
    stage_tails,
)

BATCH = 8192  # placements played together


class TooLarge(Exception):
    """More placements than were asked for."""


class Best(NamedTuple):
    """step_ms: inf and no placement where nothing fits. placements: how many were played."""

    step_ms: float
    placement: Document | None
    placements: int


class StageOptions(NamedTuple):
    """What one stage may hold under one cut, each within its memory: durations [options, chunks, 2, micro-batches],
    tails [options] beyond those of the blocks' own layouts, and the counts in modes of each chunk."""

    durations: np.ndarray
    tails: np.ndarray
    modes: list[tuple[list[list[int]], ...]]


def cuts(problem: Document) -> Iterator[tuple[int, ...]]:
    """Lawful ways to cut the flat chain: where each virtual stage begins, and its length at the end."""
    chain, total = problem["chain"], num_virtual_stages(problem)
    flat = [block for block in chain for _ in range(block["count"])]
    low, high, together = 0, len(flat), set()  # cuts lie between low and high, and not before those in `together`
    kept = [(i, *block["within"]) for i, block in enumerate(flat) if block.get("within")]
    for i, block in enumerate(flat):
        if block.get("pinned") == "first" and total > 1:
            low = max(low, i + 1)
        if block.get("pinned") == "last" and total > 1:
            high = min(high, i)
        if block.get("attach") == "previous":
            together.add(i)
        if block.get("attach") == "next":
            together.add(i + 1)
    layers = [block.get("layer", True) for block in flat]
    most = problem.get("max_layers_per_chunk") or len(flat)

    def grow(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        left = total - len(cut)  # cuts still to come
        held, remaining = 0, sum(layers[cut[-1] :])
        if not left:
            ends = (*cut, len(flat))
            if 1 <= remaining <= most and all(ends[begin] <= i < ends[end] for i, begin, end in kept):
                yield ends
            return
        for end in range(cut[-1] + 1, high + 1):
            held += layers[end - 1]
            if held > most or remaining - held < left:
                return
            if held and end >= low and end not in together:
                yield from grow((*cut, end))

    yield from grow((0,))


def mode_counts(problem: Document, held: list[int]) -> list[list[list[int]]]:
    """All lawful counts [e][m] of a virtual stage that holds held[e] of each block."""
    chain = problem["chain"]
    of_group: dict[tuple[str, str], list[int]] = {}
    for e, block in enumerate(chain):
        if held[e] and modes_of(block):
            of_group.setdefault(group_of(block), []).append(e)
    choices = [[[0] * len(modes_of(block)) for block in chain]]
    for blocks in of_group.values():
        layers = [e for e in blocks for _ in range(held[e])]
        names = range(len(modes_of(chain[blocks[0]])) + 1)  # the last one is none
        grown = []
        for choice in choices:
            for taken in combinations_with_replacement(names, len(layers)):
                counts = [list(row) for row in choice]
                for e, m in zip(layers, taken, strict=True):
                    if m < len(counts[e]):
                        counts[e][m] += 1
                grown.append(counts)
        choices = grown
    return choices


def held_between(problem: Document, begin: int, end: int) -> list[int]:
    """How many of each block lie in flat[begin:end]."""
    first, counts = 0, []
    for block in problem["chain"]:
        counts.append(max(0, min(end, first + block["count"]) - max(begin, first)))
        first += block["count"]
    return counts


def undominated(rows: np.ndarray) -> list[int]:
    """Rows [n, figures] that no other is at most in every figure; one of each that are equal."""
    columns = np.unique(rows, axis=1)
    _, order = np.unique(columns, axis=0, return_index=True)  # what is at most a row comes before it
    kept: list[int] = []
    for i in order.tolist():
        if not (columns[kept] <= columns[i]).all(axis=1).any():
            kept.append(i)
    return kept


class _Stages:
    """Options of stages, kept by what they hold."""

    def __init__(self, problem: Document, most: float, prune: bool) -> None:
        self.problem, self.most, self.prune = problem, most, prune
        self.limits = limits(problem)
        self.flight = [in_flight(problem, s) for s in range(problem["num_stages"])]
        self.own = spread(problem.get("stage_static_bytes", 0.0), problem["num_stages"])
        self.of_chunk: dict[Any, list[tuple[list[list[int]], Document]]] = {}
        self.of_stage: dict[Any, StageOptions] = {}

    def chunk(self, stage: int, begin: int, end: int) -> list[tuple[list[list[int]], Document]]:
        key = stage, begin, end
        if key not in self.of_chunk:
            held = held_between(self.problem, begin, end)
            options = [(modes, content(self.problem, stage, held, modes)) for modes in mode_counts(self.problem, held)]
            if self.prune:
                kept = ("activation", "restored", "host")
                rows = [[*of["forward"], *of["backward"], *(of[name] for name in kept)] for _, of in options]
                options = [options[i] for i in undominated(np.array(rows))]
            self.of_chunk[key] = options
        return self.of_chunk[key]

    def stage(self, stage: int, ranges: tuple[tuple[int, int], ...]) -> StageOptions:
        key = stage, ranges
        if key not in self.of_stage:
            self.of_stage[key] = self._stage(stage, [self.chunk(stage, *of) for of in ranges])
        return self.of_stage[key]

    def _stage(self, stage: int, chunks: list[list[tuple[list[list[int]], Document]]]) -> StageOptions:
        if np.prod([len(options) for options in chunks], dtype=float) > self.most:
            raise TooLarge
        choice = np.indices([len(options) for options in chunks]).reshape(len(chunks), -1)  # [chunks, options]

        def figure(name: str) -> np.ndarray:
            return np.array(
                [np.array([of[name] for _, of in options])[row] for options, row in zip(chunks, choice, strict=True)]
            )

        flight = self.flight[stage]
        at_work = (
            figure("restored").sum(axis=0)
            + (flight @ figure("activation")).max(axis=0)
            + figure("transient").max(axis=0)
        )
        once = np.minimum(figure("step_once").max(axis=0), figure("step_shard").sum(axis=0))
        passing = np.maximum(at_work, figure("step").sum(axis=0) + once)
        peak = self.own[stage] + figure("static").sum(axis=0) + passing
        host = figure("host_static").sum(axis=0) + (flight @ figure("host")).max(axis=0)
        good = fits(peak, self.limits[0][stage]) & fits(host, self.limits[1][stage])
        kept = choice[:, good]
        durations = np.stack([figure("forward"), figure("backward")], axis=2)[:, good].swapaxes(0, 1)
        tails = figure("tail").sum(axis=0)[good]
        if self.prune and len(durations):
            least = undominated(np.column_stack([durations.reshape(len(durations), -1), tails]))
            kept, durations, tails = kept[:, least], durations[least], tails[least]
        return StageOptions(
            durations,
            tails,
            [tuple(options[i][0] for options, i in zip(chunks, column, strict=True)) for column in kept.T],
        )


def count_placements(problem: Document, most: float = np.inf) -> int:
    """Lawful placements, whether they fit or not; no more than a little above `most` are counted."""
    known: dict[tuple[int, int], int] = {}
    count = 0
    for cut in cuts(problem):
        product = 1
        for ends in pairwise(cut):
            if ends not in known:
                known[ends] = count_modes(problem, held_between(problem, *ends))
            product *= known[ends]
        count += product
        if count > most:
            break
    return count


def count_modes(problem: Document, held: list[int]) -> int:
    """How many choices of modes a virtual stage has that holds held[e] of each block."""
    of_group: dict[tuple[str, str], int] = {}
    num_modes: dict[tuple[str, str], int] = {}
    for block, count in zip(problem["chain"], held, strict=True):
        if count and modes_of(block):
            of_group[group_of(block)] = of_group.get(group_of(block), 0) + count
            num_modes[group_of(block)] = len(modes_of(block))
    product = 1
    for group, count in of_group.items():
        m = num_modes[group]
        ways = 1
        for i in range(m):
            ways = ways * (count + m - i) // (i + 1)
        product *= ways
    return product


def brute_force(problem: Document, most: float = 2e6, prune: bool = False) -> Best:
    """The fastest lawful placement that fits. prune: leave out choices of stages that cannot be better than another.
    Raises TooLarge where more than `most` would be played."""
    stages, total, count = problem["num_stages"], num_virtual_stages(problem), problem["num_microbatches"]
    options_of = _Stages(problem, most, prune)
    best = Best(np.inf, None, 0)
    played = 0
    waiting: list[tuple[np.ndarray, np.ndarray, tuple[int, ...], list[StageOptions], np.ndarray]] = []

    def flush() -> None:
        nonlocal best, waiting
        if not waiting:
            return
        durations = np.concatenate([item[0] for item in waiting])
        extras = np.concatenate([item[1] for item in waiting])
        columns = durations.transpose(1, 2, 3, 0)  # [k, 2, micro-batches, placements]
        split = np.split(extras.T, [total - 1, 2 * (total - 1)])
        forward = [[columns[k, 0, i] for i in range(count)] for k in range(total)]
        backward = [[columns[k, 1, i] for i in range(count)] for k in range(total)]
        steps = play(problem, forward, backward, *split)
        at = int(np.argmin(steps))
        if best.placement is None or steps[at] < best.step_ms:
            step = float(steps[at])
            for rows, _, cut, of_stage, choice in waiting:
                if at < len(rows):
                    best = Best(step, _placement(problem, cut, of_stage, choice[:, at]), 0)
                    break
                at -= len(rows)
        waiting = []

    in_waiting = 0
    for cut in cuts(problem):
        ranges = list(pairwise(cut))
        of_stage = [options_of.stage(s, tuple(ranges[s::stages])) for s in range(stages)]
        sizes = [len(of.modes) for of in of_stage]
        number = int(np.prod(sizes, dtype=float))
        played += number
        if played > most:
            raise TooLarge
        if not number:
            continue
        held = np.array([held_between(problem, *ends) for ends in ranges])
        there, back = hops(problem, [max(np.flatnonzero(row)) for row in held])
        extra = np.array([*there, *back, *stage_tails(problem, held)])
        for begin in range(0, number, BATCH):
            choice = np.array(np.unravel_index(np.arange(begin, min(begin + BATCH, number)), sizes))
            durations = np.empty((choice.shape[1], total, 2, count))
            for s in range(stages):
                durations[:, s::stages] = of_stage[s].durations[choice[s]]
            extras = np.tile(extra, (choice.shape[1], 1))
            for s in range(stages):
                extras[:, 2 * (total - 1) + s] += of_stage[s].tails[choice[s]]
            waiting.append((durations, extras, cut, of_stage, choice))
            in_waiting += choice.shape[1]
            if in_waiting >= BATCH:
                flush()
                in_waiting = 0
    flush()
    return best._replace(placements=played)


def _placement(problem: Document, cut: tuple[int, ...], of_stage: list[StageOptions], choice: np.ndarray) -> Document:
    stages = problem["num_stages"]
    modes = [of_stage[k % stages].modes[choice[k % stages]][k // stages] for k in range(len(cut) - 1)]
    return {"layers": [held_between(problem, *ends) for ends in pairwise(cut)], "modes": modes}
