"""What measured memory says of frozen parts, gradient bytes and recompute, and when it contradicts what is stated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.fingerprint import Fingerprint, read_memory

Row = dict[str, str]


@pytest.fixture
def read(
    published: Callable[[str], list[Row]], write_table: Callable[..., Path]
) -> Callable[..., tuple[Fingerprint, Path]]:
    """The fingerprint of a published row by its id, some cells changed, and the table it then stands in."""

    def read(name: str, **cells: str) -> tuple[Fingerprint, Path]:
        row = next(row for row in published("multimodal_published") if row["id"] == name) | cells
        path = write_table([row])
        cases, refused = read_table(path)
        assert not refused, refused
        found = read_memory(cases[0])
        assert found is not None
        return found, path

    return read


def test_memory_confirms_what_is_stated(read: Callable[..., tuple[Fingerprint, Path]]) -> None:
    found, _ = read("ci_qwen2vl_7b@0bf3bda2")
    assert found.readings[0].stated
    assert not found.contradicted
    assert found.readings[0].distance_fraction < 0.003
    assert found.readings[1].distance_fraction > 3 * found.readings[0].distance_fraction


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"vision_frozen": "0"}, "the job says nothing frozen, gradients of 4 bytes"),
        ({"gradient_bytes": "2"}, "gradients of 2 bytes, which makes"),
        ({"text_frozen": "1", "vision_frozen": "0"}, "the job says text frozen"),
    ],
)
def test_memory_contradicts_what_is_stated(
    cells: Row, words: str, read: Callable[..., tuple[Fingerprint, Path]]
) -> None:
    found, _ = read("ci_qwen2vl_7b@488067e9", **cells)
    assert found.contradicted
    best = found.readings[0]
    assert "vision" in best.frozen
    assert "text" not in best.frozen
    assert (best.gradient_bytes, best.recomputed) == (4.0, ())
    assert words in found.words
    assert "contradicts the job" in found.words
    assert "GiB" in found.words


def test_layers_that_lay_otherwise_are_no_combination(read: Callable[..., tuple[Fingerprint, Path]]) -> None:
    """The script of this row lays 0, 10, 10 and 8 layers."""
    found, _ = read("ci_qwen2vl_7b@89c053aa")
    assert found.contradicted
    assert not found.consistent
    assert "layers per stage" in found.words


def test_a_row_that_does_not_say_is_read(
    read: Callable[..., tuple[Fingerprint, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    found, path = read("ci_qwen2vl_7b@0bf3bda2", text_frozen="", gradient_bytes="2")
    assert found.assumed
    assert "contradicts what was assumed: assumed was" in found.words
    capsys.readouterr()
    assert main(["validate", str(path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    told = table["predictions"][0]["fingerprint"]
    assert (told["frozen"], told["gradient_bytes"]) == (["vision", "vision projector"], 4.0)
    assert told["contradicted"]
    assert told["off_pct"] < 0.3 < told["next_off_pct"] < told["stated_off_pct"]
    assert table["memory_consistent"] is None
    assert main(["validate", str(path)]) == 0
    assert "row 0: its peak memory" in capsys.readouterr().out
