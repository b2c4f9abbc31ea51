"""`layout` of the result file: written where it is not the chain, read back and simulated, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_modules import APART, PHASES, make_job

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.bare_plan import parse_bare_plan
from mm_autoparallel.planner.edits import move_layers, set_mode
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan, parse_plan
from mm_autoparallel.reports.page.pictures import map_layout


@pytest.mark.parametrize("plan", [APART, PHASES])
def test_what_is_written_is_read_and_simulated(plan: Plan) -> None:
    job = make_job()
    estimate = evaluate(job, plan)
    document = json.loads(json.dumps(estimate.plan_document()))
    assert parse_plan(document, job, "plan") == plan
    assert parse_bare_plan(document, "plan").strategy == plan.strategy
    assert document["world_size"] == 8
    assert document["throughput"] == pytest.approx(24 * 1024 / estimate.step_ms * 1e3 / 8)
    assert document["layout"]["modules"]["llm"]["PP"] == 2


def test_the_form_of_the_section() -> None:
    document = evaluate(make_job(), APART).plan_document()
    assert document["parallel_config"] == {
        "PP": 3, "TP": 2, "DP": 1, "MBS": 4, "CP": 1, "EP": 1, "VPP": 1, "ZERO": 1,
    }  # fmt: skip
    assert document["layout"] == {
        "kind": "disaggregated",
        "encoder_run": "inline",
        "modules": {
            "vision": {"PP": 1, "TP": 1, "CP": 1, "DP": 4, "MBS": 1, "rank_offset": 4},
            "llm": {"PP": 2, "TP": 2, "CP": 1, "DP": 1, "MBS": 4, "rank_offset": 0},
        },
    }
    assert document["layer_placement"] == {"vit_layer_placement": [2, 0, 0], "llm_layer_placement": [0, 3, 1]}
    phases = evaluate(make_job(), PHASES).plan_document()
    assert phases["layer_placement"] == {"vit_layer_placement": [0, 0], "llm_layer_placement": [2, 2]}


def test_plans_of_the_chain_have_no_layout() -> None:
    chain = Plan(Strategy(2, 2, 2, 1), {"vision": (2, 0), "text": (1, 3)}, {"vision": (0, 0), "text": (0, 0)}, 24)
    document = evaluate(make_job(), chain).plan_document()
    assert "layout" not in document
    named = document | {"layout": {"kind": "chain"}}
    assert parse_plan(json.loads(json.dumps(named)), make_job(), "plan") == chain


def test_what_contradicts_a_chain_is_refused() -> None:
    chain = Plan(Strategy(2, 2, 2, 1), {"vision": (2, 0), "text": (1, 3)}, {"vision": (0, 0), "text": (0, 0)}, 24)
    document = json.loads(json.dumps(evaluate(make_job(), chain).plan_document()))
    others = {"vision": {"PP": 1, "TP": 4, "DP": 1, "MBS": 77}, "llm": {"PP": 2, "TP": 2, "DP": 2}}
    own = {"vision": others["vision"] | {"kind": "colocated", "encoder_run": "phases"}, "llm": others["llm"]}
    for modules in (others, own):
        with pytest.raises(PlanError, match=r"layout.kind is chain, and layout.modules stands beside it"):
            parse_plan(document | {"layout": {"kind": "chain", "modules": modules}}, make_job(), "plan")
    with pytest.raises(PlanError, match=r"layout.kind is chain, and layout.encoder_run is .phases."):
        parse_plan(document | {"layout": {"kind": "chain", "encoder_run": "phases"}}, make_job(), "plan")
    plain = document | {"layout": {"kind": "chain", "encoder_run": "inline", "modules": {}}}
    assert parse_plan(plain, make_job(), "plan") == chain


def test_keys_of_the_section_that_nobody_knows_are_named() -> None:
    document = json.loads(json.dumps(evaluate(make_job(), APART).plan_document()))
    assert parse_plan(document, make_job(), "plan").warnings == ()
    document["layout"] |= {"pieces": 4, "encoder_runs": "phases", "foo": 1}
    read = parse_plan(document, make_job(), "plan")
    assert read == APART
    assert read.warnings == (
        "layout.pieces is not known here and decides nothing; each of layout.modules has its own",
        'layout.encoder_runs is not known here and decides nothing (did you mean "encoder_run"?)',
        "layout.foo is not known here and decides nothing",
    )


def test_an_order_beside_a_schedule_of_a_name_is_said_not_to_decide() -> None:
    document = json.loads(json.dumps(evaluate(make_job(), APART).plan_document()))
    read = parse_plan(document | {"order": ["junk"]}, make_job(), "plan")
    assert read == APART
    (told,) = read.warnings
    assert told.startswith("order decides nothing here: schedule 1f1b says by its name what each stage runs")
    one_by_one = " ".join(f"{m}F0 {m}B0" for m in range(12))
    given = Strategy(2, 2, 2, 1, schedule="given", orders=(one_by_one,) * 2)
    counts = {"vision": (2, 0), "text": (1, 3)}
    chain = Plan(given, counts, dict.fromkeys(counts, (0, 0)), 24)
    document = json.loads(json.dumps(evaluate(make_job(), chain).plan_document()))
    read = parse_plan(document, make_job(), "plan")
    assert (read, read.warnings) == (chain, ())


def test_sizes_of_samples_may_be_left_out() -> None:
    for plan in (APART, PHASES):
        document = json.loads(json.dumps(evaluate(make_job(), plan).plan_document()))
        modules = document["layout"]["modules"]
        for sizes in modules.values():
            del sizes["MBS"], sizes["CP"]
        read = parse_plan(document, make_job(), "plan").strategy.arrangement
        assert read is not None
        assert read.encoder.mbs == (1 if plan is APART else plan.strategy.mbs)


HEARING = ModuleLayout("vision+audio", 1, 1, 8, 3)
SHARED = Strategy(2, 2, 2, 1, arrangement=Arrangement("colocated", "phases", HEARING))
OWN = replace(HEARING, pp=2, dp=2, mbs=2, rank_offset=4)
TWO = [
    Plan(SHARED, {"text": (2, 2)}, {"text": (0, 0)}, 24),
    Plan(
        Strategy(4, 2, 1, 4, arrangement=Arrangement("disaggregated", "inline", OWN)),
        {"vision": (2, 0, 0, 0), "audio": (0, 1, 0, 0), "text": (0, 0, 3, 1)},
        {"vision": (0, 0, 0, 0), "audio": (0, 0, 0, 0), "text": (0, 0, 0, 0)},
        24,
    ),
]


@pytest.mark.parametrize("plan", TWO)
def test_two_encoders_stand_there_each_with_the_same_sizes(plan: Plan) -> None:
    job = make_job(hears=True)
    document = json.loads(json.dumps(evaluate(job, plan).plan_document()))
    modules = document["layout"]["modules"]
    assert [*modules] == ["vision", "audio", "llm"]
    assert modules["vision"] == modules["audio"]
    assert parse_plan(document, job, "plan") == plan
    assert map_layout(evaluate(job, plan), job.model).encoder.num_layers == 3
    with pytest.raises(PlanError, match=r"its layout has vision and audio one after the other|gives each rank one"):
        export_plan(plan, job, "megatron-bridge", version="0.6", out=Path("nowhere"))
    modules["audio"]["MBS"] = 1
    with pytest.raises(PlanError, match=r"layout\.modules\.audio has other sizes than vision; encoders of one kind"):
        parse_plan(document, job, "plan")
    del modules["audio"]
    with pytest.raises(PlanError, match=r"names the encoder vision, and the model's is vision\+audio"):
        evaluate(job, parse_plan(document, job, "plan"))


def _spoilt(path: tuple[str, ...], value: object) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(json.loads(json.dumps(evaluate(make_job(), APART).plan_document())))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


_VISION, _LLM = ("layout", "modules", "vision"), ("layout", "modules", "llm")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("layout",), [], "layout is a list"),
        (("layout", "kind"), "mixed", r"layout.kind is .mixed.; one of chain, colocated, disaggregated"),
        (("layout", "encoder_run"), "bubbles", "other runs are of shared devices"),
        (("layout", "encoder_run"), "cached", "other runs are of shared devices"),
        (("layout", "encoder_run"), None, "layout.encoder_run is missing"),
        (("layout", "modules"), {"llm": {}}, "layout.modules names llm; the sizes of one encoder"),
        ((*_VISION, "DP"), None, "layout.modules.vision.DP is missing"),
        ((*_VISION, "TP"), "two", r"layout.modules.vision.TP is .two."),
        ((*_VISION, "EP"), 2, "layout.modules.vision.EP is not known"),
        ((*_VISION, "DP"), 3, "no multiple|must divide"),
        ((*_VISION, "rank_offset"), 5, "leave ranks idle"),
        ((*_LLM, "TP"), 4, "layout.modules.llm.TP is 4, and parallel_config says 2"),
        ((*_LLM, "PP"), 3, "layout.modules.llm.PP is 3, and parallel_config says 2 .all stages but"),
        ((*_LLM, "rank_offset"), 4, "layout.modules.llm.rank_offset is 4"),
        (("parallel_config", "PP"), 1, "it counts all stages of the pipeline"),
        (("layer_placement", "vit_layer_placement"), [1, 1, 0], "vision_layer, which lies within"),
    ],
)
def test_refused(path: tuple[str, ...], value: object, words: str) -> None:
    job = make_job()
    with pytest.raises(PlanError, match=words):
        evaluate(job, parse_plan(_spoilt(path, value), job, "plan"))


def test_layers_of_an_encoder_in_phases_are_refused() -> None:
    document = json.loads(json.dumps(evaluate(make_job(), PHASES).plan_document()))
    document["layer_placement"]["vit_layer_placement"] = [2, 0]
    with pytest.raises(PlanError, match="holds layers, and no stage holds vision layers, for its layout is"):
        parse_plan(document, make_job(), "plan")


def test_what_no_stage_holds_cannot_be_moved() -> None:
    for change in (
        lambda: move_layers(PHASES, "vision", 0, 1, 1),
        lambda: set_mode(make_job(), PHASES, "vision", 0, "recompute", 1),
        lambda: PHASES.edited(layers={"vision": [1, 1]}),
        lambda: PHASES.edited(modes={"vision": {"offload": [1, 0]}}),
    ):
        with pytest.raises(PlanError, match="no stage holds vision layers, for its layout is colocated in phases"):
            change()


def test_a_list_that_misses_is_not_thought_to_be_one_that_may_stand_there() -> None:
    """Zeros of an encoder in phases, and of a model's vision that there is none of, are known; a slip is not."""
    document = json.loads(json.dumps(evaluate(make_job(), PHASES).plan_document()))
    del document["layer_recompute"]["llm_layer_recompute"]
    with pytest.raises(PlanError, match=r"layer_recompute\.llm_layer_recompute is missing$"):
        parse_plan(document, make_job(), "plan")
    document["layer_recompute"]["lm_layer_recompute"] = [0, 0]
    with pytest.raises(PlanError, match="the key 'lm_layer_recompute' stands there, which is not known"):
        parse_plan(document, make_job(), "plan")
