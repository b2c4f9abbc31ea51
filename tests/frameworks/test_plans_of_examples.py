"""Every plan of the examples through every exporter: written and read back as it is, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from test_every_exporter import EXPORTERS, exporter_of

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.features import list_features
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.plan import Plan, read_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHES = {
    "megatron_core/train_8b.sh": Given(),
    "mindformers/pretrain_llama3_70b.yaml": Given(),
}

WRITTEN = {
    "internvl2_76b.baseline.json": "torch",
    "internvl2_76b.tuned.json": "torch",
    "internvl2_8b.baseline.json": "torch torchtitan",
    "internvl2_8b.tuned.json": "torch torchtitan",
    "qwen2vl_72b.baseline.json": "torch torchtitan",
    "qwen2vl_72b.tuned.json": "torch torchtitan",
    "qwen2vl_72b.tuned_pp8.json": "torchtitan",
    "megatron_core/train_8b.sh": "accelerate colossalai megatron-bridge megatron-core mindspeed-llm paddle torchtitan",
    "mindformers/pretrain_llama3_70b.yaml": "colossalai megatron-bridge megatron-core mindspeed-llm paddle torchtitan",
}
"""Plan → the frameworks that it is written for; the others refuse it by name."""


@cache
def list_plans() -> dict[str, tuple[Plan, Job]]:
    """Of each example that has a plan, that and its job."""
    found = {}
    for path in sorted((EXAMPLES / "published_gains").glob("*.yaml")):
        job = read_job(path)
        for file in sorted(path.parent.glob(f"{path.stem}.*.json")):
            found[file.name] = read_plan(file, job), job
    for name, given in LAUNCHES.items():
        read = import_launch(EXAMPLES / name, device="h100-80g", given=given)
        found[name] = read.estimate.plan, read.job
    return found


def give(takes: frozenset[str], plan: Plan, job: Job, folder: Path) -> Given:
    """What a person says beside the files that were written."""
    model = folder / "model.json"
    model.write_text(json.dumps(job.model.model_dump(mode="json")))
    given = Given(model, world_size=plan.strategy.world_size)
    if "seq_length" in takes:
        given = replace(given, seq_length=job.workload.seq_length)
    if "global_batch_size" in takes:
        given = replace(given, global_batch_size=plan.global_batch_size)
    return replace(given, micro_batch_size=plan.strategy.mbs) if "micro_batch_size" in takes else given


@pytest.mark.parametrize("framework", EXPORTERS)
def test_each_is_accounted_for(framework: str, tmp_path: Path) -> None:
    exporter, written, reasons = exporter_of(framework), set[str](), list[str]()
    for number, (name, (plan, job)) in enumerate(list_plans().items()):
        refused = [feature for feature in list_features(plan, job) if exporter.handling(feature) == "refused"]
        out = tmp_path / str(number)
        try:
            result = export_plan(plan, job, framework, out=out)
        except PlanError as refusal:
            reasons.append(str(refusal))
            assert not out.exists(), name
            continue
        assert not refused, name
        run = result.exported.plan
        assert run == plan or result.exported.approximations, name
        _, kind = find_kind(out / exporter.read_back, framework)
        again = kind.read_plan(out / exporter.read_back, give(kind.takes, plan, job, tmp_path))
        assert (again.layers, again.recompute) == (run.layers, run.recompute), name
        for key in ("pp", "tp", "dp", "cp", "ep", "vpp", "mbs", "zero", "schedule"):
            assert getattr(again.strategy, key) == getattr(run.strategy, key), (name, key)
        written.add(name)
    assert all(reason.startswith("plan: ") for reason in reasons)
    assert written == {name for name, frameworks in WRITTEN.items() if framework in frameworks.split()}
