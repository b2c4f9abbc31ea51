"""From a script's flags to a job with its profiles: what is missing of them is measured on the devices at hand."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.hooks.flags import Flags
from mm_autoparallel.hooks.pretraining import Pretraining, build_job
from mm_autoparallel.hooks.profiling import (
    describe_carried,
    list_divisions,
    list_tasks,
    profile_missing,
    profile_paths,
    shipped_paths,
)
from mm_autoparallel.hooks.rendezvous import Rendezvous
from mm_autoparallel.hooks.runs import Site
from mm_autoparallel.hooks.stored_device import stored_device
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.reports.terminal import say, warn, writing


def make_site(flags: Flags, rendezvous: Rendezvous | None) -> Site:
    """Where ranks are started, and as what: this very script."""
    from mm_autoparallel.profilers.device import find_device_type

    return Site(
        program=(sys.executable, *sys.orig_argv[1:]),
        processes_per_node=flags.processes_per_node,
        on_cpu=find_device_type() == "cpu",
        root=flags.profiles,
        host=flags.master_addr,
        port=flags.master_port if rendezvous is None else None,
        rendezvous=rendezvous,
    )


def profile_job(flags: Flags, pretraining: Pretraining, site: Site) -> Job:
    """The job of planning `pretraining` for the simulated cluster, its blocks and the network measured.

    Raises JobError where script or flags are wrong, RankFailure or BackendError where a run failed; what was measured
    before is kept.
    """
    job = build_job(pretraining, flags.simulated_nodes, flags.simulated_per_node, stored_device(flags.profiles))
    warn(job.warnings)
    if carried := describe_carried(job):
        say(carried)
    return with_profiles(job, site)


def with_profiles(job: Job, site: Site) -> Job:
    """`job` with what of the store it reads, or of the shipped one where that has all that the own one lacks; else what
    is not there yet is measured. Raises as `profile_job` does."""
    bare = replace(job, model=job.model.model_copy(update={"adapters": None}))  # what the script's subject builds
    divisions = list_divisions(job)
    shipped = shipped_paths(bare, divisions, site) if list_tasks(bare, divisions, site) else ()
    source = "shipped" if shipped else "measured now" if profile_missing(bare, divisions, site) else "measured before"
    job = replace(job, profiles=shipped or profile_paths(bare, site.root))
    say(f"costs: {source}, in {', '.join(map(str, job.profiles))}")
    return job


def check_writable(path: Path) -> None:
    """Raises JobError where `path` could not be written: better told before an hour of profiling than after."""
    with writing(path), tempfile.TemporaryFile(dir=path.parent):
        return
