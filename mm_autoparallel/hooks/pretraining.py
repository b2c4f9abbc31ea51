"""Pretraining: what a script hands over, and the job that it makes together with a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job

if TYPE_CHECKING:
    from mm_autoparallel.profilers.subject import Subject

DEFAULT_SEARCH: Mapping[str, Any] = {"cp": (1,), "mbs": (1, 2, 4)}
"""Of the search space, where the script says nothing: each size more is profiled. Assumed: larger micro-batches add
little that these do not show, and few scripts divide a sample among devices."""


@dataclass(frozen=True)
class Pretraining:
    """A training script in five parts; mappings as they stand in a job file (docs/reference/job-file.md).

    model: sizes, as a mapping or the path of a model file (MindSpeed-MM's model.json, Hugging Face's config.json).
    workload: one training step. subject: how the model is built and stepped. search: limits of the space; where it does
    not name them, CP is 1 and MBS one of 1, 2, 4. freeze: part → frozen or not. adapters: what trains beside parts that
    are not frozen, in place of them (`subject` builds the model without).
    """

    model: Mapping[str, Any] | Model | str | Path
    workload: Mapping[str, Any] | Workload
    subject: Subject
    search: Mapping[str, Any] = field(default_factory=dict)
    freeze: Mapping[str, bool] = field(default_factory=dict)
    adapters: Mapping[str, Any] | None = None


def build_job(
    pretraining: Pretraining,
    num_nodes: int,
    devices_per_node: int,
    device: Device,
    profiles: Sequence[Path] = (),
) -> Job:
    """The job of planning `pretraining` for a cluster. Raises JobError, which calls the script its job file."""
    model, workload = pretraining.model, pretraining.workload
    if isinstance(model, (str, Path)):
        model = str(Path(model).resolve())  # messages and look-up are the caller's, not the script's folder
    elif isinstance(model, Model):
        model = model.model_dump(mode="json")
    document = {
        "model": model,
        "cluster": {
            "num_nodes": num_nodes,
            "devices_per_node": devices_per_node,
            "device": device.model_dump(mode="json"),
        },
        "workload": workload.model_dump(mode="json") if isinstance(workload, Workload) else dict(workload),
        "search": {**DEFAULT_SEARCH, **pretraining.search},
        "freeze": dict(pretraining.freeze),
        "adapters": None if pretraining.adapters is None else dict(pretraining.adapters),
    }
    return replace(parse_job(document, Path(sys.argv[0])), profiles=tuple(profiles))
