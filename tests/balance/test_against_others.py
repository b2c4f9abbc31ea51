"""The balancer beats the rules of others, and comes near the best dealing that CP-SAT finds."""

from __future__ import annotations

import numpy as np
import pytest
from balancing import EXACT_SHAPES, PLACEMENTS, balancer_of, compare_exact, draw, equal_step_ms
from dealing_rules import RULES
from exact_dealing import solve


def count_wins(shape: tuple[int, int, int, int], draws: int) -> tuple[dict[str, int], list[float]]:
    """Of each rule how often it is beaten; the balancer's steps over those of equal micro-batches."""
    random = np.random.default_rng(11)
    wins, steps = dict.fromkeys(RULES, 0), []
    for _ in range(draws):
        batch = draw(random, *shape)
        balancer = balancer_of(batch, shape[0])
        dealt = balancer.assign(batch.samples)
        steps.append(dealt.predicted_ms / equal_step_ms(batch, balancer))
        for name, rule in RULES.items():
            dealing = rule(batch)
            assert sorted(i for replica in dealing for held in replica for i in held) == [*range(len(batch.samples))]
            wins[name] += balancer.evaluate(dealing, batch.samples) > dealt.predicted_ms
    return wins, steps


def test_it_beats_the_rules_of_others() -> None:
    wins, steps = count_wins((4, 4, 4, 96), 5)
    assert wins == dict.fromkeys(RULES, 5)
    assert max(steps) <= 1.1


def test_few_samples_are_dealt_as_well_as_can_be() -> None:
    batch = draw(np.random.default_rng(4), 2, 2, 2, 8)
    dealt = balancer_of(batch, 2).assign(batch.samples)
    best = solve(batch, PLACEMENTS[2], dealt.ranks, limit_s=60)
    assert best.proven
    assert dealt.lower_bound_ms <= best.bound_ms * 1.001
    assert dealt.predicted_ms <= best.bound_ms * 1.01


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(8, 16, 16, 1536), (8, 8, 64, 3072), (4, 8, 8, 512)])
def test_it_beats_them_in_large_batches(shape: tuple[int, int, int, int]) -> None:
    wins, steps = count_wins(shape, 40)
    assert min(wins.values()) >= 38
    assert max(steps) <= 1.1


@pytest.mark.nightly
def test_its_regret_is_small() -> None:
    regrets = [regret for shape in EXACT_SHAPES for regret in compare_exact(shape, draws=4, seed=3, limit_s=60)]
    assert np.mean(regrets) <= 0.03
