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


def make_sampler(
    samples: list[Sample], rank: int = 0, dp: int = DP, micro_batches: int = MICRO_BATCHES, **given: int
) -> DistributedBalancedBatchSampler:
    balancer = BatchBalancer(
        plan_document([3, 0], [1, 4]), dp=dp, micro_batches=micro_batches, token_cap=60000, cost=COST
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


def test_each_iterator_has_its_own_place(samples: list[Sample]) -> None:
    sampler = make_sampler(samples)
    whole = list(sampler)
    assert next(iter(sampler)) == whole[0]
    assert list(sampler) == whole
    one, other = iter(sampler), iter(sampler)
    assert [next(one), next(other), next(other), next(one)] == [whole[0], whole[0], whole[1], whole[1]]
    assert next(other) == whole[2]
    assert (sampler.state_dict()["step"], sampler.state_dict()["micro_batch"]) == (1, 0)
    assert (list(one), list(other)) == (whole[2:], whole[3:])


def test_a_loaded_state_goes_to_the_iterator_that_is_read_first(samples: list[Sample]) -> None:
    """A DataLoader with workers asks for two iterators and reads the second."""
    sampler = make_sampler(samples)
    whole = list(sampler)
    list(islice(sampler, 5))
    other = make_sampler(samples)
    other.load_state_dict(sampler.state_dict())
    assert other.state_dict() == sampler.state_dict()
    unread, read = iter(other), iter(other)
    assert list(read) == whole[5:]
    assert list(unread) == list(other) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_peek_into_a_loader_loses_nothing(samples: list[Sample], workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    whole = list(make_sampler(samples))
    sampler = make_sampler(samples)
    loader = data.DataLoader(range(len(samples)), batch_sampler=sampler, collate_fn=list, num_workers=workers)
    assert next(iter(loader)) == whole[0]
    assert list(loader) == whole
    begun = make_sampler(samples)
    list(islice(begun, 4))
    sampler.load_state_dict(begun.state_dict())
    assert list(loader) == whole[4:]
    assert list(loader) == whole


def test_an_epoch_that_is_over_is_not_repeated(samples: list[Sample]) -> None:
    sampler = make_sampler(samples, seed=3)
    list(sampler)
    state = sampler.state_dict()
    assert (state["epoch"], state["step"], state["micro_batch"]) == (0, sampler.steps_per_epoch, 0)
    trained = []
    other = make_sampler(samples)
    other.load_state_dict(state)
    for epoch in range(state["epoch"], 2):
        other.set_epoch(epoch)
        trained += list(other)
    assert trained == list(make_sampler(samples, seed=3, epoch=1))
    later = make_sampler(samples)
    later.load_state_dict(state)
    later.set_epoch(1)
    assert (later.state_dict()["epoch"], later.state_dict()["step"]) == (1, 0)
    assert list(later) == trained


OTHER_SIZES = (
    {"dp": 3, "global_batch_size": 12},
    {"dp": 1},
    {"micro_batches": 2},
    {"global_batch_size": 20},
    {"global_batch_size": 7, "dp": 1},
)


def take(samplers: list[DistributedBalancedBatchSampler], number: int) -> list[int]:
    """The samples of so many micro-batches of each replica."""
    return [i for sampler in samplers for micro_batch in islice(sampler, number) for i in micro_batch]


@pytest.mark.parametrize("sizes", OTHER_SIZES)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_other_sizes_go_on_at_the_same_sample(samples: list[Sample], sizes: dict[str, int], steps: int) -> None:
    """And back, so that a step of the one size begins where none of the other would."""
    samplers = [make_sampler(samples, rank, seed=3, epoch=2) for rank in range(DP)]
    order, trained = samplers[0]._order(), take(samplers, steps * MICRO_BATCHES)
    assert sorted(trained) == sorted(order[: steps * BATCH])
    (state, other_state) = (sampler.state_dict() for sampler in samplers)
    assert state == other_state
    others = [make_sampler(samples, rank, **sizes) for rank in range(sizes.get("dp", DP))]
    for other in others:
        other.load_state_dict(state)
    trained += take(others, sizes.get("micro_batches", MICRO_BATCHES))
    assert sorted(trained) == sorted(order[: len(trained)])
    state = others[0].state_dict()
    for sampler in samplers:
        sampler.load_state_dict(state)
    trained += [i for sampler in samplers for micro_batch in sampler for i in micro_batch]
    assert sorted(trained) == sorted(order[: len(trained)])
    assert len(samples) - len(trained) < BATCH


@pytest.mark.parametrize("sizes", OTHER_SIZES)
def test_other_sizes_inside_a_step_are_refused(samples: list[Sample], sizes: dict[str, int]) -> None:
    sampler = make_sampler(samples)
    take([sampler], MICRO_BATCHES + 1)
    with pytest.raises(PlanError, match="inside a step of 16 samples over 2 replicas of 3 micro-batches, behind micro"):
        make_sampler(samples, **sizes).load_state_dict(sampler.state_dict())


def test_a_state_without_sizes_is_read(samples: list[Sample]) -> None:
    sampler = make_sampler(samples, 1)
    sampler.load_state_dict({"seed": 3, "epoch": 2, "step": 2, "micro_batch": 1})
    assert list(sampler) == list(make_sampler(samples, 1, seed=3, epoch=2))[2 * MICRO_BATCHES + 1 :]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, "rank 2 of 2 replicas"),
        ({"rank": None}, "rank is nothing"),
        ({"seed": -1}, "seed is -1"),
        ({"epoch": -1}, "epoch is -1"),
        ({"global_batch_size": 8.0}, "global_batch_size is 8.0; a whole number"),
        ({"global_batch_size": 5}, "between 6"),
        ({"global_batch_size": 71}, "70 of the data set"),
    ],
)
def test_what_is_wrong_is_said(samples: list[Sample], given: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_sampler(samples, **given)
    with pytest.raises(PlanError, match="sample 70 has 60001 tokens"):
        make_sampler([*samples, Sample(tokens=60001)])
    with pytest.raises(PlanError, match="epoch is -1"):
        make_sampler(samples).set_epoch(-1)
    with pytest.raises(PlanError, match="state of the sampler is nothing"):
        make_sampler(samples).load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="taken with shuffle=True, and this one has shuffle=False"):
        make_sampler(samples, shuffle=False).load_state_dict(make_sampler(samples).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 9}, "has 4 steps"),
        ({"seed": None}, "seed is nothing"),
        ({"replicas": None}, "replicas is nothing"),
        ({"step": 2}, "0 samples passed by step 2 of 16 samples"),
        ({"step": 7, "passed_samples": 71, "global_batch_size": 10}, "71 samples passed .* the data set has 70"),
    ],
)
def test_a_wrong_state_is_refused(samples: list[Sample], change: dict, message: str) -> None:
    sampler = make_sampler(samples)
    with pytest.raises(PlanError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)
