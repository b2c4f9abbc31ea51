"""Plans whose layers run in several modes: as good as brute force, never worse for more modes, and offload where the
link to the host hides it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import brute_force

from mm_autoparallel.errors import NoFeasiblePlan
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import format_document, plan_document, read_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space

ALL = ("selective", "activation", "offload", "recompute")
SMALL = {"tp": (1,), "cp": (1,), "mbs": (1,), "workload": {"attention": "unfused", "seq_length": 2048}}


def best_ms(job: Job) -> float:
    try:
        return search(job, num_workers=1).figures.step_ms
    except NoFeasiblePlan:
        return float("inf")


@pytest.mark.parametrize(
    ("memory_bytes", "limits"),
    [
        (4.3e9, {"pp": (2, 4)}),
        (4.6e9, {"pp": (2,), "max_vpp": 2}),
        (4.6e9, {"pp": (2, 4), "freeze_vision": False}),
        (4.6e9, {"pp": (1, 2), "host_link_bytes_per_s": 150e9}),
        (4.6e9, {"pp": (2,), "max_vpp": 2, "host_link_bytes_per_s": 80e9}),
    ],
)
def test_the_best_plan_equals_brute_force(memory_bytes: float, limits: dict[str, Any], make_job, tmp_path) -> None:
    job = make_job(memory_bytes=memory_bytes, modes=ALL, **(SMALL | limits))
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    truth_ms = min(brute_force(build_problem(job, strategy))[0] for strategy in lawful)
    result = search(job, num_workers=1)
    assert result.proven
    assert result.figures.step_ms == pytest.approx(truth_ms, rel=1e-5)
    assert result.estimates[0].fits
    path = tmp_path / "plan.json"
    path.write_text(format_document(plan_document(result.plan, result.figures)))
    read = read_plan(path, job)
    assert read == result.plan
    # a job whose search allows recompute alone plays the same plan
    narrow = make_job(memory_bytes=memory_bytes, **(SMALL | limits))
    assert evaluate(narrow, read).step_ms == pytest.approx(result.figures.step_ms, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    memory_bytes=st.floats(4.2e9, 6e9),
    modes=st.permutations(ALL),
    num_fewer=st.integers(1, 3),
    link_bytes_per_s=st.floats(10e9, 400e9),
    max_vpp=st.sampled_from([1, 2]),
)
def test_more_modes_never_make_a_plan_slower(
    make_job, memory_bytes: float, modes: list[str], num_fewer: int, link_bytes_per_s: float, max_vpp: int
) -> None:
    fewer = tuple(modes[:num_fewer])
    limits = SMALL | {"pp": (2,), "max_vpp": max_vpp, "host_link_bytes_per_s": link_bytes_per_s}
    wide, narrow = (best_ms(make_job(memory_bytes=memory_bytes, modes=m, **limits)) for m in (tuple(modes), fewer))
    assert wide <= narrow * (1 + 1e-5)


@pytest.mark.parametrize(("speed_factor", "hidden"), [(4.0, True), (1.001, True), (0.98, False), (0.05, False)])
def test_offload_costs_nothing_exactly_where_the_link_hides_it(make_job, speed_factor: float, hidden: bool) -> None:
    """One stage that lacks room for one and a half layers' activations: two of four must go, behind its forward."""
    limits = {"pp": (1,), "tp": (2,), "cp": (1,), "mbs": (1,), "modes": ("offload", "recompute")}
    ample = make_job(memory_bytes=70e9, **limits)
    free = search(ample, num_workers=1).estimates[0]
    assert free.plan.modes_used == ()  # where there is room nothing moves
    layer = next(block for block in free.problem.chain if block.modes)
    moved_bytes = layer.modes[0].host_bytes
    link_bytes_per_s = 2 * moved_bytes / free.timeline.loads.forward_ms[0, 0] * 1e3 * speed_factor
    needed_bytes = (free.peak_memory_bytes[0] - 1.5 * moved_bytes) / ample.cluster.memory_fraction
    tight = make_job(memory_bytes=needed_bytes, host_link_bytes_per_s=link_bytes_per_s, **limits)
    found = search(tight, num_workers=1).estimates[0]
    assert (found.step_ms == pytest.approx(free.step_ms, rel=1e-9)) == hidden
    alone_ms = best_ms(make_job(memory_bytes=needed_bytes, **(limits | {"modes": ("recompute",)})))
    if speed_factor > 0.9:  # a link that is a little too slow costs less than recompute
        assert found.plan.modes == {"text": {"offload": (2,)}}
        assert found.step_ms < alone_ms
    else:
        assert found.plan.modes == {}
        assert found.plan.recompute["text"] == (2,)
        assert found.step_ms == pytest.approx(alone_ms, rel=1e-9)
