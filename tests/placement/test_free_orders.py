"""Placement and order together (`"schedule": "free"`): known answers, what always holds, and what is refused.

Against every placement with every order: tests/oracle/test_free_orders.py. Of the fixtures, `known` is the best step
that was ever found, and the best bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import generate_free
import numpy as np
import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement import PlacementResult, place
from mm_autoparallel.pipeline.placement.orders.bounds import (
    Bounds,
    bound_rows,
    bound_stages,
    least_step,
    list_placements,
)
from mm_autoparallel.pipeline.placement.orders.options import list_options
from mm_autoparallel.pipeline.placement.orders.parting import part_backwards
from mm_autoparallel.pipeline.placement.orders.run import OrderSearch
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_from_entry, read_problem
from mm_autoparallel.pipeline.simulate.step import simulate

FIXTURES = Path(__file__).parents[1] / "fixtures" / "free_orders"
PROVEN_GAP_FRACTION = 1e-3
ROUNDING_FRACTION = 1e-9


def fixture(name: str) -> tuple[Problem, dict[str, float]]:
    """A stored problem, and what is known of it."""
    path = FIXTURES / f"{name}.problem.json"
    return read_problem(path), json.loads(path.read_text(encoding="utf-8"))["known"]


def read(document: dict[str, Any]) -> Problem:
    return problem_from_entry(ProblemEntry.model_validate(document))


def small(limit_bytes: float = 40.0, schedule: str = "free", **of_block: Any) -> Problem:
    """Two kinds of blocks on three stages, six micro-batches, all of whose backwards may be split."""
    first = ChainBlock("a", "text", 4, 2.0, 4.0, 1.0, 3.0, backward_weight_ms=2.0, **of_block)
    second = ChainBlock("b", "text", 3, 3.0, 5.0, 1.0, 2.0, backward_weight_ms=2.0, kept_for_weight_bytes=1.0)
    return Problem(
        3, 1, 6, schedule, (first, second), (limit_bytes,) * 3, (0.0,) * 3, (0.0,) * 3, (1.0,) * 2, (0.0,) * 2
    )


def confined(problem: Problem, at: Sequence[int]) -> Problem:
    """The same problem, whose stages hold what they do where cuts lie at these flat positions [P + 1] of the chain."""
    flat = [index for index, block in enumerate(problem.chain) for _ in range(block.count)]
    chain: list[ChainBlock] = []
    for begin, end in pairwise(at):
        for position in range(begin, end):
            block = problem.chain[flat[position]]
            chain.append(
                replace(
                    block,
                    name=f"{block.name}{position}",
                    count=1,
                    pinned=None,
                    attach="previous" if position > begin else None,
                    recompute_group=block.recompute_group or block.name,
                )
            )
    return replace(problem, chain=tuple(chain))


def check_result(problem: Problem, result: PlacementResult, gap_fraction: float) -> None:
    """Proven to a gap, with an order of every stage that plays to its step within every limit."""
    assert result.placement is not None
    assert len(result.placement.orders) == problem.num_stages
    timeline = simulate(problem, result.placement)
    assert timeline.step_ms == result.step_ms
    assert np.all(np.array(timeline.peak_memory_bytes) <= np.array(problem.memory_limit_bytes))
    assert result.lower_bound_ms <= result.step_ms
    assert result.gap_fraction <= gap_fraction * (1.0 + 1e-6)


@pytest.mark.parametrize(
    ("name", "best_ms"),
    [
        ("p4_m8", 744.0),
        pytest.param("p8_m16_112", 12052.0, marks=pytest.mark.nightly),
        pytest.param("p8_m16_44", 1426.0, marks=pytest.mark.slow),
        pytest.param("p8_m16_frozen", 1465.0, marks=pytest.mark.nightly),
    ],
)
def test_known_steps_are_met_and_proven_to_a_thousandth(name: str, best_ms: float) -> None:
    problem, known = fixture(name)
    result = place(problem, gap_fraction=PROVEN_GAP_FRACTION)
    check_result(problem, result, PROVEN_GAP_FRACTION)
    assert known["best_step_ms"] <= best_ms
    assert result.step_ms <= best_ms
    assert result.lower_bound_ms <= known["best_step_ms"]
    assert result.step_ms >= known["lower_bound_ms"] * (1.0 - ROUNDING_FRACTION)


@pytest.mark.slow
def test_a_known_step_is_proven_to_be_the_best() -> None:
    """Without a limit of time, and without a gap: the search ends."""
    problem, known = fixture("p6_m12")
    result = place(problem)
    assert result.status == "optimal"
    assert result.step_ms == known["best_step_ms"] == 1327.0
    check_result(problem, result, 1e-5)


def test_without_a_limit_it_ends() -> None:
    problem = small()
    result = place(problem)
    assert result.status == "optimal"
    check_result(problem, result, 1e-5)


def test_what_is_known_is_no_contradiction() -> None:
    names = sorted(path.name.split(".")[0] for path in FIXTURES.glob("*.problem.json"))
    assert len(names) == 11
    for name in names:
        problem, known = fixture(name)
        assert problem.schedule == "free"
        assert 0.0 < known["lower_bound_ms"] <= known["best_step_ms"]
        options = list_options(cut_into_segments(problem), lambda: False)
        least_ms, rows = bound_stages(options).least_ms, np.arange(len(options.stage))
        assert least_ms <= known["best_step_ms"]
        above_ms = 1.01 * known["best_step_ms"]
        left, _ = bound_rows(options, rows, above_ms)
        assert 0 < len(left) < len(rows)
        assert least_ms <= least_step(options, left, least_ms, above_ms) <= known["best_step_ms"]


def test_two_runs_that_end_proven_agree() -> None:
    for problem, gap_fraction in ((small(), 0.0), (fixture("p4_m8")[0], PROVEN_GAP_FRACTION)):
        one, other = (place(problem, gap_fraction=gap_fraction) for _ in range(2))
        assert one.placement is not None
        assert one.placement == other.placement
        assert one.placement.orders == other.placement.orders
        assert (one.step_ms, one.lower_bound_ms) == (other.step_ms, other.lower_bound_ms)


def test_stopped_it_gives_a_plan_and_a_gap() -> None:
    problem, known = fixture("p8_m32_112")
    steps: list[float] = []
    result = place(problem, should_stop=lambda: bool(steps), on_better=lambda step_ms, _: steps.append(step_ms))
    assert result.status == "feasible"
    check_result(problem, result, 1.0)
    assert result.step_ms == steps[-1]
    assert result.gap_fraction > 0.0
    assert result.lower_bound_ms <= known["best_step_ms"]


def test_stopped_at_once_it_gives_a_bound_at_most() -> None:
    result = place(fixture("p4_m8")[0], should_stop=lambda: True)
    assert result.status in ("unknown", "feasible")
    assert result.lower_bound_ms <= 744.0


def test_unequal_micro_batches_are_refused() -> None:
    problem = small(microbatch_scale=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0))
    with pytest.raises(
        JobError, match="free takes equal micro-batches; leave microbatch_scale out, or name a schedule"
    ):
        place(problem)


def test_layouts_are_refused() -> None:
    layout = {"name": "tp2", "forward_ms": 1.0, "backward_ms": 2.0, "static_bytes": 1.0, "activation_bytes": 1.0}
    mode = {"name": "tp2", "extra_forward_ms": 0.0, "extra_backward_ms": 0.0, "activation_bytes": 1.0, "layout": layout}
    block = {
        "name": "b",
        "modality": "text",
        "count": 4,
        "forward_ms": 2.0,
        "backward_ms": 4.0,
        "activation_bytes": 2.0,
    }
    document = {"schema": "mm-autoparallel/problem/1", "num_stages": 2, "num_chunks": 1, "num_microbatches": 4}
    document |= {"schedule": "free", "memory_limit_bytes": 50.0, "chain": [block | {"modes": [mode]}]}
    with pytest.raises(JobError, match="a layout need whole backwards, and schedule free parts them"):
        place(read(document))


def test_more_than_two_chunks_are_refused() -> None:
    document = json.loads((FIXTURES / "p4_m8.problem.json").read_text(encoding="utf-8")) | {"num_chunks": 3}
    for key in ("source", "known"):
        del document[key]
    with pytest.raises(
        JobError, match="schedule free runs one chunk a stage, or 2 there and back, and num_chunks is 3"
    ):
        read(document)


def test_too_little_memory_is_told() -> None:
    """Of seven blocks one stage holds three; three of a, or two and one b, and one micro-batch of them: 12 or 11."""
    result = place(small(limit_bytes=5.0))
    assert result.status == "infeasible"
    assert result.placement is None
    assert "memory: with one micro-batch at a time on every stage the best placement still exceeds" in result.reason


def test_too_little_room_on_hosts_is_told() -> None:
    block = ChainBlock(
        "a", "text", 3, 2.0, 4.0, 1.0, 8.0, (Mode("offload", 0.0, 0.0, 0.0, host_bytes=8.0),), backward_weight_ms=2.0,
        kept_for_weight_bytes=0.0,
    )  # fmt: skip
    problem = Problem(
        3, 1, 4, "free", (block,), (5.0,) * 3, (0.0,) * 3, (0.0,) * 3, (0.0,) * 2, (0.0,) * 2,
        host_limit_bytes=(1.0,) * 3, host_ms_per_byte=(0.0,) * 3,
    )  # fmt: skip
    result = place(problem)
    assert result.status == "infeasible"
    assert "host: with one micro-batch at a time every placement still exceeds a host's limit" in result.reason


def test_more_memory_never_costs_time() -> None:
    steps = []
    for limit_bytes in (14.0, 20.0, 60.0):
        problem = small(limit_bytes)
        result = place(problem)
        assert result.status == "optimal"
        check_result(problem, result, 1e-5)
        steps.append(result.step_ms)
    assert all(later <= earlier * (1.0 + 1e-5) for earlier, later in pairwise(steps))
    assert steps[0] > steps[-1]


@pytest.mark.parametrize("limit_bytes", [20.0, 40.0])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "zb_h2"])
def test_no_named_order_is_faster(schedule: str, limit_bytes: float) -> None:
    named = place(small(limit_bytes, schedule))
    free = place(small(limit_bytes))
    assert free.status == "optimal"
    if named.placement is not None:
        assert free.lower_bound_ms <= named.step_ms
        assert free.step_ms <= named.step_ms * (1.0 + 1e-5)


def test_the_last_backwards_of_a_stage_are_split_where_that_gains() -> None:
    problem = small()
    named = place(replace(problem, schedule="1f1b")).placement
    assert named is not None
    one_f_one_b = ("0F0 1F0 2F0 0B0 3F0 1B0 4F0 2B0 5F0 3B0 4B0 5B0", "0F0 1F0 0B0 2F0 1B0 3F0 2B0 4F0 3B0 5F0 4B0 5B0")
    last = " ".join(f"{m}F0 {m}B0" for m in range(6))
    placement = replace(named, orders=(*one_f_one_b, last))
    step_ms = simulate(problem, placement).step_ms
    parted, parted_ms = part_backwards(placement, step_ms, [1, 2], lambda tried: simulate(problem, tried).step_ms)
    assert parted_ms == simulate(problem, parted).step_ms < step_ms
    assert parted.orders[0] == one_f_one_b[0]
    assert "5I0" in parted.orders[2]
    assert part_backwards(placement, step_ms, [1, 2], lambda _: np.inf) == (placement, step_ms)


def test_many_placements_of_one_bound_are_listed_one_after_another() -> None:
    """Sixty stages of one segment or two: 3e11 placements, all of one bound but for the stage that holds most."""
    num_stages, num_segments = 60, 66
    stretch = np.full((num_stages, num_segments + 1, num_segments + 1), np.inf)
    rest = np.full((num_stages + 1, num_segments + 1), np.inf)
    rest[num_stages, num_segments] = 1.0
    for s in range(num_stages - 1, -1, -1):
        for at in range(num_segments):
            stretch[s, at, at + 1 : at + 3] = 1.0
        rest[s] = np.min(np.maximum(stretch[s], rest[s + 1][None, :]), axis=1)
    listed = list(islice(list_placements(Bounds(np.ones(0), stretch, rest), np.inf), 1_000))
    assert len({boundaries for _, boundaries in listed}) == 1_000
    assert {bound_ms for bound_ms, _ in listed} == {1.0}
    assert [boundaries for _, boundaries in listed] == sorted(boundaries for _, boundaries in listed)


@pytest.mark.slow
def test_bounds_of_placements_are_below_what_is_proven_of_each() -> None:
    """A hundred small problems, and one to three placements of each: the list's bound against `place` on it alone."""
    checked, compared = 0, 0
    for seed in range(300):
        problem = read(generate_free.problem(f"{generate_free.MOODS[seed % len(generate_free.MOODS)]}-{seed}"))
        if problem.num_stages * problem.num_microbatches > 6:
            continue
        try:
            segments = cut_into_segments(problem)
            options = list_options(segments, lambda: False)
        except JobError:
            continue
        found = list(islice(list_placements(bound_stages(options), np.inf), 40))
        assert [bound_ms for bound_ms, _ in found] == sorted(bound_ms for bound_ms, _ in found)
        for bound_ms, boundaries in found[:: max(1, len(found) // 2)]:
            alone = confined(problem, segments.start[list(boundaries)].tolist())
            assert cut_into_segments(alone).num_segments == problem.num_stages
            result = place(alone, gap_fraction=PROVEN_GAP_FRACTION)
            if result.placement is not None:
                assert bound_ms <= result.step_ms * (1.0 + ROUNDING_FRACTION), (seed, boundaries)
                compared += result.gap_fraction <= PROVEN_GAP_FRACTION
        checked += bool(found)
        if checked == 100:
            break
    assert checked == 100
    assert compared >= 100


@pytest.mark.parametrize(
    ("cutoff_part", "goes_on", "is_taken"), [(1.1, True, True), (1.0, True, False), (0.9, False, False)]
)
def test_search_goes_on_from_a_placement_that_is_known(cutoff_part: float, goes_on: bool, is_taken: bool) -> None:
    """Also where only what is faster counts: its words are a beginning."""
    problem = small()
    known = place(problem)
    assert known.placement is not None
    options = list_options(cut_into_segments(problem), lambda: False)
    cutoff_ms = known.step_ms * cutoff_part
    search = OrderSearch(problem, options, 0.0, lambda: False, lambda *_: None, cutoff_ms, 0.0, np.inf)
    search.adopt(known.placement)
    assert (search.best is not None) == goes_on
    assert (search.placement is not None) == is_taken
    assert search.upper_ms == (known.step_ms if is_taken else cutoff_ms)
