"""published_layouts.py: every published figure has its source, and what is not planned a reason that holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_layout_rows import ROWS, Published, optimus_job
from published_layouts import HEADER, best_of_kind, gain, judge, step_of, table_line

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.strategy import unlawful_reason
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


def test_a_second_encoder_of_images_is_refused_as_the_table_says() -> None:
    document = optimus_job("ViT-5B", "GPT-175B", 512, 256, "h100-80g")
    (first,) = document["model"]["encoders"]
    document["model"]["encoders"] = [first, {**first, "name": "vision1"}]
    with pytest.raises(JobError, match="second encoder of images"):
        parse_job(document, Path("job.yaml"))


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
