"""The longest path told: its shares add up to the step, and its words name what is on it."""

from __future__ import annotations

import pytest

from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate
from mm_autoparallel.reports.critical_path import describe_path, share_path


def pipeline(counts: tuple[int, ...], p2p_ms: float = 0.5, tail_ms: float = 3.0) -> Timeline:
    """`counts` equal layers of 1 + 2 ms per stage, six micro-batches."""
    num_stages = len(counts)
    problem = Problem(
        num_stages=num_stages,
        num_chunks=1,
        num_microbatches=6,
        schedule="1f1b",
        chain=(ChainBlock("layer", "text", sum(counts), 1.0, 2.0, tail_ms=tail_ms),),
        memory_limit_bytes=(1e9,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=(p2p_ms,) * (num_stages - 1),
        p2p_ms_per_byte=(0.0,) * (num_stages - 1),
    )
    rows = tuple((count,) for count in counts)
    return simulate(problem, Placement(rows, tuple(((),) for _ in counts)))


@pytest.mark.parametrize("counts", [(3,), (1, 4), (2, 2, 2), (1, 1, 5, 1)])
def test_the_shares_are_the_step(counts: tuple[int, ...]) -> None:
    timeline = pipeline(counts)
    shares = share_path(timeline)
    total_ms = sum(one.time_ms for one in shares.stages) + shares.transfers_ms + shares.tail_ms
    assert total_ms == pytest.approx(timeline.step_ms, rel=1e-12)


def test_the_slowest_stage_is_named_first() -> None:
    """Stage 1 holds four of five layers: forward through stage 0, all six there, and back through stage 0."""
    timeline = pipeline((1, 4), p2p_ms=0.0, tail_ms=0.0)
    assert timeline.step_ms == 1 + 6 * 12 + 2
    assert describe_path(timeline) == (
        "the longest path, 75.00 ms: 96.0 % on stage 1 (6 forwards, 6 backwards) and 4.0 % on stage 0 (1 forward, "
        "1 backward)"
    )


def test_transfers_and_tails_are_told_where_they_matter() -> None:
    told = describe_path(pipeline((2, 2), p2p_ms=5.0, tail_ms=4.0))
    assert "in transfers" in told
    assert "after the last backward of stage 0" in told
