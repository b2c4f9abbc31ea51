"""What each encoder has of its own, named in words: against every strategy of spaces with two encoders."""

from __future__ import annotations

from typing import Any

import pytest
from two_modules import apart, make_job, shared

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.explain.modules import Own, list_beside, list_branches, list_owns
from mm_autoparallel.planner.explain.nearest import _Nearness, nearest_strategy
from mm_autoparallel.planner.explain.variables import list_variables
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_all_boughs, list_entries
from mm_autoparallel.studio.drawing import SIZES, list_values

SMALL: dict[str, Any] = {"cp": [1], "pp": [1, 2], "tp": [1, 2], "mbs": [3], "modes": [], "devices": [4]}


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(hears=True, layouts="all", **SMALL)


@pytest.fixture(scope="module")
def lawful(job: Job) -> list[Strategy]:
    """Every strategy, those of a module for each encoder too."""
    return [entry.strategy for entry in list_entries(job) if entry.reason is None]


def is_meant(strategy: Strategy, wish: dict[str, Any]) -> bool:
    """As words have it, by another hand."""
    for key, value in wish.items():
        name, _, of = key.rpartition(".")
        if not name:
            if getattr(strategy, of) != value:
                return False
            continue
        each = strategy.arrangement.each if strategy.arrangement else ()
        (one,) = [one for one in each if name in one.encoder.name.split("+")] or [None]
        if of == "layout":
            words = (
                {"chain"} if one is None else {one.kind} | ({one.encoder_run} - ({"inline"} if one.apart else set()))
            )
            own, of_decoder = one.encoder if one else None, strategy.of_decoder()
            if one and one.kind == "colocated" and one.encoder_run == "inline" and own:
                same = (own.tp, own.cp, own.dp) == (of_decoder.tp, of_decoder.cp, of_decoder.dp)
                words |= {"chain"} if same else set()
            if value not in words:
                return False
        elif getattr(one.encoder if one else strategy.of_decoder(), of) != value:
            return False
    return True


WISHES = (
    "vision.LAYOUT=phases",
    "audio.LAYOUT=prefetch",
    "audio.LAYOUT=prefetch,vision.LAYOUT=bubbles",
    "vision.LAYOUT=chain,audio.LAYOUT=phases",
    "vision.TP=1,TP=2",
    "audio.MBS=6",
    "PP=3",
    "vision.LAYOUT=disaggregated,vision.PP=2",
    "audio.LAYOUT=disaggregated,vision.LAYOUT=disaggregated,PP=4",
    "audio.LAYOUT=inline,PP=1",
)


