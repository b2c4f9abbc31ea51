"""Mixes of layer strategies against all assignments of strategies to layers, written by another hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mm_autoparallel.integrations.galvatron.mixes import Mixing, Resharding
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost


@dataclass(frozen=True)
class Problem:
    """A space drawn at random."""

    costs: tuple[LayerCost, ...]
    ends: EndsCost
    layers: tuple[int, ...]
    chunks: int
    limit_mib: tuple[int, ...]
    spread: int
    counts_every_stage: bool
    resharding: Resharding | None


def draw(seed: int) -> Problem:
    """Small enough for all assignments."""
    rng = random.Random(seed)
    pp = rng.choice((1, 1, 2, 2, 3, 4))
    layers = tuple(rng.randint(1, {1: 6, 2: 4, 3: 3, 4: 2}[pp]) for _ in range(pp))
    chunks = rng.choice((pp, pp + 1, 2 * pp, 4 * pp))
    costs = []
    for _ in range(rng.randint(1, 4 if pp < 3 else 3)):
        compute = rng.choice((rng.uniform(0.5, 3.0), rng.randint(1, 3)))
        exchange = rng.choice((0.0, rng.uniform(0.0, 1.0), rng.uniform(0.0, 20.0)))
        costs.append(LayerCost(compute, compute + exchange, tuple(rng.randint(1, 40) for _ in range(pp))))
    ends_s = [0.0] * pp
    ends_s[0] = rng.choice((0.0, rng.uniform(0.0, 4.0)))
    ends_s[-1] = rng.choice((ends_s[0], rng.uniform(0.0, 4.0)))
    ends = EndsCost(tuple(ends_s), tuple(rng.randint(0, 20) for _ in range(pp)))
    limit = rng.randint(10, 200)
    degrees = tuple(rng.choice((1, 2, 4)) for _ in costs)
    charges = {1: 0.0, 2: rng.uniform(0.0, 0.5), 4: rng.uniform(0.5, 1.0)}
    return Problem(
        tuple(costs),
        ends,
        layers,
        chunks,
        (limit,) * pp,
        rng.choice((0, 0, 1, 2)) if pp > 1 else 0,
        rng.random() < 0.4,
        Resharding(degrees, charges) if rng.random() < 0.4 else None,
    )


def step_of(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """The formula of design and of upstream's source once more, layer by layer."""
    computing, synced = [], []
    for stage, chosen in enumerate(stages):
        moved = 0.0
        if problem.resharding:
            used = sorted({problem.resharding.degrees[one] for one in chosen})
            moved = sum(problem.resharding.charges_s[degree] for degree in used if degree != used[0])
        computing.append(sum(problem.costs[one].compute_s for one in chosen) + problem.ends.compute_s[stage] + moved)
        synced.append(sum(problem.costs[one].synced_s for one in chosen) + moved)
    pp, m = len(stages), problem.chunks
    slow = max(computing) if problem.counts_every_stage else computing[-1]
    one_way = sum(computing) + slow * (m - 1)
    waiting, others = min(pp - 1, m - 1) * computing[0], sum(computing[1:])
    other_way = max(waiting / 3, others / 3) + max(2 * waiting / 3, 2 * others / 3) + computing[0] * max(0, m + 1 - pp)
    late = max(synced[stage] - sum(computing[: stage + 1]) for stage in range(pp))
    return max(one_way, other_way) + max(0.0, late)


def try_all(problem: Problem) -> float:
    """The shortest step of all multisets of strategies on all divisions; infinite where nothing fits."""
    best, total = math.inf, sum(problem.layers)
    lengths = [range(max(1, own - problem.spread), own + problem.spread + 1) for own in problem.layers]
    for division in itertools.product(*lengths):
        if sum(division) != total:
            continue
        options = []
        for stage, own in enumerate(division):
            fitting = [
                chosen
                for chosen in itertools.combinations_with_replacement(range(len(problem.costs)), own)
                if sum(problem.costs[one].stage_mib[stage] for one in chosen) + problem.ends.stage_mib[stage]
                <= problem.limit_mib[stage]
            ]
            options.append(fitting)
        for stages in itertools.product(*options):
            best = min(best, step_of(problem, stages))
    return best


def solve(problem: Problem, ceiling_s: float = math.inf) -> tuple[float, float]:
    """The step that `Mixing` finds and its bound."""
    mixing = Mixing(
        problem.costs, problem.layers, problem.chunks, problem.spread, problem.counts_every_stage, problem.resharding
    )
    mix, bound_s = mixing.solve(problem.ends, problem.limit_mib, ceiling_s, 10**6, lambda: None)
    if mix is None:
        return math.inf, bound_s
    stages = [[one for one, number in enumerate(held) for _ in range(number)] for held in mix.counts]
    assert mix.step_s == pytest.approx(step_of(problem, stages), rel=1e-12)
    for stage, chosen in enumerate(stages):
        taken = sum(problem.costs[one].stage_mib[stage] for one in chosen) + problem.ends.stage_mib[stage]
        assert taken <= problem.limit_mib[stage]
        assert abs(len(chosen) - problem.layers[stage]) <= problem.spread
    assert sum(map(len, stages)) == sum(problem.layers)
    quick_s = mixing.quick_bound_s(problem.ends, problem.limit_mib)
    assert quick_s <= mix.step_s * (1 + 1e-12)
    return mix.step_s, bound_s


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_the_best_mix_is_the_best_of_all_assignments(start: int) -> None:
    for seed in range(start, start + 50):
        problem = draw(seed)
        right = try_all(problem)
        found, bound_s = solve(problem)
        assert found == pytest.approx(right, rel=1e-11), seed
        assert bound_s == pytest.approx(right, rel=1e-11), seed


def test_a_ceiling_cuts_off_what_is_not_below_it() -> None:
    seen = set()
    for seed in range(400, 460):
        problem = draw(seed)
        right = try_all(problem)
        if right == math.inf:
            continue
        found, bound_s = solve(problem, right * 1.001)
        assert found == pytest.approx(right, rel=1e-11), seed
        found, bound_s = solve(problem, right * 0.999)
        assert found == math.inf, seed
        assert bound_s <= right * (1 + 1e-12), seed
        seen.add(problem.spread)
    assert seen == {0, 1, 2}


def test_stages_of_too_many_mixes_to_list_are_searched_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_autoparallel.integrations.galvatron.mix_search._MOST_MIXES", 0)
    for seed in range(500, 560):
        problem = draw(seed)
        right = try_all(problem)
        found, bound_s = solve(problem)
        assert found == pytest.approx(right, rel=1e-11), seed
        assert bound_s == pytest.approx(right, rel=1e-11), seed


def test_without_nodes_the_bound_stays_below() -> None:
    short = 0
    for seed in range(600, 660):
        problem = draw(seed)
        mixing = Mixing(
            problem.costs, problem.layers, problem.chunks, 0, problem.counts_every_stage, problem.resharding
        )
        right = try_all(Problem(**{**vars(problem), "spread": 0}))
        mix, bound_s = mixing.solve(problem.ends, problem.limit_mib, math.inf, 1, lambda: None)
        assert bound_s <= right * (1 + 1e-11), seed
        assert mix is None or mix.step_s >= right * (1 - 1e-11), seed
        short += mix is None and right < math.inf
    assert short > 5
