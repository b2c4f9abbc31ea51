"""What has to be measured before a job can be planned, and the runs that measure it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.hooks.runs import Site, run_task
from mm_autoparallel.hooks.stored_device import is_shipped_device
from mm_autoparallel.hooks.task import Arrangement, Division, Task, describe_job
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles import store
from mm_autoparallel.model.profiles.network import NetworkProfile, network_path, read_network
from mm_autoparallel.model.profiles.shipped import STORE, shipped_store
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.reports.terminal import say

COMMAND = "mm-autoparallel"


def list_divisions(job: Job) -> tuple[Division, ...]:
    """How micro-batches are divided by the lawful strategies of `job`, each once. Raises JobError as list_space does.

    Towers are measured where TP divides them. Blocks are measured whole, with every expert: what CP and EP change is
    carried over (model/costs/cost_model.py).
    """
    divided = replace(job, workload=job.workload.model_copy(update={"replicate_towers": False}))
    lawful = [entry.strategy for entry in list_space(divided) if entry.reason is None]
    found = sorted({(one.tp, one.mbs) for one in lawful})
    return tuple(Division(tp=tp, mbs=mbs) for tp, mbs in found)


def describe_carried(job: Job) -> str:
    """Which lawful sizes are not measured, in a sentence; empty where all are."""
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    sizes = {"CP": {one.cp for one in lawful} - {1}, "EP": {one.ep for one in lawful} - {1}}
    told = [f"{name} {', '.join(map(str, sorted(found)))}" for name, found in sizes.items() if found]
    if any(not one.sequence_parallel for one in lawful):
        told.append("TP without sequence parallel")
    return f"not measured, but carried over by the ratio of analytic costs: {'; '.join(told)}" if told else ""


def list_tasks(job: Job, divisions: Sequence[Division], site: Site) -> tuple[Task, ...]:
    """What of `divisions` and of the network is not in the store yet, as tasks in the order they are to run.

    The network comes first, because shards take the time of their collectives from it. Raises ProfileError where
    what is there no longer holds.
    """
    from mm_autoparallel.profilers.device import software_versions

    device, command = job.cluster.device, plan_command()
    folder = store.profile_folder(site.root, device.name, job.model)
    manifest = store.make_manifest(job.model, job.workload, device.name, software_versions(), command)
    missing = store.missing_configurations(folder, manifest, divisions, job.workload)
    whole = [one for one in missing if site.processes_per_node % one.tp == 0]
    parts = [one for one in missing if one not in whole]
    network = site.num_ranks > 1 and not _knows_network(manifest, site)

    def task(arrangement: Arrangement, divisions: Sequence[Division], network: bool) -> Task:
        return Task.model_validate(
            {
                "schema": "mm-autoparallel/task/1",
                "network": network,
                "arrangement": arrangement,
                "divisions": [one.model_dump() for one in divisions],
                "command": command,
                "job": describe_job(job),
            }
        )

    tasks = [task("group", whole, network)] if whole or network else []
    return tuple(tasks + ([task("shard", parts, False)] if parts else []))


def profile_missing(job: Job, divisions: Sequence[Division], site: Site) -> bool:
    """Measure what the store lacks of `divisions` and of the network; whether that was anything.

    Raises RankFailure or BackendError where a run failed; what was measured before is kept.
    """
    tasks = list_tasks(job, divisions, site)
    for task in tasks:
        say(_announce(task, site))
        run_task(site, task)
    return bool(tasks)


def profile_paths(job: Job, root: Path) -> tuple[Path, ...]:
    """What of the store a job reads: the folder of its model on its device, and the network where it was measured."""
    network = network_path(root, job.cluster.device.name)
    folder = store.profile_folder(root, job.cluster.device.name, job.model)
    return (folder, network) if network.exists() else (folder,)


def shipped_paths(job: Job, divisions: Sequence[Division], site: Site) -> tuple[Path, ...]:
    """What a job reads of the profiles that come with the package, after what its own store has of the same.

    Empty where they do not hold all that planning `job` needs: they are of another device or of other versions, they
    lack a division or the network, or the store is one that a person named, to measure into.
    """
    device, root = job.cluster.device, shipped_store()
    if site.root != STORE or not is_shipped_device(device):
        return ()
    from mm_autoparallel.profilers.device import software_versions

    now = software_versions()
    folder = store.profile_folder(root, device.name, job.model)
    files = [folder / store.file_name(one.tp, one.cp, one.mbs, job.workload) for one in divisions]
    if not all(path.exists() and not store.stale_software(store.read_profile(path).software, now) for path in files):
        return ()
    if site.num_ranks > 1 and not _ships_network(network_path(root, device.name), device.name, now, site):
        return ()
    own = store.profile_folder(site.root, device.name, job.model)
    networks = (network_path(place, device.name) for place in (site.root, root))
    network = next((path for path in networks if path.exists()), None)
    return (*((own,) if any(own.glob("*.json")) else ()), folder, *((network,) if network else ()))


def plan_command() -> str:
    """What a person types to have the same measured again."""
    words = ["python", *sys.orig_argv[1:]]
    if Path(words[1]).name == COMMAND:  # the console script, which is started by name and not by its path
        words[:2] = [COMMAND]
    return shlex.join(words)


def _knows_network(manifest: store.Manifest, site: Site) -> bool:
    """Whether the store has every group that the ranks at hand form. Raises ProfileError where it is stale."""
    path = network_path(site.root, manifest.device)
    found = read_network([path], manifest.device) if path.exists() else None
    if found is None:
        return False
    store.check_fresh(path, found[1], manifest)
    return _spans(found[1], site)


def _ships_network(path: Path, device_name: str, now: Mapping[str, str], site: Site) -> bool:
    found = read_network([path], device_name) if path.exists() else None
    return found is not None and not store.stale_software(found[1].software, now) and _spans(found[1], site)


def _spans(network: NetworkProfile, site: Site) -> bool:
    """Whether every group that the ranks at hand form was measured."""
    from mm_autoparallel.profilers.collectives import list_shapes

    known = {(fit.level, fit.num_ranks, fit.inside) for fit in network.fits}
    shapes = list_shapes(site.num_ranks, site.processes_per_node)
    return all((shape.level, shape.num_ranks, shape.inside) in known for shape in shapes)


def _announce(task: Task, site: Site) -> str:
    ranks = f"{site.num_ranks} rank{'s' if site.num_ranks > 1 else ''}"
    network = ["the network"] if task.network else []
    blocks = (
        [f"blocks at {', '.join(f'TP {one.tp} MBS {one.mbs}' for one in task.divisions)}"] if task.divisions else []
    )
    shards = ", as shards of groups that are larger than what is here" if task.arrangement == "shard" else ""
    return f"measuring {' and '.join(network + blocks)} on {ranks}{shards}"
