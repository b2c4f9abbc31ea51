"""Findings of pydantic are told in words: key, value, what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mm_autoparallel.errors import PlanError
from mm_autoparallel.validation import nearest, parse_record


class Square(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["square"]
    side_length: int = Field(strict=True, ge=1)


class Circle(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["circle"]
    radius: float = Field(strict=True, gt=0)


class Drawing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str
    shapes: tuple[Annotated[Square | Circle, Field(discriminator="type")], ...] = ()
    colour: Literal["red", "blue"] = "red"
    visible: bool = Field(True, strict=True)
    scale_factor: float | None = Field(None, strict=True)
    form: str = Field("plain", alias="schema")
    margins: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = Field((0,), min_length=1)

    @model_validator(mode="after")
    def check(self) -> Drawing:
        if len(self.shapes) > 2:
            raise ValueError("at most two shapes fit")
        return self


SQUARE = {"type": "square", "side_length": 2}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "title is missing; a text is expected"),
        ({"title": 3}, "title is 3; a text is expected"),
        ({"title": "t", "colour": "reed"}, "colour is \"reed\"; one of 'red' or 'blue' is expected"),
        ({"title": "t", "visible": "yes"}, 'visible is "yes"; true or false is expected'),
        ({"title": "t", "scale_factor": "2"}, 'scale_factor is "2"; a number is expected'),
        ({"title": "t", "shapes": 3}, "shapes is 3; a list is expected"),
        ({"title": "t", "margins": []}, "margins is empty; it must hold at least 1"),
        ({"title": "t", "shema": "x"}, 'shema is not a key known here (did you mean "schema"?)'),
        ({"title": "t", "shapes": [3]}, "shapes[0] is 3; a mapping is expected"),
        (
            {"title": "t", "shapes": [{"type": "square", "side_length": 0}]},
            "shapes[0].side_length is 0; it must be at least 1",
        ),
        (
            {"title": "t", "shapes": [{"type": "square", "side_length": 2.5}]},
            "shapes[0].side_length is 2.5; a whole number",
        ),
        ({"title": "t", "shapes": [{"type": "square", "side_length": True}]}, "side_length is true; a whole number"),
        (
            {"title": "t", "shapes": [{"type": "square"}]},
            "shapes[0].side_length is missing; a whole number is expected",
        ),
        ({"title": "t", "shapes": [{"type": "circle", "radius": -1}]}, "shapes[0].radius is -1; it must be above 0"),
        (
            {"title": "t", "shapes": [{"type": "oval"}]},
            "shapes[0].type is missing or unknown; one of 'square', 'circle'",
        ),
        ({"title": "t", "shapes": [{"side_length": 2}]}, "shapes[0].type is missing or unknown"),
        ({"titel": "t"}, 'titel is not a key known here (did you mean "title"?); known are colour, margins, scale'),
        (
            {"title": "t", "shapes": [{"type": "square", "side_lenght": 2}]},
            'shapes[0].side_lenght is not a key known here (did you mean "side_length"?)',
        ),
        ({"title": "t", "shapes": [SQUARE] * 3}, "at most two shapes fit"),
    ],
)
def test_one_paragraph_names_key_value_and_remedy(document: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_record(Drawing, document, "drawing", Path("d.yaml"), PlanError)
    message = str(caught.value)
    assert message.startswith("drawing d.yaml: ")
    assert words in message
    assert "\n" not in message


def test_a_misspelt_key_is_told_before_what_it_leaves_missing() -> None:
    with pytest.raises(PlanError, match=r"^drawing d: titel is not .*; title is missing; a text is expected$"):
        parse_record(Drawing, {"titel": "t"}, "drawing", Path("d"), PlanError)


def test_a_list_is_not_called_empty_for_a_wrong_entry() -> None:
    with pytest.raises(PlanError, match=r"^drawing d: margins\[0\] is -1; it must be at least 0$"):
        parse_record(Drawing, {"title": "t", "margins": [-1]}, "drawing", Path("d"), PlanError)


def test_only_the_first_findings_are_told() -> None:
    document = {"title": "t", "shapes": [{"type": "square", "side_length": 0}] * 5}
    with pytest.raises(PlanError, match=r"; and 2 more$"):
        parse_record(Drawing, document, "drawing", Path("d"), PlanError)


def test_what_is_right_comes_back() -> None:
    drawing = parse_record(Drawing, {"title": "t", "shapes": [SQUARE]}, "drawing", Path("d"))
    assert drawing == Drawing(title="t", shapes=(Square(type="square", side_length=2),))


def test_nothing_near_no_hint() -> None:
    assert nearest("zzz", ["hidden_size"]) == ""
