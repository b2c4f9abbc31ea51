"""What each module of a layout takes, and how passes beside a pipeline are shown: all of it adds up to the plan's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from two_modules import make_job

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.by_module import ModuleShare
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.explain.causes import divide_step
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.search.space import list_entries
from mm_autoparallel.reports.estimates import estimate_document
from mm_autoparallel.reports.page.report import Numbers
from mm_autoparallel.reports.page.timelines import Block, pack_timeline
from mm_autoparallel.reports.tables import share_time
from mm_autoparallel.reports.terminal_timeline import worked_in_columns
from mm_autoparallel.reports.timeline import render_timeline
from mm_autoparallel.reports.trace import render_trace

SMALL: dict[str, Any] = {"cp": [1], "pp": [1, 2], "tp": [1, 2], "mbs": [3], "modes": [], "devices": [4]}


@pytest.fixture(scope="module")
def estimates() -> list[Estimate]:
    """A plan of each combination of ways to run two encoders, as one module and as modules of their own."""
    job = make_job(hears=True, layouts="all", **SMALL)
    costs, by_way = CostModel(job), dict[object, Strategy]()
    for entry in list_entries(job):
        one = entry.strategy.arrangement
        if entry.reason is None and one is not None:
            way = tuple((each.encoder.name, each.kind, each.encoder_run, each.in_chain) for each in one.each)
            by_way.setdefault((way, entry.strategy.pp > 1), entry.strategy)
    return [evaluate(costs, first_plan(costs, strategy)) for strategy in by_way.values()]


def total(modules: tuple[ModuleShare, ...], name: str) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.sum([getattr(one, name) for one in modules], axis=0)
    return sums


def test_modules_add_up_to_what_stages_do_and_hold(estimates: list[Estimate]) -> None:
    assert len(estimates) > 30
    for estimate in estimates:
        modules, timeline = estimate.modules, estimate.timeline
        assert [one.name for one in modules] == ["vision", "audio", "text"]
        in_phases = [one for one in modules if "phases" in one.layout]
        phases_ms = total(tuple(in_phases), "work_ms") if in_phases else 0.0
        assert total(modules, "work_ms") == pytest.approx(timeline.busy_ms + phases_ms)
        held = [one.weight_bytes + one.gradient_bytes + one.optimizer_bytes for one in estimate.memory]
        assert total(modules, "held_bytes") == pytest.approx(held)
        assert np.all(np.array([one.kept_bytes for one in modules]) >= 0.0)
        assert np.all(total(modules, "kept_bytes") <= np.array(estimate.peak_memory_bytes))
        document = estimate_document(estimate)
        assert [one["name"] for one in document["modules"]] == ["vision", "audio", "text"]


def test_where_a_step_goes_adds_up_with_passes_too(estimates: list[Estimate]) -> None:
    with_passes = [one for one in estimates if one.timeline.passes is not None]
    assert 0 < len(with_passes) < len(estimates)
    for estimate in estimates:
        shares = vars(share_time(estimate.timeline))
        assert sum(shares.values()) == pytest.approx(np.full(estimate.problem.num_stages, estimate.step_ms))
        assert (shares["encoders_ms"].sum() > 0) == (estimate.timeline.passes is not None)
        columns = [worked_in_columns(estimate.timeline, stage, 40) for stage in range(estimate.problem.num_stages)]
        worked_ms = np.array([column[:4].sum() for column in columns]) * estimate.step_ms / 40
        assert worked_ms == pytest.approx(estimate.timeline.busy_ms)
    job = make_job(hears=True, layouts="all", **SMALL)
    for estimate in with_passes[::5]:
        assert sum(divide_step(job, estimate.plan).values()) == pytest.approx(estimate.step_ms)


def test_pictures_show_every_pass_once(estimates: list[Estimate]) -> None:
    for estimate in estimates:
        timeline, problem, passes = estimate.timeline, estimate.problem, estimate.timeline.passes
        number = 0 if passes is None else len(passes.stage)
        slices = [e for e in render_trace(problem, timeline)["traceEvents"] if e.get("cat", "").startswith("encoder ")]
        assert len(slices) == number
        told = " ".join(estimate.placement.orders).split() if number else []
        assert sorted(e["name"] for e in slices) == sorted(word for word in told if "@" in word)
        assert ("encoders beside the pipeline" in render_timeline(problem, timeline)) == bool(number)
        block = Block()
        page = pack_timeline(timeline, block)
        content = block.bytes()

        def read(numbers: Numbers, content: bytes = content) -> NDArray[np.int64]:
            found = np.frombuffer(content, f"<u{numbers.width}", numbers.count, numbers.offset)
            return found.astype(np.int64)

        assert page.start.count == timeline.graph.num_tasks + number
        start, end, idle, transfer = map(read, (page.start, page.end, page.idle, page.transfer))
        assert np.all(transfer <= idle)
        held = read(page.held)
        for stage in range(problem.num_stages):
            mine = slice(page.first[stage], page.first[stage + 1])
            assert np.all(start[mine][1:] >= end[mine][:-1] - 2)
            lengths_ms = (end - start)[mine].sum() * page.tick_ms
            assert lengths_ms == pytest.approx(timeline.busy_ms[stage], rel=1e-6)
            rests_ms = idle[mine].sum() * page.tick_ms + page.cooldown_ms[stage] + page.tail_ms[stage]
            assert lengths_ms + rests_ms == pytest.approx(timeline.step_ms, rel=1e-6)
            most_bytes = max(held[mine].max() * page.tick_bytes, page.held_first_bytes[stage])
            assert most_bytes == pytest.approx(timeline.peak_memory_bytes[stage], rel=1e-6)
        kinds = read(page.kind)
        of_encoders = [page.kinds[kind].encoder != "" for kind in kinds]
        assert sum(of_encoders) == number
        on_path = read(page.on_path)
        assert on_path.sum() > 0
        for at in np.flatnonzero(of_encoders):
            assert (end - start)[at] * page.tick_ms == pytest.approx(page.kinds[kinds[at]].length_ms, rel=1e-5)
