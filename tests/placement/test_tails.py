"""Tails: the last stages of a pipeline whose order is free, against every word of small windows and proven steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations, product

import pytest

from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.orders.bounds import bound_stages
from mm_autoparallel.pipeline.placement.orders.options import list_options
from mm_autoparallel.pipeline.placement.orders.tails import WINDOWS, least_units, raise_by_tails
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem

Word = tuple[tuple[str, int], ...]


def words(number: int, extra: bool, most_in_flight: int, most_held: int) -> Iterator[Word]:
    """Every order of `number` micro-batches on one stage, and of one more forward where it is asked for."""
    letters = "F" * (number + extra) + "I" * number + "W" * number
    for letter_word in sorted(set(permutations(letters))):
        counts = {"F": 0, "I": 0, "W": 0}
        word = []
        for letter in letter_word:
            word.append((letter, counts[letter]))
            counts[letter] += 1
            begun, left, done = counts["F"], counts["I"], counts["W"]
            if not done <= left <= begun or begun - left > most_in_flight or begun - done > most_held:
                break
        else:
            yield tuple(word)


def play(stages: list[tuple[int, ...]], of_stages: tuple[Word, ...]) -> dict[tuple[int, str, int], int] | None:
    """When each action of these words begins; None where they wait for one another."""
    starts: dict[tuple[int, str, int], int] = {}
    at, free = [0] * len(stages), [0] * len(stages)
    length = {"F": 0, "I": 1, "W": 2}
    while any(at[s] < len(word) for s, word in enumerate(of_stages)):
        moved = False
        for s, word in enumerate(of_stages):
            if at[s] == len(word):
                continue
            kind, m = word[at[s]]
            waits = [(free[s], 0)]
            if kind == "F" and s > 0:
                waits.append((starts.get((s - 1, "F", m), -1), stages[s - 1][0] + stages[s - 1][3]))
            if kind == "I" and s + 1 < len(stages):
                waits.append((starts.get((s + 1, "I", m), -1), stages[s + 1][1] + stages[s][4]))
            if any(start < 0 for start, _ in waits):
                continue
            starts[s, kind, m] = max(start + more for start, more in waits)
            free[s], at[s], moved = starts[s, kind, m] + stages[s][length[kind]], at[s] + 1, True
        if not moved:
            return None
    return starts


@pytest.mark.parametrize("seed", range(8))
def test_a_window_takes_what_the_best_of_all_its_orders_does(seed: int) -> None:
    """The next forward is behind whatever its stage runs before it, and may leave the rest for later."""
    rng = random.Random(seed)
    number = 2 if seed % 2 else 1
    stages = [(*(rng.randint(1, 9) for _ in range(3)), rng.randint(0, 2), rng.randint(0, 2)) for _ in range(2)]
    limits = [(rng.randint(1, 2), rng.randint(1, 3)) for _ in stages]
    best = None
    of_first = words(number, True, *limits[0])
    for of_stages in product(of_first, list(words(number, False, *limits[1]))):
        starts = play(stages, of_stages)
        if starts is not None:
            best = min(starts[0, "F", number], best or 10**9)
    found = least_units(tuple((*stage, *limit) for stage, limit in zip(stages, limits, strict=True)), number)
    assert best is not None
    assert found == best


def test_few_at_once_are_no_way_to_keep_four_stages_busy() -> None:
    """Three in flight on each, which take 588.5 ms of each: on average they would do, but no order of 12 or 16 does."""
    stages = (*((1812, 2152, 1921, 34, 34, 3, 3),) * 3, (1698, 1887, 1733, 0, 0, 3, 3))
    windows = [least_units(stages, number) for number in (3, 6, 9, 12)]
    assert windows == [17602, 35257, 55091, 74925]
    assert windows[-1] > 1.06 * 12 * (1812 + 2152 + 1921 - 1)
    assert max(WINDOWS) >= 12


def tight_problem(seed: int) -> Problem:
    """Few stages, each with room for one to four micro-batches of what it must hold."""
    rng = random.Random(seed)
    num_stages = rng.choice([2, 3, 3, 4])
    forward_ms, kept = float(rng.randint(4, 12)), 10.0
    backward_ms = float(rng.randint(6, 24))
    modes = (Mode("recompute", 0.0, forward_ms, 1.0),) if rng.random() < 0.5 else ()
    layer = ChainBlock(
        "layer",
        "text",
        num_stages + rng.randint(0, 2),
        forward_ms,
        backward_ms,
        activation_bytes=kept,
        modes=modes,
        backward_weight_ms=backward_ms * rng.choice([0.0, 0.4, 0.6]),
        kept_for_weight_bytes=rng.choice([None, None, 0.3 * kept]),
    )
    room = tuple(kept * (1 + rng.randint(0, 3)) + rng.choice([0.0, 2.0, 5.0]) for _ in range(num_stages))
    hops_ms = (rng.choice([0.0, 0.5, 2.0]),) * (num_stages - 1)
    return Problem(
        num_stages=num_stages,
        num_chunks=1,
        num_microbatches=rng.randint(5, 11),
        schedule="free",
        chain=(layer,),
        memory_limit_bytes=room,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=hops_ms,
        p2p_ms_per_byte=(0.0,) * (num_stages - 1),
    )


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.nightly) for first in (1_000, 2_000, 3_000, 4_000))]
)
def test_no_bound_of_tails_is_above_the_least_step(first: int) -> None:
    """And they close much of what other bounds leave open."""
    num_proven, open_before, open_after = 0, 0.0, 0.0
    for seed in range(first, first + 40):
        problem = tight_problem(seed)
        placed = place(problem, time_limit_s=30.0)
        if placed.status != "optimal":
            continue
        options = list_options(cut_into_segments(problem), lambda: False)
        low_ms = bound_stages(options).least_ms
        raised_ms = raise_by_tails(options, low_ms, 2.0 * placed.step_ms, lambda: False)
        assert low_ms <= raised_ms <= placed.step_ms * (1.0 + 1e-9), f"seed {seed}"
        sharp_ms = bound_step(problem, sharpen=True, enough_ms=1.02 * placed.step_ms).step_ms
        assert sharp_ms <= placed.step_ms * (1.0 + 1e-9), f"seed {seed}"
        num_proven += 1
        open_before += 1.0 - low_ms / placed.step_ms
        open_after += 1.0 - raised_ms / placed.step_ms
    assert num_proven > 20
    assert open_after < 0.8 * open_before
