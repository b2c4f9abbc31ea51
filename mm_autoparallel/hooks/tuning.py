"""Auto Tuning and Auto Settings: the best three configurations for a cluster, from the devices at hand.

What they leave in the work folder: `auto_tuning_top1.json` to `…top3.json`, plans as any other; a folder of the name of
each with the launch flags that run it; `subgraph_profiles/`, what was measured. And the block that upstream ends with,
on standard error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.hooks.flags import Flags
from mm_autoparallel.hooks.language import LanguageTraining
from mm_autoparallel.hooks.planner_process import check_planner, search_in
from mm_autoparallel.hooks.planning import check_writable, make_site, profile_job
from mm_autoparallel.hooks.rendezvous import Rendezvous
from mm_autoparallel.hooks.tuning_flags import Tuning
from mm_autoparallel.integrations.auto_tuning.flags import NUM_BEST
from mm_autoparallel.integrations.auto_tuning.profile_runs import list_profile_runs
from mm_autoparallel.integrations.auto_tuning.recommended import Recommended, format_recommended
from mm_autoparallel.integrations.auto_tuning.space import Network, laws_of, list_configurations
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import read_plan
from mm_autoparallel.reports.terminal import say, writing
from mm_autoparallel.streams import detail, write_error


def check_work_dir(tuning: Tuning) -> None:
    """Make the work folder. Raises JobError where nothing can be written there."""
    with writing(tuning.work_dir):
        tuning.work_dir.mkdir(parents=True, exist_ok=True)
    check_writable(tuning.path("top1.json"))


def tune(tuning: Tuning, flags: Flags, training: LanguageTraining, rendezvous: Rendezvous | None) -> None:
    """Profile what is missing, search, write the best three and print the block. Raises as a search and a run do."""
    check_planner(flags.planner)
    site = make_site(flags, rendezvous)
    job = profile_job(flags, training.describe(tuning.num_ranks), site)
    _detail_theirs(job, training.micro_batch_size, site.num_ranks)
    paths = [tuning.path(f"top{number}.json") for number in range(1, NUM_BEST + 1)]
    search_in(flags.planner, job, flags.time_limit_s, *paths, export_to=training.framework)
    found = [path for path in paths if path.exists()]
    say(f"wrote {', '.join(map(str, found))}")
    write_error(format_recommended(read_recommended(job, found)))


def read_recommended(job: Job, paths: Sequence[Path]) -> list[Recommended]:
    """The plans at `paths`, as the block has them. Raises PlanError where a file is no plan of `job`."""
    configs = []
    for path in paths:
        document = read_document(path, "plan", PlanError)
        configs.append(
            Recommended(
                plan=read_plan(path, job),
                step_ms=document["e2e_time"],
                peak_bytes=max(document["peak_memory_bytes"]),
                mc2=job.workload.fused_matmul_fraction > 0,
            )
        )
    return configs


def _detail_theirs(job: Job, micro_batch_size: int, num_devices: int) -> None:
    """In detail: what upstream would measure and try for `job`, on devices that it knows."""
    try:
        laws = laws_of(job.cluster.device.name)
        assert isinstance(job.model, Model)
        layers, workload = job.model.text.layers, job.workload
        experts = layers.experts.num_experts if layers.experts else 1
        num_samples = workload.global_batch_size // micro_batch_size
        network = Network(layers.num_layers, workload.seq_length, num_samples, experts)
        runs = list_profile_runs(laws, num_devices, workload.seq_length, experts > 1)
    except JobError as unknown:
        detail(f"upstream's space and profile runs are not told: {unknown}")
        return
    num_configurations = sum(1 for _ in list_configurations(network, job.cluster.num_devices, laws))
    detail(f"upstream would try {num_configurations} configurations for {job.cluster.num_devices} devices")
    detail(f"upstream would profile {', '.join(run.name for run in runs)}")
