"""Whatever is put into a job or a model file, it is read or refused with a JobError; nothing else comes out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.model.readers.model_file import parse_inline_model, read_model

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
MODELS = {
    path.stem: json.loads(path.read_text())
    for folder in ("mindspeed_mm_models", "huggingface")
    for path in sorted((FIXTURES / folder).glob("*.json"))
    if path.stem != "parameters"
}
OWN = {path.stem: read_model(path).model_dump(mode="json") for path in (FIXTURES / "huggingface").glob("q*.json")}
JOBS = {path.parent.name: read_document(path, "job file") for path in (ROOT / "examples").glob("*/job.yaml")}

SPOILT = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from(
        [0, -1, 10**6, 10**12, 10**30, 0.5, 1e-320, 1e300, "", "x", "RMSNorm", [], [0], [[1]], {}, {"a": 1}]
    ),
)


def places(document: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The trail to every value of a document."""
    if trail:
        yield trail
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*trail, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from places(value, (*trail, index))


def spoil(document: dict[str, Any], trail: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with the value at the end of `trail` replaced, or removed for None in a mapping."""
    document = copy.deepcopy(document)
    part: Any = document
    for step in trail[:-1]:
        part = part[step]
    if value is None and isinstance(part, dict):
        del part[trail[-1]]
    else:
        part[trail[-1]] = value
    return document


@pytest.mark.parametrize("name", [*MODELS, *(f"own {name}" for name in OWN)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spoilt_models(name: str, data: st.DataObject) -> None:
    document = OWN[name.removeprefix("own ")] if name.startswith("own ") else MODELS[name]
    trail = data.draw(st.sampled_from(list(places(document))))
    try:
        model = parse_inline_model(spoil(document, trail, data.draw(SPOILT)), Path("job.yaml"))
    except JobError as error:
        message = str(error)
    else:
        assert count_chain_parameters(expand(model)) > 0
        return
    assert message.startswith("job file job.yaml: ")
    assert "\n" not in message


@pytest.mark.parametrize("name", list(JOBS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoilt_jobs(name: str, tmp_path: Path, data: st.DataObject) -> None:
    trail = data.draw(st.sampled_from(list(places(JOBS[name]))))
    document = spoil(JOBS[name], trail, data.draw(SPOILT))
    for path in (ROOT / "examples" / name).glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    path = tmp_path / "spoilt.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        job = read_job(path)
    except JobError as error:
        message = str(error)
    else:
        assert all(count_tokens(modality, job.workload).layer_tokens >= 0 for modality in job.model.modalities)
        return
    assert "\n" not in message
