"""Backwards in two parts, pairs, and orders that come with a problem or a placement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nouns import some_placement
from split_problems import play_by_the_rules, random_orders, random_split_problem

from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem
from mm_autoparallel.pipeline.problem_file import problem_document, read_problem
from mm_autoparallel.pipeline.simulate.step import memory_timeline, part_pairs, simulate, tasks_on_path
from mm_autoparallel.reports.critical_path import describe_path, share_path
from mm_autoparallel.reports.tables import share_time
from mm_autoparallel.reports.timeline import render_timeline
from mm_autoparallel.reports.trace import render_trace


def even_placement(problem: Problem, with_modes: bool) -> Placement:
    """About as many segments on every virtual stage; with_modes: one layer of each in the first mode."""
    segments = cut_into_segments(problem)
    boundaries = np.linspace(0, segments.num_segments, problem.num_virtual_stages + 1).astype(int).tolist()
    lanes = [[int(with_modes and lane == 0) for lane in range(segments.num_lanes)] for _ in range(len(boundaries) - 1)]
    return segments.placement(boundaries, lanes)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_steps_spans_and_peaks_of_random_orders_are_those_of_the_rules(num_chunks: int) -> None:
    for seed in range(150):
        num_stages, num_microbatches = 1 + seed % 4, 1 + seed % 5
        problem = random_split_problem(seed, "given", num_stages, num_chunks, num_microbatches)
        placement = even_placement(problem, with_modes=seed % 3 > 0)
        timeline = simulate(problem, placement)
        step, span, peaks = play_by_the_rules(problem, placement, problem.orders, v_shaped=False)
        assert timeline.step_ms == pytest.approx(step, rel=1e-12)
        assert timeline.span_ms == pytest.approx(span, rel=1e-12)
        assert timeline.peak_memory_bytes.tolist() == pytest.approx(peaks, rel=1e-12)
        loads, path = timeline.loads, timeline.critical_path
        length = path.hop_forward @ loads.hop_forward_ms + path.hop_backward @ loads.hop_backward_ms
        length += (path.forward * loads.forward_ms).sum() + (path.backward * loads.backward_ms).sum()
        length += (path.input * loads.input_ms).sum() + (path.weight * loads.weight_ms).sum()
        length += path.pairs @ loads.pair_ms + loads.tail_ms[path.end_stage]
        assert length == pytest.approx(timeline.step_ms)
        shares = share_path(timeline)
        told = sum(stage.time_ms for stage in shares.stages) + shares.transfers_ms + shares.tail_ms
        assert told == pytest.approx(timeline.step_ms)
        for stage in range(num_stages):
            _, held = memory_timeline(timeline, stage)
            assert held.max() == pytest.approx(timeline.peak_memory_bytes[stage])
            assert held[-1] == pytest.approx(held[0])


def test_reports_of_parted_and_paired_backwards_add_up() -> None:
    for seed in range(40):
        problem = random_split_problem(seed, "given", 3, 2, 4)
        timeline = simulate(problem, even_placement(problem, with_modes=True))
        start_ms, end_ms = part_pairs(timeline)
        assert np.all(end_ms - start_ms >= -1e-9)
        shares = share_time(timeline)
        total = shares.forward_ms + shares.backward_ms + shares.recompute_ms + shares.idle_ms + shares.tail_ms
        assert total == pytest.approx(np.full(3, timeline.step_ms))
        names = [event["name"] for event in render_trace(problem, timeline)["traceEvents"] if event.get("cat")]
        assert sum(len(text.split()) + text.count(";") for text in problem.orders) == sum(
            name[-1].isdigit() and name[0].isdigit() for name in names
        )
        assert render_timeline(problem, timeline).startswith("<svg")
        assert "longest path" in describe_path(timeline)
        assert len(tasks_on_path(timeline))


def small(schedule: str, orders: tuple[str, ...] = (), **more: Any) -> Problem:
    chain = (ChainBlock("layer", "text", 2, 1.0, 2.0, activation_bytes=4.0, backward_weight_ms=1.0),)
    problem = Problem(2, 1, 2, schedule, chain, (1e9,) * 2, (0.0,) * 2, (0.0,) * 2, (0.0,), (0.0,), orders=orders)
    return replace(problem, **more)


ONE_EACH = (((1,), (1,)), (((),), ((),)))
SPLIT = ("0F0 1F0 0I0 0W0 1I0 1W0", "0F0 0I0 1F0 1I0 0W0 1W0")


def test_a_free_schedule_plays_the_order_of_its_placement() -> None:
    timeline = simulate(small("free"), Placement(*ONE_EACH, SPLIT))
    # stage 1: F 1-2, I 2-3, F 3-4, I 4-5, W, W to 7; stage 0: I 3-4, W 4-5, I 5-6, W 6-7
    assert timeline.step_ms == 7.0
    assert timeline.span_ms == 7.0
    assert timeline.peak_memory_bytes.tolist() == [8.0, 8.0]
    whole = simulate(small("free"), Placement(*ONE_EACH, ("0F0 1F0 0B0 1B0", "0F0 0B0 1F0 1B0")))
    assert whole.step_ms == simulate(small("1f1b"), Placement(*ONE_EACH)).step_ms


def test_what_is_kept_for_weights_counts_from_the_end_of_the_input_gradient() -> None:
    mode = Mode("recompute", 0.0, 1.0, 1.0)
    chain = (replace(small("free").chain[0], modes=(mode,), kept_for_weight_bytes=3.0),)
    problem = small("free", chain=chain)
    late = ("0F0 1F0 0I0 1I0 0W0 1W0", SPLIT[1])
    recomputed = Placement(((1,), (1,)), (((1,),), ((0,),)), late)
    timeline = simulate(problem, recomputed)
    # stage 0 keeps 1 of each in flight, and 3 of each until its weight gradient; stage 1 keeps 4 and 3
    assert timeline.peak_memory_bytes.tolist() == [6.0, 7.0]
    assert timeline.loads.input_ms.ravel().tolist() == [2.0, 1.0]
    assert timeline.loads.weight_ms.ravel().tolist() == [1.0, 1.0]


def test_a_pair_waits_for_both_and_is_the_end_of_both() -> None:
    orders = ("0F0 1F0 0B0 1B0", "0F0 (1F0;0B0) 1B0")
    for fraction, step in ((0.0, 9.0), (0.5, 8.5), (1.0, 8.0)):
        problem = small("given", orders, pair_overlap_fraction=fraction)
        # stage 1: F 1-2, the pair from 2 on, B of 1 after it, and that of stage 0 after that
        assert simulate(problem, Placement(*ONE_EACH)).step_ms == step


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (SPLIT[:1], "1 entries; num_stages is 2"),
        ((SPLIT[0], "0F0 0X0"), r"orders\[1\]: '0X0' is not an action"),
        ((SPLIT[0], SPLIT[1] + " 2F0"), r"orders\[1\] has 2F0; chunks are 0 to 0, and micro-batches 0 to 1"),
        ((SPLIT[0], SPLIT[1] + " 1W0"), "has 1W0 twice"),
        ((SPLIT[0], "0F0 0I0 1F0 1I0 0W0"), "has no 1W0"),
        ((SPLIT[0], "0F0 0I0 0W0 1F0"), "has no 1B0 or an I and a W"),
        ((SPLIT[0], "0F0 0B0"), "has no 1F0"),
        ((SPLIT[0], "0F0 0B0 0I0 0W0 1F0 1B0"), "has 0I0 and 0B0"),
        ((SPLIT[0], "0F0 0W0 0I0 1F0 1B0"), "has 0W0 with no 0I0 before it"),
        ((SPLIT[0], "0B0 0F0 1F0 1B0"), "has 0B0 with no 0F0 before it"),
        ((SPLIT[0], "1F0 (0F0;0B0) 1B0"), "pairs 0F0 with its own backward"),
        (
            ("0F0 0B0 1F0 1B0", "1F0 1I0 1W0 0F0 0B0"),
            "never end: stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0 for 1F0 of stage 0",
        ),
        (("0F0 0B0 1F0 1B0", "0F0 (1F0;0B0) 1B0"), "stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0"),
    ],
)
def test_orders_that_cannot_run_are_refused(
    orders: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanError, match=words):
        simulate(small("free"), Placement(*ONE_EACH, orders))
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem_document(small("given", orders))))
    with pytest.raises(JobError, match=words):
        read_problem(path)
    assert main(["place", str(path)]) == 2
    assert "orders" in capsys.readouterr().err


def test_orders_stand_where_they_are_used_and_nowhere_else() -> None:
    with pytest.raises(PlanError, match="has no order, and schedule free needs one"):
        simulate(small("free"), Placement(*ONE_EACH))
    with pytest.raises(PlanError, match="has an order, and schedule 1f1b takes none"):
        simulate(small("1f1b"), Placement(*ONE_EACH, SPLIT))
    with pytest.raises(JobError, match="no order of its own"):
        simulate(small("given"), Placement(*ONE_EACH))
    found = place(small("free"))
    assert found.status == "optimal"
    assert found.placement is not None
    assert len(found.placement.orders) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backward_weight_ms": 3.0}, "backward_weight_ms is 3; it is a part of backward_ms, so at most 2"),
        ({"kept_for_weight_bytes": 5.0}, "kept_for_weight_bytes is 5; it is a part of activation_bytes"),
        ({"backward_weight_ms": 0.0, "split_extra_ms": 1.0}, "there is nothing to part"),
    ],
)
def test_figures_of_the_parts_that_contradict_the_whole_are_refused(
    change: dict[str, float], words: str, tmp_path: Path
) -> None:
    document = problem_document(small("1f1b"))
    document["chain"][0] |= change
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))
    with pytest.raises(JobError, match=words):
        read_problem(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": "given"}, "has no orders"),
        ({"orders": ["0F0 1F0 0B0 1B0"] * 2}, "orders stand beside it"),
        ({"pair_overlap_fraction": 1.5}, "pair_overlap_fraction"),
    ],
)
def test_orders_go_with_the_schedule_given(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem_document(small("1f1b")) | change))
    with pytest.raises(JobError, match=words):
        read_problem(path)


def test_problems_with_parted_backwards_read_back_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    for seed in range(30):
        problem = random_split_problem(seed, "given", 2, 2, 3)
        path.write_text(json.dumps(problem_document(problem)))
        assert read_problem(path) == problem


def test_random_orders_differ() -> None:
    import random

    assert len({random_orders(random.Random(seed), 2, 2, 3) for seed in range(20)}) == 20
    assert some_placement(small("1f1b")) is not None
