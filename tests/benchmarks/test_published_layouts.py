"""published_layouts.py: every published figure has its source, and what is not planned a reason that holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_layout_rows import ROWS, Published, optimus_job
from published_layouts import HEADER, best_of_kind, gain, judge, step_of, table_line

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job

PLANNED = [row for row in ROWS if row.job is not None]


def test_every_row_has_a_source_and_a_figure_over_each_baseline() -> None:
    assert len({row.name + row.baselines[0].told for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.source.startswith(("arXiv:", "github "))
        assert row.baselines
        assert all(base.name and "%" in base.told for base in row.baselines)
        assert bool(row.cannot) == (row.job is None)
    assert {row.paper for row in ROWS} == {"Optimus", "Megatron MIMO", "DistTrain", "Cornstarch"}


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: row.name)
def test_published_sizes_are_lawful(row: Published) -> None:
    job = parse_job(dict(row.job or {}), Path("job.yaml"))
    for base in row.baselines:
        if base.strategy:
            assert base.strategy.world_size == job.cluster.num_devices
            assert unlawful_reason(job.model, job.cluster, job.workload, base.strategy) is None


def test_both_encoders_make_the_first_stage_of_the_baseline_long() -> None:
    """Each adds to it what its layers take and hold by themselves."""
    found = {}
    for first, second in (("ViT-10B", ""), ("ViT-5B", ""), ("ViT-10B", "ViT-5B")):
        job = parse_job(optimus_job(first, "GPT-175B", 512, 256, "h100-80g", second), Path("job.yaml"))
        layers = [b for b in build_problem(CostModel(job), Strategy(8, 8, 8, 2)).chain if b.layer]
        towers = [b for b in layers if b.modality != "text"]
        found[first, second] = [
            sum(b.count * b.static_bytes for b in towers),
            sum(b.count * (b.forward_ms + b.backward_ms) for b in towers),
        ]
    one, other = found["ViT-10B", ""], found["ViT-5B", ""]
    assert found["ViT-10B", "ViT-5B"] == [pytest.approx(sum(pair)) for pair in zip(one, other, strict=True)]


def test_an_encoder_of_less_tensor_parallelism_gains_as_little_as_was_measured() -> None:
    (row,) = (row for row in ROWS if row.name.startswith("ViT-1B + 7B"))
    costs = CostModel(parse_job(dict(row.job or {}), Path("job.yaml")))
    (base,) = row.baselines
    found = gain(step_of(costs, row, base, 1.0), best_of_kind(costs, row, 1.0))
    assert found == pytest.approx(float(base.told.split()[0]), abs=1.0)


def test_a_line_a_baseline() -> None:
    (row,) = (row for row in ROWS if row.paper == "DistTrain")
    (result,) = judge(row)
    assert result.gain_percent is None
    assert table_line(result).count("|") == HEADER.splitlines()[0].count("|")
    assert "generator" in result.plan
