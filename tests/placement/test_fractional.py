"""Fractional placements: bounds of the program and its tree against brute force, and where only whole layers tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nouns import brute_force
from random_modes import random_modes_problem

from mm_autoparallel.pipeline.placement.relaxation.columns import find_main, least_transient_bytes
from mm_autoparallel.pipeline.placement.relaxation.linear_program import FractionalMaster, Limits
from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem


def go_on() -> bool:
    return False


def bound_of(master: FractionalMaster, limits: Limits | None = None) -> float:
    return master.bound(limits or master.no_limits(), np.inf, 200, 200)


def test_a_solver_that_goes_in_circles_is_left_and_begins_anew() -> None:
    """GLOP's dual simplex never ended on the 12th path of this one."""
    problem = random_modes_problem(131)
    best_ms, _ = brute_force(problem)
    tree = FractionalTree(problem, 1.2 * best_ms)
    tree.advance(0.8 * best_ms, 1.2 * best_ms, 20_000, go_on)
    assert 0.0 < tree.lower_bound_ms <= best_ms


def two_chunks(num_layers: int, memory: float = 1e3, **more: object) -> Problem:
    """Layers of 3 ms each on two stages of two chunks, 16 micro-batches."""
    modes = (Mode("recompute", 0.0, 1.0, 0.0),)
    layer = ChainBlock("layer", "text", num_layers, 1.0, 2.0, 0.0, 1.0, modes)
    problem = Problem(
        2, 2, 16, "interleaved_1f1b", (layer,), (memory,) * 2, (0.0,) * 2, (0.0,) * 2, (0.0,) * 3, (0.0,) * 3
    )  # fmt: skip
    return replace(problem, **more)  # type: ignore[arg-type]


def test_whole_layers_tell_more_than_parts() -> None:
    """Five layers on two stages: parts put two and a half on each, whole layers three on one, which works 16 · 9 ms."""
    problem = two_chunks(5)
    best_ms, _ = brute_force(problem)
    tree = FractionalTree(problem, best_ms * 1.01)
    assert bound_of(tree.master) < 16 * 9.0 * 0.95
    tree.raise_bound(best_ms * 1.01, 10_000, go_on)
    assert 16 * 9.0 - 1e-6 <= tree.lower_bound_ms <= best_ms * (1 + 1e-9)


def test_limits_and_memory_count() -> None:
    """A stage that must hold all but two of twelve layers works 16 · 30 ms; where no activation fits, all recompute."""
    master = FractionalMaster(two_chunks(12), np.inf)
    free = master.no_limits()
    forced = bound_of(master, replace(free, stage_least=np.array([10, 0])))
    assert forced >= 16 * 30.0 * (1 - 1e-6) > 1.2 * bound_of(master)
    assert bound_of(master) < forced  # limits of an earlier solve are gone
    tight = bound_of(FractionalMaster(two_chunks(12, memory=1e-3), np.inf))
    assert tight == pytest.approx(bound_of(master) * 4.0 / 3.0, rel=0.02)


def test_more_bytes_pass_once_every_last_chunk_holds_the_main_kind() -> None:
    """Small blocks first: unless they fill stage 0's last chunk as well, every stage has room for a main layer's
    transient bytes; if they do, the main layers lie on one stage, which works 16 · 8 · 3 ms through all of them."""
    small = ChainBlock("small", "vision", 6, 0.1, 0.1, transient_bytes=1.0)
    main = ChainBlock("main", "text", 8, 1.0, 2.0, transient_bytes=5.0)
    problem = two_chunks(5, chain=(small, main))
    assert find_main(problem) == 1
    whole_ms = 16 * 8 * 3.0
    assert least_transient_bytes(problem, False, whole_ms - 1.0).tolist() == [5.0, 5.0]
    assert least_transient_bytes(problem, False, whole_ms + 1.0).tolist() == [1.0, 5.0]
    assert least_transient_bytes(problem, True, whole_ms - 1.0).tolist() == [1.0, 1.0]
    turned = replace(problem, chain=(main, small))
    assert least_transient_bytes(turned, False, whole_ms - 1.0).tolist() == [1.0, 1.0]
