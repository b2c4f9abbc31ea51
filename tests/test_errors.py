"""Errors carry what code asks of them, so that no code takes their text apart."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest

from mm_autoparallel import errors
from mm_autoparallel.errors import JobError, NoFeasiblePlan, ProfileError
from mm_autoparallel.files import read_document
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.records import Count, Noun
from mm_autoparallel.validation import parse_record

TEXT_METHODS = {"replace", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "startswith"}
OURS = {name for name, found in vars(errors).items() if isinstance(found, type)} | {"Unrepresentable"}


def test_the_message_begins_with_where() -> None:
    error = JobError("workload.mbs is 0; at least 1 is expected", where="job file job.yaml", key="workload.mbs")
    assert str(error) == "job file job.yaml: workload.mbs is 0; at least 1 is expected"
    assert (error.where, error.key, error.reason) == ("job file job.yaml", "workload.mbs", str(error)[19:])
    plain = NoFeasiblePlan("nothing fits")
    assert (str(plain), plain.reason, plain.where, plain.key) == ("nothing fits", "nothing fits", "", "")


def test_fields_cross_processes() -> None:
    there = copy.copy(ProfileError("it is stale", where="profile file a.json", key="entries[0]"))  # as pickle does
    assert (type(there), str(there)) == (ProfileError, "profile file a.json: it is stale")
    assert (there.where, there.key, there.reason) == ("profile file a.json", "entries[0]", "it is stale")


class _Two(Noun):
    a: Count
    b: Count = 1


def test_files_and_records_fill_them(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(JobError) as wrong:
        parse_record(_Two, {"a": 0}, "job file", path)
    assert (wrong.value.where, wrong.value.key) == (f"job file {path}", "a")
    assert str(wrong.value) == f"job file {path}: {wrong.value.reason}"
    with pytest.raises(JobError) as several:
        parse_record(_Two, {"a": 0, "b": 0}, "job file", path)
    assert several.value.key == ""
    path.write_text("[1]")
    with pytest.raises(ProfileError) as unread:
        read_document(path, "profile file", ProfileError)
    assert unread.value.where == f"profile file {path}"
    assert str(unread.value) == f"profile file {path}: {unread.value.reason}"
    with pytest.raises(JobError) as missing:
        Section({"inner": {"size": "x"}}, path).section("inner").count("size")
    assert (missing.value.where, missing.value.key) == (f"model file {path}", "inner.size")
    with pytest.raises(JobError) as empty:
        parse_job({}, path)
    assert empty.value.where == f"job file {path}"


def taken_apart(tree: ast.Module) -> list[int]:
    """Lines that take the text of one of our errors apart, where it was caught."""
    lines = []
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None or handler.name is None:
            continue
        caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        text = f"str({handler.name})"
        if not caught & OURS:
            continue
        for node in ast.walk(handler):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                on_text = ast.unparse(node.func.value) == text and node.func.attr in TEXT_METHODS and node.args
                by_pattern = ast.unparse(node.func.value) == "re" and text in map(ast.unparse, node.args)
                lines += [node.lineno] if on_text or by_pattern else []
    return lines


def test_nobody_takes_messages_apart(sources: dict[str, ast.Module]) -> None:
    wrong = [f"{path}:{line}" for path, tree in sources.items() for line in taken_apart(tree)]
    assert not wrong, f"give the error a field (mm_autoparallel/errors.py): {wrong}"


def test_taking_apart_is_recognised() -> None:
    lines = (
        "try: run()",
        "except (JobError, OSError) as e:",
        "    str(e).replace('a', '')",
        "    re.sub('a', '', str(e))",
    )
    found = "\n".join(lines)
    assert taken_apart(ast.parse(found)) == [3, 4]
    assert not taken_apart(ast.parse(found.replace("JobError", "ValueError")))
