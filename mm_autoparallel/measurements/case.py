"""MeasuredCase: one published row as a job, a plan, and what was measured; Refused: a row that cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.plan import Plan


@dataclass(frozen=True, eq=False)
class MeasuredCase:
    """A row of a table. Whatever was not measured is None.

    table: the file's name. row: its data row, counted from 0. name: what a person calls it. software: the stack that
    ran it, as calibrations call it. measured_bytes: peak allocated bytes of each pipeline stage that was measured, or
    the largest of all stages; first_step: they were told after one step. resting_bytes: stage → what stays
    allocated after that step, between steps. out_of_memory: whether the run ended so.
    source: who measured it, and where it stands. content: the row's cells, by column. remarks: what a reader of its
    errors should know, a sentence each.
    unstated: what decides a figure, is not said by the table, and was assumed (`attention backend`); alternatives: the
    job as it is where that was otherwise, where few readings are possible; memory_alternatives: jobs between whose
    peaks the row's lie, whatever is not stated.
    kernels: whose kernels ran, in the table's words, where rows of one job differ in them. release: of the software,
    where the table has several: runs of different ones are no repeats.
    """

    table: str
    row: int
    name: str
    job: Job
    plan: Plan
    software: str
    measured_ms: float | None
    measured_bytes: Mapping[int, float] | float | None
    out_of_memory: bool | None
    source: str
    content: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    alternatives: tuple[Job, ...] = ()
    memory_alternatives: tuple[Job, ...] = ()
    first_step: bool = False
    resting_bytes: Mapping[int, float] | None = None
    kernels: str = ""
    release: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it leaves something unstated that no other reading of it bounds."""
        return bool(self.unstated) and not (self.alternatives or self.memory_alternatives)


@dataclass(frozen=True)
class Refused:
    """A well-formed row that cannot be predicted, and why, in a sentence."""

    row: int
    reason: str
