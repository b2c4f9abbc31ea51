"""Task: what the ranks of one launched run are to measure, in a file that their environment names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mm_autoparallel.errors import BackendError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.records import Bytes, Count, Flag, Noun, Time
from mm_autoparallel.validation import parse_record

Arrangement = Literal["group", "shard"]


class Division(Noun):
    """How a micro-batch that is measured is divided."""

    tp: Count
    mbs: Count
    cp: Count = 1


class Trained(Noun):
    """What ranks told of a training: times of its steps, in order; their highest peak, 0 where they said none."""

    steps_ms: tuple[Time, ...] = ()
    peak_bytes: Bytes = 0


class Task(Noun):
    """The network, if so told, then blocks of a model under some divisions; or a training.

    arrangement: `group` where tensor parallel groups are made of real ranks, `shard` where each rank measures the first
    rank's part of one. command: what a person types to have it measured again. job: as in a file. It does not say where
    to write: each node's own flags do. training: the script itself is run in their place, with each of these flags as
    it stands here (its words, none for a switch; null: left out) and without those that search.
    """

    schema_name: Literal["mm-autoparallel/task/1"] = Field(alias="schema")
    network: Flag
    arrangement: Arrangement
    divisions: tuple[Division, ...]
    command: str
    job: dict[str, Any]
    training: dict[str, tuple[str, ...] | None] | None = None

    def read_job(self) -> Job:
        """The job that the measurements are for."""
        return parse_job(self.job, Path("the task's job"))


def describe_job(job: Job) -> dict[str, Any]:
    """`job` as a job file would say it; its profiles are left out, because what is measured needs none."""
    return {
        "model": job.model.model_dump(mode="json"),
        "cluster": job.cluster.model_dump(mode="json"),
        "workload": job.workload.model_dump(mode="json"),
        "search": job.search.model_dump(mode="json"),
    }


def write_task(folder: Path, task: Task) -> Path:
    """The task file in `folder`, written."""
    path = folder / "task.json"
    write_text_atomically(path, task.model_dump_json(by_alias=True))
    return path


def read_task(path: Path) -> Task:
    """The task in the file at `path`. Raises BackendError where there is none."""
    return parse_record(Task, read_document(path, "task file", BackendError), "task file", path, BackendError)
