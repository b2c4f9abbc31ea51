"""`profile JOB --operators`: time single operators of the job's traces that the operator base lacks, each once."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.output import print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import say, warn

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.profiles.operators.base import Sampled
    from mm_autoparallel.model.profiles.traced import TracedFile
    from mm_autoparallel.profilers.operators.benchmark import Failed


def profile_operators(arguments: argparse.Namespace, job: Job) -> int:
    """Measure in this process, on one device, what configurations below the coverage lack; print the base's path.

    What was measured is added form by form, so that a run that is ended continues where it was.
    """
    from mm_autoparallel.hooks.stored_device import stored_device
    from mm_autoparallel.model.costs.traced_coverage import USUAL_COVERAGE_FRACTION, cover_traces
    from mm_autoparallel.model.profiles.operators.base import OperatorBase, base_path
    from mm_autoparallel.model.profiles.operators.times import OperatorTimes
    from mm_autoparallel.profilers.device import claim_device, platform_at_hand
    from mm_autoparallel.profilers.operators.benchmark import measure_forms

    files = _read_traces(arguments, job)
    least_fraction = USUAL_COVERAGE_FRACTION if arguments.coverage is None else arguments.coverage
    device = stored_device(arguments.out)
    if device.name != job.cluster.device.name:
        warn([f"the job's devices are {job.cluster.device.name}, and what is measured here holds for {device.name}"])
    job = replace(job, cluster=job.cluster.model_copy(update={"device": device}), profiles=())
    live, platform, path = claim_device(0), platform_at_hand(device.name), base_path(arguments.out)
    with OperatorBase.open_to_add(path) as base:
        times = OperatorTimes.of(base, platform.device, platform.software)
        found = list(cover_traces(job, files, times))
        below = [one for one in found if one.coverage.coverage_fraction < least_fraction]
        lacking = {form.digest: form for one in below for form in one.lacking}
        for one in found:
            what = f"{len(one.lacking)} forms lack" if one in below else "enough"
            say(f"{one.path.name}: coverage {one.coverage.coverage_fraction:.3f}, {what}")

        def tell(done: Sampled | Failed) -> None:
            if hasattr(done, "reason"):
                warn([f"{done.form.operator} cannot be run by itself: {done.reason}"])
            else:
                base.add(platform, "micro-benchmark", [done])

        measured, failed = measure_forms(lacking.values(), live, on_form=tell)
        if measured:
            say(f"measured {len(measured)} operators; {len(failed)} could not be run by themselves")
            times = OperatorTimes.of(base, platform.device, platform.software)
            for one in cover_traces(job, files, times):
                say(f"{one.path.name}: coverage {one.coverage.coverage_fraction:.3f}")
    print_line(str(path))
    return 0


def _read_traces(arguments: argparse.Namespace, job: Job) -> list[tuple[Path, TracedFile]]:
    """Those of the job's model in the store that have forms, of the sizes that are asked for. Raises JobError where
    there are none."""
    from mm_autoparallel.files import is_folder
    from mm_autoparallel.model.profiles.traced import list_forms, read_traces, trace_folder

    folder = trace_folder(arguments.out, job.model)
    advice = f"trace the job first: `mm-autoparallel trace {arguments.job} --out {arguments.out}`"
    if not is_folder(folder):
        raise JobError(f"there are no traces of {job.model.name} in {folder}; {advice}")
    files = [
        (path, trace)
        for path, trace in read_traces([folder], job.model, job.workload)
        if _is_asked(arguments, trace) and list_forms(trace.entries)
    ]
    if not files:
        raise JobError(f"no trace in {folder} is of these sizes and says the forms of its operators; {advice}")
    return files


def _is_asked(arguments: argparse.Namespace, trace: TracedFile) -> bool:
    first = trace.entries[0]
    sizes = ((first.tp, arguments.tp), (first.mbs, arguments.mbs), (trace.workload.seq_length, arguments.seq_lengths))
    return all(limit is None or size in limit for size, limit in sizes)
