"""The trace shows the simulated step: every task once, in its place, with arrows and memory that agree with it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from two_stages import PLACEMENT, PROBLEM

from mm_autoparallel.pipeline.simulate.step import Timeline, simulate
from mm_autoparallel.reports.trace import render_trace, write_trace
from mm_autoparallel.units import GIB


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(PROBLEM, PLACEMENT)


@pytest.fixture(scope="module")
def events(timeline: Timeline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render_trace(PROBLEM, timeline)["traceEvents"]
    return found


def slices(events: list[dict[str, Any]], category: str, stage: int) -> list[tuple[str, float, float]]:
    """(name, start, end) in ms of the slices of `category` on `stage`, in order of time."""
    found = [e for e in events if e["ph"] == "X" and e["cat"] == category and e["pid"] == stage]
    return sorted(((e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in found), key=lambda s: s[1])


def test_tasks_lie_where_they_run(events: list[dict[str, Any]]) -> None:
    # Stage 0 runs 0F 1F 0B 2F 1B 2B; it gets the first gradient at 1 + 0.5 + 3 + 0.5 = 5.
    assert slices(events, "forward", 0)[:2] == [("0F0", 0.0, 1.0), ("1F0", 1.0, 2.0)]
    assert slices(events, "backward", 0)[0] == ("0B0", 5.0, 8.0)
    assert slices(events, "forward", 1)[0] == ("0F0", 1.5, 2.5)
    assert slices(events, "backward", 1)[0] == ("0B0", 2.5, 4.5)
    assert Counter(e["cat"] for e in events if e["ph"] == "X") == {
        "forward": 6,
        "backward": 6,
        "recompute": 3,
        "tail": 1,
    }


def test_recompute_lies_at_the_start_of_its_backward(events: list[dict[str, Any]]) -> None:
    assert slices(events, "recompute", 1) == []
    backward = slices(events, "backward", 0)
    assert [(start, start + 1.0) for _, start, _ in backward] == [(s, e) for _, s, e in slices(events, "recompute", 0)]


def test_the_tail_ends_the_step(events: list[dict[str, Any]], timeline: Timeline) -> None:
    ((_, start, end),) = slices(events, "tail", 1)
    assert end - start == pytest.approx(4.0)
    last_of_stage_0 = slices(events, "backward", 0)[-1][2]
    assert max(end, last_of_stage_0) == pytest.approx(timeline.step_ms)


def test_arrows_run_from_sender_to_receiver(events: list[dict[str, Any]]) -> None:
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 6  # three forward, three backward
    for arrow, start in starts.items():
        assert {start["pid"], ends[arrow]["pid"]} == {0, 1}
        assert ends[arrow]["ts"] - start["ts"] >= 0.5e3  # the hop takes 0.5 ms
    assert all(e["bp"] == "e" for e in ends.values())


def test_the_memory_counter_peaks_at_the_peak(events: list[dict[str, Any]], timeline: Timeline) -> None:
    for stage in (0, 1):
        held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == stage]
        assert max(held) == pytest.approx(timeline.peak_memory_bytes[stage] / GIB)
        assert held[-1] == pytest.approx(2.0)  # only the layer itself is left


def test_stages_are_named_in_order(events: list[dict[str, Any]]) -> None:
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "stage 0", 1: "stage 1"}


def test_the_file_is_json_and_the_same_every_time(tmp_path: Path, timeline: Timeline) -> None:
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, PROBLEM, timeline)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["step_ms"] == pytest.approx(timeline.step_ms)
