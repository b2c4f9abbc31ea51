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
from random_problems import random_problem

import mm_autoparallel as mmap
from mm_autoparallel.api.report_page import ReportResult
from mm_autoparallel.pipeline.placement.every import list_placements
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.reports.page.provenance import _by_source, _list_traffic
from mm_autoparallel.reports.page.timelines import Block, pack_timeline

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


@pytest.mark.parametrize("seed", range(24))
def test_gaps_by_cause_add_up_to_the_simulator_s_idle_times(seed: int) -> None:
    """Before a stage's first task warm-up, before others transfers and imbalance; after its last work cool-down."""
    problem = random_problem(seed, ("round", "real", "unequal")[seed % 3])
    placements = list_placements(problem)
    if not placements:
        pytest.skip("it has no placement, or too many to list")
    timeline = simulate(problem, placements[seed % len(placements)])
    block = Block()
    packed = pack_timeline(timeline, block)
    idle, transfer, end = (
        numbers(block.bytes(), dict(column)) * packed.tick_ms for column in (packed.idle, packed.transfer, packed.end)
    )
    near = 1e-6 * timeline.step_ms
    for stage, (first, last) in enumerate(pairwise(packed.first)):
        gaps = {
            "idle_warmup": idle[first],
            "idle_communication": transfer[first:last].sum(),
            "idle_imbalance": (idle - transfer)[first + 1 : last].sum(),
            "idle_cooldown": timeline.step_ms - end[last - 1] - packed.tail_ms[stage],
        }
        assert transfer[first] == 0.0
        assert packed.cooldown_ms[stage] == pytest.approx(gaps["idle_cooldown"], abs=near)
        for cause, told_ms in gaps.items():
            assert told_ms == pytest.approx(getattr(timeline, f"{cause}_ms")[stage], abs=near), cause
    means = {cause: getattr(timeline, f"{cause}_ms").mean() for cause in gaps}
    assert packed.mean_idle_ms == pytest.approx(means)


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
    assert columns["peak_bytes"] == [row["peak_memory_bytes"] for row in rows]
    assert max(shown["stages"], key=lambda one: one["peak_bytes"])["peak_bytes"] in columns["peak_bytes"]
    assert columns["limit_bytes"] == sorted({stage["memory_limit_bytes"] for stage in found["stages"]})
    assert columns["sizes"]["PP"] == [row["parallel_config"]["PP"] for row in rows]
    assert json.loads(shown["file"])["e2e_time"] == found["e2e_time"]
    assert len(document["sources"]["rows"][0]["plans"]) == 2


def test_every_figure_has_its_source(page: ReportResult, best: mmap.PlanResult) -> None:
    document, _ = unpack(page.html())
    shown = document["plans"][1]
    told = shown["provenance"] | document["search"]["provenance"]
    causes = {*shown["stages"][0]["memory_bytes"], *shown["stages"][0]["time_ms"]}
    assert {"step", "expected", "throughput", "bubble", "oom", "bound", "gap", "peak", "limit", *causes} <= told.keys()
    assert all(told.values())
    assert "times of blocks are analytic" in told["step"]
    assert best.best[0].estimate.provenance["calibration"] in told["step"]
    assert "a100-80g: " in told["communicator"]
    assert all("NVLink" in group["source"] for group in shown["groups"])


def test_sources_are_told_apart() -> None:
    blocks = {"pre": {"time": "analytic"}, "layer": {"time": "measured"}, "post": {"time": "analytic"}}
    assert _by_source(blocks, "time") == "analytic (pre, post), measured (layer)"
    network = {"profile": "n.json", "tensor_parallel": {"all_gather": "measured", "reduce_scatter": "analytic"}}
    assert _list_traffic(network | {"overlap": "measured"}) == "measured and analytic (profile n.json)"


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
