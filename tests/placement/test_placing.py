"""How `place` behaves: stopping, repeating, cutoffs, gaps, infeasibility in words, more memory never slower."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known_cases import large_case, multimodal_case, taylor_case

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import list_patterns
from mm_autoparallel.pipeline.placement.result import Known
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import simulate

PRINT_PLACEMENT = """
from known_cases import taylor_case
from mm_autoparallel.pipeline.placement import place
result = place(taylor_case("512_8k_swap")[0])
print(result.status, result.step_ms, result.placement)
"""


@pytest.mark.slow
def test_fresh_processes_give_one_plan() -> None:
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parents[1])])}
    command = [sys.executable, "-c", PRINT_PLACEMENT]
    printed = {
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(3)
    }
    assert len(printed) == 1
    assert printed.pop().startswith("optimal")


def test_a_stop_returns_the_best_so_far_with_its_gap() -> None:
    problem, _ = large_case("p8_v4_m240_n96")
    began = time.monotonic()
    result = place(problem, should_stop=lambda: time.monotonic() - began > 2.0)
    print(f"a stop after 2 s ended it after {time.monotonic() - began:.1f} s")
    assert result.status == "feasible"
    assert result.placement is not None
    assert simulate(problem, result.placement).step_ms == result.step_ms
    assert 0 < result.gap_fraction <= 1  # a slow machine has no bound yet
    assert result.lower_bound_ms < result.step_ms


def test_nothing_is_below_a_cutoff_that_is_the_optimum() -> None:
    problem, case = taylor_case("768_4k_gp")
    result = place(problem, cutoff_ms=case["best_step"] * (1 - 1e-9))
    assert result.placement is None
    assert result.status == "dominated"
    assert result.lower_bound_ms == pytest.approx(case["best_step"], rel=1e-6)
    found = place(problem, cutoff_ms=case["best_step"] * 1.01)
    assert found.step_ms == pytest.approx(case["best_step"], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wider_gap_ends_sooner_and_says_so() -> None:
    problem, _ = multimodal_case("pp16_m16")
    rough, exact = place(problem, gap_fraction=0.02), place(problem)
    assert rough.step_ms <= exact.step_ms / (1 - 0.02)
    assert rough.lower_bound_ms <= exact.step_ms * (1 + 1e-9)
    assert exact.gap_fraction <= 1e-5


def test_a_hint_is_taken_where_it_is_best() -> None:
    problem, _ = taylor_case("512_4k")
    best = place(problem)
    again = place(problem, hint=best.placement, time_limit_s=0.0)
    assert again.step_ms == best.step_ms


def layers(count: int, static_bytes: float, activation_bytes: float) -> tuple[ChainBlock, ...]:
    return (
        ChainBlock(
            "layer", "text", count, 1.0, 2.0, static_bytes, activation_bytes, (Mode("recompute", 0.0, 1.0, 0.0),)
        ),
    )


def pipeline(num_stages: int, chain: tuple[ChainBlock, ...], limit_bytes: float, **more: object) -> Problem:
    n = num_stages
    problem = Problem(
        n, 1, 8, "1f1b", chain, (limit_bytes,) * n, (0.0,) * n, (0.0,) * n, (0.0,) * (n - 1), (0.0,) * (n - 1)
    )
    return replace(problem, **more)


def test_a_step_of_no_time_ends_at_once() -> None:
    """Micro-batches that differ leave no method able; it went on for ever."""
    layer = ChainBlock("layer", "text", 1, 0.0, 0.0, microbatch_scale=(1.0, 2.0) * 4)
    result = place(pipeline(1, (layer,), 1e9))
    assert (result.status, result.step_ms, result.gap_fraction) == ("optimal", 0.0, 0.0)


def test_memory_that_cannot_fit_names_the_stage_and_the_smallest_relaxation() -> None:
    result = place(pipeline(4, layers(8, 10e9, 1e9), 18e9))
    assert result.status == "infeasible"
    assert result.overflow_bytes == pytest.approx(2e9)
    assert "by at least 2.00 GB" in result.reason
    assert "20.00 GB of 18.00 GB" in result.reason
    relaxed = place(pipeline(4, layers(8, 10e9, 1e9), 20e9))
    assert relaxed.status == "optimal"


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (pipeline(4, layers(3, 0, 0), 1e9), "4 stages need at least 4 layers"),
        (pipeline(2, layers(8, 0, 0), 1e9, max_layers_per_chunk=3), "8 layers do not fit .* 4 would do"),
        (pipeline(2, layers(2, 5.0, 0), 1e9, stage_static_bytes=(2e9, 0.0)), "memory: .*stage 0"),
    ],
)
def test_other_reasons_are_named(problem: Problem, words: str) -> None:
    result = place(problem)
    assert result.status == "infeasible"
    assert np.isinf(result.step_ms)

    assert re.search(words, result.reason), result.reason


def test_pins_against_the_order_of_the_chain_are_an_error() -> None:
    chain = (
        ChainBlock("head", "text", 1, 1.0, 1.0, layer=False, pinned="last"),
        *layers(4, 0, 0),
        ChainBlock("embedding", "text", 1, 1.0, 1.0, layer=False, pinned="first"),
    )
    with pytest.raises(JobError, match="contradict the chain's order"):
        place(pipeline(2, chain, 1e9))


def test_one_stage_holds_everything() -> None:
    result = place(pipeline(1, layers(4, 1e9, 1e9), 6e9))
    assert result.status == "optimal"
    assert result.placement is not None
    assert result.placement.layers == ((4,),)
    assert result.placement.modes == (((2,),),)
    assert result.step_ms == pytest.approx(8 * (4 * 3 + 2))


def test_stages_that_could_hold_too_much_are_given_up_after_a_bounded_number_of_choices() -> None:
    """Some 10^10 ways to deal two kinds of layers to four chunks, none of them heavy enough."""
    vision = ChainBlock("vision", "vision", 60, 1.0, 1.0)
    text = ChainBlock("text", "text", 80, 1.0, 2.0)
    hops, none = (0.0,) * 7, (0.0, 0.0)
    problem = Problem(2, 4, 16, "interleaved_1f1b", (vision, text), (1.0, 1.0), none, none, hops, hops)
    segments = cut_into_segments(problem)
    graph = full_graph("interleaved_1f1b", 2, 4, 16)
    with pytest.raises(TooManyPatterns):
        list_patterns(segments, graph, 0, max_load_ms=360.0, min_load_ms=360.5)


@pytest.mark.parametrize("name", ["512_8k_swap", "512_4k"])
def test_what_is_known_is_not_shown_again(name: str) -> None:
    """From a bound that the caller has, placing goes on: to the same step, and to no bound above it."""
    problem = taylor_case(name)[0]
    best = place(problem)
    for known_ms in (0.9 * best.step_ms, best.lower_bound_ms):
        result = place(problem, known=Known(lower_ms=known_ms))
        assert result.status == "optimal"
        assert result.step_ms == pytest.approx(best.step_ms, rel=1e-5)
        assert known_ms <= result.lower_bound_ms <= result.step_ms
    beyond = place(problem, cutoff_ms=0.95 * best.step_ms, known=Known(lower_ms=0.95 * best.step_ms))
    assert (beyond.status, beyond.placement) == ("dominated", None)
