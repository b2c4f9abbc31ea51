"""What the census recorded of every model type with images or sounds; the census itself runs by night."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.integrations.huggingface.config import FAMILIES

RECORD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures" / "model_types.json").read_text())
TYPES: dict[str, dict[str, Any]] = RECORD["types"]


def test_a_type_is_read_with_the_parameters_of_its_class_or_refused_with_a_reason() -> None:
    assert not [name for name, told in TYPES.items() if "crash" in told]
    refused = {name for name, told in TYPES.items() if "refusal" in told}
    assert {name for name, told in TYPES.items() if told.get("parameters") == told.get("of_class", 0)} | refused == {
        *TYPES
    }
    assert all(len(TYPES[name]["refusal"]) > 20 for name in refused)


def test_types_are_recorded_as_what_reads_them_now() -> None:
    assert {name for name, told in TYPES.items() if told["route"] == "described"} == TYPES.keys() & FAMILIES.keys()


@pytest.mark.nightly
def test_the_record_has_all_types_of_its_release() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from model_types_census import list_types

    if transformers.__version__ != RECORD["transformers"]:
        pytest.skip(f"the record is of transformers {RECORD['transformers']}")
    listed = list_types()
    assert TYPES.keys() == {*listed}
    assert RECORD["of_release"] == len(listed)
