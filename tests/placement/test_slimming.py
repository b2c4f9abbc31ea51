"""Orders that take equally long and hold less (`placement/orders/slimming.py`), against the simulator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.orders.slimming import find_peak, hold_at_most, hold_less, write_actions
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, WEIGHT
from mm_autoparallel.pipeline.simulate.step import simulate


def drawn_problem(draw: random.Random, num_stages: int, num_microbatches: int) -> Problem:
    """A layer a stage, of which a weight gradient keeps some, all, or more than its input's leaves."""
    chain = tuple(
        ChainBlock(
            f"b{s}",
            "text",
            1,
            draw.choice([1.0, 2.0, 2.5]),
            4.0,
            1.0,
            draw.choice([0.3, 2.0]),
            backward_weight_ms=draw.choice([0.0, 2.0, 4.0]),
            split_extra_ms=draw.choice([0.0, 0.5]),
            kept_for_weight_bytes=draw.choice([0.0, 0.3, 0.2]),
        )
        for s in range(num_stages)
    )
    hops = num_stages - 1
    each = (0.0,) * num_stages
    limits = (1e9,) * num_stages
    return Problem(num_stages, 1, num_microbatches, "free", chain, limits, each, each, (0.5,) * hops, (0.0,) * hops)


def drawn_actions(draw: random.Random, num_microbatches: int, is_split: bool) -> list[int]:
    """Any order of a stage of which every action follows what it needs there."""
    left, in_flight, waiting, actions = num_microbatches, 0, 0, list[int]()
    while left or in_flight or waiting:
        kind = draw.choice([FORWARD] * bool(left) + [BACKWARD] * bool(in_flight) + [WEIGHT] * bool(waiting))
        if kind == FORWARD:
            left, in_flight = left - 1, in_flight + 1
        elif kind == WEIGHT:
            waiting -= 1
        else:
            kind = draw.choice([BACKWARD, INPUT]) if is_split else BACKWARD
            in_flight, waiting = in_flight - 1, waiting + (kind == INPUT)
        actions.append(kind)
    return actions


def placed(orders: list[list[int]]) -> Placement:
    num_stages = len(orders)
    layers = tuple(tuple(int(e == s) for e in range(num_stages)) for s in range(num_stages))
    modes = tuple(((),) * num_stages for _ in range(num_stages))
    return Placement(layers, modes, tuple(map(write_actions, orders)))


@pytest.mark.parametrize("seed", range(40))
def test_no_stage_holds_more_and_no_step_is_longer(seed: int) -> None:
    """Of any orders; all forwards first in place of those that wait for one another for ever."""
    draw = random.Random(f"slim {seed}")
    num_stages, count = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 5, 9])
    problem = drawn_problem(draw, num_stages, count)
    splits = [bool(block.backward_weight_ms) for block in problem.chain]
    orders = [drawn_actions(draw, count, is_split) for is_split in splits]
    try:
        timeline = simulate(problem, placed(orders))
    except PlannerError:  # they wait for one another for ever
        orders = [[FORWARD] * count + [BACKWARD] * count] * num_stages
        timeline = simulate(problem, placed(orders))
    placement = placed(orders)
    slim, slim_timeline = hold_less(problem, placement, timeline)
    again = simulate(problem, slim)
    assert again.step_ms == slim_timeline.step_ms <= timeline.step_ms
    assert np.all(again.peak_memory_bytes <= timeline.peak_memory_bytes)
    for text, before in zip(slim.orders, placement.orders, strict=True):
        assert Counter(action[-2] for action in text.split()) == Counter(action[-2] for action in before.split())


def test_what_runs_ahead_for_nothing_waits() -> None:
    """A first stage that runs all forwards at once, before a stage that takes longer: it needs three in flight."""
    problem = drawn_problem(random.Random(0), 2, 8)
    fast, slow = replace(problem.chain[0], forward_ms=1.0, backward_ms=1.0, backward_weight_ms=0.0), problem.chain[1]
    problem = replace(problem, chain=(fast, replace(slow, backward_weight_ms=0.0)), p2p_ms=(0.0,))
    ahead = [FORWARD] * 8 + [BACKWARD] * 8
    placement = placed([ahead, [FORWARD, BACKWARD] * 8])
    timeline = simulate(problem, placement)
    slim, slim_timeline = hold_less(problem, placement, timeline)
    assert slim_timeline.step_ms == timeline.step_ms
    assert slim.orders[1] == placement.orders[1]
    kinds = ["FBIW".index(action[-2]) for action in slim.orders[0].split()]
    assert find_peak(np.array(kinds, dtype=np.int8), 1.0, 0.0) <= 3.0
    assert find_peak(np.array(ahead, dtype=np.int8), 1.0, 0.0) == 8.0


@pytest.mark.parametrize("seed", range(60))
def test_an_order_that_is_changed_keeps_the_limit_and_the_order_of_the_rest(seed: int) -> None:
    draw = random.Random(f"limit {seed}")
    actions = np.array(drawn_actions(draw, draw.choice([1, 3, 8]), True), dtype=np.int8)
    kept, pending = draw.choice([(2.0, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 0.0)])
    peak = find_peak(actions, kept, pending)
    most = draw.choice([peak, 0.75 * peak, 0.5 * peak, 0.1 * peak])
    changed = np.full_like(actions, -1)
    for early in (False, True):
        if not hold_at_most(actions, kept, pending, most, early, changed):
            assert most < peak
            continue
        assert sorted(changed.tolist()) == sorted(actions.tolist())
        assert find_peak(changed, kept, pending) <= most
        in_place = [kind for kind in actions.tolist() if kind in (BACKWARD, INPUT)]
        assert [kind for kind in changed.tolist() if kind in (BACKWARD, INPUT)] == in_place
        running = np.cumsum([(kind == FORWARD) - (kind in (BACKWARD, INPUT)) for kind in changed.tolist()])
        waiting = np.cumsum([(kind == INPUT) - (kind == WEIGHT) for kind in changed.tolist()])
        assert min(running) >= 0
        assert min(waiting) >= 0


def test_stages_that_keep_nothing_stay_as_they_are() -> None:
    """Nothing is less than nothing; a limit may be nothing too."""
    problem = drawn_problem(random.Random(5), 2, 4)
    chain = tuple(replace(block, activation_bytes=0.0, kept_for_weight_bytes=0.0) for block in problem.chain)
    problem = replace(problem, chain=chain, memory_limit_bytes=(0.0, 1e9))
    draw = random.Random(5)
    placement = placed([[FORWARD] * 4 + [BACKWARD] * 4, drawn_actions(draw, 4, False)])
    assert hold_less(problem, placement, simulate(problem, placement))[0] == placement


def test_place_gives_a_slim_order() -> None:
    """What `place` gives cannot be made slimmer."""
    problem = replace(drawn_problem(random.Random(3), 3, 6), memory_limit_bytes=(40.0,) * 3)
    result = place(problem, gap_fraction=1e-3)
    assert result.placement is not None
    assert result.timeline is not None
    slim, _ = hold_less(problem, result.placement, result.timeline)
    assert slim.orders == result.placement.orders
