"""A module for each of two encoders: what is lawful, what their plans' files say, and that options left out lose
nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_modules import make_job

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlanError
from mm_autoparallel.hooks.applied import apply
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.resharding import cross_to_first_stage
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.planner.evaluate import evaluate, plan_from_placement
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.plan import parse_plan
from mm_autoparallel.planner.search.arrangements import combine
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import judge, list_all_boughs
from mm_autoparallel.planner.search.thinning import Thinning
from mm_autoparallel.reports.page.pictures import map_layout
from mm_autoparallel.reports.page.timelines import _list_places

JOB = make_job(hears=True)
SOUND = 2.0 * 128 * 512  # bytes of one sample's tokens, whole


def beside(first: Arrangement, second: Arrangement, decoder: Strategy) -> Strategy:
    """vision, then audio."""
    whole = replace(first, others=(second,))
    return replace(decoder, pp=decoder.pp + whole.num_stages_apart, arrangement=whole)


def on_shared(run: str, name: str, tp: int, dp: int, mbs: int, pp: int = 1) -> Arrangement:
    return Arrangement("colocated", run, ModuleLayout(name, pp, tp, dp, mbs))  # type: ignore[arg-type]


def on_own(name: str, tp: int, dp: int, mbs: int, offset: int, pp: int = 1) -> Arrangement:
    return Arrangement("disaggregated", "inline", ModuleLayout(name, pp, tp, dp, mbs, 1, offset))


DECODER = Strategy(2, 2, 2, 1)
MIXED = {
    "ranks of its own and prefetch": beside(
        on_own("vision", 1, 4, 1, 4), on_shared("prefetch", "audio", 1, 4, 2), Strategy(2, 2, 1, 4)
    ),
    "bubbles and ranks of its own": beside(
        on_shared("bubbles", "vision", 1, 4, 2), on_own("audio", 1, 4, 1, 4), Strategy(2, 2, 1, 4)
    ),
    "phases and prefetch": beside(
        on_shared("phases", "vision", 2, 4, 3), on_shared("prefetch", "audio", 1, 8, 1), DECODER
    ),
    "bubbles and the decoder's stages": beside(
        on_shared("bubbles", "vision", 1, 8, 1), on_shared("inline", "audio", 2, 2, 1, pp=2), DECODER
    ),
    "phases and inline, of shards": beside(
        on_shared("phases", "vision", 2, 4, 3),
        on_shared("inline", "audio", 1, 8, 1),
        replace(DECODER, pp=1, tp=4, mbs=4, zero=3),
    ),
    "ranks of their own each": beside(on_own("vision", 1, 2, 2, 4), on_own("audio", 2, 1, 4, 6), Strategy(2, 2, 1, 4)),
    "one apart, one inline": beside(
        on_own("vision", 1, 4, 1, 4), on_shared("inline", "audio", 1, 4, 1), Strategy(1, 2, 2, 2)
    ),
    "one apart, one in phases": beside(
        on_own("vision", 1, 2, 2, 4, pp=2), on_shared("phases", "audio", 1, 4, 3), Strategy(2, 1, 2, 2)
    ),
}


@pytest.mark.parametrize("strategy", MIXED.values(), ids=list(MIXED))
def test_planned_written_read_and_drawn(strategy: Strategy) -> None:
    costs = CostModel(JOB)
    assert unlawful_reason(JOB.model, JOB.cluster, JOB.workload, strategy) is None
    problem = build_problem(costs, strategy)
    found = place(problem)
    assert found.placement is not None
    assert LeastSteps(costs).least_ms(strategy) <= bound_step(problem).step_ms <= found.step_ms
    plan = plan_from_placement(problem, found.placement, strategy, 24)
    estimate = evaluate(costs, plan)
    assert estimate.step_ms == pytest.approx(found.step_ms)
    document = json.loads(json.dumps(estimate.plan_document()))
    assert parse_plan(document, JOB, "plan") == plan
    assert strategy.arrangement is not None
    assert [*document["layout"]["modules"]] == ["vision", "audio", "llm"]
    assert {one["kind"] for name, one in document["layout"]["modules"].items() if name != "llm"} == {
        one.kind for one in strategy.arrangement.each
    }
    assert document["world_size"] == strategy.world_size == 8
    told = map_layout(estimate, JOB.model)
    assert told is not None
    assert [told.encoder.name, *(one.encoder.name for one in told.others)] == ["vision", "audio"]
    assert {one.decoder.first_stage for one in (told, *told.others)} == {strategy.arrangement.num_stages_apart}
    places = _list_places(strategy)
    assert sorted(set(places["pp"].tolist())) == list(range(strategy.pp))
    assert document["provenance"]["crossing"].keys() == {"vision", "audio"}
    with pytest.raises(PlanError, match="a module for each encoder"):
        apply(JOB, plan)
    for framework, version in (("megatron-bridge", "0.6"), ("megatron-core", "0.16")):
        with pytest.raises(PlanError, match=r"a module for each encoder|have one parallel size for encoder"):
            export_plan(plan, JOB, framework, version=version, out=Path("nowhere"))


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (
            beside(on_own("vision", 1, 4, 1, 4), on_shared("prefetch", "audio", 1, 4, 1), Strategy(2, 2, 1, 4)),
            "a pass of the encoder takes 2 samples, which must be whole micro-batches of 4",
        ),
        (
            beside(on_shared("prefetch", "vision", 1, 8, 1), on_shared("phases", "audio", 1, 8, 1), DECODER),
            "this encoder or its projector trains",
        ),
        (
            beside(on_shared("inline", "vision", 2, 2, 1, pp=2), on_shared("inline", "audio", 2, 2, 1, pp=2), DECODER),
            "which is the chain",
        ),
        (
            beside(on_shared("inline", "vision", 1, 4, 1, pp=2), on_shared("phases", "audio", 1, 8, 1), DECODER),
            "vision has TP 1 inline on the stages of a decoder of TP 2",
        ),
        (
            beside(on_own("vision", 1, 2, 2, 4), on_own("audio", 1, 1, 4, 7), Strategy(2, 2, 1, 4)),
            "leave ranks idle; 6 would do",
        ),
        (
            beside(on_own("audio", 1, 2, 2, 4), on_own("vision", 2, 1, 4, 6), Strategy(2, 2, 1, 4)),
            "layout names the encoders audio, vision, and the model's are vision, audio",
        ),
    ],
)
def test_unlawful(strategy: Strategy, told: str) -> None:
    assert told in (unlawful_reason(JOB.model, JOB.cluster, JOB.workload, strategy) or "lawful")


def test_files_that_contradict_themselves() -> None:
    strategy = MIXED["phases and prefetch"]
    problem = build_problem(CostModel(JOB), strategy)
    found = place(problem)
    assert found.placement is not None
    plan = plan_from_placement(problem, found.placement, strategy, 24)
    document = evaluate(JOB, plan).plan_document()
    for change, told in (
        ({"kind": "chain"}, r"layout\.modules\.audio\.kind is .chain.; one of colocated"),
        ({"encoder_run": "kept"}, r"layout\.modules\.audio\.encoder_run is .kept.; one of inline, .*, cached"),
        ({"encoder_run": None}, r"layout\.modules\.audio\.encoder_run is missing"),
    ):
        spoilt = json.loads(json.dumps(document))
        spoilt["layout"]["modules"]["audio"] |= change
        with pytest.raises(PlanError, match=told):
            parse_plan(spoilt, JOB, "plan")


def test_options_left_out_lose_nothing() -> None:
    """The best of all products of options is among those that are left, at every limit of memory."""
    best_ms = []
    for memory_fraction in (1.0, 0.025):
        job = make_job(hears=True, layouts=["colocated"], mbs=[1], cp=[1], pp=[2], tp=[2])
        job = replace(job, cluster=job.cluster.model_copy(update={"memory_fraction": memory_fraction}))
        costs = CostModel(job)
        (branch,) = [branch for bough in list_all_boughs(job) for branch in bough.branches()]
        (options,) = branch.several()
        short = tuple(tuple(one for one in each if not one.in_bubbles)[::3] for each in options)
        left, every = set(Thinning(costs).combine(branch.decoder, short)), set(combine(branch.decoder, short))
        assert left < every
        found = {one: place(build_problem(costs, one)).step_ms for one in every if judge(job, one).reason is None}
        assert left <= found.keys()
        assert min(found.values()) == pytest.approx(min(found[one] for one in left), rel=1e-9)
        best_ms.append(min(found.values()))
    assert best_ms[0] < best_ms[1]


def test_why_not_looks_at_a_module_for_each_too() -> None:
    """One encoder trains and the other is frozen, so that prefetch is of the second alone."""
    limits: dict[str, Any] = {"mbs": [3], "cp": [1], "pp": [2], "tp": [2], "modes": []}
    costs = CostModel(make_job(hears=True, layouts=["chain"], **limits))
    chain = search(costs.job, num_workers=1)
    answer = explain_why_not(costs, chain.estimates[0], parse_wish("layout=prefetch,TP=2"), 20.0)
    assert answer.outside
    assert answer.estimate is not None
    assert answer.strategy.arrangement is not None
    assert [one.encoder_run for one in answer.strategy.arrangement.each][1] == "prefetch"
    assert answer.strategy.tp == 2


def test_what_modules_hold_and_take_adds_up() -> None:
    """By hand: vision in phases makes 24 / (4 x 3) calls, and a pass of audio takes two micro-batches of twelve."""
    costs = CostModel(JOB)
    problem = build_problem(costs, MIXED["phases and prefetch"])
    vision = [b for b in build_problem(costs, Strategy(1, 2, 4, 3)).chain if b.modality == "vision"]
    audio = [b for b in build_problem(costs, Strategy(1, 1, 8, 1)).chain if b.modality == "audio"]
    kept = 2 * sum(b.count * b.activation_bytes for b in vision)
    image, sound = 2.0 * 256 * 512, 2.0 * 128 * 512  # bytes of one sample's tokens, whole
    on_first = kept + 12 * image + 12 * sound
    elsewhere = kept + 2 * 3 * image + 2 * sound
    assert [held.kept_bytes for held in problem.beside] == [pytest.approx(on_first), pytest.approx(elsewhere)]
    static = sum(b.count * b.static_bytes for b in (*vision, *audio))
    assert [held.static_bytes for held in problem.beside] == [pytest.approx(static)] * 2
    (beside,) = problem.encoders
    assert (beside.name, beside.microbatches_per_pass, beside.is_frozen) == ("audio", 2, True)
    assert beside.forward_ms == (pytest.approx(sum(b.count * b.forward_ms for b in audio)),)


def test_ranks_of_one_begin_when_phases_of_the_other_have_run_forward() -> None:
    """By hand: audio in phases makes 24 / (4 x 3) calls of each device of the decoder, vision has two stages apart."""
    costs, strategy = CostModel(JOB), MIXED["one apart, one in phases"]
    problem = build_problem(costs, strategy)
    assert strategy.arrangement is not None
    alone = build_problem(CostModel(make_job()), replace(strategy, arrangement=strategy.arrangement.each[0]))
    audio = [b for b in build_problem(costs, Strategy(1, 1, 4, 3)).chain if b.modality == "audio"]
    heard = strategy.with_only(strategy.arrangement.others[0])
    crossing = cross_to_first_stage(costs.cluster, None, heard, 12 * SOUND)
    before_ms = 2 * sum(b.count * b.forward_ms for b in audio) + crossing.forward_ms
    more_ms = [a - b for a, b in zip(problem.stage_tail_ms, alone.stage_tail_ms, strict=True)]
    # audio is frozen: nothing of it comes after the pipeline
    assert more_ms == [pytest.approx(before_ms)] * 4
    assert [held.static_bytes > 0 for held in problem.beside] == [False, False, True, True]
    held, before = ([each - of.communicator_bytes for each in of.stage_static_bytes] for of in (problem, alone))
    assert held[:2] == [pytest.approx(before[0])] * 2
    # its two calls' outputs, of three samples each, are on every device; all twelve of its replica come to the first
    static_bytes = sum(b.count * b.static_bytes for b in audio)
    assert held[3] == pytest.approx(before[3] + static_bytes + 6 * SOUND)
    assert held[2] == pytest.approx(before[2] + static_bytes + 12 * SOUND)
