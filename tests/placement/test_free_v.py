"""Free orders of two chunks a stage, there and back: known answers, what is refused, certificates and torch's CSV.

Against every placement with every order: tests/oracle/test_v_orders.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.pipeline.certify.certificate import read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import PlacementResult, place
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.problem_file import read_problem
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.watched import compile_search

FIXTURES = Path(__file__).parents[1] / "fixtures" / "free_orders"


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    """What searches of orders run is compiled before any clock does."""
    compile_search(("free",), 2)


def uniform(num_stages: int, num_microbatches: int, limit_bytes: float = 1e9, hop_ms: float = 0.0) -> Problem:
    """One layer in each chunk, F = I = W = 1."""
    chain = (ChainBlock("layer", "text", 2 * num_stages, 1.0, 2.0, 0.0, 1.0, backward_weight_ms=1.0),)
    zeros, hops = (0.0,) * num_stages, (hop_ms,) * (2 * num_stages - 1)
    limits = (limit_bytes,) * num_stages
    return Problem(num_stages, 2, num_microbatches, "free", chain, limits, zeros, zeros, hops, (0.0,) * len(hops))


def check(problem: Problem, result: PlacementResult) -> None:
    """What is said of it is what the simulator plays, and no bound is above it."""
    assert result.placement is not None
    assert simulate(problem, result.placement).step_ms == result.step_ms
    assert result.lower_bound_ms <= result.step_ms


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8)])
def test_equal_layers_take_what_zero_bubble_takes(num_stages: int, num_microbatches: int) -> None:
    """6 M + P - 1: stage P - 1 waits for P - 1 forwards and is busy from then on; ZB-V reaches it."""
    problem = uniform(num_stages, num_microbatches)
    result = place(problem, time_limit_s=20.0)
    check(problem, result)
    assert (result.status, result.step_ms) == ("optimal", 6 * num_microbatches + num_stages - 1)
    assert simulate(replace(problem, schedule="zbv"), replace(result.placement, orders=())).step_ms == result.step_ms


def test_one_micro_batch_at_a_time_where_memory_takes_no_more() -> None:
    problem = uniform(2, 2, limit_bytes=2.0)
    result = place(problem, time_limit_s=20.0)
    check(problem, result)
    assert result.status == "optimal"
    nothing = place(uniform(2, 2, limit_bytes=1.5), time_limit_s=20.0)
    assert nothing.status == "infeasible"
    assert nothing.overflow_bytes == pytest.approx(0.5)
    assert "exceeds a limit by" in nothing.reason


def test_a_certificate_is_confirmed_by_other_code_and_a_false_one_is_not(tmp_path: Path) -> None:
    problem = uniform(2, 3, limit_bytes=5.0, hop_ms=1.0)
    result = place(problem, time_limit_s=20.0)
    check(problem, result)
    assert result.status == "optimal"
    path = tmp_path / "proof.json"
    write_certificate(path, problem, result)
    certificate = read_certificate(path)
    assert verify(certificate, 20.0).lower_bound_ms == pytest.approx(result.lower_bound_ms)
    slow = place(problem, time_limit_s=20.0, gap_fraction=0.0)
    worse = replace(
        slow.placement, orders=("0F0 0F1 0I1 0W1 0I0 0W0 1F0 1F1 1I1 1W1 1I0 1W0 2F0 2F1 2I1 2W1 2I0 2W0",) * 2
    )
    step_ms = simulate(problem, worse).step_ms
    false = replace(certificate, placement=worse, step_ms=step_ms, lower_bound_ms=step_ms, gap_fraction=0.0)
    with pytest.raises(PlanError, match="another placement takes"):
        verify(false, 20.0)


def test_other_numbers_of_chunks_are_refused() -> None:
    problem = uniform(2, 2)
    with pytest.raises(JobError, match="one chunk a stage, or 2 there and back, and num_chunks is 3"):
        place(replace(problem, num_chunks=3, p2p_ms=(0.0,) * 5, p2p_ms_per_byte=(0.0,) * 5))


@pytest.mark.nightly
def test_eight_stages_there_and_back() -> None:
    """The stored problem of 8 stages and 16 micro-batches, with two chunks a stage."""
    path = FIXTURES / "p8_m16_112.problem.json"
    known_ms = json.loads(path.read_text(encoding="utf-8"))["known"]["best_step_ms"]
    hops = (2.0,) * 15
    both = replace(read_problem(path), num_chunks=2, p2p_ms=hops, p2p_ms_per_byte=(0.0,) * 15)
    result = place(both, time_limit_s=60.0, gap_fraction=1e-3)
    check(both, result)
    assert result.gap_fraction <= 0.05
    assert result.step_ms < known_ms
