"""Bounds never lie: against brute force on seeded problems, and against every placement that the simulator plays."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
from nouns import brute_force
from random_modes import random_modes_problem
from random_problems import random_problem

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement.bounds.overflow import least_overflow_bytes
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.every import list_placements
from mm_autoparallel.pipeline.placement.paths.average_path import average_path
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import full_graph, short_graph
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

STYLES = ("round", "real", "unequal")
PARTED = tuple(rule for rule in SCHEDULES.values() if rule.splits and rule.given_by == "rule")


def varied_problem(seed: int) -> Problem:
    """A random problem, sometimes with a schedule of chunks on one chunk, or with micro-batches of any durations."""
    problem = random_problem(seed, STYLES[seed % 3])
    rng = random.Random(seed)
    if problem.num_chunks == 1 and rng.random() < 0.2:
        problem = replace(problem, schedule=rng.choice(["interleaved_1f1b", "interleaved_1f1b_low_memory"]))
    if rng.random() < 0.2:
        scales = [tuple(rng.choice([0.3, 1.0, 2.0]) for _ in range(problem.num_microbatches)) for _ in problem.chain]
        chain = (replace(b, microbatch_scale=s) for b, s in zip(problem.chain, scales, strict=True))
        problem = replace(problem, chain=tuple(chain))
    return problem


def with_more_memory(problem: Problem, more_bytes: float) -> Problem:
    return replace(problem, memory_limit_bytes=tuple(limit + more_bytes for limit in problem.memory_limit_bytes))


@pytest.mark.parametrize(
    "first", [10_000, *(pytest.param(first, marks=pytest.mark.nightly) for first in (10_100, 10_200, 10_300))]
)
def test_no_bound_is_above_the_optimum(first: int) -> None:
    """And one that calls a problem infeasible is right, by just as many bytes as it says."""
    num_seen, num_enough, tightness = 0, 0, []
    for seed in range(first, first + 100):
        problem = varied_problem(seed)
        best_ms, _ = brute_force(problem)
        assert work_bound_ms(problem) <= best_ms * (1 + 1e-9), f"seed {seed}"
        for sharpen in (False, True):
            bound = bound_step(problem, sharpen)
            assert bound.step_ms <= best_ms * (1 + 1e-9), f"seed {seed}, sharpen {sharpen}"
        if np.isfinite(best_ms):
            enough_ms = random.Random(seed).uniform(0.9, 1.0) * best_ms
            low = bound_step(problem, enough_ms=enough_ms).step_ms
            known_ms = bound_step(problem).step_ms
            assert min(known_ms, enough_ms) * (1 - 1e-4) <= low <= best_ms * (1 + 1e-9), f"seed {seed}"
            num_enough += low == enough_ms < known_ms
            tightness.append(bound.step_ms / best_ms)
        elif bound.reason:
            num_seen += 1
            if bound.overflow_bytes:  # a byte or two: what bounds allow for rounding
                less = with_more_memory(problem, bound.overflow_bytes * 0.999999 - 2.0)
                assert brute_force(less)[1] is None, f"seed {seed}"
            if bound.exact:
                enough = with_more_memory(problem, bound.overflow_bytes + 2.0)
                assert brute_force(enough)[1] is not None, f"seed {seed}"
    assert num_seen > 20  # infeasible problems that needed no placing
    assert num_enough > 5  # those whose bound is above what was enough
    assert np.mean(tightness) > 0.8


@pytest.mark.parametrize(
    ("first", "number"), [(20_000, 60), *(pytest.param(n, 600, marks=pytest.mark.nightly) for n in (21_000, 22_000))]
)
def test_nor_is_one_of_chunks_whose_layers_have_several_modes(first: int, number: int) -> None:
    """Half of them limit what lies on hosts."""
    with_chunks = (p for p in map(random_modes_problem, range(first, 10**9)) if p.num_chunks > 1)
    tightness = []
    for problem in islice(with_chunks, number):
        best_ms, _ = brute_force(problem)
        for sharpen in (False, True):
            bound = bound_step(problem, sharpen)
            assert bound.step_ms <= best_ms * (1 + 1e-9)
        if np.isfinite(best_ms):
            tightness.append(bound.step_ms / best_ms)
    assert np.mean(tightness) > 0.75


def parted_problem(seed: int) -> Problem:
    """A random problem of at most six virtual stages under an order by a rule that parts backwards."""
    rng = random.Random(f"parted {seed}")
    rule = PARTED[seed % len(PARTED)]
    drawn = (random_modes_problem(rng.randrange(10**9)) for _ in count())
    problem = next(p for p in drawn if (p.num_chunks == 2) == rule.interleaved and p.num_virtual_stages <= 6)
    num_microbatches = max(problem.num_microbatches, rule.least_rounds * problem.num_stages)
    if not rule.v_shaped and rule.interleaved:
        num_microbatches += -num_microbatches % problem.num_stages
    chain = []
    for block in problem.chain:
        weight_ms = block.backward_ms * rng.choice([0.0, 0.3, 0.5, 0.6])
        extra_ms, kept = rng.choice([0.0, 0.1 * weight_ms]), rng.choice([None, 0.5 * block.activation_bytes])
        of_weights = {"backward_weight_ms": weight_ms, "split_extra_ms": extra_ms, "kept_for_weight_bytes": kept}
        chain.append(replace(block, microbatch_scale=(), **of_weights))
    overlap_fraction = rng.choice([0.0, 0.5, 1.0]) if rule.pairs else 0.0
    of_order = {"num_microbatches": num_microbatches, "pair_overlap_fraction": overlap_fraction}
    return replace(problem, schedule=rule.name, chain=tuple(chain), **of_order)


@pytest.mark.parametrize(
    ("first", "number"), [(0, 90), *(pytest.param(n, 1_000, marks=pytest.mark.nightly) for n in (1_000, 4_000))]
)
def test_what_sums_say_is_over_is_over_in_every_placement(first: int, number: int) -> None:
    """Whatever the modes, chunks, hosts and orders: no placement exceeds its memory by less."""
    num_over, tightness = 0, []
    for seed in range(first, first + number):
        problem = (varied_problem, random_modes_problem, parted_problem)[seed % 3](seed)
        tight = with_more_memory(problem, -0.7 * min(problem.memory_limit_bytes))
        try:
            placements = list_placements(tight, 2_000)
        except JobError:  # too few micro-batches for its schedule
            continue
        if not placements:
            continue
        limits = np.array(tight.memory_limit_bytes)
        over = min(np.max(simulate(tight, one).peak_memory_bytes - limits) for one in placements)
        least = least_overflow_bytes(tight)
        assert least <= max(over, 0.0) + 1e-6 * np.max(limits), f"seed {seed}"
        num_over += over > 0.0
        if over > 0.0:
            tightness.append(least / over)
    assert num_over > number / 4
    assert np.mean(tightness) > 0.3  # small stages hold few blocks, which sums share out in fractions


@pytest.mark.parametrize(
    ("first", "number"), [(0, 120), *(pytest.param(n, 2_000, marks=pytest.mark.nightly) for n in (1_000, 4_000))]
)
def test_nor_is_one_of_orders_that_part_backwards(first: int, number: int) -> None:
    """Whatever their chunks and pairs; and what memory enforces is part of it."""
    num_misfits, gains = 0, []
    for seed in range(first, first + number):
        problem = parted_problem(seed)
        try:
            placements = list_placements(problem, 2_000)
        except JobError:  # too few micro-batches for its schedule
            continue
        steps_ms, peaks = [np.inf], []
        for placement in placements or ():
            timeline = simulate(problem, placement)
            peaks.append((timeline.peak_memory_bytes, timeline.peak_host_bytes))
            if not find_misfits(problem, *peaks[-1]):
                steps_ms.append(timeline.step_ms)
        if not placements:
            continue
        for sharpen in (False, True):
            bound = bound_step(problem, sharpen)
            assert bound.step_ms <= min(steps_ms) * (1 + 1e-9), f"seed {seed}, sharpen {sharpen}"
        if bound.overflow_bytes:
            less = with_more_memory(problem, bound.overflow_bytes * 0.999999 - 2.0)
            assert all(find_misfits(less, *each) for each in peaks), f"seed {seed}"
        num_misfits += bool(bound.reason)
        if not bound.reason:
            gains.append(bound.step_ms / work_bound_ms(problem))
    assert num_misfits > number // 30
    assert np.mean(gains) > 1.05


def test_a_cheap_mode_frees_no_more_than_it_can() -> None:
    """A mode that frees a tenth of a layer for a twentieth of the time of the one that frees all of it: what it cannot
    free the other must, at its own price (the best step takes 108)."""
    modes = (Mode("activation", 0.0, 0.05, 9.0), Mode("recompute", 0.0, 1.0, 0.0))
    layer, hops = ChainBlock("layer", "text", 8, 1.0, 2.0, activation_bytes=10.0, modes=modes), (0.0,) * 3
    problem = replace(uniform(2, 8, "interleaved_1f1b"), num_chunks=2, chain=(layer,), p2p_ms=hops)
    problem = replace(problem, p2p_ms_per_byte=hops, memory_limit_bytes=(60.0, 60.0))
    assert 102.5 < bound_step(problem).step_ms < bound_step(problem, sharpen=True).step_ms < 108.0


def test_small_layers_before_the_main_kind_spare_it_no_chunk_for_nothing() -> None:
    """Four small layers may fill virtual stages alone; then fewer are left for the others, whose bubble is longer. And
    each chunk behind them holds a layer, however many micro-batches it has in flight (the best step takes 60.04)."""
    small, hops = ChainBlock("small", "vision", 4, 0.01, 0.0), (0.0,) * 5
    layer = ChainBlock("layer", "text", 4, 1.0, 2.0, activation_bytes=10.0, modes=(Mode("recompute", 0.0, 1.0, 0.0),))
    problem = replace(uniform(2, 8, "interleaved_1f1b"), num_chunks=3, chain=(small, layer), p2p_ms=hops)
    problem = replace(problem, p2p_ms_per_byte=hops, memory_limit_bytes=(60.0, 60.0))
    assert 52.0 < bound_step(problem, sharpen=True).step_ms < 60.04


def uniform(num_stages: int, num_microbatches: int, schedule: str = "1f1b") -> Problem:
    return Problem(
        num_stages=num_stages,
        num_chunks=1,
        num_microbatches=num_microbatches,
        schedule=schedule,
        chain=(ChainBlock("layer", "text", num_stages, 1.0, 2.0),),
        memory_limit_bytes=(1.0,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=(0.0,) * (num_stages - 1),
        p2p_ms_per_byte=(0.0,) * (num_stages - 1),
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 4), (2, 2), (4, 8), (8, 64)])
def test_one_layer_a_stage_is_bounded_by_its_closed_form(num_stages: int, num_microbatches: int) -> None:
    expected_ms = (num_microbatches + num_stages - 1) * 3.0
    assert bound_step(uniform(num_stages, num_microbatches)).step_ms == pytest.approx(expected_ms, rel=1e-4)


def test_enforced_recompute_is_part_of_the_bound() -> None:
    """Two stages of two layers; the first keeps two micro-batches in flight and has room for one layer's alone."""
    layer = ChainBlock("layer", "text", 4, 1.0, 2.0, activation_bytes=10.0, modes=(Mode("recompute", 0.0, 1.0, 0.0),))
    problem = replace(uniform(2, 64), chain=(layer,), memory_limit_bytes=(20.0, 20.0))
    free = bound_step(with_more_memory(problem, 100.0)).step_ms
    assert free == pytest.approx(64 * 6.0 + 6.0, rel=1e-4)
    assert bound_step(problem).step_ms == pytest.approx(brute_force(problem)[0], rel=1e-2)
    assert bound_step(problem).step_ms > free * 1.05


