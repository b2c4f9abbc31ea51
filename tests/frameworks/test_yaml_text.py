"""Values are changed in a YAML text, and nothing else: comments, anchors, quoting and order stay byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.yaml_text import set_yaml_values

TEXT = """# head
first: &first 16 # a number
'quoted': "x # no comment"
section:
  offset: [1, 2] # behind
  flag: True
  rows:
  -   - 1 # one
      - 2
  # before the next
  shared: &rows [[0, 0]]
  again: *rows
use: *first
"""


def test_a_list_of_the_same_shape_changes_its_numbers_alone() -> None:
    edited = set_yaml_values(TEXT, {("section", "rows"): [[3, 2]], ("section", "offset"): [1, -7]})
    assert edited == TEXT.replace("- 1 # one", "- 3 # one").replace("[1, 2] # behind", "[1, -7] # behind")


def test_another_shape_is_written_in_brackets_and_its_comments_are_kept() -> None:
    edited = set_yaml_values(TEXT, {("section", "rows"): [[1], [2]]})
    assert edited == TEXT.replace("  rows:\n  -   - 1 # one\n      - 2\n", "  # one\n  rows: [[1], [2]]\n")


def test_an_anchor_stays_where_its_value_changes_with_its_aliases() -> None:
    edited = set_yaml_values(TEXT, {("first",): 8, ("use",): 8})
    assert edited == TEXT.replace("&first 16", "&first 8")
    edited = set_yaml_values(TEXT, {("section", "shared"): [[1], [2]], ("section", "again"): [[1], [2]]})
    assert edited == TEXT.replace("&rows [[0, 0]]", "&rows [[1], [2]]")


def test_an_alias_becomes_a_value_of_its_own() -> None:
    assert set_yaml_values(TEXT, {("use",): 8}) == TEXT.replace("use: *first", "use: 8")


def test_an_edit_that_would_change_an_alias_elsewhere_is_refused() -> None:
    with pytest.raises(JobError, match=r"section\.shared cannot be written without changing other keys"):
        set_yaml_values(TEXT, {("section", "shared"): [[1, 1]]})


def test_an_edit_that_an_alias_misleads_is_refused() -> None:
    text = "a:\n  x: &all\n  - - 0\n    - 0\n  - - 0\n    - 0\n  y: *all\nb:\n  f:\n  - *all\nc: 1\n"
    with pytest.raises(JobError, match="because anchors or merged mappings share"):
        set_yaml_values(text, {("b", "f"): [1, 2]})


def test_a_number_in_the_place_of_a_list_keeps_its_anchor_once() -> None:
    assert set_yaml_values("a: &x [1, 2] # two\n", {("a",): 5}) == "a: &x 5 # two\n"


def test_flags_are_spelt_as_they_were() -> None:
    assert "flag: False" in set_yaml_values(TEXT, {("section", "flag"): False})
    assert "flag: false" in set_yaml_values(TEXT.replace("True", "true"), {("section", "flag"): False})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  b: 1 # one\n", "a:\n  new: [1]\n  b: 1 # one\n"),
        ("a: {b: 1}\n", "a: {new: [1], b: 1}\n"),
        ("a: {}\n", "a: {new: [1]}\n"),
        ("b: 1", "b: 1\na: {new: [1]}\n"),
        ("b: 1\r\n", "b: 1\r\na: {new: [1]}\r\n"),
        ("a: true # all\nb: 1\n", "a: {new: [1]} # all\nb: 1\n"),
        ("a:\nb: 1\n", "a: {new: [1]}\nb: 1\n"),
        ("a:\n  new: &x 3 # kept\n  b: 1\n", "a:\n  new: &x [1] # kept\n  b: 1\n"),
        ("a:\n  new: # later\n  b: 1\n", "a:\n  new: [1] # later\n  b: 1\n"),
    ],
)
def test_missing_keys_and_sections_are_added(text: str, expected: str) -> None:
    assert set_yaml_values(text, {("a", "new"): [1]}) == expected


def test_a_section_in_the_place_of_a_word_is_written() -> None:
    edited = set_yaml_values("parallel: t\nother: 1\n", {("parallel", "size"): 2}, aliases_follow=True)
    assert yaml.safe_load(edited) == {"parallel": {"size": 2}, "other": 1}


def test_a_key_that_plain_yaml_would_misread_is_quoted() -> None:
    edited = set_yaml_values("a: 1\n", {("s", r".*\.norm"): [[1]]})
    assert yaml.safe_load(edited) == {"a": 1, "s": {r".*\.norm": [[1]]}}


def test_what_is_already_there_is_not_touched() -> None:
    odd = "a: [ 1,2 ]   # odd spacing\n"
    assert set_yaml_values(odd, {("a",): [1, 2]}) == odd


def test_a_text_is_composed_once_for_changes_that_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What people write by hand is small; a list of thousands of entries among it is not."""
    composed: list[str] = []
    compose = yaml.compose
    monkeypatch.setattr(yaml, "compose", lambda text, **more: composed.append(text) or compose(text, **more))
    text = TEXT + "long: [" + ", ".join(["1"] * 500) + "]\n"
    changes: dict[tuple[str | int, ...], Any] = {
        ("first",): 3,
        ("section", "offset"): [4, 5],
        ("section", "rows"): [[6], [7]],
        ("section", "flag"): False,
        ("profile",): True,
        ("profile_level",): 1,
    }
    for first in range(20, 30):
        edited = yaml.safe_load(set_yaml_values(text, changes | {("first",): first}, aliases_follow=True))
        assert edited["first"] == edited["use"] == first
        assert [edited["section"][key] for key in ("offset", "rows", "flag")] == [[4, 5], [[6], [7]], False]
        assert (edited["profile"], edited["profile_level"]) == (True, 1)
    assert composed == [text]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({("new", "a"): 1, ("new", "b"): 2}, "new: {b: 2, a: 1}\n"),
        ({("s", "x"): 1, ("s", "y"): 2}, "s:\n  y: 2\n  x: 1\n  a: 0\n"),
        ({("s", "a"): [1], ("s", "x"): 2}, "s:\n  x: 2\n  a: [1]\n"),
    ],
)
def test_changes_that_meet_see_each_other(changes: dict[tuple[str | int, ...], Any], expected: str) -> None:
    text = "s:\n  a: 0\n" if ("new", "a") not in changes else ""
    assert set_yaml_values("b: 1\n" + text, changes) == "b: 1\n" + expected


