"""evaluate: a plan's layers become a placement of its job's problem, and that placement's figures the plan's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem, recomputed
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.evaluate import evaluate, plan_from_placement
from mm_autoparallel.planner.plan import Plan


@pytest.fixture(scope="module")
def job(repository: Path) -> Job:
    return read_job(repository / "examples/qwen2vl_72b/job.yaml")


STRATEGY = Strategy(pp=8, tp=8, dp=2, mbs=1)


def plan_of(vision: list[int], text: list[int], recompute: list[int], strategy: Strategy = STRATEGY) -> Plan:
    layers = {"vision": tuple(vision), "text": tuple(text)}
    return Plan(strategy, layers, {"vision": (0,) * len(vision), "text": tuple(recompute)}, 512)


PLAN = plan_of([32, 0, 0, 0, 0, 0, 0, 0], [5, 11, 11, 11, 11, 11, 11, 9], [0, 10, 9, 9, 9, 7, 4, 0])


def test_the_figures_are_the_simulators(job: Job) -> None:
    estimate = evaluate(job, PLAN)
    timeline = simulate(build_problem(job, STRATEGY), estimate.placement)
    assert estimate.step_ms == timeline.step_ms
    assert estimate.peak_memory_bytes == tuple(timeline.peak_memory_bytes)
    assert estimate.bubble_fraction == timeline.bubble_fraction
    assert estimate.throughput_tokens_per_s == pytest.approx(512 * 8192 / timeline.step_ms * 1e3 / 128)
    assert estimate.memory_limit_bytes == job.cluster.memory_limit_bytes
    assert estimate.provenance["blocks"]["text_layer"]["time"] == "analytic"


def test_the_placement_holds_what_the_plan_says(job: Job) -> None:
    estimate = evaluate(job, PLAN)
    names = [block.name for block in estimate.problem.chain]
    held = {name: [row[e] for row in estimate.placement.layers] for e, name in enumerate(names)}
    assert held["vision_layer"] == [32, 0, 0, 0, 0, 0, 0, 0]
    assert held["text_layer"] == [5, 11, 11, 11, 11, 11, 11, 9]
    for name in ("vision_pre", "vision_post", "text_pre"):
        assert held[name] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert held["text_post"] == [0, 0, 0, 0, 0, 0, 0, 1]
    again = [row[names.index("text_layer")] for row in recomputed(estimate.problem, estimate.placement)]
    assert again == [0, 10, 9, 9, 9, 7, 4, 0]
    back = plan_from_placement(estimate.problem, estimate.placement, STRATEGY, 512)
    assert back == PLAN


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ([20, 12, 0, 0, 0, 0, 0, 0], [0, 8, 12, 12, 12, 12, 12, 12]),
        ([16, 16, 0, 0, 0, 0, 0, 0], [0, 0] + [14] * 4 + [12] * 2),
    ],
)
def test_one_stage_may_hold_both_ends_or_one(job: Job, vision: list[int], text: list[int]) -> None:
    """The projector stays with the last vision layer, the embedding with the first text layer."""
    estimate = evaluate(job, plan_of(vision, text, [0] * 8))
    names = [block.name for block in estimate.problem.chain]
    stage_of = {n: next(k for k, row in enumerate(estimate.placement.layers) if row[e]) for e, n in enumerate(names)}
    assert stage_of["vision_post"] == 1
    assert stage_of["text_pre"] == stage_of["text_layer"]


def test_chunks_are_told_in_the_order_of_data(job: Job) -> None:
    strategy = Strategy(pp=4, tp=8, dp=4, mbs=1, vpp=2)
    plan = plan_of([16, 16, 0, 0, 0, 0, 0, 0], [0, 10, 12, 12, 12, 12, 12, 10], [0, 10, 9, 9, 9, 7, 4, 0], strategy)
    estimate = evaluate(job, plan)
    assert estimate.problem.num_chunks == 2
    assert plan_from_placement(estimate.problem, estimate.placement, strategy, 512) == plan


def test_more_recompute_is_slower_and_smaller(job: Job) -> None:
    less, more = (
        evaluate(job, PLAN),
        evaluate(job, replace(PLAN, recompute=PLAN.recompute | {"text": PLAN.layers["text"]})),
    )
    assert more.step_ms > less.step_ms
    assert more.peak_memory_bytes[0] < less.peak_memory_bytes[0]


def test_what_does_not_fit_is_played_and_marked(job: Job) -> None:
    estimate = evaluate(
        job, plan_of([32] + [0] * 7, [3, 11, 11, 11, 11, 11, 11, 11], [0] * 8, Strategy(8, 2, 4, 1, cp=2))
    )
    over = [s for s, peak in enumerate(estimate.peak_memory_bytes) if peak > estimate.memory_limit_bytes]
    assert over
    assert not estimate.fits
    marked = [warning for warning in estimate.warnings if "above its limit" in warning]
    assert [warning.split(" peaks")[0] for warning in marked] == [f"stage {s}" for s in over]


def test_a_smaller_plan_is_played_on_its_part_of_the_cluster(job: Job) -> None:
    """The same pipeline with half the replicas takes longer in all, not per micro-batch."""
    half = evaluate(job, replace(PLAN, strategy=replace(STRATEGY, dp=1)))
    whole = evaluate(job, PLAN)
    assert half.problem.num_microbatches == 2 * whole.problem.num_microbatches
    assert half.problem.chain[4].forward_ms == whole.problem.chain[4].forward_ms
    assert half.job_sha256 == whole.job_sha256 == job.sha256
    tokens_per_s = half.throughput_tokens_per_s * 64
    assert tokens_per_s == pytest.approx(512 * 8192 / half.step_ms * 1e3)


def test_the_gap_is_relative_to_the_step(job: Job) -> None:
    estimate = evaluate(job, PLAN)
    figures = estimate.figures(0.75 * estimate.step_ms)
    assert figures.gap_fraction == pytest.approx(0.25)
    assert not figures.proven
    assert estimate.figures(estimate.step_ms).proven


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of([31] + [0] * 7, [10] * 8, [0] * 8), r"vision: they sum to 31, and the model has 32"),
        (plan_of([32] + [0] * 7, [10] * 7 + [11], [0] * 8), r"text: they sum to 81, and the model has 80"),
        (
            plan_of([0, 32] + [0] * 6, [1] + [11] * 6 + [13], [0] * 8),
            r"stage 0 holds text layers that follow vision .*stage 1",
        ),
        (plan_of([32] + [0] * 7, [-1, 12, 11, 11, 11, 12, 12, 12], [0] * 8), r"text: stage 0 has -1"),
        (plan_of([32] + [0] * 7, [10] * 8, [0, 11] + [0] * 6), r"recompute of text: stage 1 recomputes 11, and 10 "),
        (plan_of([32] + [0] * 7, [10] * 8, [0, 0, -3] + [0] * 5), r"recompute of text: stage 2 has -3"),
        (plan_of([32] + [0] * 7, [10] * 7, [0] * 8), r"layers of text: 7 counts for 8"),
        (plan_of([32] + [0] * 7, [20, 20, 20, 20, 0, 0, 0, 0], [0] * 8), r"stage 4 holds no layer"),
        (plan_of([32] + [0] * 7, [10] * 8, [0] * 8, Strategy(8, 3, 2, 1)), r"TP 3"),
        (plan_of([32] + [0] * 7, [10] * 8, [0] * 8, Strategy(8, 8, 4, 1)), r"needs 256 devices"),
    ],
)
def test_a_plan_that_does_not_fit_its_job_is_refused(job: Job, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        evaluate(job, plan)


def test_frozen_layers_have_nothing_to_recompute(job: Job) -> None:
    plan = replace(PLAN, recompute=PLAN.recompute | {"vision": (4, *(0,) * 7)})
    with pytest.raises(PlanError, match="recompute of vision: stage 0 recomputes 4, and 0 of its vision layers can be"):
        evaluate(job, plan)


def test_a_modality_that_the_model_lacks_is_refused(job: Job) -> None:
    plan = replace(PLAN, layers=PLAN.layers | {"audio": (1, *(0,) * 7)})
    with pytest.raises(PlanError, match="no modality audio; known are vision, text"):
        evaluate(job, plan)


def mixed_problem(num_stages: int, num_chunks: int) -> Problem:
    """Two kinds of vision layers in turn, a projector without a mark, text layers of which some cannot recompute."""
    again = (Mode("recompute", 0.0, 1.0, 1.0),)
    chain = (
        ChainBlock("patches", "vision", 1, 1.0, 1.0, layer=False),
        ChainBlock("window", "vision", 2, 1.0, 1.0, modes=again, recompute_group="vision"),
        ChainBlock("full", "vision", 1, 1.0, 1.0, modes=again, recompute_group="vision"),
        ChainBlock("projector", "vision", 1, 1.0, 1.0, layer=False),
        ChainBlock("embedding", "text", 1, 1.0, 1.0, layer=False, attach="next"),
        ChainBlock("fixed", "text", 1, 1.0, 1.0),
        ChainBlock("text", "text", 4, 1.0, 1.0, modes=again, recompute_group="text"),
        ChainBlock("head", "text", 1, 1.0, 1.0, layer=False, pinned="last"),
    )
    return Problem(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=4,
        schedule="1f1b" if num_chunks == 1 else "interleaved_1f1b",
        chain=chain,
        memory_limit_bytes=(1e9,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=(0.0,) * (num_stages * num_chunks - 1),
        p2p_ms_per_byte=(0.0,) * (num_stages * num_chunks - 1),
    )


def test_layers_are_handed_out_in_the_order_of_the_chain() -> None:
    problem = mixed_problem(2, 2)
    placement = placement_from_modalities(
        problem, {"vision": (2, 1, 0, 0), "text": (0, 1, 1, 3)}, {"vision": (1, 0, 0, 0), "text": (0, 0, 1, 2)}
    )
    #                              patches window full projector embedding fixed text head
    assert placement.layers[0] == (1, 2, 0, 0, 0, 0, 0, 0)
    assert placement.layers[1] == (0, 0, 1, 1, 1, 1, 0, 0)
    assert placement.layers[2] == (0, 0, 0, 0, 0, 0, 1, 0)
    assert placement.layers[3] == (0, 0, 0, 0, 0, 0, 3, 1)
    assert [row[1] for row in recomputed(problem, placement)] == [1, 0, 0, 0]
    assert [row[6] for row in recomputed(problem, placement)] == [0, 0, 1, 2]
    simulate(problem, placement)


def test_the_first_layers_that_can_be_are_recomputed() -> None:
    """A group spans kinds, and skips what cannot recompute."""
    placement = placement_from_modalities(
        mixed_problem(2, 1), {"vision": (3, 0), "text": (2, 3)}, {"vision": (3, 0), "text": (1, 0)}
    )
    assert recomputed(mixed_problem(2, 1), placement)[0] == (0, 2, 1, 0, 0, 0, 1, 0)
    with pytest.raises(PlanError, match="recompute of text: stage 0 recomputes 2, and 1 of its text layers can be"):
        placement_from_modalities(mixed_problem(2, 1), {"vision": (3, 0), "text": (2, 3)}, {"text": (2, 0)})


def test_chunks_are_named_where_the_order_is_wrong() -> None:
    with pytest.raises(
        PlanError, match="stage 0, chunk 0 holds text layers that follow vision layers of stage 1, chunk 0"
    ):
        placement_from_modalities(mixed_problem(2, 2), {"vision": (0, 3, 0, 0), "text": (1, 1, 1, 2)}, {})


def test_every_plan_of_a_small_chain_comes_back() -> None:
    """All ways to deal the layers out in order: to a placement, and back to the same plan."""
    problem, strategy, seen = mixed_problem(3, 1), Strategy(3, 1, 1, 1), 0
    for cut in itertools.combinations_with_replacement(range(9), 2):
        ends = [0, *cut, 8]
        held = [range(a, b) for a, b in itertools.pairwise(ends)]
        if not all(held):
            continue
        layers = {
            "vision": tuple(sum(i < 3 for i in part) for part in held),
            "text": tuple(sum(i >= 3 for i in part) for part in held),
        }
        placement = placement_from_modalities(problem, layers, {})
        simulate(problem, placement)
        assert plan_from_placement(problem, placement, strategy, 4).layers == layers
        seen += 1
    assert seen == 21


class TestInterval:
    def test_it_is_that_of_the_calibration(self, job: Job) -> None:
        estimate = evaluate(job, PLAN)
        near = calibration_of(job).interval
        assert estimate.interval == near
        assert estimate.step_ms_low == estimate.step_ms * near.low_factor
        assert estimate.step_ms_high == estimate.step_ms * near.high_factor
        assert estimate.provenance["calibration"] == calibration_of(job).description

    def test_another_calibration_makes_another_step_and_is_forgotten(self, job: Job) -> None:
        own, before = calibration_of(job), evaluate(job, PLAN)
        figures = own.figures.model_copy(update={"matrix_fraction": own.figures.matrix_fraction / 2})
        slow = evaluate(CostModel(job, own.model_copy(update={"figures": figures})), PLAN)
        assert slow.step_ms > 1.3 * before.step_ms
        assert evaluate(job, PLAN).step_ms == before.step_ms
