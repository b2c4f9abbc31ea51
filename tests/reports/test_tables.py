"""The tables hold what the simulator said: shares add up, every stage is there, an overflow is marked."""

from __future__ import annotations

import dataclasses
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem, place_in_modes
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate
from mm_autoparallel.reports.tables import share_time, stage_table, time_table
from mm_autoparallel.units import GIB, format_percent, format_signed

# Two stages × two chunks of vision and text; the second virtual stage ends one and begins the other.
PROBLEM = Problem(
    num_stages=2,
    num_chunks=2,
    num_microbatches=4,
    schedule="interleaved_1f1b",
    chain=(
        ChainBlock("patches", "vision", 1, 0.5, 0.0, layer=False, pinned="first"),
        ChainBlock("vit", "vision", 3, 1.0, 2.0, 1 * GIB, 0.25 * GIB),
        ChainBlock("llm", "text", 5, 2.0, 4.0, 2 * GIB, 0.5 * GIB, (Mode("recompute", 0.0, 2.0, 0.125 * GIB),)),
        ChainBlock("head", "text", 1, 1.0, 2.0, layer=False, pinned="last"),
    ),
    memory_limit_bytes=(16.0 * GIB, 6.0 * GIB),
    stage_static_bytes=(1.0 * GIB, 0.0),
    stage_tail_ms=(0.0, 3.0),
    p2p_ms=(0.1, 0.1, 0.1),
    p2p_ms_per_byte=(0.0,) * 3,
)
PLACEMENT = place_in_modes(
    PROBLEM,
    layers=((1, 2, 0, 0), (0, 1, 1, 0), (0, 0, 2, 0), (0, 0, 2, 1)),
    counts={"recompute": ((0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 0, 0))},
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(PROBLEM, PLACEMENT)


def lines(table: Table) -> list[str]:
    text = StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue().splitlines()


def cells(table: Table, stage: int) -> list[str]:
    """The row of `stage`, split where two or more blanks stand."""
    (row,) = [line for line in lines(table) if line.split() and line.split()[0] == str(stage)]
    return [cell for cell in row.strip().split("  ") if cell.strip()]


def test_shares_are_the_whole_step_on_every_stage(timeline: Timeline) -> None:
    shares = share_time(timeline)
    total_ms = sum(getattr(shares, field.name) for field in dataclasses.fields(shares))
    assert np.allclose(total_ms, timeline.step_ms)


def test_shares_are_what_the_stages_were_given(timeline: Timeline) -> None:
    shares = share_time(timeline)
    # Four micro-batches. Stage 0: patches, 2 vision, 2 recomputed text. Stage 1: vision, 3 text (1 recomputed), head.
    assert shares.forward_ms == pytest.approx([4 * (0.5 + 2 * 1 + 2 * 2), 4 * (1 + 3 * 2 + 1)])
    assert shares.backward_ms == pytest.approx([4 * (2 * 2 + 2 * 4), 4 * (2 + 3 * 4 + 2)])
    assert shares.recompute_ms == pytest.approx([4 * 2 * 2, 4 * 1 * 2])
    assert shares.tail_ms == pytest.approx([0.0, 3.0])


def test_the_time_table_names_every_cause_and_the_step(timeline: Timeline) -> None:
    text = "\n".join(lines(time_table(timeline)))
    for words in ("forward", "backward", "recompute", "fills", "transfers", "other stages", "drains", "last backward"):
        assert words in text
    (step,) = [line for line in text.splitlines() if line.split()[:1] == ["step"]]
    assert f" {timeline.step_ms:.2f} " in step
    assert "100.0 %" in step


def test_what_rounds_to_nothing_has_no_minus(timeline: Timeline) -> None:
    """Idle times are differences, and rounding may leave -1e-13."""
    tiny = np.full_like(timeline.idle_imbalance_ms, -1e-13)
    assert "-0.0" not in "\n".join(lines(time_table(dataclasses.replace(timeline, idle_imbalance_ms=tiny))))
    assert (format_percent(-1e-9), format_percent(-0.01), format_signed(-1e-9, 2)) == ("0.0 %", "-1.0 %", "+0.00")


def test_stages_count_layers_by_modality_and_chunk(timeline: Timeline) -> None:
    table = stage_table(PROBLEM, PLACEMENT, timeline, "modality")
    heading = next(line for line in lines(table) if "stage" in line)
    assert heading.split()[:4] == ["stage", "vision", "text", "recomputed"]  # vision cannot be recomputed: no column
    assert [cell.strip() for cell in cells(table, 0)[:4]] == ["0", "2+0", "0+2", "0+2"]
    assert [cell.strip() for cell in cells(table, 1)[:4]] == ["1", "1+0", "1+2", "1+0"]


def test_other_modes_have_columns_where_a_layer_runs_in_them() -> None:
    modes = (Mode("selective", 0.0, 0.5, 0.375 * GIB), Mode("offload"), Mode("recompute", 0.0, 2.0, 0.125 * GIB))
    chain = [dataclasses.replace(block, modes=modes) if block.name == "llm" else block for block in PROBLEM.chain]
    problem = dataclasses.replace(PROBLEM, chain=tuple(chain))
    offloaded = ((0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 1, 0))
    placement = place_in_modes(problem, PLACEMENT.layers, {"offload": offloaded})
    table = stage_table(problem, placement, simulate(problem, placement), "modality")
    heading = next(line for line in lines(table) if "stage" in line)
    assert heading.split()[:5] == ["stage", "vision", "text", "recomputed", "offload"]
    assert [cell.strip() for cell in cells(table, 1)[:5]] == ["1", "1+0", "1+2", "0+0", "1+1"]


def test_blocks_that_are_no_layers_have_columns_only_by_name(timeline: Timeline) -> None:
    heading = next(line for line in lines(stage_table(PROBLEM, PLACEMENT, timeline, "name")) if "stage" in line)
    assert heading.split()[:6] == ["stage", "patches", "vit", "llm", "recomputed", "head"]


def test_a_peak_above_its_limit_is_marked(timeline: Timeline) -> None:
    assert timeline.peak_memory_bytes[1] > 6 * GIB
    table = stage_table(PROBLEM, PLACEMENT, timeline, "modality")
    assert cells(table, 1)[-1].endswith("OVER")
    assert not cells(table, 0)[-1].endswith("OVER")
