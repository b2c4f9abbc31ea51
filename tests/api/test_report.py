"""What a report's page holds: the figures of the other commands, and nothing that runs but its own script."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_autoparallel as mmap
from mm_autoparallel.api.report_page import ReportResult
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.step import simulate

HOSTILE = "</script><script>alert(1)</script>\u202e" + "x" * 100


@pytest.fixture(scope="module")
def page(job: mmap.Job, best: mmap.PlanResult) -> ReportResult:
    other = best.plan.edited(layers={"text": [1, 3, 2, 2]})
    return mmap.report(job, {HOSTILE: other, "best": best.plan}, found=best, command="mm-autoparallel report …")


def unpack(html: str) -> tuple[dict[str, Any], bytes]:
    """The document and the block of a page, as the browser reads them."""
    (packed,) = re.findall(r'<script type="text/plain" id="report">([^<]*)</script>', html)
    data = gzip.decompress(base64.b64decode(packed))
    length = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + length]), data[4 + length :]


def numbers(block: bytes, where: dict[str, int]) -> Any:
    return np.frombuffer(block, f"<u{where['width']}", where["count"], where["offset"]).astype(float)


def test_every_task_is_where_the_simulator_has_it(page: ReportResult, best: mmap.PlanResult) -> None:
    document, block = unpack(page.html())
    packed = document["plans"][1]["timeline"]
    estimate = best.best[0].estimate
    timeline = simulate(estimate.problem, estimate.placement)
    order = np.argsort(timeline.graph.stage, kind="stable")
    for column, times_ms in (("start", timeline.start_ms), ("end", timeline.end_ms)):
        assert numbers(block, packed[column]) * packed["tick_ms"] == pytest.approx(times_ms[order], abs=1e-3)
    kinds = [packed["kinds"][int(kind)] for kind in numbers(block, packed["kind"])]
    assert [kind["backward"] for kind in kinds] == (timeline.graph.kind[order] != FORWARD).tolist()
    assert [kind["chunk"] for kind in kinds] == timeline.graph.chunk[order].tolist()
    assert [kind["length_ms"] for kind in kinds] == pytest.approx((timeline.end_ms - timeline.start_ms)[order])
    assert numbers(block, packed["micro_batch"]).tolist() == timeline.graph.micro_batch[order].tolist()
    firsts = packed["first"]
    held = numbers(block, packed["held"]) * packed["tick_bytes"]
    idle = numbers(block, packed["idle"]) * packed["tick_ms"]
    for stage, (first, end) in enumerate(pairwise(firsts)):
        assert set(timeline.graph.stage[order][first:end]) == {stage}
        peak = max(packed["held_first_bytes"][stage], held[first:end].max())
        assert peak == pytest.approx(timeline.peak_memory_bytes[stage], rel=1e-9)
        before = sum(
            float(part[stage])
            for part in (timeline.idle_warmup_ms, timeline.idle_communication_ms, timeline.idle_imbalance_ms)
        )
        assert idle[first:end].sum() == pytest.approx(before, abs=1e-3)


def test_the_marked_tasks_are_the_longest_path(page: ReportResult, best: mmap.PlanResult) -> None:
    document, block = unpack(page.html())
    packed, path = document["plans"][1]["timeline"], best.best[0].estimate.timeline.critical_path
    on_path, kind = numbers(block, packed["on_path"]), numbers(block, packed["kind"]).astype(int)
    counted = np.bincount(kind[on_path == 1], minlength=len(packed["kinds"]))
    assert counted.tolist() == [*path.forward.ravel().tolist(), *path.backward.ravel().tolist()]


def test_figures_are_those_of_the_other_commands(page: ReportResult, best: mmap.PlanResult) -> None:
    document, _ = unpack(page.html())
    shown, found = document["plans"][1], best.document()["best"][0]
    assert shown["step_ms"] == found["e2e_time"]
    assert [stage["peak_bytes"] for stage in shown["stages"]] == found["peak_memory_bytes"]
    for stage, limit in zip(shown["stages"], found["stages"], strict=True):
        assert sum(stage["memory_bytes"].values()) == pytest.approx(stage["peak_bytes"], rel=1e-6)
        assert stage["limit_bytes"] == limit["memory_limit_bytes"]
        assert sum(value for cause, value in stage["time_ms"].items()) == pytest.approx(shown["step_ms"])
    rows, columns = best.document()["candidates"], document["search"]["strategies"]
    assert [columns["statuses"][place] for place in columns["status"]] == [row["status"] for row in rows]
    assert [columns["reasons"][place] for place in columns["reason"]] == [row["reason"] for row in rows]
    assert columns["bound_ms"] == [row["lower_bound_ms"] for row in rows]
    assert columns["sizes"]["PP"] == [row["parallel_config"]["PP"] for row in rows]
    assert json.loads(shown["file"])["e2e_time"] == found["e2e_time"]
    assert len(document["sources"]["rows"][0]["plans"]) == 2


def test_every_rank_of_the_cluster_has_its_place(page: ReportResult, best: mmap.PlanResult) -> None:
    document, block = unpack(page.html())
    devices, strategy = document["plans"][1]["devices"], best.plan.strategy
    assert devices["nodes"] == [4]
    for stage in range(strategy.pp):
        ranks = np.flatnonzero(numbers(block, devices["stage"]) == stage).tolist()
        assert ranks == [rank for run in strategy.stage_runs(stage) for rank in run]


def test_only_its_own_script_may_run_and_names_are_text(page: ReportResult) -> None:
    html = page.html()
    assert html == page.html()
    assert "alert(1)" not in html  # names are in the packed document alone, and title and text are escaped
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    for name, source in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "http://www.w3.org" not in policy


def test_a_plan_by_itself_needs_no_search(job: mmap.Job, best: mmap.PlanResult, tmp_path: Path) -> None:
    page = mmap.report(job, best.plan, search=False)
    page.write(tmp_path / "plan.html")
    document, _ = unpack((tmp_path / "plan.html").read_text())
    assert document["search"] is None
    assert [plan["name"] for plan in document["plans"]] == ["given"]
    assert page.to_dict() == document


def test_in_a_terminal_and_in_a_notebook(page: ReportResult) -> None:
    assert "\u202e" not in page.table()
    assert any("best" in line and "fits" in line for line in page.table().splitlines())
    frame = page._repr_html_()
    assert re.fullmatch(r'<iframe sandbox="allow-scripts[^"]*" style="[^"]*" srcdoc="[^"]*"></iframe>', frame)
    assert unescape(re.findall('srcdoc="([^"]*)"', frame)[0]) == page.html()
