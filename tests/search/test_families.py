"""A problem that cannot beat another never does, by brute force."""

from __future__ import annotations

import random
from dataclasses import replace

from nouns import brute_force
from random_problems import random_problem

from mm_autoparallel.pipeline.footprint import Footprint
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.solve.families import Families, content_key, figures_of


def no_better(problem: Problem, seed: int) -> Problem:
    """Some of its figures made worse."""
    rng = random.Random(seed)

    def more(value: float) -> float:
        return value * rng.choice([1.0, 1.0, 1.5]) + rng.choice([0.0, 0.0, 0.25])

    chain = []
    for block in problem.chain:
        names = ("forward_ms", "backward_ms", "static_bytes", "activation_bytes", "transient_bytes", "tail_ms")
        chain.append(replace(block, **{name: more(getattr(block, name)) for name in names}))
    return replace(
        problem,
        chain=tuple(chain),
        p2p_ms=tuple(map(more, problem.p2p_ms)),
        stage_static_bytes=tuple(map(more, problem.stage_static_bytes)),
        memory_limit_bytes=tuple(limit - rng.choice([0.0, 1.0]) for limit in problem.memory_limit_bytes),
    )


def add(families: Families, number: int, problem: Problem) -> tuple[list[int], list[int]]:
    return families.add(number, *figures_of(problem))


def test_what_cannot_beat_another_does_not() -> None:
    num_compared = 0
    for seed in range(60):
        problem = random_problem(seed, ("round", "real", "unequal")[seed % 3])
        worse, mixed = no_better(problem, seed), no_better(problem, seed + 1000)
        best = [brute_force(p)[0] for p in (problem, worse, mixed)]
        families = Families()
        assert add(families, 0, problem) == ([], [])
        for number, other in ((1, worse), (2, mixed)):
            above, below = add(families, number, other)
            assert 0 in above
            for faster, slower in [(n, number) for n in above] + [(number, n) for n in below]:
                num_compared += 1
                assert best[faster] <= best[slower], f"seed {seed}"
    assert num_compared >= 120


def test_both_directions_and_equals_are_told() -> None:
    problem = random_problem(3, "real")
    families = Families()
    assert add(families, 7, no_better(problem, 1)) == ([], [])
    assert add(families, 8, problem) == ([], [7])
    assert add(families, 9, problem) == ([8], [7])  # of equals, the first


def test_other_shapes_are_not_compared() -> None:
    problem = random_problem(3, "real")
    families = Families()
    add(families, 0, problem)
    assert add(families, 1, replace(problem, num_microbatches=problem.num_microbatches + 1)) == ([], [])
    pinned = (replace(problem.chain[0], name="other"), *problem.chain[1:])
    assert add(families, 2, replace(problem, chain=pinned)) == ([], [])


def test_the_key_is_that_of_what_decides() -> None:
    problem = random_problem(3, "real")
    key = content_key(*figures_of(problem))
    told = Footprint(1.0, 2.0, 3.0, 4.0, True)
    chain = tuple(replace(block, footprint=told) for block in problem.chain)
    assert content_key(*figures_of(replace(problem, chain=chain, context_bytes=5.0))) == key
    other = replace(problem.chain[-1], tail_ms=problem.chain[-1].tail_ms + 1e-9)
    assert content_key(*figures_of(replace(problem, chain=(*problem.chain[:-1], other)))) != key
