"""Described: what a framework's own files say of a training, as sections of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.job.model import Model


@dataclass(frozen=True)
class Described:
    """What a user's own files say of a training: sections of a job, and what a person must know of them.

    model: path of the model file, or the model itself. workload, search: sections of a job as its file has them.
    world_size: devices that the files ask for; None where they leave it to the machine. notes: a sentence for each
    figure that was assumed.
    """

    model: Path | Model
    workload: Mapping[str, object]
    search: Mapping[str, object]
    world_size: int | None = None
    notes: tuple[str, ...] = ()
