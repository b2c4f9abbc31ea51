"""Schedules as data: golden grids, every action once, no deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, format_order, parse_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, find_schedule
from mm_autoparallel.pipeline.simulate.graph import full_graph

GOLDEN = {
    ("gpipe", 2, 1, 3, 0): "0F0 1F0 2F0 0B0 1B0 2B0",
    ("1f1b", 3, 1, 4, 0): "0F0 1F0 2F0 0B0 3F0 1B0 2B0 3B0",
    ("1f1b", 3, 1, 4, 2): "0F0 0B0 1F0 1B0 2F0 2B0 3F0 3B0",
    ("1f1b", 3, 1, 1, 0): "0F0 0B0",
    ("interleaved_1f1b", 2, 2, 4, 0): "0F0 1F0 0F1 1F1 2F0 0B1 3F0 1B1 2F1 0B0 3F1 1B0 2B1 3B1 2B0 3B0",
    ("interleaved_1f1b", 2, 2, 4, 1): "0F0 1F0 0F1 0B1 1F1 1B1 2F0 0B0 3F0 1B0 2F1 2B1 3F1 3B1 2B0 3B0",
    ("interleaved_1f1b_low_memory", 2, 2, 4, 0): "0F0 1F0 0F1 1F1 0B1 2F0 1B1 3F0 0B0 2F1 1B0 3F1 2B1 3B1 2B0 3B0",
    ("seq_1f1b_2", 2, 1, 4, 0): "0F0 1F0 2F0 1B0 3F0 0B0 3B0 2B0",
    ("seq_1f1b_2", 2, 1, 4, 1): "0F0 1F0 1B0 2F0 0B0 3F0 3B0 2B0",
    ("seq_1f1b_4", 2, 1, 6, 1): "0F0 1F0 2F0 3F0 3B0 4F0 2B0 5F0 1B0 0B0 5B0 4B0",
    # three micro-batches on two stages: the first group takes the remainder
    ("interleaved_1f1b", 2, 2, 3, 1): "0F0 1F0 2F0 0F1 0B1 1F1 1B1 2F1 2B1 0B0 1B0 2B0",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_grid(case: tuple[str, int, int, int, int]) -> None:
    name, *shape = case
    order = SCHEDULES[name].order(*shape)
    assert format_order(order) == GOLDEN[case]
    assert parse_order(GOLDEN[case]).tolist() == order.tolist()


@given(
    name=st.sampled_from(sorted(name for name, s in SCHEDULES.items() if not s.splits and s.given_by == "rule")),
    num_stages=st.integers(1, 6),
    num_chunks=st.integers(1, 4),
    num_microbatches=st.integers(1, 20),
)
def test_every_action_once_backward_after_forward_and_no_deadlock(
    name: str, num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    if not SCHEDULES[name].interleaved:
        num_chunks = 1
    for stage in range(num_stages):
        order = [tuple(row) for row in SCHEDULES[name].order(num_stages, num_chunks, num_microbatches, stage).tolist()]
        assert len(order) == len(set(order)) == 2 * num_chunks * num_microbatches
        for chunk in range(num_chunks):
            for micro_batch in range(num_microbatches):
                assert order.index((FORWARD, chunk, micro_batch)) < order.index((BACKWARD, chunk, micro_batch))
    graph = full_graph(name, num_stages, num_chunks, num_microbatches)  # raises where the schedule deadlocks
    assert graph.num_tasks == 2 * num_stages * num_chunks * num_microbatches


def test_one_forward_one_backward_keeps_few_in_flight() -> None:
    graph = full_graph("1f1b", 4, 1, 10)
    assert [int(rows.max()) for rows in graph.in_flight] == [4, 3, 2, 1]
    assert [int(rows.max()) for rows in full_graph("gpipe", 4, 1, 10).in_flight] == [10] * 4
    assert [int(rows.max()) for rows in full_graph("seq_1f1b_4", 4, 1, 32).in_flight] == [7, 6, 5, 4]


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError, match="did you mean interleaved_1f1b"):
        find_schedule("interleaved_1f1")
    with pytest.raises(JobError, match="runs one chunk a stage"):
        find_schedule("1f1b", num_chunks=2)


def test_text_that_is_no_action_is_refused() -> None:
    with pytest.raises(ValueError, match="not an action"):
        parse_order("0F0 1X0")