def test_the_overflow_names_the_stage_that_binds() -> None:
    head = ChainBlock("head", "text", 1, 1.0, 2.0, static_bytes=7.5e9, layer=False, pinned="last")
    layer = ChainBlock("layer", "text", 2, 1.0, 2.0, static_bytes=1e9)
    problem = replace(uniform(2, 4), chain=(layer, head), memory_limit_bytes=(8e9, 8e9))
    bound = bound_step(problem)
    assert bound.overflow_bytes == pytest.approx(0.5e9, rel=1e-6)
    assert "stage 1 is 0.5 GB over its 8 GB" in bound.reason


def test_too_few_layers_are_said_so() -> None:
    problem = replace(uniform(4, 4), chain=(ChainBlock("layer", "text", 3, 1.0, 2.0),))
    assert "at least 4 layers" in bound_step(problem).reason


@pytest.mark.parametrize("classes", [(), (0, 1, 1, 0, 2, 0, 1, 2)])
@pytest.mark.parametrize(
    ("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("interleaved_1f1b_low_memory", 2)]
)
def test_the_average_path_is_never_longer_than_the_step(
    schedule: str, num_chunks: int, classes: tuple[int, ...]
) -> None:
    """Whatever the times: it was found for others."""
    num_stages, num_microbatches, rng = 3, 8, np.random.default_rng(7)
    num_classes, num_virtual = max(classes, default=0) + 1, num_stages * num_chunks
    path = average_path(
        schedule,
        num_stages,
        num_chunks,
        num_microbatches,
        classes,
        np.ones(num_classes),
        np.full(num_classes, 2.0),
        1,
        0.1,
    )
    assert path is not None
    graph = full_graph(schedule, num_stages, num_chunks, num_microbatches, classes)
    ends, free = np.empty(graph.num_tasks + 1), np.empty(num_stages)
    for _ in range(50):
        forward, backward = rng.exponential(size=(2, num_virtual, num_classes))
        hops, tails = np.append(rng.exponential(size=2 * num_virtual - 2), 0.0), rng.exponential(size=num_stages)
        step = engine.play(
            graph.stage,
            graph.dependency,
            graph.hop,
            graph.duration,
            np.concatenate([forward.ravel(), backward.ravel()]),
            hops,
            tails,
            ends,
            free,
        )
        length = np.sum(path.forward_count * forward) + np.sum(path.backward_count * backward)
        length += (
            path.hop_forward_count @ hops[: num_virtual - 1] + path.hop_backward_count @ hops[num_virtual - 1 : -1]
        )
        assert length + path.end_fraction @ tails <= step * (1 + 1e-9)


def test_the_average_path_leaves_no_cheap_place() -> None:
    """4 stages, 4 chunks, 16 micro-batches: spread evenly, work counts 4.19 times, and less than 4.09 nowhere."""
    path = average_path("interleaved_1f1b", 4, 4, 16, (), np.array([1.0]), np.array([2.0]), 0.0, 0.0)
    assert path is not None
    assert np.min(path.forward_count + 2 * path.backward_count) / 3 > 4.09


@pytest.mark.parametrize("schedule", [name for name, s in SCHEDULES.items() if s.periodic and s.interleaved])
@pytest.mark.parametrize("num_microbatches", [64, 67])
def test_a_shortened_run_has_as_much_in_flight(schedule: str, num_microbatches: int) -> None:
    """Bounds take in-flight counts from it."""
    shape = (schedule, 4, 3, num_microbatches)
    assert short_graph(*shape).num_microbatches < num_microbatches
    for short, full in zip(short_graph(*shape).in_flight, full_graph(*shape).in_flight, strict=True):
        assert np.array_equal(short, full)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_search_that_is_stopped_waits_for_no_bound(num_chunks: int) -> None:
    """What is said then is true all the same: the work, and nothing of what fits."""
    schedule, hops = "interleaved_1f1b" if num_chunks > 1 else "1f1b", (0.0,) * (8 * num_chunks - 1)
    layer = ChainBlock("layer", "text", 16, 1.0, 2.0, static_bytes=1e9)
    whole = replace(uniform(8, 16), num_chunks=num_chunks, schedule=schedule, chain=(layer,), p2p_ms=hops)
    roomy = replace(whole, p2p_ms_per_byte=hops, memory_limit_bytes=(1e12,) * 8)
    crowded = replace(roomy, memory_limit_bytes=(1.5e9,) * 8)
    assert bound_step(roomy).step_ms > work_bound_ms(roomy)
    assert bound_step(crowded).reason
    for problem in (roomy, crowded) if num_chunks == 1 else (roomy,):  # memory of chunks is looked at in no time
        bound = bound_step(problem, should_stop=lambda: True)
        assert (bound.step_ms, bound.reason) == (work_bound_ms(problem), "")


def test_winding_paths_are_no_longer_than_the_step_and_close_to_it() -> None:
    """Stages of fixed layers, some alike, behind slow hops: what 1F1B takes is a path that goes back and forth."""
    ratios = []
    for seed in range(40):
        rng = random.Random(f"winding {seed}")
        num_stages, num_microbatches = rng.randint(3, 7), rng.choice((4, 9, 60, 100))
        speeds = [rng.choice((1.0, 1.0, 1.0, 0.7, 0.4)) for _ in range(num_stages)]
        tails_ms = [rng.choice((0.0, 1.0)) for _ in speeds]
        chain = tuple(
            ChainBlock(f"b{s}", "text", 1, 5.0 * speed, 10.0 * speed, tail_ms=tails_ms[s], within=(s, s + 1))
            for s, speed in enumerate(speeds)
        )
        hops_ms = tuple(rng.choice((0.0, 0.5, 1.5)) for _ in range(num_stages - 1))
        zeros = (0.0,) * num_stages
        problem = Problem(
            num_stages, 1, num_microbatches, "1f1b", chain, (1.0,) * num_stages, zeros, zeros, hops_ms, zeros[1:]
        )
        (only,) = list_placements(problem) or ()
        step_ms, bound_ms = simulate(problem, only).step_ms, bound_step(problem).step_ms
        assert bound_ms <= step_ms * (1 + 1e-9), f"seed {seed}"
        ratios.append(bound_ms / step_ms)
    assert np.median(ratios) > 0.9999
    assert np.mean(ratios) > 0.99
