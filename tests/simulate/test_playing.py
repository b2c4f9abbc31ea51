"""The simulator against closed forms, against a plain event loop, and against its own parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import cost_of, some_placement
from random_problems import random_problem

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import (
    ChainBlock,
    Mode,
    Placement,
    Problem,
    place_in_modes,
)
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import distinct_rows, full_graph, short_graph
from mm_autoparallel.pipeline.simulate.step import Timeline, memory_timeline, simulate


def uniform(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, forward_ms: float, backward_ms: float
) -> Timeline:
    num_virtual = num_stages * num_chunks
    chain = (ChainBlock("layer", "text", num_virtual, forward_ms, backward_ms),)
    problem = Problem(
        num_stages,
        num_chunks,
        num_microbatches,
        schedule,
        chain,
        (1e12,) * num_stages,
        (0.0,) * num_stages,
        (0.0,) * num_stages,
        (0.0,) * (num_virtual - 1),
        (0.0,) * (num_virtual - 1),
    )
    return simulate(problem, Placement(((1,),) * num_virtual, (((),),) * num_virtual))


@given(st.integers(1, 8), st.integers(1, 40), st.floats(0.1, 100), st.floats(0.1, 100))
@settings(max_examples=50, deadline=None)
def test_uniform_pipelines_take_the_closed_form(num_stages: int, num_microbatches: int, f: float, b: float) -> None:
    """(m + p - 1) (f + b) for GPipe and 1F1B (Narayanan et al. 2021, section 2.2)."""
    expected = (num_microbatches + num_stages - 1) * (f + b)
    for schedule in ("gpipe", "1f1b"):
        assert uniform(schedule, num_stages, 1, num_microbatches, f, b).step_ms == pytest.approx(expected, rel=1e-9)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_interleaving_divides_the_bubble_by_the_chunks(num_stages: int, num_chunks: int, groups: int) -> None:
    """Bubble over ideal time is (p - 1) / (v m) (Narayanan et al. 2021, section 2.2); chunks of f = b = 1."""
    num_microbatches = groups * num_stages
    ideal = 2.0 * num_chunks * num_microbatches
    step = uniform("interleaved_1f1b", num_stages, num_chunks, num_microbatches, 1.0, 1.0).step_ms
    assert step == pytest.approx(ideal * (1 + (num_stages - 1) / (num_chunks * num_microbatches)))


@pytest.mark.parametrize("style", ["round", "real", "unequal"])
def test_steps_and_peaks_equal_the_oracle(style: str) -> None:
    for seed in range(150):
        problem = random_problem(seed, style)
        placement = some_placement(problem)
        if placement is None:  # fewer layers than a cap allows
            continue
        timeline, cost = simulate(problem, placement), cost_of(problem, placement)
        assert timeline.step_ms == pytest.approx(cost.step_ms, rel=1e-12)
        assert timeline.peak_memory_bytes.tolist() == pytest.approx(cost.peak_bytes, rel=1e-12)


@pytest.mark.parametrize("style", ["round", "unequal"])
def test_parts_of_a_timeline_add_up(style: str) -> None:
    for seed in range(100):
        problem = random_problem(seed, style)
        placement = some_placement(problem)
        if placement is None:
            continue
        timeline = simulate(problem, placement)
        loads, path = timeline.loads, timeline.critical_path
        idle = (
            timeline.idle_warmup_ms
            + timeline.idle_communication_ms
            + timeline.idle_imbalance_ms
            + timeline.idle_cooldown_ms
        )
        assert timeline.busy_ms + idle + loads.tail_ms == pytest.approx(np.full(problem.num_stages, timeline.step_ms))
        assert 0 <= timeline.bubble_fraction < 1
        length = (
            (path.forward * loads.forward_ms).sum()
            + (path.backward * loads.backward_ms).sum()
            + path.hop_forward @ loads.hop_forward_ms
            + path.hop_backward @ loads.hop_backward_ms
            + loads.tail_ms[path.end_stage]
        )
        assert length == pytest.approx(timeline.step_ms)
        for stage in range(problem.num_stages):
            _, held = memory_timeline(timeline, stage)
            assert held.max() == pytest.approx(timeline.peak_memory_bytes[stage])
            assert held[-1] == pytest.approx(held[0])


@given(
    st.sampled_from(["1f1b", "interleaved_1f1b", "interleaved_1f1b_low_memory"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 90),
    st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_a_shortened_run_brackets_the_full_one(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, seed: int
) -> None:
    if schedule == "1f1b":
        num_chunks = 1
    short = short_graph(schedule, num_stages, num_chunks, num_microbatches)
    full = full_graph(schedule, num_stages, num_chunks, num_microbatches)
    rng = np.random.default_rng(seed)
    num_virtual = num_stages * num_chunks
    durations, hops, tails = (
        rng.uniform(0.1, 3, 2 * num_virtual),
        rng.uniform(0, 2, 2 * num_virtual - 1),
        rng.uniform(0, 3, num_stages),
    )
    hops[-1] = 0.0

    def play(graph: object) -> tuple[float, np.ndarray]:
        ends, free = np.empty(graph.num_tasks + 1), np.empty(num_stages)  # type: ignore[attr-defined]
        arrays = (graph.stage, graph.dependency, graph.hop, graph.duration)  # type: ignore[attr-defined]
        return engine.play(*arrays, durations, hops, tails, ends, free), ends

    exact, _ = play(full)
    step, ends = play(short)
    if short.num_skipped_periods:
        low, high = engine.shifts(ends, short.window, short.previous_window)
        assert step + short.num_skipped_periods * low <= exact * (1 + 1e-9)
        assert step + short.num_skipped_periods * high >= exact * (1 - 1e-9)
        for mine, theirs in zip(short.in_flight, full.in_flight, strict=True):
            assert mine.tolist() == theirs.tolist()
    else:
        assert step == exact


def test_one_more_microbatch_and_one_slower_link_never_shorten_the_step() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        placement = some_placement(problem)
        if placement is None:
            continue
        step_ms = simulate(problem, placement).step_ms
        more = replace(problem, num_microbatches=problem.num_microbatches + 1)
        if problem.num_chunks == 1:  # a larger first group may help an interleaved schedule
            assert simulate(more, placement).step_ms >= step_ms
        slower = replace(problem, p2p_ms=tuple(p2p + 1.0 for p2p in problem.p2p_ms))
        assert simulate(slower, placement).step_ms >= step_ms


def two_stages(**more: object) -> Problem:
    chain = (
        ChainBlock("embedding", "text", 1, 1.0, 1.0, layer=False, pinned="first"),
        ChainBlock("layer", "text", 4, 1.0, 2.0, modes=(Mode("recompute", 0.0, 1.0, 0.0),)),
        ChainBlock("head", "text", 1, 1.0, 1.0, layer=False, pinned="last"),
    )
    return replace(Problem(2, 1, 4, "1f1b", chain, (1e9, 1e9), (0.0, 0.0), (0.0, 0.0), (0.0,), (0.0,)), **more)


@pytest.mark.parametrize(
    ("layers", "recompute", "words"),
    [
        (((1, 2, 0),), ((0, 0, 0),), "1 chunks"),
        (((1, 3, 0), (0, 2, 1)), ((0, 0, 0), (0, 0, 0)), "does not continue the chain"),
        (((1, 10**15, 0), (0, 2, 1)), ((0, 0, 0), (0, 0, 0)), "holds 1000000000000000 of"),
        (((1, 2, 0), (0, 1, 1)), ((0, 0, 0), (0, 0, 0)), "does not continue the chain"),
        (((1, 2, 0), (0, 2, 1)), ((0, 3, 0), (0, 0, 0)), "stage 0 holds 2 of layer and recomputes 3"),
        (((1, 2, 0), (0, 2, 1)), ((1, 0, 0), (0, 0, 0)), "recomputes 1 of embedding, which cannot be"),
        (((1, 4, 0), (0, 0, 1)), ((0, 0, 0), (0, 0, 0)), "stage 1 holds no layer"),
        (((0, 2, 0), (1, 2, 1)), ((0, 0, 0), (0, 0, 0)), "does not continue the chain"),
    ],
)
def test_a_placement_that_does_not_fit_the_chain_is_refused(
    layers: tuple[tuple[int, ...], ...], recompute: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        simulate(two_stages(), place_in_modes(two_stages(), layers, {"recompute": recompute}))


def test_a_cap_on_layers_is_kept() -> None:
    with pytest.raises(PlanError, match="max_layers_per_chunk is 2"):
        simulate(two_stages(max_layers_per_chunk=2), place_in_modes(two_stages(), ((1, 3, 0), (0, 1, 1)), {}))


def one_of_each(**more: object) -> Problem:
    """Two stages of two layers with two modes each; a forward takes 1 ms, a backward 2 ms."""
    modes = (Mode("recompute", 0.0, 1.0, 0.0), Mode("offload", 0.25, 0.5, 0.0, 0.0, host_bytes=8.0))
    chain = (
        ChainBlock("first", "text", 2, 1.0, 2.0, modes=modes, recompute_group="all"),
        ChainBlock("second", "text", 2, 1.0, 2.0, modes=modes, recompute_group="all"),
    )
    problem = Problem(2, 1, 4, "1f1b", chain, (1e9, 1e9), (0.0, 0.0), (0.0, 0.0), (0.0,), (0.0,))
    return replace(problem, **{"host_ms_per_byte": (0.125, 0.5), **more})


def test_times_are_the_larger_of_compute_and_host_link() -> None:
    problem = one_of_each(stage_time_factor=(1.0, 3.0))
    counts = {"offload": ((1, 0), (0, 2)), "recompute": ((1, 0), (0, 0))}
    loads = simulate(problem, place_in_modes(problem, ((2, 0), (0, 2)), counts)).loads
    assert loads.forward_ms.ravel().tolist() == [2.25, max(3 * 2.5, 2 * 8 * 0.5)]
    assert loads.backward_ms.ravel().tolist() == [4 + 1 + 0.5, max(3 * 5.0, 8.0)]
    assert loads.recompute_ms.ravel().tolist() == [1.5, 3.0]
    slow = simulate(replace(problem, host_ms_per_byte=(1.0, 1.0)), place_in_modes(problem, ((2, 0), (0, 2)), counts))
    assert slow.loads.forward_ms.ravel().tolist() == [8.0, 16.0]
    assert slow.loads.backward_ms.ravel().tolist() == [8.0, 16.0]
    scaled = tuple(replace(block, microbatch_scale=(1.0, 2.0, 1.0, 1.0)) for block in problem.chain)
    by_class = simulate(replace(problem, chain=scaled), place_in_modes(problem, ((2, 0), (0, 2)), counts)).loads
    assert by_class.forward_ms.tolist() == [[2.25, 4.5], [8.0, 16.0]]


@pytest.mark.parametrize(
    ("layers", "modes", "words"),
    [
        (
            ((2, 0), (0, 2)),
            (((2, 1), (0, 0)), ((0, 0), (0, 0))),
            'recomputes 2 and runs 1 in mode "offload": it must be',
        ),
        (((2, 0), (0, 2)), (((0, 3), (0, 0)), ((0, 0), (0, 0))), 'holds 2 of first and runs 3 in mode "offload"'),
        (((2, 0), (0, 2)), (((-1, 0), (0, 0)), ((0, 0), (0, 0))), "recomputes -1"),
        (((2, 0), (0, 2)), (((1,), (0, 0)), ((0, 0), (0, 0))), "counts 1 modes of first, which has 2"),
        (((2, 1), (0, 1)), (((0, 2), (1, 0)), ((0, 0), (0, 0))), "recomputes second before all of first"),
        (((2, 1), (0, 1)), (((0, 1), (0, 1)), ((0, 0), (0, 0))), 'runs second in mode "offload" before all of first'),
    ],
)
def test_modes_that_a_placement_cannot_have_are_refused(
    layers: tuple[tuple[int, ...], ...], modes: tuple[tuple[tuple[int, ...], ...], ...], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        simulate(one_of_each(), Placement(layers, modes))


def test_traffic_without_a_link_is_refused() -> None:
    problem = one_of_each(host_ms_per_byte=())
    with pytest.raises(JobError, match='block "first": mode "offload" moves 8 bytes'):
        simulate(problem, place_in_modes(problem, ((2, 0), (0, 2)), {}))


def test_layers_take_modes_in_order_across_blocks() -> None:
    problem = one_of_each()
    placement = placement_from_modalities(problem, {"text": (3, 1)}, {"text": (1, 0)}, {"text": {"offload": (2, 1)}})
    assert placement == Placement(((2, 1), (0, 1)), (((1, 1), (0, 1)), ((0, 0), (0, 1))))
    simulate(problem, placement)
    with pytest.raises(PlanError, match="offload of text: stage 1 runs 2 in this mode, and 1 of its text layers can"):
        placement_from_modalities(problem, {"text": (3, 1)}, {}, {"text": {"offload": (0, 2)}})


def test_distinct_rows_are_those_of_numpy_whether_or_not_they_fit_into_one_number() -> None:
    rng = np.random.default_rng(0)
    for most in (2, 9, 2**30):
        for _ in range(20):
            rows = rng.integers(0, most, size=(40, 3)) // rng.integers(1, most, size=3)
            np.testing.assert_array_equal(distinct_rows(rows), np.unique(rows, axis=0))
