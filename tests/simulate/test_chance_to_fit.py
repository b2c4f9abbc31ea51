"""The chance to fit: a logistic curve over what the fullest stage takes of its device, fragments included."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mm_autoparallel.model.costs.held_once import count_communicator_kinds
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.simulate.memory import StageMemory, list_shelved_bytes
from mm_autoparallel.planner.chance_to_fit import device_peak_bytes, most_likely_to_fail, oom_probability
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.estimates import estimate_document, render_estimate
from mm_autoparallel.units import GIB

PARTS = StageMemory(1, 2, 4, 100, 200, 300, 400, 8, 16, 1000)


def test_static_bytes_lie_unfragmented_and_all_else_of_the_allocator_does_not() -> None:
    assert device_peak_bytes(PARTS) == pytest.approx(1 + 2 + 4 + 1.22 * (100 + 200 + 300 + 400) + 8 + 16)


def test_what_layers_worked_in_is_fragmented_too() -> None:
    assert device_peak_bytes(PARTS, shelved_bytes=50) == pytest.approx(device_peak_bytes(PARTS) + 1.22 * 50)


def test_kinds_of_communicators_count_where_less_is_known() -> None:
    outside = device_peak_bytes(PARTS, num_kinds=3) - device_peak_bytes(PARTS)
    assert outside == pytest.approx(3 * GIB - 24)
    known = replace(PARTS, communicator_bytes=4 * GIB)
    assert device_peak_bytes(known, num_kinds=3) == device_peak_bytes(known)


@pytest.mark.parametrize(
    ("strategy", "num_kinds"),
    [
        (Strategy(pp=1, tp=1, dp=1, mbs=1), 0),
        (Strategy(pp=1, tp=1, dp=8, mbs=1), 1),
        (Strategy(pp=2, tp=2, dp=2, mbs=1), 3),
        (Strategy(pp=2, tp=2, cp=2, dp=1, mbs=1), 4),
        (Strategy(pp=2, tp=2, dp=4, ep=2, mbs=1), 4),
    ],
)
def test_kinds_are_those_of_several_ranks(strategy: Strategy, num_kinds: int) -> None:
    assert count_communicator_kinds(strategy) == num_kinds


def test_what_placement_counts_too_much_is_no_part_of_it() -> None:
    assert device_peak_bytes(PARTS) == device_peak_bytes(replace(PARTS, reserve_bytes=0))


@pytest.mark.parametrize(
    ("peak", "probability"),
    [(1.046, 0.5), (1.046 * math.exp(0.043), 1 / (1 + math.exp(-1))), (1.046 * math.exp(-0.129), 1 / (1 + math.e**3))],
)
def test_the_curve_by_hand(peak: float, probability: float) -> None:
    assert oom_probability(peak * 80 * GIB, 80 * GIB) == pytest.approx(probability)


def test_it_grows_with_the_peak_and_stays_within_0_and_1() -> None:
    chances = [oom_probability(peak, 80 * GIB) for peak in (0.0, 1.0, *(n * GIB for n in range(1, 1000, 7)), 1e30)]
    assert all(before <= after for before, after in itertools.pairwise(chances))
    assert (chances[0], chances[-1]) == (0.0, 1.0)


def test_the_fullest_stage_is_that_of_the_least_room_not_of_the_most_bytes() -> None:
    assert most_likely_to_fail((70, 60), (80, 64)) == 1


@pytest.fixture(scope="module")
def job(repository: Path) -> Job:
    return read_job(repository / "examples/qwen2vl_72b/job.yaml")


PLAN = Plan(
    Strategy(pp=8, tp=8, dp=2, mbs=1),
    {"vision": (32, 0, 0, 0, 0, 0, 0, 0), "text": (5, 11, 11, 11, 11, 11, 11, 9)},
    {"vision": (0,) * 8, "text": (0, 10, 9, 9, 9, 7, 4, 0)},
    512,
)


def test_an_estimate_tells_it_of_its_fullest_stage(job: Job) -> None:
    estimate = evaluate(job, PLAN)
    memory_bytes = job.cluster.device.memory_bytes
    assert estimate.device_memory_bytes == (memory_bytes,) * 8
    assert estimate.oom_probability == max(oom_probability(peak, memory_bytes) for peak in estimate.device_peak_bytes)


def test_layers_are_shelved_where_the_head_is_fullest(job: Job) -> None:
    """By hand: the last stage's fullest moment is the head's, so the largest working set of its layers counts too."""
    estimate = evaluate(job, PLAN)
    shelved = list_shelved_bytes(estimate.problem, estimate.placement, estimate.timeline.graph)
    working = {block.name: block.footprint.working_bytes for block in estimate.problem.chain if block.footprint}
    assert estimate.memory[-1].transient_bytes == working["text_post"]
    assert shelved == (0.0,) * 7 + (working["text_layer"],)
    assert estimate.device_peak_bytes[-1] == device_peak_bytes(estimate.memory[-1], shelved[-1], 3)


def test_it_is_told_in_words_and_in_the_document(job: Job) -> None:
    estimate = evaluate(job, PLAN)
    document = estimate_document(estimate)
    assert document["oom_probability"] == estimate.oom_probability
    assert document["device_peak_bytes"] == [math.ceil(peak) for peak in estimate.device_peak_bytes]
    console = Console(width=200, file=io.StringIO())
    console.print(render_estimate(estimate))
    assert isinstance(console.file, io.StringIO)
    told = f"out of memory with probability {estimate.oom_probability * 100:.1f} %: stage"
    assert told in console.file.getvalue()
