"""Documents are read strictly and written in one step."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import (
    MAX_DOCUMENT_BYTES,
    describe_value,
    is_there,
    read_document,
    read_text,
    write_text_atomically,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@given(document=st.dictionaries(st.text(min_size=1), VALUES, max_size=5))
def test_what_json_writes_is_read_back(document: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("json"), json.dumps(document), "job.json")
    assert read_document(path, "job file") == document


@given(
    document=st.dictionaries(st.from_regex(r"\A[a-z_]{1,9}\Z"), st.integers() | st.floats(-1e9, 1e9) | st.booleans())
)
def test_what_yaml_writes_is_read_back(document: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "".join(f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in document.items()) or "{}"
    assert read_document(written(tmp_path_factory.mktemp("yaml"), text), "job file") == document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25e9", 25e9),
        ("1.5E-3", 1.5e-3),
        (".5", 0.5),
        ("10", 10),
        ("1_000", 1000),
        ("-3", -3),
        ("yes", True),
        ("~", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1e", "1e"),
    ],
)
def test_yaml_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = read_document(written(tmp_path, f"key: {text}"), "job file")["key"]
    assert found == value
    assert type(found) is type(value)


def test_merge_keys_work(tmp_path: Path) -> None:
    path = written(tmp_path, "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\n")
    assert read_document(path, "job file")["more"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.yaml", "a: 1\nb: 2\na: 3\n", '"a" stands twice'),
        ("job.yaml", "a: {b: 1, b: 2}", '"b" stands twice'),
        ("job.json", '{"a": {"b": 1, "b": 2}}', '"b" stands twice'),
        ("job.yaml", "a: [1, .nan]", r"a\[1\] is NaN"),
        ("job.yaml", "a: {b: -.inf}", "a.b is infinite"),
        ("job.json", '{"a": NaN}', "NaN"),
        ("job.json", '{"a": 1e999}', "a is inf"),
        ("job.yaml", "1: 2", "no text"),
        ("job.yaml", "no: 2", "no text"),
        ("job.yaml", "? [a]\n: 2", "no text"),
        ("job.yaml", "a: [1, 2", "no valid YAML"),
        ("job.yaml", "a: !!python/object/apply:os.system [ls]", "it has the tag"),
        ("job.json", '{"a": ', "no valid JSON"),
        ("job.json", '{"a": ' + "9" * 5000 + "}", "no valid JSON"),
        ("job.yaml", "", "empty"),
        ("job.yaml", "- 1\n- 2", "a list of 2"),
        ("job.json", '"text"', '"text"'),
        ("job.json", "[" * 100_000, "nested too deeply"),
        ("job.yaml", "[" * 100_000, "nested too deeply"),
        ("job.yaml", "a: " + "- " * 100_000, "no valid YAML|nested too deeply"),
        ("job.yaml", "- " * 100_000, "nested too deeply"),
        ("job.yaml", "a: &a [*a]", "unfolds"),
        ("job.yaml", "a: &a {b: *a}", "unfolds"),
        ("job.yaml", "a: b\0c", "binary"),
        ("job.yaml", "a: !!timestamp x", "it has the tag"),
        ("job.yaml", "a: *b", "no valid YAML"),
        ("job.json", '{"a": "\\ud800"}', "half a surrogate pair"),
        ("job.json", '{"a": ' + "[" * 300 + "]" * 300 + "}", "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        read_document(written(tmp_path, text, name), "job file")
    assert str(caught.value).startswith(f"job file {tmp_path / name}: ")
    assert "\n" not in str(caught.value)


def test_alias_bombs_end_soon(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(JobError, match="unfolds"):
        read_document(written(tmp_path, "\n".join(lines)), "job file")


def test_merged_mappings_are_counted_before_they_are_merged(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    with pytest.raises(JobError, match="unfolds"):
        read_document(written(tmp_path, "\n".join(lines)), "job file")


@pytest.mark.parametrize("text", ["a:\n" + "- 1\n" * 2_400_000, "a: [" + "1, " * 2_400_000 + "1]"])
def test_long_lists_are_refused_before_they_are_built(tmp_path: Path, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(JobError, match="unfolds"):
            read_document(written(tmp_path, text), "job file")
        assert tracemalloc.get_traced_memory()[1] < 5 * len(text)
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    for path, words in [(tmp_path / "job.yaml", "a named pipe"), (Path("/dev/zero"), "a device")]:
        with pytest.raises(JobError, match=words):
            read_document(path, "job file")


def test_a_file_that_tells_no_size_is_read_no_further() -> None:
    with pytest.raises(JobError, match="larger than 0 MB"):
        read_text(Path("/proc/self/status"), "table", "text", max_bytes=10)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_path_that_no_file_can_have(name: str) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        read_document(Path(name), "job file")
    assert not is_there(Path(name))


def test_no_text_no_file_no_reading(tmp_path: Path) -> None:
    binary, large = tmp_path / "job.bin", tmp_path / "large.yaml"
    binary.write_bytes(b"\x7fELF\xff\xfe")
    large.write_bytes(b"a: 1\n" * (MAX_DOCUMENT_BYTES // 4))
    for path, words in [
        (binary, "UTF-8"),
        (large, "12.5 MB"),
        (tmp_path, "directory"),
        (tmp_path / "none.yaml", "no such file"),
        (binary / "below", "cannot be read"),
    ]:
        with pytest.raises(PlanError, match=words):
            read_document(path, "plan", PlanError)


@pytest.mark.parametrize("num_marks", [1, 2])
def test_a_text_with_byte_order_marks_is_read(tmp_path: Path, num_marks: int) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" * num_marks + b"a: 1\n")
    assert read_document(path, "job file") == {"a": 1}
    assert read_text(path, "job file", "text") == "a: 1\n"
    assert read_text(path, "job file", "text", with_marks=True) == "\ufeff" * num_marks + "a: 1\n"


def test_writing_makes_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    write_text_atomically(path, "one")
    path.chmod(0o640)
    write_text_atomically(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o640
    write_text_atomically(path, "three", 0o755)
    assert path.stat().st_mode & 0o777 == 0o755
    assert [item.name for item in path.parent.iterdir()] == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, texts = tmp_path / "plan.json", {"a" * 200_000, "b" * 200_000}
    write_text_atomically(path, next(iter(texts)))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_text_atomically(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(path.read_text() in texts for _ in range(200))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    ("value", "words"),
    [("abc", '"abc"'), (-3, "-3"), (True, "true"), (None, "nothing"), ([1], "a list of 1"), ({}, "a mapping")],
)
def test_values_are_quoted_as_people_write_them(value: object, words: str) -> None:
    assert describe_value(value) == words


def test_long_values_are_cut() -> None:
    assert len(describe_value("x" * 1000)) == 60


def test_pyyaml_itself_would_take_what_is_refused_here() -> None:
    """The reason for a loader of our own."""
    assert yaml.safe_load("a: 25e9\na: 12:30") == {"a": 750}
