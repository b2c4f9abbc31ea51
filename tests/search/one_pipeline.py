"""A small job of one pipeline, and a level of it that was placed."""

from __future__ import annotations

import math
from pathlib import Path

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.space import list_space

LAYERS = {"num_layers": 6, "hidden_size": 2048, "ffn_size": 5504, "num_heads": 16, "norm": "rms"}


def never() -> bool:
    return False


def job_of(schedule: str) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h100-80g"},
        "workload": {"global_batch_size": 6, "seq_length": 2048},
        "search": {"pp": [2], "tp": [1], "mbs": [1], "schedule": schedule, "choice": "point"},
    }
    return parse_job(document, Path("job.json"))


def first_of(schedule: str) -> Pipeline:
    """The one pipeline of the job, before it is placed."""
    job = job_of(schedule)
    agenda = Agenda(CostModel(job))
    for entry in list_space(job, lambda: None):
        agenda.admit(entry, never)
    pipeline = agenda.next_open(math.inf, 0.0, 0.0, never)
    assert pipeline is not None
    return pipeline


def place_level(pipeline: Pipeline, fill: float) -> None:
    """Leave it at a level of so much memory, placed once."""
    pipeline.level.fill_fraction = fill
    pipeline.tighten(math.inf, never)
    assert pipeline.level.problem is not None
    result = place(pipeline.level.problem)
    found = Answer(pipeline.number, result.placement, result.step_ms, result.lower_bound_ms, 0.1)
    pipeline.take(found, math.inf)
    assert pipeline.level.num_slices == 1
