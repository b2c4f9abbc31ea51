"""operators.py: its look-ups are of the base, its unseen layers share operators with known ones, its table is one."""

from __future__ import annotations

from operators import Predicted, describe, list_layers, many_forms, time_look_ups


def test_look_ups_are_timed_of_distinct_forms() -> None:
    assert len({form.digest for form in many_forms(2000)}) == 2000
    assert [name for name, took_us in time_look_ups(200) if took_us > 0] == [
        "form to key",
        "first look-up",
        "second look-up",
    ]


def test_unseen_layers_are_others_with_the_same_parts() -> None:
    known, unseen = list_layers()
    assert not set(known) & set(unseen)
    for parts in ("ffn_size", "num_heads"):
        assert {(one.hidden_size, getattr(one, parts)) for one in unseen} == {
            (one.hidden_size, getattr(one, parts)) for one in known
        }


def test_the_table_has_a_row_for_each_part_that_is_kept() -> None:
    header, line, row = describe([Predicted(1.0, 0.5, 0.25, 0.03, 0.08)])
    assert row == "| 100.0 % | 50.0 % | 25.0 % | 3.0 % | 8.0 % |"
    assert header.count("|") == line.count("|") == row.count("|")
