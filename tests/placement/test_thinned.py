"""Mixtures without the light blocks in front of the main kind, against brute force over all blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from nouns import brute_force

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.methods import METHODS
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import BranchAndBound
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import list_patterns, load_limits
from mm_autoparallel.pipeline.placement.patterns.state_graph import build_layers
from mm_autoparallel.pipeline.placement.patterns.thinned import Spread, thin
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.simulate.graph import full_graph


def go_on() -> bool:
    return False


def with_an_encoder(seed: int) -> Problem:
    """Two or three stages of two chunks; a few encoder layers and what joins them, in front of a decoder's."""
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(2, 4))
    num_vision, num_text = int(rng.integers(1, 4)), 2 * num_stages + int(rng.integers(-1, 2))
    backward_ms = float(rng.choice([0.0, 1.0])) * float(rng.uniform(0.1, 0.6))
    modes = (Mode("recompute", 0.0, float(rng.uniform(0.5, 1.0)), 0.1),) if rng.random() < 0.7 else ()
    chain = (
        ChainBlock("vision_pre", "vision", 1, float(rng.uniform(0.0, 0.2)), 0.0, 0.1, 0.1, layer=False),
        ChainBlock("vision", "vision", num_vision, float(rng.uniform(0.1, 0.6)), backward_ms, 0.2, 0.2),
        ChainBlock("text_pre", "text", 1, 0.1, 0.2, 0.5, 0.1, layer=False),
        ChainBlock("text", "text", num_text, 1.0, float(rng.uniform(1.5, 2.5)), 1.0, 1.0, modes),
        ChainBlock("head", "text", 1, 0.7, 1.4, 0.5, 0.3, layer=False, pinned="last"),
    )
    hops = tuple(rng.uniform(0.0, 0.2, 2 * num_stages - 1).tolist())
    memory = float(rng.uniform(5.0, 25.0))
    factors = tuple(rng.choice([1.0, 1.3], num_stages).tolist())
    problem = Problem(
        num_stages, 2, num_stages * int(rng.integers(1, 3)), "interleaved_1f1b", chain, (memory,) * num_stages,
        (0.0,) * num_stages, (0.1,) * num_stages, hops, hops,
    )  # fmt: skip
    return replace(problem, stage_time_factor=factors) if rng.random() < 0.3 else problem


def bound_below(problem: Problem, light: tuple[Segments, Spread], target_ms: float) -> float:
    """What mixtures show, at most target_ms."""
    segments, spread = light
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    limits = [load_limits(problem, segments, s, target_ms) for s in range(problem.num_stages)]
    linked = build_layers(segments, [list_patterns(segments, graph, s, *each) for s, each in enumerate(limits)])
    if linked is None:
        return target_ms
    splits = BranchAndBound(segments.problem, *linked, graph, target_ms, spread=spread)
    splits.advance(10**12, go_on)
    assert splits.exhausted
    assert splits.best is None
    return splits.lower_bound_ms


def test_nothing_is_said_to_be_below_the_optimum_and_little_is_lost() -> None:
    shown = []
    for seed in range(120):
        problem = with_an_encoder(seed)
        best_ms, _ = brute_force(problem)
        light = thin(problem, np.inf)
        if light is None or np.isinf(best_ms):  # fewer decoder layers than chunks are left alone
            continue
        bounds = [bound_below(problem, light, fraction * best_ms) for fraction in (0.8, 1 - 1e-6, 1.2)]
        assert max(bounds) <= best_ms * (1 + 1e-9), seed
        shown.append(bounds[-1] / best_ms)
    assert len(shown) > 50
    assert np.median(shown) > 0.95


def after_looks(number: int) -> Callable[[], bool]:
    """Told to stop once it has been asked so often."""
    looks = iter(range(number))
    return lambda: next(looks, None) is None


def test_place_is_bounded_by_it_where_patterns_are_too_many() -> None:
    methods = [method for method in METHODS if method.name in ("annealing", "thinned mixtures")]
    num_bounded = 0
    for seed in range(15):
        problem = with_an_encoder(seed)
        chain = tuple(replace(b, forward_ms=0.2 * b.forward_ms) if b.modality == "vision" else b for b in problem.chain)
        problem = replace(problem, chain=chain)
        best_ms, _ = brute_force(problem)
        result = place(problem, methods=methods, should_stop=after_looks(20))
        assert result.lower_bound_ms <= best_ms * (1 + 1e-9), seed
        num_bounded += result.proof == "mixtures"
    assert num_bounded > 3


@pytest.mark.parametrize(
    ("changes", "is_thinned"),
    [
        ({}, True),
        ({"pinned": "first"}, False),
        ({"modes": (Mode("recompute", 0.0, 1.0),)}, False),
        ({"forward_ms": 50.0}, False),
    ],
)
def test_only_light_blocks_without_modes_or_pins_are_left_out(changes: dict[str, object], is_thinned: bool) -> None:
    problem = with_an_encoder(1)
    vision = replace(problem.chain[1], **{"forward_ms": 0.1, "backward_ms": 0.0} | changes)  # type: ignore[arg-type]
    light = thin(replace(problem, chain=(vision, *problem.chain[2:])))
    assert (light is not None) == is_thinned
    if light is not None:
        assert [block.name for block in light[0].problem.chain] == ["text", "head"]
        assert light[1].forward_ms.shape == (2, problem.num_virtual_stages)
