"""What is generated is as new as the program, and the pages that readers navigate by are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from doc_blocks import list_pages
from doc_parts import PARTS, meanings
from renew import renew

from mm_autoparallel.model.job.stacks import StackFacts
from mm_autoparallel.model.job.workload import Workload


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return {page: page.read_text(encoding="utf-8") for page in list_pages()}


def test_no_generated_part_is_stale(pages: dict[Path, str]) -> None:
    stale = [str(page) for page, text in pages.items() if renew(text) != text]
    assert not stale, f"run `python docs/tools/renew.py`: {stale}"


def test_every_part_stands_on_one_page(pages: dict[Path, str]) -> None:
    whole = "\n".join(pages.values())
    assert {name: whole.count(f"<!-- generated: {name} -->") for name in PARTS} == dict.fromkeys(PARTS, 1)


def test_docstrings_tell_the_meaning_of_nearly_every_key() -> None:
    """A key without words would be an empty cell of the reference."""
    for record in (Workload, StackFacts):
        assert {*record.model_fields} - meanings(record, tuple(record.model_fields)).keys() <= {"global_batch_size"}


def test_a_meaning_ends_where_the_next_begins() -> None:
    class Noun:
        """Something. first, second: of both. third: alone; fourth: last (a: b).

        fifth: in a paragraph of its own."""

    names = ("first", "second", "third", "fourth", "fifth")
    assert meanings(Noun, names) == {
        "first": "of both.",
        "second": "of both.",
        "third": "alone",
        "fourth": "last (a: b).",
        "fifth": "in a paragraph of its own.",
    }


def test_every_page_stands_in_the_navigation(repository: Path, pages: dict[Path, str]) -> None:
    text = (repository / "mkdocs.yml").read_text(encoding="utf-8")
    listed = {str(page) for page in _leaves(yaml.load(text.split("\nnav:")[1].join(("nav:", "")), yaml.SafeLoader))}
    docs = repository / "docs"
    assert listed == {str(page.relative_to(docs)) for page in pages if page.is_relative_to(docs)}


def _leaves(tree: object) -> list[object]:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in _leaves(branch)]
    if isinstance(tree, list):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]


def test_readme_fits_a_few_screens(repository: Path) -> None:
    assert len((repository / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
