"""Every mistake that is put into a good configuration is found by its own rule, on its line, in its own keys."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from configs import lint_form, list_forms, read_form

from mm_autoparallel.api.linted import list_rules

FORMS = {name: read_form(name) for name in list_forms()}
CASES = [(name, mistake) for name, form in FORMS.items() for mistake in form["mistakes"]]


@pytest.mark.parametrize("name", FORMS)
def test_nothing_is_found_in_a_good_configuration(name: str, tmp_path: Path) -> None:
    result, _ = lint_form(FORMS[name], {}, tmp_path)
    assert result.findings == ()


@pytest.mark.parametrize(("name", "mistake"), CASES)
def test_a_mistake_is_found_by_its_rule_alone(name: str, mistake: str, tmp_path: Path) -> None:
    seeded = FORMS[name]["mistakes"][mistake]
    result, texts = lint_form(FORMS[name], seeded, tmp_path)
    assert {one.rule.key for one in result.findings} - {*seeded.get("also", ())} == {seeded["rule"]}
    found = next(one for one in result.findings if one.rule.key == seeded["rule"])
    assert found.mend.startswith(seeded.get("mend", ""))
    if "at" in seeded:
        assert found.line is not None
        assert seeded["at"] in texts[found.path].splitlines()[found.line - 1]


def test_mistakes_are_of_twenty_kinds_and_more() -> None:
    seeded = {FORMS[name]["mistakes"][mistake]["rule"] for name, mistake in CASES}
    assert len(seeded) >= 20
    rules = list_rules()
    for name, mistake in CASES:
        form = FORMS[name]
        assert form["mistakes"][mistake]["rule"] in {rule.key for rule in (*rules[""], *rules[form["framework"]])}


def test_every_framework_whose_configurations_are_read_has_a_form() -> None:
    assert {form["framework"] for form in FORMS.values()} == {
        *("accelerate", "colossalai", "deepspeed", "megatron-bridge", "mindformers", "mindspeed-mm"),
        *("mindspeed-mm-fsdp", "paddle", "torchtitan"),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMS)
def test_whatever_is_done_to_a_configuration_it_is_answered(name: str, tmp_path: Path) -> None:
    """Lines gone, numbers and words in their place: all that is told is told by a rule."""
    rng, form = random.Random(name), FORMS[name]
    keys = {rule.key for rules in list_rules().values() for rule in rules}
    seen = set()
    for _ in range(60):
        lines = form["good"].splitlines(keepends=True)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(lines))
            value = str(rng.choice([0, 3, 7, 10**9, -1, "x", "[]", "{}", "null", "true", '"2"', "1.5"]))
            match rng.randrange(3):
                case 0:
                    lines[place] = ""
                case 1:
                    lines[place] = re.sub(r"\b\d+\b", value, lines[place])
                case _:
                    lines[place] = re.sub(r"(?<=[:=] )[\w.]+", value, lines[place])
        result, _ = lint_form({**form, "good": "".join(lines), "device": None}, {}, tmp_path)
        seen |= {one.rule.key for one in result.findings}
    assert seen <= keys
    assert len(seen) >= 2


def test_of_several_functions_the_one_that_is_meant_has_the_line(tmp_path: Path) -> None:
    form = FORMS["megatron_bridge_recipe"]
    good = form["good"]
    other = good[good.index("def small") :].replace("small", "other").replace("size = 128", "size = 64")
    bad = good.replace("size = 128", "size = 8")
    two = {**form, "good": f"{bad}\n\n{other}"}
    result, texts = lint_form(two, {"given": {"entry": "small_pretrain_config"}}, tmp_path)
    (found,) = result.findings
    assert found.rule.key == "few-micro-batches"
    assert found.line is not None
    assert texts[found.path].splitlines()[found.line - 1].strip() == "cfg.train.global_batch_size = 8"
    result, _ = lint_form(two, {"given": {"entry": "other_pretrain_config"}}, tmp_path)
    assert {one.rule.key for one in result.findings} <= {"few-micro-batches"}
