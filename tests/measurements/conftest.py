"""Tables to read: the published ones of examples/, and changed copies of them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements"


@pytest.fixture
def published() -> Callable[[str], list[dict[str, str]]]:
    """The rows of a published table, by its file's name without the ending."""

    def read(name: str) -> list[dict[str, str]]:
        with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
            return list(csv.DictReader(stream))

    return read


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as a table called `name`, its columns those of the first row; the table's path."""

    def write(rows: list[dict[str, str]], name: str = "table.csv") -> Path:
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write
