"""Drawn pipelines are what their docstring says, the same for ever, and hold some placement."""

from __future__ import annotations

import pytest
from drawn_pipelines import drawn_problem


@pytest.mark.parametrize("number", range(20))
def test_a_drawn_pipeline_is_of_its_kind(number: int) -> None:
    problem = drawn_problem(3, number)
    assert problem == drawn_problem(3, number)
    assert problem != drawn_problem(4, number)
    assert 4 <= problem.num_stages <= 16
    assert 2 <= problem.num_chunks <= 4
    assert 16 <= problem.num_microbatches <= 240
    assert problem.num_microbatches % problem.num_stages == 0
    num_layers = sum(block.count for block in problem.chain if block.layer)
    assert max(40, problem.num_virtual_stages) <= num_layers <= 120
    assert all(block.count > 0 for block in problem.chain)
    assert len({block.modality for block in problem.chain}) in (2, 3)


def test_memory_is_tight_in_some_and_hops_take_time_in_some() -> None:
    drawn = [drawn_problem(3, number) for number in range(20)]
    assert 0 < sum(problem.p2p_ms[0] > 0 for problem in drawn) < 20
    assert len({problem.memory_limit_bytes[0] for problem in drawn}) == 20
