"""The face is stable: its names, their signatures, and what results can do."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.cli import plan as plan_command
from mm_autoparallel.planner.search.planner import search

SIGNATURES = {
    "read_job": ["path", "changes"],
    "Job": ["model", "cluster", "workload", "search", "freeze", "adapters", "profiles", "calibration"],
    "plan": ["job", "time_limit_s", "on_progress", "top_k", "should_stop", "engine", "ray_address", "cache"],
    "simulate": ["job", "plan", "name"],
    "explain": ["job", "plan", "why_not", "top_k", "time_limit_s", "should_stop", "on_progress"],
    "report": ["job", "plans", "found", "search", "time_limit_s", "should_stop", "on_progress", "texts", "command"],
    "place": ["problem", "time_limit_s", "on_progress", "should_stop"],
    "verify": ["certificate", "time_limit_s"],
    "read_plan": ["path", "job"],
    "read_problem": ["path"],
    "BatchBalancer": ["plan", "dp", "micro_batches", "token_cap", "cost"],
    "DistributedBalancedBatchSampler": [
        *("samples", "balancer", "rank", "global_batch_size", "seed", "epoch", "shuffle"),
    ],
    "Sample": ["patches", "text_tokens", "tokens", "audio_s"],
    "SampleCost": ["image_ms", "token_ms", "encoder_frozen", "merge_tokens"],
}
NOUNS = {
    "Plan": ["edited", "layers", "modes_used", "num_microbatches", "recompute", "strategy"],
    "Problem": ["chain", "num_stages"],
    "Progress": ["best_ms", "gap_fraction", "lower_bound_ms", "num_candidates", "num_done"],
    "PlanResult": ["best", "gap_fraction", "lower_bound_ms", "plan", "proven", "step_ms", "warnings", "write"],
    "Simulation": ["fits", "plan", "step_ms", "svg", "unstated", "warnings", "write_svg", "write_trace"],
    "Explanation": ["warnings"],
    "ReportResult": ["block", "html", "report", "write"],
    "PlaceResult": ["gap_fraction", "lower_bound_ms", "placement", "reason", "status", "step_ms", "write_certificate"],
    "VerifyResult": ["lower_bound_ms", "step_ms"],
    "Assignment": ["lower_bound_ms", "predicted_ms", "ranks", "regret"],
}
ERRORS = {
    "PlannerError": 2,
    "JobError": 2,
    "ProfileError": 2,
    "PlanError": 2,
    "TableError": 2,
    "NoFeasiblePlan": 3,
    "Unfinished": 124,
    "Interrupted": 130,
    "BackendError": 2,
}
UNITS = re.compile(r"(?:_ms|_s|_bytes|_per_s|_fraction|_factor|_probability|_price|_ms_low|_ms_high)$")
WITHOUT = {"elasticity", "robust"}
CLUSTER = {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 4}
WORKLOAD = {"global_batch_size": 16, "seq_length": 1024}


def test_its_names_are_the_stable_ones() -> None:
    assert sorted(mmap.__all__) == sorted([*SIGNATURES, *NOUNS, *ERRORS])
    assert set(mmap.__all__) <= set(dir(mmap))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(mmap, name)).parameters) == SIGNATURES[name]
    assert inspect.getdoc(getattr(mmap, name))


@pytest.mark.parametrize("name", NOUNS)
def test_nouns_are_frozen_and_have_what_is_promised(name: str) -> None:
    noun = getattr(mmap, name)
    assert dataclasses.is_dataclass(noun)
    there = {*dir(noun), *(field.name for field in dataclasses.fields(noun))}
    assert set(NOUNS[name]) <= there
    if name.endswith(("Result", "Simulation", "Explanation")):
        assert noun.__dataclass_params__.frozen
        assert {"table", "to_dict", "_repr_html_"} <= there


def test_errors_and_their_exit_codes() -> None:
    assert {name: getattr(mmap, name).exit_code for name in ERRORS} == ERRORS


def test_a_name_that_it_lacks() -> None:
    with pytest.raises(AttributeError, match="plane"):
        mmap.plane  # noqa: B018


def test_modules_of_the_same_name_do_not_take_its_functions_places() -> None:
    code = (
        "import mm_autoparallel as m, mm_autoparallel.planner.plan, mm_autoparallel.pipeline.simulate.step\n"
        "from mm_autoparallel.planner.plan import Plan\n"
        "assert m.plan.__name__ == 'plan' and m.simulate.__name__ == 'simulate' and m.Plan is Plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_job_is_built_and_read_alike(job: mmap.Job, tmp_path: Path) -> None:
    document = {"model": job.model.model_dump(mode="json"), "cluster": CLUSTER, "workload": WORKLOAD}
    (tmp_path / "job.json").write_text(json.dumps(document))
    read = mmap.read_job(tmp_path / "job.json")
    assert isinstance(job, mmap.Job)
    assert isinstance(read, mmap.Job)
    assert read.sha256 == job.sha256
    assert not isinstance("job.yaml", mmap.Job)


def test_records_are_taken_as_mappings_are(job: mmap.Job) -> None:
    again = mmap.Job(job.model, job.cluster, job.workload, search=job.search)
    assert again.sha256 == job.sha256
    assert again.search == job.search


def test_a_device_s_name_is_one_node_of_it_and_that_is_said() -> None:
    job = mmap.Job("qwen3-30b-a3b", "h100-80g", {"global_batch_size": 8, "seq_length": 4096})
    assert job.cluster.num_devices == 8
    assert job.search.ep == (1, 2, 4, 8)
    assert [warning.split(" is not said")[0] for warning in job.warnings] == ["cluster.devices_per_node", "search.ep"]


@pytest.mark.parametrize(
    ("model", "cluster", "workload", "words"),
    [
        ("llama9-70b", "h100-80g", {}, ('no file is called "?llama9', 'did you mean "llama3-70b"')),
        ("nowhere/config.json", "h100-80g", {"global_batch_size": 8, "seq_length": 8}, ("nowhere/config.json",)),
        ("llama3-8b", "h100", {"global_batch_size": 8, "seq_length": 8}, ('did you mean "h100-80g"',)),
        ("llama3-8b", "h100-80g", {"global_batch_size": 8, "seq_lenght": 8}, ("workload.seq_lenght", "seq_length")),
        ({"text": {}}, "h100-80g", {"global_batch_size": 8, "seq_length": 8}, ("model.text",)),
    ],
)
def test_a_wrong_job_is_one_paragraph(model: Any, cluster: Any, workload: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(mmap.JobError) as caught:
        mmap.Job(model, cluster, workload)
    told = str(caught.value).replace("'", '"')
    assert "\n" not in told
    for word in words:
        assert re.search(word, told), told


def test_a_plan_and_its_edit(job: mmap.Job, best: mmap.PlanResult, tmp_path: Path) -> None:
    assert best.lower_bound_ms <= best.step_ms * (1 + 1e-9)
    assert sum(best.plan.layers["text"]) == 8
    every = best.plan.edited(recompute={"text": best.plan.layers["text"]})
    slower = mmap.simulate(job, every)
    assert slower.step_ms > best.step_ms
    assert slower.fits
    best.write(tmp_path / "plan.json")
    assert mmap.read_plan(tmp_path / "plan.json", job) == best.plan
    assert mmap.simulate(job, best.plan).step_ms == best.step_ms


def test_progress_is_told(job: mmap.Job) -> None:
    told: list[mmap.Progress] = []
    result = mmap.plan(job, on_progress=told.append)
    assert told
    assert told[-1].num_candidates == len(result.search.candidates)
    assert math.isfinite(told[-1].best_ms)


def floats_without_unit(value: Any, trail: tuple[str, ...] = ()) -> list[str]:
    """Trails of floats whose own key, and no key above, says a unit."""
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in floats_without_unit(item, (*trail, str(key)))]
    if isinstance(value, list):
        return [found for item in value for found in floats_without_unit(item, trail)]
    united = any(UNITS.search(part) or part in WITHOUT for part in trail)
    return [".".join(trail)] if isinstance(value, float) and not united and "provenance" not in trail else []


def test_a_limit_of_nothing_is_a_limit(job: mmap.Job) -> None:
    with pytest.raises(mmap.Unfinished, match="came to its time limit"):
        mmap.plan(job, time_limit_s=0)


def test_the_help_says_the_search_s_own_limit() -> None:
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    (option,) = (action for action in parser._actions if action.dest == "time_limit")
    assert option.default is None
    assert str(option.help).endswith(f"(default: {inspect.signature(search).parameters['time_limit_s'].default:g})")


def test_results_are_json_with_units(job: mmap.Job, best: mmap.PlanResult, tmp_path: Path) -> None:
    simulation = mmap.simulate(job, best.plan)
    explanation = mmap.explain(job, best.plan, why_not={"PP": 4, "MBS": 2}, time_limit_s=2)
    placed = mmap.place(simulation.estimate.problem)
    placed.write_certificate(tmp_path / "certificate.json")
    verified = mmap.verify(tmp_path / "certificate.json")
    assert verified.step_ms == pytest.approx(placed.step_ms)
    for result in (best, simulation, explanation, placed, verified):
        document = result.to_dict()
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert not floats_without_unit(document)
        assert "\x1b" not in result.table()
        html = result._repr_html_()
        assert "<script" not in html
        assert "small <b>" not in html
    assert best.to_dict()["step_ms"] == best.step_ms
    assert "why not" in explanation.table()
    assert "<svg" in best._repr_html_()


def test_what_cannot_be_placed_is_a_result(best: mmap.PlanResult, tmp_path: Path) -> None:
    problem = best.best[0].estimate.problem
    tight = dataclasses.replace(problem, memory_limit_bytes=(1.0,) * problem.num_stages)
    placed = mmap.place(tight)
    assert placed.status == "infeasible"
    assert placed.placement is None
    assert placed.reason in placed.table()
    assert placed.to_dict()["step_ms"] is None
    with pytest.raises(mmap.PlanError, match="no placement"):
        placed.write_certificate(tmp_path / "certificate.json")


@pytest.mark.parametrize(
    ("layers", "recompute", "words"),
    [
        ({"text": [2, 2, 2]}, {}, "PP is 4"),
        ({"text": [2, 2, 2, 3]}, {}, "sums to 9; the model has 8"),
        ({"text": [8, 0, 0, 0]}, {}, "no layer"),
        ({"vision": [1, 1, 1, 1]}, {}, "'vision'; the parts of the model are text"),
        ({}, {"text": [0, 0, 0, 9]}, "recomputes 9 layers"),
        ({}, {"text": "2222"}, "a list of 4 whole numbers"),
    ],
)
def test_a_wrong_edit_is_told(best: mmap.PlanResult, layers: Any, recompute: Any, words: str) -> None:
    with pytest.raises(mmap.PlanError, match=words):
        best.plan.edited(layers=layers, recompute=recompute)


def test_arrays_and_tuples_are_lists_too(best: mmap.PlanResult) -> None:
    import numpy as np

    assert best.plan.edited(layers={"text": np.array([3, 2, 2, 1])}).layers["text"] == (3, 2, 2, 1)
    assert best.plan.edited(layers={"text": (3, 2, 2, 1)}, recompute={"text": [1, 1, 1]}).recompute["text"][-1] == 0
