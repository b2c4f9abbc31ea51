"""From a document to a pydantic record, and pydantic's findings in words a person can act on.

Each message names the file, the key as one would write it (`cluster.levels[1].latency_ms`), what stands there, and what
would be right; a key nobody knows comes with the nearest one that is known.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import describe_value

Record = TypeVar("Record", bound=BaseModel)

OUT_OF_RANGE = "out_of_range"
"""The type of pydantic's findings that records.py makes of figures beyond what their unit may be."""

MAX_FINDINGS = 3
"""Findings told at once; more bury the first."""


def parse_record(
    record: type[Record],
    document: dict[str, Any],
    what: str,
    path: Path,
    error: type[PlannerError] = JobError,
) -> Record:
    """`document` as a `record`. Raises `error` with one paragraph naming file, key, value and what would be right."""
    try:
        return record.model_validate(document)
    except ValidationError as failure:
        raise validation_error(failure, f"{what} {path}", record, document, error) from None


def validation_error(
    failure: ValidationError,
    where: str,
    record: type[BaseModel],
    document: dict[str, Any],
    error: type[PlannerError] = JobError,
) -> PlannerError:
    """The error of one paragraph for `failure`, which arose from validating `document`, which messages call `where`, as
    a `record`; for the caller to raise."""
    findings = failure.errors(include_url=False)
    # A misspelt key is one mistake but two findings (unknown, and missing under its right name): tell it first.
    findings.sort(key=lambda finding: finding["type"] != "extra_forbidden")
    # A list is also counted as too short where one of its entries is refused: only the entry is to be mended.
    findings = [
        finding
        for finding in findings
        if finding["type"] != "too_short" or not any(_is_inside(other["loc"], finding["loc"]) for other in findings)
    ]
    described = [_describe_finding(dict(finding), record, _drop_tags(finding["loc"], document)) for finding in findings]
    distinct = list(dict.fromkeys(described))
    told = distinct[:MAX_FINDINGS]
    rest = len(distinct) - len(told)
    key = _join(_drop_tags(findings[0]["loc"], document)) if len(distinct) == 1 else ""
    return error("; ".join(told) + (f"; and {rest} more" if rest else ""), where=where, key=key)


def describe_unfit(failure: ValidationError) -> str:
    """What is wrong with sizes that were read one by one, under names of another tool, and do not go together."""
    described = []
    for finding in failure.errors(include_url=False):
        found = _describe_finding(dict(finding), BaseModel, finding["loc"])
        described.append(f"sizes of {failure.title}: {found}" if finding["loc"] else found)
    return "; ".join(dict.fromkeys(described))


def nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean "hidden_size"?)`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f' (did you mean "{near[0]}"?)' if near else ""


def _is_inside(inner: tuple[str | int, ...], outer: tuple[str | int, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _describe_finding(finding: dict[str, Any], record: type[BaseModel], location: tuple[str | int, ...]) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    where = _join(location) or "the document"
    found = describe_value(finding["input"])
    if kind == "extra_forbidden":
        known = sorted(_known_keys(record, location[:-1]))
        return f"{where} is not a key known here{nearest(str(location[-1]), known)}; known are {', '.join(known)}"
    if kind == "missing":
        expected = _expectation(record, location)
        return f"{where} is missing" + (f"; {expected} is expected" if expected else "")
    if kind in _LIMITS:
        word, key = _LIMITS[kind]
        return f"{where} is {found}; it must be {word} {context[key]:,}"
    if kind == "value_error":
        return f"{where}: {context['error']}" if location else str(context["error"])
    if kind in ("literal_error", "enum"):
        return f"{where} is {found}; one of {context['expected']} is expected"
    if kind in ("too_short", "string_too_short"):
        return f"{where} is empty; it must hold at least {context['min_length']}"
    if kind.startswith("union_tag"):
        tag = str(context["discriminator"]).strip("'")
        options = context.get("expected_tags", "")
        return f"{where}.{tag} is missing or unknown" + (f"; one of {options} is expected" if options else "")
    if kind == OUT_OF_RANGE:
        return f"{where} is {found}; {context['expected']} is expected"
    if kind in _EXPECTED:
        # A field of several types fails once for each: the field's own words name them all, and the findings are one.
        expected = _expectation(record, location) if len(location) < len(finding["loc"]) else ""
        return f"{where} is {found}; {expected or _EXPECTED[kind]} is expected"
    return f"{where} is {found}: {finding['msg']}"


_LIMITS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing (null)",
}


def _join(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def _drop_tags(location: tuple[str | int, ...], document: object) -> tuple[str | int, ...]:
    """The location without what pydantic puts in for the branch of a union, which nobody wrote."""
    kept: list[str | int] = []
    here = document
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(here, dict) and (part in here or last):
            here = here.get(part)
        elif isinstance(here, (list, tuple)) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            continue
        kept.append(part)
    return tuple(kept)


def _known_keys(record: type[BaseModel], location: Sequence[str | int]) -> set[str]:
    """Keys a mapping at `location` may have; of all branches where it may be several records."""
    return {found.alias or name for here in _records_at(record, location) for name, found in here.model_fields.items()}


def _records_at(record: type[BaseModel], location: Sequence[str | int]) -> list[type[BaseModel]]:
    records = [record]
    for part in location:
        if isinstance(part, int):
            continue
        records = [
            inner
            for here in records
            if part in here.model_fields
            for inner in _records_in(here.model_fields[part].annotation)
        ]
    return records


def _records_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)


def _expectation(record: type[BaseModel], location: Sequence[str | int]) -> str:
    """What the field at `location` holds, in words; nothing where its type says too little."""
    name = location[-1]
    for here in _records_at(record, location[:-1]):
        if name in here.model_fields:
            return _describe_annotation(here.model_fields[str(name)].annotation)
    return ""


def _describe_annotation(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _describe_annotation(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        described = {_describe_annotation(part) for part in get_args(annotation) if part is not type(None)}
        return " or ".join(sorted(described - {""}))
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    if origin in (tuple, list):
        return "a list"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(annotation, "")
