"""Reads this project's own table of runs: a job file, the plan it ran under, and what was measured.

Both files lie beside the table. For runs of one's own: their models, profiles and calibrations are the job's.
"""

from __future__ import annotations

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.build import read_peaks
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.provenance import find_software
from mm_autoparallel.measurements.table import Row
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.plan import read_plan

REQUIRED = "job plan"
OPTIONAL = "name software measured_ms measured_bytes first_step out_of_memory source note"


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed or one of its files is wrong."""
    folder = row.path.parent
    try:
        job = read_job(folder / row.text("job"))
    except PlannerError as failure:
        raise row.error("job", str(failure)) from None
    try:
        plan = read_plan(folder / row.text("plan"), job)
    except PlannerError as failure:
        raise row.error("plan", str(failure)) from None
    measured_ms, measured_bytes = row.measurement("measured_ms"), read_peaks(row, plan.strategy.pp)
    out_of_memory = row.flag("out_of_memory") if row.has("out_of_memory") else None
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=row.text("name", f"{row.text('job')}, {row.text('plan')}"),
        job=job,
        plan=plan,
        software=find_software(row.text("software", "unknown"), row.text("source", "")),
        measured_ms=None if out_of_memory else measured_ms,
        measured_bytes=None if out_of_memory else measured_bytes,
        out_of_memory=out_of_memory,
        source=row.text("source", row.path.name),
        content=row.cells,
        first_step=row.flag("first_step", False),
    )
