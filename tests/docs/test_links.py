"""No link leads nowhere: files and anchors always, other sites by night."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import list_pages

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def links_of(text: str) -> list[str]:
    """What the links and pictures of a page lead to; blocks of code have none."""
    return _LINK.findall(_FENCE.sub("", text))


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings: words in lower case, white space as hyphens, other signs left out."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchors.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return anchors


def dead_links(page: Path, text: str) -> Iterator[str]:
    for link in links_of(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page}: {link}: no such file"
        elif anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{page}: {link}: no such heading"


def test_links_lead_somewhere() -> None:
    dead = [found for page in list_pages() for found in dead_links(page, page.read_text(encoding="utf-8"))]
    assert not dead, "\n".join(dead)


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What `it` is\n\n[a](page.md#what-it-is) [b](#nowhere) [c](none.md)\n```\n[d](none.md)\n```\n")
    assert [found.rsplit(": ", 1)[1] for found in dead_links(page, page.read_text())] == [
        "no such heading",
        "no such file",
    ]


@pytest.mark.nightly
def test_links_to_other_sites_answer() -> None:
    links = {link for page in list_pages() for link in links_of(page.read_text(encoding="utf-8"))}
    dead, answered = {}, 0
    for link in sorted(link for link in links if link.startswith("http")):
        asked = urllib.request.Request(link, headers={"User-Agent": "mm-autoparallel documentation"})
        try:
            with urllib.request.urlopen(asked, timeout=30):
                answered += 1
        except urllib.error.HTTPError as error:
            answered += 1
            dead |= {link: str(error)} if error.code in (404, 410) else {}
        except OSError as error:
            dead[link] = str(error)
    if not answered:
        pytest.skip(f"no other site answers from here: {dead}")
    assert dead == {}