@pytest.mark.parametrize("text", WISHES)
def test_the_nearest_is_the_nearest_of_all(job: Job, lawful: list[Strategy], text: str) -> None:
    wish = dict(parse_wish(text))
    matching = [one for one in lawful if is_meant(one, wish)]
    assert matching
    for present in lawful[:: max(1, len(lawful) // 7)]:
        near = _Nearness(job, present, wish)
        assert nearest_strategy(job, present, wish) == min(matching, key=near.distance)


def test_a_plan_that_differs_in_one_module_keeps_the_other(job: Job, lawful: list[Strategy]) -> None:
    several = [one for one in lawful if one.arrangement and one.arrangement.others]
    for present in several[:: len(several) // 12]:
        audio = Own.of(present, "audio")
        near = nearest_strategy(job, present, {"vision.layout": Own.of(present, "vision").layout, "mbs": 3})
        assert near == present
        if audio.layout in ("prefetch", "bubbles"):
            moved = nearest_strategy(job, present, {"vision.layout": "phases"})
            assert Own.of(moved, "audio") == audio
            assert Own.of(moved, "vision").layout == "phases"


@pytest.mark.parametrize("text", ["vision.PP=2", "layout=disaggregated,vision.PP=2", "PP=3"])
def test_layout_and_decoder_are_kept_before_sizes_of_the_encoder(text: str) -> None:
    present = Strategy(2, 1, 4, 2, arrangement=apart(1, 1, 4, 2))
    near = nearest_strategy(make_job(layouts="all"), present, parse_wish(text, "--sizes"))
    assert near == Strategy(3, 1, 4, 2, arrangement=apart(2, 1, 2, 4))


def test_how_an_encoder_runs_is_kept_before_the_decoder() -> None:
    """Two ranks share a pass, which a stage of the decoder's ranks must be able to make."""
    present = Strategy(2, 1, 4, 1, arrangement=shared("bubbles", 1, 8, 1))
    near = nearest_strategy(make_job(layouts="all"), present, parse_wish("vision.TP=2", "--sizes"))
    assert near.arrangement is not None
    assert (near.arrangement.encoder_run, near.arrangement.encoder.tp) == ("bubbles", 2)
    assert (near.pp, near.tp * near.cp) == (2, 2)


def test_what_encoders_may_be_is_what_lawful_strategies_have(job: Job, lawful: list[Strategy]) -> None:
    found = list_owns(job, list_branches(list_all_boughs(job)))
    arranged = [one for one in lawful if one.arrangement]
    for name in ("vision", "audio"):
        assert found[name] == {Own.of(one, name) for one in arranged}
        for decoder in {one.of_decoder() for one in arranged}:
            beside = {Own.of(one, name) for one in arranged if one.of_decoder() == decoder}
            assert list_beside(job, decoder)[name] == beside
    by_name = {one.name: one for one in list_variables(job)}
    assert (
        by_name["how audio runs"].values == "bubbles, chain, disaggregated, inline, phases, prefetch, recomputed_phases"
    )
    assert "prefetch" not in by_name["how vision runs"].values  # it trains
    assert by_name["tensor parallel size of vision in such a layout"].where == "layout.modules.vision.TP"
    of_chain = {one.name for one in list_variables(make_job(hears=True, layouts=["chain"], **SMALL))}
    assert not any("how" in name and "runs" in name for name in of_chain)


def test_sizes_to_choose_from_are_those_of_lawful_strategies(job: Job) -> None:
    lawful = [entry.strategy for entry in list_entries(job, with_several=False) if entry.reason is None]
    assert list_values(job) == {name: {getattr(one, name) for one in lawful} for name in SIZES}


@pytest.mark.parametrize("devices", [4, 5, 8])
def test_variables_have_what_a_module_for_each_encoder_alone_makes(devices: int) -> None:
    job = make_job(hears=True, layouts=["disaggregated"], encoder_cp=[1, 2], **(SMALL | {"devices": [devices]}))
    every = [entry.strategy for entry in list_entries(job) if entry.reason is None]
    by_place = {one.where: one.values for one in list_variables(job)}
    for where, key in (("search.pp", "pp"), ("search.tp", "tp"), ("search.dp", "dp"), ("search.mbs", "mbs")):
        assert by_place[where] == ", ".join(map(str, sorted({getattr(one, key) for one in every})))
    shared = {max(each.encoder.cp for each in one.arrangement.each) for one in every if one.arrangement}
    assert by_place["search.encoder_cp"] == ", ".join(map(str, sorted(shared)))
    stages_of_one = {one.pp for one in every if one.arrangement and not one.arrangement.others}
    assert {one.pp for one in every} > stages_of_one or devices == 4


def test_first_plans_of_passes_beside_the_decoder_have_their_orders(job: Job, lawful: list[Strategy]) -> None:
    beside = [one for one in lawful if one.arrangement and one.arrangement.has_orders]
    for strategy in beside[:: len(beside) // 6]:
        plan = first_plan(job, strategy)
        assert plan == first_plan(job, strategy)
        assert len(plan.orders) == strategy.pp
        assert evaluate(job, plan).step_ms > 0.0


def test_why_not_of_one_encoder(job: Job, lawful: list[Strategy]) -> None:
    best = search(make_job(hears=True, layouts=["chain"], **SMALL), num_workers=1).estimates[0]
    wish = parse_wish("audio.layout=prefetch,vision.LAYOUT=phases,vision.TP=1")
    answer = explain_why_not(job, best, wish, 30.0)
    assert answer.estimate is not None
    assert is_meant(answer.strategy, dict(wish))
    assert not answer.outside
    outside = explain_why_not(make_job(hears=True, layouts=["chain"], **SMALL), best, wish, 30.0)
    assert outside.outside
    assert outside.estimate is not None
    assert outside.estimate.step_ms == pytest.approx(answer.estimate.step_ms, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sight.TP=2", r"sight.TP 2: the model has no encoder sight; its encoders are vision, audio"),
        ("vison.TP=2", r'no encoder vison \(did you mean "vision"\?\)'),
        ("vision.LAYOUT=prefetch", "prefetch makes features in another step"),
        ("vision.LAYOUT=kept", "vision.LAYOUT is 'kept'; known are chain, colocated, .*, cached"),
        ("vision.LAYOUT=cached", "features of vision may be made once and read where workload.cached_features names"),
        ("vision.EP=2", r"names no size of an encoder vision; it takes NAME=VALUE .* and knows LAYOUT, PP, TP"),
        ("vision.TP=2,vision.tp=1", "vision.TP stands there twice"),
        ("vision.TP=0", "vision.TP is '0'; a whole number of at least 1 is expected"),
    ],
)
def test_what_no_module_is_called_so_is_refused(job: Job, lawful: list[Strategy], text: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        nearest_strategy(job, lawful[0], parse_wish(text, "--sizes"))
