"""The picture of a step: what is drawn where, how small it stays, and that nothing in it runs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table
from two_stages import PLACEMENT, PROBLEM

from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.reports.html import render_paragraph, render_table
from mm_autoparallel.reports.timeline import render_timeline

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str, colour: str) -> list[tuple[float, float, float]]:
    """(left, top, width) of what is drawn in `colour`, in pixels."""
    paths = [e.get("d", "") for e in ElementTree.fromstring(svg).iter(f"{SVG}path") if e.get("fill") == colour]
    return [tuple(map(float, box)) for d in paths for box in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", d)]


def test_tasks_are_drawn_where_they_run() -> None:
    timeline = simulate(PROBLEM, PLACEMENT)
    svg = render_timeline(PROBLEM, timeline)
    per_ms = (1200 - 64 - 200) / timeline.step_ms
    forwards, backwards, again = boxes(svg, "#4c78a8"), boxes(svg, "#f58518"), boxes(svg, "#e45756")
    assert (len(forwards), len(backwards), len(again), len(boxes(svg, "#72b7b2"))) == (6, 6, 3, 1)
    # stage 0 runs 0F at 0 and its first backward at 5, recompute first; stage 1 runs 0F at 1.5
    assert forwards[0] == pytest.approx((64.0, 46, per_ms - 0.2), abs=0.1)
    assert again[0][0] == pytest.approx(64 + 5 * per_ms, abs=0.1)
    assert backwards[0][0] == pytest.approx(64 + 6 * per_ms, abs=0.1)
    assert min(left for left, top, _ in forwards if top > 46) == pytest.approx(64 + 1.5 * per_ms, abs=0.1)
    words = "".join(ElementTree.fromstring(svg).itertext())
    assert "peak 3.5 GiB of 10.0 GiB" in words or "of 10.0 GiB" in words


def test_a_long_step_stays_a_small_picture() -> None:
    long = replace(PROBLEM, num_microbatches=20_000)
    svg = render_timeline(long, simulate(long, PLACEMENT))
    assert len(svg) < 100_000
    assert "too narrow to tell apart" in svg


def test_nothing_in_tables_and_sentences_is_markup() -> None:
    table = Table("<b>", "right")
    table.add_row("<script>x</script>", "\x1b[31m")
    assert render_table(table).count("<b>") == render_table(table).count("<script>") == 0
    assert "\x1b" not in render_table(table)
    assert render_paragraph("a < b\nc & d") == "<p>a &lt; b<br>c &amp; d</p>"


def test_the_picture_in_the_documentation_is_one_of_ours(repository: Path) -> None:
    """`simulate --svg` made it (docs/reference/python.md has the command); figures may have moved since."""
    path = repository / "docs" / "pictures" / "timeline_72b.svg"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 200_000
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "text", "path"}
    assert "".join(root.itertext()).count("stage ") == 8
