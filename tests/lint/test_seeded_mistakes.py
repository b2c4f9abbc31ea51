"""Every mistake that is put into a good script is found by its own rule, on its line, and by no other rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeded import GOOD, MISTAKES, Mistake

from mm_autoparallel.api.linted import LintResult, lint_files, list_rules


def lint(text: str, folder: Path) -> LintResult:
    """What is found in `text` as a script."""
    path = folder / "train.sh"
    path.write_text(text, encoding="utf-8")
    return lint_files([path], device="h100-80g")


def test_nothing_is_found_in_the_good_script(tmp_path: Path) -> None:
    assert lint(GOOD, tmp_path).findings == ()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_by_its_rule_alone(name: str, tmp_path: Path) -> None:
    mistake: Mistake = MISTAKES[name]
    text = GOOD
    for old, new in mistake.changes.items():
        assert old in text, old
        text = text.replace(old, new)
    result = lint(text, tmp_path)
    assert {one.rule.key for one in result.findings} - mistake.also == {mistake.rule}
    found = next(one for one in result.findings if one.rule.key == mistake.rule)
    assert found.mend.startswith(mistake.mend)
    if mistake.at:
        assert found.line is not None
        assert mistake.at in text.splitlines()[found.line - 1]
    assert result.fails() is (found.rule.severity == "error")


def test_mistakes_are_of_twenty_kinds_and_more() -> None:
    assert len({mistake.rule for mistake in MISTAKES.values()}) >= 20


def test_lint_goes_on_after_the_first(tmp_path: Path) -> None:
    text = GOOD
    for name in ("batch", "old", "connections", "exclusive", "positions"):
        for old, new in MISTAKES[name].changes.items():
            text = text.replace(old, new)
    keys = {one.rule.key for one in lint(text, tmp_path).findings}
    assert keys >= {MISTAKES[name].rule for name in ("batch", "old", "connections", "exclusive", "positions")}


def test_rules_have_names_of_their_own() -> None:
    rules = [rule for of_one in list_rules().values() for rule in dict.fromkeys(of_one)]
    keys = {rule.key for rule in rules}
    assert len(keys) == len({*rules})
    assert all(key == key.lower() and " " not in key and "_" not in key for key in keys)
