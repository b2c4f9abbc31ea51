"""What an operator base lacks of traced configurations: how much of their time it covers, and what it has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.analytic import Rates, rates_of
from mm_autoparallel.model.operators.traced_table import cover
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.operators.coverage import Coverage
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.model.profiles.operators.times import OperatorTimes
from mm_autoparallel.model.profiles.traced import TracedEntry, TracedFile, list_forms

USUAL_COVERAGE_FRACTION = 0.3
"""Below it what lacks is measured. Assumed; the threshold that MindSpeed's Auto Tuning states for its operators."""


@dataclass(frozen=True)
class Covered:
    """A traced configuration, what the base covers of a micro-batch through it, and the forms without a time."""

    path: Path
    coverage: Coverage
    lacking: tuple[OperatorForm, ...]


def cover_traces(job: Job, files: Sequence[tuple[Path, TracedFile]], times: OperatorTimes | None) -> Iterator[Covered]:
    """Of each of `files`, traces of the job's model, what `times` cover. times None: nothing is known."""
    counts = Counter[str]()
    for block in expand(job.model).blocks:
        counts[block.kind] += block.count
    for path, trace in files:
        whole = Coverage()
        for entry in trace.entries:
            whole += counts[entry.kind] * cover(entry.operators, _rates(job, entry), times)
        lacking = [form for form in list_forms(trace.entries) if not _is_measured(form, times)]
        yield Covered(path, whole, tuple(lacking))


def _is_measured(form: OperatorForm, times: OperatorTimes | None) -> bool:
    found = times.find_us(form) if times else None
    return found is not None and found[1] == "measured"


def _rates(job: Job, entry: TracedEntry) -> Rates:
    """What the operators of `entry` take where nothing is measured."""
    calibration = calibration_of(job)
    strategy = Strategy(pp=1, tp=entry.tp, dp=max(1, job.cluster.num_devices // entry.tp), mbs=entry.mbs)
    return rates_of(calibration.reached(job.cluster), calibration, strategy, workload=job.workload)
