"""ModelForm: a form of model files that a framework reads, registered with it (registry.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.foreign import Section

TRACED_MBS = (1, 2, 4)
"""Micro-batches that are traced where the job's search names none."""

REFUSAL = "refused.json"
"""Where a process that takes a model apart says why it refuses."""


@dataclass(frozen=True)
class TracedHere:
    """A model that was taken apart while its job was read, and the folder of its traces."""

    model: TracedModel
    folder: Path


@dataclass(frozen=True)
class Undescribed:
    """Models of a form whose files do not say their layers: their live class is taken apart.

    is_one: whether a file's content is of such a model. trace: (content, path, workload, part → frozen or not, samples
    of a micro-batch that are traced) → the model with its traces; raises JobError where that cannot be.
    """

    is_one: Callable[[Mapping[str, Any]], bool]
    trace: Callable[[Mapping[str, Any], Path, Workload, Mapping[str, bool], Sequence[int]], TracedHere]


@dataclass(frozen=True)
class ModelForm:
    """A form of model files: YAML or JSON with a mapping at its top.

    mark: what shows it, for messages ("a Hugging Face config.json has model_type"). is_one: whether a file's content
    is of this form. read: the model; raises JobError naming file, key and value, as Section's look-ups do. asked_last:
    files of other forms may have the mark too, so those are asked first. undescribed: models of the form that `read`
    cannot tell from their file. fill_job: (a job's content, its path) → that with what files beside the model's say,
    and a sentence for what was read or is left out of the model; raises JobError for a malformed one.
    """

    mark: str
    is_one: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Section], Model]
    asked_last: bool = False
    undescribed: Undescribed | None = None
    fill_job: Callable[[dict[str, Any], Path], tuple[dict[str, Any], tuple[str, ...]]] | None = None


def usual_mbs(mbs: Sequence[int] | None, global_batch_size: int) -> tuple[int, ...]:
    """The micro-batches of a job whose search says `mbs`, where they are traced."""
    return tuple(mbs) if mbs else tuple(size for size in TRACED_MBS if global_batch_size % size == 0)
