"""Steps under micro-batches that all differ: as `simulate` plays them, never below the step of mean durations, and what
that bound does not say."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.simulate.unequal import list_modalities, prepare

NUM_PLANS = 500


def random_plan(rng: random.Random) -> tuple[Problem, Placement]:
    """A chain of two modalities in some schedule, layers dealt at random, some in a mode that moves bytes."""
    schedule = rng.choice(("1f1b", "1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zbv", "dualpipev"))
    num_chunks = 1 if schedule in ("1f1b", "gpipe", "zb_h1") else 2
    num_stages = rng.choice((1, 2, 3, 4)) if num_chunks == 1 else rng.choice((2, 3))
    num_microbatches = num_stages * rng.choice((2, 3))
    num_virtual = num_stages * num_chunks
    counts = [rng.randint(1, 3) for _ in range(num_virtual)]
    num_vision = rng.randint(1, sum(counts) - 1) if sum(counts) > 1 else 0
    sizes = {"vision": num_vision, "text": sum(counts) - num_vision}

    def block(name: str) -> ChainBlock:
        backward_ms = rng.uniform(0.0, 3.0)
        host = Mode("offload", extra_backward_ms=rng.uniform(0, 1), host_bytes=rng.choice((0.0, rng.uniform(0, 3))))
        return ChainBlock(
            name=name,
            modality=name,
            count=sizes[name],
            forward_ms=rng.uniform(0.2, 2.0),
            backward_ms=backward_ms,
            backward_weight_ms=rng.uniform(0.0, backward_ms),
            activation_bytes=1.0,
            modes=(host,),
            tail_ms=rng.uniform(0, 0.3),
            output_bytes=rng.uniform(0, 2),
        )

    chain = tuple(block(name) for name in sizes if sizes[name])
    problem = Problem(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        chain=chain,
        memory_limit_bytes=(1e9,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=tuple(rng.uniform(0, 1) for _ in range(num_stages)),
        p2p_ms=tuple(rng.uniform(0, 0.2) for _ in range(num_virtual - 1)),
        p2p_ms_per_byte=(0.1,) * (num_virtual - 1),
        host_ms_per_byte=(1.0,) * num_stages,
        stage_time_factor=tuple(rng.uniform(0.8, 1.5) for _ in range(num_stages)),
        pair_overlap_fraction=rng.choice((0.0, 0.4)) if find_schedule(schedule, num_chunks).pairs else 0.0,
    )
    left, layers, modes = [block.count for block in chain], [], []
    for count in counts:
        row = []
        for e in range(len(left)):
            taken = min(count - sum(row), left[e])
            row.append(taken)
            left[e] -= taken
        layers.append(tuple(row))
        modes.append(tuple((rng.randint(0, taken),) for taken in row))
    return problem, Placement(tuple(layers), tuple(modes))


def scaled(problem: Problem, factors: np.ndarray) -> Problem:
    """The problem whose blocks have these factors, [modalities, M]."""
    rows = dict(zip(list_modalities(problem), factors.tolist(), strict=True))
    chain = tuple(replace(block, microbatch_scale=tuple(rows[block.modality])) for block in problem.chain)
    return replace(problem, chain=chain)


def test_steps_are_those_that_simulate_plays() -> None:
    rng, draw = random.Random(3), np.random.default_rng(3)
    schedules = set()
    for _ in range(60):
        problem, placement = random_plan(rng)
        schedules.add(problem.schedule)
        factors = draw.lognormal(0.0, 0.7, (2, len(list_modalities(problem)), problem.num_microbatches))
        steps = prepare(problem, placement).play(factors)
        told = [simulate(scaled(problem, one), placement).step_ms for one in factors]
        assert steps == pytest.approx(told, rel=1e-12)
    assert len(schedules) == 6


def test_the_mean_step_is_at_least_that_of_the_mean_durations() -> None:
    """Jensen, position by position: of random plans, replicas, spreads and light or heavy ends."""
    rng, draw = random.Random(11), np.random.default_rng(11)
    looser = 0
    for _ in range(NUM_PLANS):
        problem, placement = random_plan(rng)
        ready, num_replicas = prepare(problem, placement), rng.choice((1, 2, 3))
        shape = (6, num_replicas, len(list_modalities(problem)), problem.num_microbatches)
        ends = np.linspace(-1, 1, problem.num_microbatches) ** 2 * rng.uniform(-0.5, 0.5)
        factors = draw.lognormal(0.0, rng.uniform(0.05, 1.0), shape) * (1 + ends)
        steps = [ready.play(batch).max() for batch in factors]
        at_means = ready.play(factors.mean(axis=0)).max()
        assert np.mean(steps) >= at_means * (1 - 1e-12)
        looser += np.mean(steps) > at_means * 1.001
    assert looser > NUM_PLANS / 2  # else nothing was tried


def one_each(
    num_stages: int, num_microbatches: int, forward_ms: float, backward_ms: float
) -> tuple[Problem, Placement]:
    block = ChainBlock("layer", "text", num_stages, forward_ms, backward_ms)
    none = (0.0,) * (num_stages - 1)
    every = (0.0,) * num_stages
    problem = Problem(
        num_stages, 1, num_microbatches, "1f1b", (block,), (1.0,) * num_stages, every, every, p2p_ms=none,
        p2p_ms_per_byte=none,
    )  # fmt: skip
    return problem, Placement(((1,),) * num_stages, (((),),) * num_stages)


def test_equal_micro_batches_are_no_bound_where_positions_differ() -> None:
    """8 stages, 16 micro-batches, F = 1, B = 2: 69.0 where all are equal, and 68.7 of the same total with four light
    ones at each end. So the step of equal micro-batches bounds nothing where a policy puts light ones at the ends: E[d]
    is to be taken position by position."""
    ready = prepare(*one_each(8, 16, 1.0, 2.0))
    equal = np.ones((1, 1, 16))
    light_ends = np.array([[[0.9] * 4 + [1.1] * 8 + [0.9] * 4]])
    assert light_ends.sum() == pytest.approx(equal.sum())
    assert ready.play(equal)[0] == pytest.approx(69.0)
    assert ready.play(light_ends)[0] == pytest.approx(68.7)


def test_shorter_durations_shorten_a_step_by_no_more_than_they_are_shorter() -> None:
    """What carries a bound of steps of mean samples over to batches: T(f d) >= min(1, f) T(d), hops and tails as they
    are."""
    rng, draw = random.Random(5), np.random.default_rng(5)
    for _ in range(100):
        problem, placement = random_plan(rng)
        ready = prepare(problem, placement)
        factors = draw.uniform(0.3, 1.5, len(list_modalities(problem)))
        ones = np.ones((1, len(factors), problem.num_microbatches))
        step_ms, changed_ms = ready.play(ones)[0], ready.play(ones * factors[None, :, None])[0]
        assert changed_ms >= min(1.0, *factors) * step_ms * (1 - 1e-12)
        assert changed_ms <= max(1.0, *factors) * step_ms * (1 + 1e-12)
