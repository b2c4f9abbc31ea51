"""Auto Tuning and Auto Settings: the best three configurations for a cluster, from the devices at hand.

What they leave in the work folder: `auto_tuning_top1.json` to `…top3.json`, plans as any other; a folder of the name of
each with the launch flags that run it; `auto_tuning_job.json`, the job that they are plans of, as `simulate` and
`explain` take it; `subgraph_profiles/`, what was measured. And the block that upstream ends with,
on standard error. Where plans are trained too (`mixed`, `black`), those lie in `candidates/`, what their trials took in
`trials/`, and all of it in `model_results.csv`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_text, write_text_atomically
from mm_autoparallel.hooks.flags import Flags
from mm_autoparallel.hooks.language import LanguageTraining
from mm_autoparallel.hooks.planner_process import check_planner, remove_plan, search_in
from mm_autoparallel.hooks.planning import check_writable, make_site, profile_job
from mm_autoparallel.hooks.rendezvous import Rendezvous
from mm_autoparallel.hooks.task import describe_job
from mm_autoparallel.hooks.trials import Candidate, Trials, read_candidate
from mm_autoparallel.hooks.tuning_flags import Tuning
from mm_autoparallel.integrations.auto_tuning.flags import NUM_BEST, NUM_MEASURED
from mm_autoparallel.integrations.auto_tuning.profile_runs import list_profile_runs
from mm_autoparallel.integrations.auto_tuning.recommended import Recommended, format_recommended
from mm_autoparallel.integrations.auto_tuning.space import Network, laws_of, list_configurations
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import format_document
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.reports.terminal import say, write_file, write_table, writing
from mm_autoparallel.streams import detail, write_error
from mm_autoparallel.units import MIB


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
    write_file(tuning.path("job.json"), format_document(_job_document(tuning, job)))
    best = _list_best(tuning)
    if tuning.kind == "white":
        search_in(flags.planner, job, flags.time_limit_s, *best, export_to=training.framework)
        found = [_recommend(job, read_candidate(path, job)) for path in best if path.exists()]
    else:
        found = _train_best(tuning, flags, Trials(job, training, site, flags.planner, tuning.work_dir / "trials"))
    say(f"wrote {', '.join(str(path) for path in best if path.exists())}")
    write_error(format_recommended(found))


def _job_document(tuning: Tuning, job: Job) -> dict[str, Any]:
    """The job as a file of the work folder, from which its profiles are named."""
    profiles = [os.path.relpath(path, tuning.work_dir) for path in job.profiles]
    return {**describe_job(job), "profiles": profiles}


def _list_best(tuning: Tuning) -> list[Path]:
    return [tuning.path(f"top{number}.json") for number in range(1, NUM_BEST + 1)]


def _train_best(tuning: Tuning, flags: Flags, trials: Trials) -> list[Recommended]:
    """Plan, train the best plans (of `black`: all), and write those that are best by what they took."""
    job, folder = trials.job, tuning.work_dir / "candidates"
    for each in (folder, trials.folder):
        with writing(each):
            each.mkdir(exist_ok=True)
    lawful = [entry for entry in list_space(job) if entry.reason is None]
    number = len(lawful) if tuning.kind == "black" else NUM_MEASURED
    paths = [folder / f"{rank:04d}.json" for rank in range(1, number + 1)]
    search_in(flags.planner, job, flags.time_limit_s, *paths, export_to=trials.training.framework)
    held = trials.hold([path for path in paths if path.exists()])
    _say_regret(held)
    ranked = sorted(held, key=lambda one: one.corrected_ms)
    write_table(tuning.work_dir / "model_results.csv", _COLUMNS, [_row(one) for one in ranked])
    for rank, path in enumerate(_list_best(tuning)):
        remove_plan(path)
        if rank < len(ranked):
            _copy(ranked[rank].path, path)
    return [_recommend(job, one) for one in ranked[:NUM_BEST]]


def _say_regret(held: Sequence[Candidate]) -> None:
    """What the plans that were planned fastest took when they were trained, beside the fastest of all that were."""
    whole_ms = [one.trained_ms for one in held if one.is_whole and one.trained_ms is not None]
    if len(whole_ms) > 1:
        more = ", ".join(f"{step_ms / min(whole_ms) - 1.0:.1%}" for step_ms in whole_ms[:NUM_BEST])
        say(f"trained, the best plans take {more} more than the fastest of {len(whole_ms)}")


def _copy(source: Path, target: Path) -> None:
    """A plan, and the folder of its launch flags where there is one."""
    with writing(target):
        write_text_atomically(target, read_text(source, "plan", "JSON file"))
        if source.with_suffix("").exists():
            shutil.copytree(source.with_suffix(""), target.with_suffix(""))


_COLUMNS = (
    *("pp", "tp", "dp", "ring_attention", "ulysses", "mbs", "vpp", "ep", "peak_memory", "e2e_time"),
    *("zero", "planned_ms", "trial_planned_ms", "trial_trained_ms", "whole"),
)
"""Those of upstream's file of this name, in its order, and ours. peak_memory: MiB, trained where a run said that, else
planned; e2e_time: ms, corrected by what the trial took; whole: what was trained is the plan, nothing was cut."""


def _row(one: Candidate) -> dict[str, object]:
    strategy = one.plan.strategy
    by_heads = strategy.cp_kind == "all_to_all"
    trained = one.trained_ms is not None
    return {
        **{name: getattr(strategy, name) for name in ("pp", "tp", "dp", "mbs", "vpp", "ep", "zero")},
        "ring_attention": 1 if by_heads else strategy.cp,
        "ulysses": strategy.cp if by_heads else 1,
        "peak_memory": f"{(one.trained_peak_bytes or one.peak_bytes) / MIB:.1f}",
        "e2e_time": f"{one.corrected_ms:.3f}",
        "planned_ms": f"{one.step_ms:.3f}",
        "trial_planned_ms": f"{one.trial_ms:.3f}" if trained else "",
        "trial_trained_ms": f"{one.trained_ms:.3f}" if trained else "",
        "whole": str(one.is_whole).lower() if trained else "",
    }


def _recommend(job: Job, one: Candidate) -> Recommended:
    """A plan as the block has it."""
    facts = one.plan.strategy.facts_of(job.workload)
    return Recommended(
        plan=one.plan,
        step_ms=one.step_ms,
        peak_bytes=one.peak_bytes,
        mc2=facts.tp_overlap == "mc2" or job.workload.fused_matmul_fraction > 0,
        token_rearrange=job.workload.token_rearrange,
        trained_ms=one.trained_ms if one.is_whole else None,
        by_trial_ms=None if one.trained_ms is None or one.is_whole else one.corrected_ms,
    )


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