@pytest.mark.parametrize("odd", ["2024-13-45", "=", "0x_", "0b_"])
def test_what_readers_of_yaml_1_1_refuse_is_named(odd: str) -> None:
    """The planner reads YAML 1.2, and takes these for texts."""
    with pytest.raises(JobError, match="training stacks have, refuse it"):
        set_yaml_values(f"a: 1\nx: {odd}\n", {("a",): 2})


KEYS = st.sampled_from(["a", "b", "offset", "x y", "1", r".*\.norm", "true", "k: v", "#"])
SCALARS = (
    st.integers(-9, 99) | st.booleans() | st.none() | st.sampled_from(["", "text", "a: b", "# no", "1", "two\nlines"])
)
GRIDS = st.lists(st.lists(st.integers(-3, 9), min_size=2, max_size=2), min_size=1, max_size=3)
DOCUMENTS = st.recursive(
    st.dictionaries(KEYS, SCALARS | GRIDS, max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | SCALARS | GRIDS, max_size=3),
)


@settings(deadline=None, max_examples=100)
@given(DOCUMENTS, st.sampled_from([True, False, None]), st.lists(KEYS, min_size=1, max_size=3), GRIDS, st.booleans())
def test_any_place_in_any_style_takes_a_value(
    document: dict[str, Any], flow: bool | None, path: list[str], value: list[list[int]], crlf: bool
) -> None:
    assume(document)
    text = yaml.safe_dump(document, default_flow_style=flow, sort_keys=False)
    edited = set_yaml_values(text.replace("\n", "\r\n") if crlf else text, {tuple(path): value})
    parent = yaml.safe_load(edited)
    for key in path[:-1]:
        parent = parent[key]
    assert parent[path[-1]] == value
