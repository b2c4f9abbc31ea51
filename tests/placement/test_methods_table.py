"""The table of methods: each may be left out, each says what it can work on, and one that gave up tries again."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from brute_force import brute_force
from compare import read
from generate import problem as problem_called
from known_cases import taylor_case

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.methods import METHODS, Method
from mm_autoparallel.pipeline.placement.run import Run, Work
from mm_autoparallel.pipeline.problem import Problem

NAMES = [method.name for method in METHODS]


def recorded(names: list[str], ran: list[tuple[int, str]]) -> list[Method]:
    """The methods of these names; `ran` gets the round and name of each that works."""

    def record(method: Method) -> Method:
        def advance(run: Run, work: Work) -> None:
            ran.append((run.round_number, method.name))
            method.advance(run, work)

        return method._replace(advance=advance)

    return [record(method) for method in METHODS if method.name in names]


@pytest.mark.parametrize("left_out", NAMES)
def test_without_any_one_method_the_answers_are_still_true(left_out: str) -> None:
    num_placed = 0
    for name in ("tidy-3", "real-1", "heavy-2", "sparse-0", "real-9", "tidy-1", "tidy-8", "real-4"):
        document = problem_called(name)
        best_ms = brute_force(document).step_ms
        ran: list[tuple[int, str]] = []
        methods = recorded([method for method in NAMES if method != left_out], ran)
        result = place(read(document), should_stop=in_round(2, ran), methods=methods)
        assert result.lower_bound_ms <= best_ms * (1 + 1e-9) or result.status == "infeasible"
        assert result.status != "infeasible" or np.isinf(best_ms)
        assert result.step_ms >= best_ms * (1 - 1e-9)
        num_placed += result.placement is not None
    assert num_placed >= 3


def in_round(number: int, ran: list[tuple[int, str]]) -> Callable[[], bool]:
    """Told to stop once that round has begun, on fast machines and slow ones."""
    return lambda: bool(ran) and ran[-1][0] >= number


def able_ones(problem: Problem, names: list[str] = NAMES) -> list[str]:
    """Which methods work in the first round, where none settles the problem: only annealing does anything."""
    ran: list[str] = []

    def record(method: Method) -> Method:
        def advance(run: Run, work: Work) -> None:
            ran.append(method.name)
            if method.name == "annealing":
                method.advance(run, work)

        return method._replace(advance=advance)

    methods = [record(method) for method in METHODS if method.name in names]
    last = next(name for name in ("path mixtures", "path cuts") if name in names)
    place(problem, should_stop=lambda: ran[-1:] == [last], methods=methods)
    return ran


def test_methods_work_on_what_they_are_able_to() -> None:
    """As docs/explanation/placement.md has it; where paths cannot be mixed, path cuts stand in."""
    chunks, _ = taylor_case("512_4k")
    without = [name for name in NAMES if name != "path mixtures"]
    assert able_ones(chunks) == ["annealing", "pattern tree", "path mixtures"]
    assert able_ones(chunks, without) == ["annealing", "pattern tree", "path cuts"]
    one_chunk, _ = taylor_case("512_8k")
    assert able_ones(one_chunk, without) == ["balanced starts", "annealing", "pattern tree", "path cuts"]
    scale = (0.5, 1.5) * (chunks.num_microbatches // 2)
    unequal = replace(chunks, chain=(replace(chunks.chain[0], microbatch_scale=scale), *chunks.chain[1:]))
    assert able_ones(unequal, without) == ["annealing", "path cuts"]


def test_a_tree_of_too_many_patterns_is_tried_again_once_the_step_has_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at few enough choices, the tree is too large for the optimum, and not for 0.97 of it: where somebody else
    has reached that, it proves at once that nothing here is below."""
    problem, case = taylor_case("512_4k")
    monkeypatch.setattr("mm_autoparallel.pipeline.placement.patterns.stage_patterns.MAX_CHOICES", 14_000)
    ran: list[tuple[int, str]] = []
    reached_ms = 0.97 * case["best_step"]
    result = place(
        problem,
        should_stop=in_round(2, ran),
        latest_cutoff_ms=lambda: reached_ms if (0, "pattern tree") in ran and ran[-1][0] == 1 else np.inf,
        methods=recorded(["annealing", "pattern tree"], ran),
    )
    assert ran == [(0, "annealing"), (0, "pattern tree"), (1, "annealing"), (1, "pattern tree")]
    assert result.proof == "tree"
    assert reached_ms * (1 - 1e-5) <= result.lower_bound_ms <= reached_ms


def test_a_tree_whose_pruning_would_take_all_the_time_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_autoparallel.pipeline.placement.patterns.tree.MAX_PRUNING_TASKS", 100_000)
    problem, case = taylor_case("512_8k")
    result = place(problem)
    assert result.proof == "cuts"
    assert result.step_ms == pytest.approx(case["best_step"], rel=1e-6)


def test_thousands_of_layers_take_no_gigabytes() -> None:
    """Where a stage could begin and end anywhere among them, pairs of begin and end are not listed."""
    block = {"name": "layer", "modality": "text", "count": 8000, "forward_ms": 1.0, "backward_ms": 2.0}
    sizes = {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 8, "memory_limit_bytes": 1e12}
    problem = read(sizes | {"chain": [block]})
    tracemalloc.start()
    result = place(problem, time_limit_s=2.0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.step_ms >= result.lower_bound_ms > 0
    assert peak_bytes < 500e6
