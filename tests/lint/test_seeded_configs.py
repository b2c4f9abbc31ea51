"""Every mistake that is put into a good configuration is found by its own rule, on its line, in its own keys."""

from __future__ import annotations

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
    assert seeded <= {rule.key for rules in list_rules().values() for rule in rules}


def test_every_framework_whose_configurations_are_read_has_a_form() -> None:
    assert {form["framework"] for form in FORMS.values()} == {
        *("accelerate", "colossalai", "deepspeed", "megatron-bridge", "mindformers", "mindspeed-mm"),
        *("mindspeed-mm-fsdp", "paddle", "torchtitan"),
    }
