"""Modes that another one makes needless are left out, and no best step changes by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from nouns import brute_force

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.solve.dominated_modes import drop_dominated_modes

CHEAP = Mode("cheap", 0.0, 1.0, 50.0)
DEAR = Mode("dear", 0.0, 2.0, 60.0)
MOVES = Mode("moves", 0.0, 0.0, 10.0, 0.0, 90.0)
WHOLE = Mode("whole", 0.0, 4.0, 10.0)


def problem_of(*layers: ChainBlock, memory_bytes: float = 1e9) -> Problem:
    return Problem(
        num_stages=2,
        num_chunks=1,
        num_microbatches=4,
        schedule="1f1b",
        chain=layers,
        memory_limit_bytes=(memory_bytes,) * 2,
        stage_static_bytes=(0.0,) * 2,
        stage_tail_ms=(0.0,) * 2,
        p2p_ms=(0.5,),
        p2p_ms_per_byte=(0.0,),
        host_ms_per_byte=(0.02,) * 2,
    )


def layer_of(*modes: Mode, name: str = "layer", count: int = 3) -> ChainBlock:
    return ChainBlock(name, "text", count, 4.0, 8.0, 0.0, 100.0, modes, recompute_group="text")


@pytest.mark.parametrize(
    ("modes", "left"),
    [
        ((CHEAP, DEAR, MOVES, WHOLE), (CHEAP, MOVES, WHOLE)),
        ((DEAR, MOVES, WHOLE, CHEAP), (MOVES, WHOLE, CHEAP)),  # one block: the order matters to no one
        ((CHEAP, replace(CHEAP, name="twin")), (CHEAP,)),
        ((MOVES, WHOLE), (MOVES, WHOLE)),
        ((DEAR,), (DEAR,)),
    ],
)
def test_what_another_mode_beats_goes(modes: tuple[Mode, ...], left: tuple[Mode, ...]) -> None:
    assert drop_dominated_modes(problem_of(layer_of(*modes))).chain[0].modes == left


def test_blocks_of_one_group_lose_a_mode_together_and_only_to_a_neighbour() -> None:
    first = layer_of(CHEAP, WHOLE, DEAR, name="first")
    second = layer_of(CHEAP, replace(WHOLE, extra_backward_ms=9.0), DEAR, name="second")
    problem = problem_of(first, second)
    assert drop_dominated_modes(problem) is problem  # cheap and dear are no neighbours
    beside = [replace(block, modes=(block.modes[0], block.modes[2], block.modes[1])) for block in (first, second)]
    dropped = drop_dominated_modes(problem_of(*beside))
    assert [[mode.name for mode in block.modes] for block in dropped.chain] == [["cheap", "whole"]] * 2
    better_there = replace(second, modes=(CHEAP, replace(DEAR, extra_backward_ms=0.5), WHOLE))
    kept = problem_of(beside[0], better_there)
    assert drop_dominated_modes(kept) is kept


def test_the_best_step_stays() -> None:
    rng = random.Random(5)
    num_dropped = 0
    for _ in range(40):
        modes = [
            Mode(f"mode {n}", rng.choice([0.0, 1.0]), rng.choice([0.0, 1.0, 3.0]), 20.0 * rng.randrange(5), 0.0, moved)
            for n, moved in enumerate(rng.choices([0.0, 0.0, 300.0], k=3))
        ]
        changed = [replace(mode, extra_backward_ms=mode.extra_backward_ms * rng.choice([1, 1, 2])) for mode in modes]
        chain = (layer_of(*modes, name="a", count=2), layer_of(*changed, name="b", count=2))
        problem = problem_of(*chain, memory_bytes=rng.choice([200.0, 300.0, 400.0]))
        dropped = drop_dominated_modes(problem)
        num_dropped += len(problem.chain[0].modes) - len(dropped.chain[0].modes)
        assert brute_force(dropped)[0] == pytest.approx(brute_force(problem)[0], rel=1e-12)
    assert num_dropped > 10
