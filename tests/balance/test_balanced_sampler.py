"""DistributedBalancedBatchSampler: all replicas together yield each global batch once, and a state goes on exactly."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from dealt import COST, draw_samples, plan_document

from mm_autoparallel import BatchBalancer, DistributedBalancedBatchSampler, PlanError, Sample

DP, MICRO_BATCHES, BATCH = 2, 3, 16


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return draw_samples(np.random.default_rng(2), 70)


def make_sampler(samples: list[Sample], rank: int = 0, **given: int) -> DistributedBalancedBatchSampler:
    balancer = BatchBalancer(
        plan_document([3, 0], [1, 4]), dp=DP, micro_batches=MICRO_BATCHES, token_cap=60000, cost=COST
    )
    return DistributedBalancedBatchSampler(samples, balancer, rank=rank, **({"global_batch_size": BATCH} | given))


def test_each_global_batch_is_yielded_once(samples: list[Sample]) -> None:
    samplers = [make_sampler(samples, rank, seed=5) for rank in range(DP)]
    yielded = [list(sampler) for sampler in samplers]
    assert [len(of_rank) for of_rank in yielded] == [len(sampler) for sampler in samplers] == [4 * MICRO_BATCHES] * DP
    plain = list(make_sampler(samples, 0, seed=5)._order())
    for step in range(4):
        rows = slice(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        seen = sorted(i for of_rank in yielded for micro_batch in of_rank[rows] for i in micro_batch)
        assert seen == sorted(plain[step * BATCH : (step + 1) * BATCH])


def test_epochs_and_seeds_shuffle(samples: list[Sample]) -> None:
    sampler = make_sampler(samples)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(make_sampler(samples, seed=1)) != first
    in_order = make_sampler(samples, shuffle=False)
    assert {i for micro_batch in islice(in_order, MICRO_BATCHES) for i in micro_batch} <= set(range(BATCH))


@pytest.mark.parametrize("taken", [0, 1, 3, 7, 12])
def test_a_state_goes_on_exactly(samples: list[Sample], taken: int) -> None:
    sampler = make_sampler(samples, 1, seed=3, epoch=2)
    whole = list(sampler)
    walk = iter(sampler)
    list(islice(walk, taken))
    other = make_sampler(samples, 1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == whole[taken:]
    assert list(other) == whole


def test_a_state_goes_on_under_other_sizes(samples: list[Sample]) -> None:
    """At the beginning of a step every sample of the epoch comes once; inside of one it is refused."""
    first = make_sampler(samples, 0), make_sampler(samples, 1)
    walks = [iter(sampler) for sampler in first]
    seen = [i for walk in walks for micro_batch in islice(walk, 2 * MICRO_BATCHES) for i in micro_batch]
    begun = {**first[0].state_dict(), "step": 2, "micro_batch": 0, "samples": 2 * BATCH}
    for size in (BATCH - 2, BATCH + 3):
        others = [make_sampler(samples, rank, global_batch_size=size) for rank in (0, 1)]
        for other in others:
            other.load_state_dict(begun)
        after = [i for other in others for micro_batch in other for i in micro_batch]
        assert sorted({*seen, *after}) == sorted(seen + after)
        assert len(seen) + len(after) == 2 * BATCH + (len(samples) - 2 * BATCH) // size * size
    next(walks[0])
    inside = first[0].state_dict()
    assert inside["micro_batch"] == 1
    with pytest.raises(PlanError, match=f"of a step with global_batch_size {BATCH}, .* other sizes go on at the"):
        make_sampler(samples, global_batch_size=BATCH + 3).load_state_dict(inside)
    old = {name: inside[name] for name in ("seed", "epoch", "step", "micro_batch")}
    again = make_sampler(samples)
    again.load_state_dict(old)
    assert again.state_dict() == inside


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, "rank 2 of 2 replicas"),
        ({"global_batch_size": 5}, "between 6"),
        ({"global_batch_size": 71}, "70 of the data set"),
    ],
)
def test_what_is_wrong_is_said(samples: list[Sample], given: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_sampler(samples, **given)
    with pytest.raises(PlanError, match="sample 70 has 60001 tokens"):
        make_sampler([*samples, Sample(tokens=60001)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 9}, "has 4 steps"),
        ({"samples": 71}, "has 4 steps"),
        ({"seed": None}, "seed is nothing"),
    ],
)
def test_a_wrong_state_is_refused(samples: list[Sample], change: dict, message: str) -> None:
    sampler = make_sampler(samples)
    with pytest.raises(PlanError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)
