"""Short interleaved runs are proven by the whole program, where the search around CP-SAT leaves a gap open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from known_cases import taylor_case

from mm_autoparallel.integrations.mindformers.program import is_small
from mm_autoparallel.integrations.mindformers.search.layouts import Solver, solve
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate


def short_run() -> Problem:
    """The case of 8 stages cut to two and six micro-batches, its layers lighter accordingly."""
    problem, _ = taylor_case("512_8k_swap")
    chain = tuple(
        replace(
            block,
            static_bytes=block.static_bytes / 4,
            activation_bytes=block.activation_bytes / 4,
            modes=tuple(replace(mode, activation_bytes=mode.activation_bytes / 4) for mode in block.modes),
        )
        for block in problem.chain
    )

    def ends(values: tuple[float, ...]) -> tuple[float, ...]:
        return (values[0], values[-1])

    return replace(
        problem,
        num_stages=2,
        num_microbatches=6,
        chain=chain,
        memory_limit_bytes=ends(problem.memory_limit_bytes),
        stage_static_bytes=ends(problem.stage_static_bytes),
        stage_tail_ms=(0.0, 0.0),
        p2p_ms=problem.p2p_ms[:7],
        p2p_ms_per_byte=problem.p2p_ms_per_byte[:7],
    )


@pytest.mark.slow
def test_the_whole_program_closes_the_gap(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mm_autoparallel.integrations.mindformers.search.layouts.SMALL_START_S", 1.0)
    problem = short_run()
    assert is_small(problem)
    assert not is_small(taylor_case("512_8k_swap")[0])
    (tmp_path / "short.sol").write_text("somebody's own")
    found = solve(problem, Solver(False, tmp_path / "short", 60.0))
    assert found.status == "optimal"  # the search alone leaves it open
    assert (tmp_path / "short.sol").read_text() == "somebody's own"
    timeline = simulate(problem, found.placement)
    assert not overfull_stages(problem, timeline.peak_memory_bytes - 4096.0)
    assert timeline.step_ms == pytest.approx(found.objective_ms)
    assert found.lower_bound_ms == pytest.approx(timeline.step_ms, rel=1e-5)


def test_a_program_s_solver_that_breaks_costs_its_time_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mm_autoparallel.integrations.mindformers.search.layouts.SMALL_START_S", 1.0)
    monkeypatch.setattr("mm_autoparallel.integrations.mindformers.highs.sys.executable", "false")
    found = solve(short_run(), Solver(False, tmp_path / "short", 2.0))
    assert found.status in ("feasible", "optimal")
    assert not (tmp_path / "short.sol").exists()
