"""Layers of one stage in several layouts: by hand, against brute force, refused by name, and through a plan's file."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare import compare
from generate import LAYOUTS, problem

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.layer_layout import LayerLayout, parse_layout
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.certify.certificate import read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.laid_out import relaxed
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.methods import METHODS
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.run import TREE
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_document, problem_from_entry
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.evaluate import evaluate, plan_from_placement
from mm_autoparallel.planner.plan import read_plan, write_result
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.validation import parse_record

WIDE = {
    "name": "wide",
    "forward_ms": 3.0,
    "backward_ms": 5.0,
    "static_bytes": 4.0,
    "activation_bytes": 2.0,
    "transient_bytes": 3.0,
    "tail_ms": 0.5,
}
DOCUMENT: dict[str, Any] = {
    "num_stages": 2,
    "num_microbatches": 4,
    "schedule": "1f1b",
    "memory_limit_bytes": 1000.0,
    "chain": [
        {
            "name": "layer",
            "modality": "text",
            "count": 4,
            "forward_ms": 2.0,
            "backward_ms": 4.0,
            "static_bytes": 10.0,
            "activation_bytes": 5.0,
            "transient_bytes": 1.0,
            "tail_ms": 1.0,
            "modes": [
                {"name": "wide+again", "extra_backward_ms": 3.0, "activation_bytes": 1.0, "layout": WIDE},
                {"name": "wide", "activation_bytes": 2.0, "layout": WIDE},
                {"name": "recompute", "extra_backward_ms": 2.0, "activation_bytes": 1.0},
            ],
            "reshards": [
                {"source": "", "target": "wide", "forward_ms": 0.25, "backward_ms": 0.125},
                {"source": "wide", "target": "", "forward_ms": 0.5, "backward_ms": 0.0625},
            ],
        }
    ],
}
MODEL = {
    "name": "m",
    "text": {
        "vocab_size": 32000,
        "layers": {"num_layers": 8, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16, "norm": "rms"},
    },
}


def read(document: dict[str, Any]) -> Problem:
    return problem_from_entry(parse_record(ProblemEntry, document, "problem", Path("PROBLEM.json")))


def job_of(memory_bytes_fraction: float = 1.0, **search: Any) -> Any:
    return parse_job(
        {
            "model": MODEL,
            "cluster": {
                "num_nodes": 1,
                "devices_per_node": 4,
                "device": "a100-80g",
                "memory_fraction": memory_bytes_fraction,
            },
            "workload": {
                "global_batch_size": 8,
                "seq_length": 1024,
                "stack": "galvatron",
                "implementation": "transformers",
            },
            "search": {"pp": [1, 2], "cp": [1], "zero": [2, 3], "mbs": [1, 2], "layer_strategies": True} | search,
        },
        Path("job.yaml"),
    )


def test_loads_by_hand() -> None:
    """Stage 0: a layer in wide again, one in none; stage 1: a recomputed layer, one in none."""
    pipeline = read(DOCUMENT)
    timeline = simulate(pipeline, Placement(((2,), (2,)), (((1, 0, 0),), ((0, 0, 1),))))
    assert timeline.loads.forward_ms.ravel().tolist() == [3 + 2 + 0.25 + 0.5, 4.0]
    assert timeline.loads.backward_ms.ravel().tolist() == [5 + 3 + 4 + 0.125 + 0.0625, 4 + 4 + 2]
    assert timeline.loads.tail_ms.tolist() == [1.5, 2.0]
    # two micro-batches in flight on stage 0: 4 + 10 static, 2 · (1 + 5) kept, 3 passing
    assert timeline.peak_memory_bytes.tolist() == [14 + 12 + 3, 20 + 6 + 1]
    assert read(problem_document(pipeline)) == pipeline


@pytest.mark.parametrize("batch", [0, *(pytest.param(b, marks=pytest.mark.nightly) for b in range(1, 10))])
def test_place_and_verify_equal_brute_force(batch: int) -> None:
    wrong = {}
    for seed in range(batch * 50, (batch + 1) * 50):
        verdict = compare(f"{LAYOUTS}-{seed}", problem(f"{LAYOUTS}-{seed}"))
        with suppress(JobError):  # where the problem contradicts itself
            rough, sharp = (bound_step(read(verdict.problem), sharpen) for sharpen in (False, True))
            if not rough.step_ms <= sharp.step_ms * (1 + 1e-9) <= verdict.optimum_ms * (1 + 2e-9):
                verdict.wrong["bound"] = f"{rough.step_ms} ms {rough.reason}, {sharp.step_ms} ms {sharp.reason}"
        if verdict.wrong:
            wrong[seed] = verdict.wrong
    assert not wrong


@pytest.mark.parametrize("batch", [0, *(pytest.param(b, marks=pytest.mark.nightly) for b in range(1, 10))])
def test_mixtures_alone_equal_brute_force_and_are_confirmed(batch: int, tmp_path: Path) -> None:
    methods, num_confirmed = [method for method in METHODS if method.name != TREE], 0
    for seed in range(batch * 20, (batch + 1) * 20):
        with suppress(JobError):  # where the problem contradicts itself
            pipeline, path = read(problem(f"{LAYOUTS}-{seed}")), tmp_path / f"{seed}.json"
            by_all, by_mixtures = place(pipeline), place(pipeline, methods=methods)
            assert (by_mixtures.status, by_mixtures.step_ms) == (by_all.status, pytest.approx(by_all.step_ms)), seed
            if by_mixtures.proof == "mixtures":
                write_certificate(path, pipeline, by_mixtures)
                assert verify(read_certificate(path)).method == "mixtures"
                num_confirmed += 1
    assert num_confirmed > 3


def test_more_memory_never_slows_the_best_step_and_bounds_stay_below() -> None:
    steps = []
    for limit in (30.0, 36.0, 42.0, 60.0, 200.0):
        pipeline = read(DOCUMENT | {"memory_limit_bytes": limit})
        result = place(pipeline)
        steps.append(result.step_ms)
        assert work_bound_ms(pipeline) <= bound_step(pipeline).step_ms <= bound_step(pipeline, sharpen=True).step_ms
        assert bound_step(pipeline, sharpen=True).step_ms <= result.step_ms * (1 + 1e-12)
        assert place(relaxed(pipeline)).step_ms <= result.step_ms * (1 + 1e-12)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_a_certificate_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    pipeline, path = read(DOCUMENT | {"memory_limit_bytes": 36.0}), tmp_path / "certificate.json"
    write_certificate(path, pipeline, place(pipeline))
    assert verify(read_certificate(path)).method == "tree"
    worst = Placement(((2,), (2,)), (((2, 0, 0),), ((2, 0, 0),)))
    step_ms = simulate(pipeline, worst).step_ms
    claimed = replace(
        read_certificate(path), placement=worst, step_ms=step_ms, lower_bound_ms=step_ms, gap_fraction=0.0
    )
    with pytest.raises(PlanError, match="another placement takes"):
        verify(claimed)


def broken(change: str) -> dict[str, Any]:
    document = json.loads(json.dumps(DOCUMENT))
    block = document["chain"][0]
    if change == "chunks":
        document |= {"num_chunks": 2, "schedule": "interleaved_1f1b"}
    elif change == "scale":
        block["microbatch_scale"] = [1.0, 2.0, 1.0, 1.0]
    elif change == "host":
        block["modes"][0]["host_bytes"] = 5.0
        document["host_ms_per_byte"] = 0.1
    elif change == "order":
        block["modes"].reverse()
    elif change == "figures":
        block["modes"][1]["layout"]["tail_ms"] = 9.0
    else:
        del block["reshards"][0]
    return document


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("chunks", "one chunk a stage"),
        ("scale", "equal ones"),
        ("host", "moves bytes to the host"),
        ("order", "come before"),
        ("figures", "tell the same figures"),
        ("reshard", 'from its own layout to layout "wide"'),
    ],
)
def test_contradictions_are_refused(change: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        read(broken(change))


def test_a_plan_by_layer_comes_back_and_one_layout_alone_costs_what_it_cost(tmp_path: Path) -> None:
    job = job_of(0.06)
    result = search(job, time_limit_s=60.0, num_workers=1)
    mixed = [c for c in result.candidates if c.strategy.layouts]
    assert mixed
    assert all(c.status in ("solved", "dominated", "infeasible") for c in mixed)
    strategy = next(c.strategy for c in mixed if c.strategy.pp == 2 and c.strategy.tp == 1)
    pipeline = build_problem(job, strategy)
    own = build_problem(job, strategy.in_layout(strategy.layout))
    assert [block.forward_ms for block in pipeline.chain] == [block.forward_ms for block in own.chain]
    held = tuple(tuple(4 if block.layer else int(k == (i > 1)) for i, block in enumerate(own.chain)) for k in range(2))
    name = next(mode.layout for mode in pipeline.chain[1].modes if mode.layout)
    assert name is not None
    index = [mode.name for mode in pipeline.chain[1].modes].index(name.name)
    counts = tuple(int(m == index) * 2 for m in range(len(pipeline.chain[1].modes)))
    none = (0,) * len(counts)
    placement = Placement(held, (((), counts, ()), ((), none, ())))
    plan = plan_from_placement(pipeline, placement, strategy, 8)
    estimate = evaluate(job, plan)
    assert estimate.step_ms == simulate(pipeline, placement).step_ms
    assert sum(stage.total_bytes for stage in estimate.memory) == pytest.approx(sum(estimate.peak_memory_bytes))
    path = tmp_path / "plan.json"
    write_result(path, plan, estimate.figures(0.0))
    assert read_plan(path, job) == plan
    document = json.loads(path.read_text())
    assert document["parallel_config"]["LAYOUTS"] == [layout.name for layout in strategy.layouts]
    document["parallel_config"]["LAYOUTS"] = ["tp9"]
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="tp4_dp2_zero1"):
        read_plan(path, job)


def test_what_no_stack_runs_is_refused() -> None:
    job = job_of()
    strategy = next(c for c in _space(job) if c.layouts and c.pp == 2 and c.tp == 1)
    for other, said in (
        (replace(strategy, layouts=(strategy.layout,)), "the strategy's own"),
        (replace(strategy, layouts=(LayerLayout(4, 1),)), "a stage has 2"),
        (replace(strategy, mbs=1, layouts=(LayerLayout(1, 2), LayerLayout(2, 1, zero=1))), None),
    ):
        reason = unlawful_reason(job.model, job.cluster, job.workload, other)
        assert (reason is None) if said is None else (reason is not None and said in reason), (said, reason)
    for more, told in (
        ({}, r"workload\.stack is megatron-te$"),
        ({"stack": "mindspeed-mm"}, r"stack is mindspeed-mm; MindSpeed-MM gives an encoder .* search\.layouts \[chain"),
    ):
        with pytest.raises(JobError, match=told):
            parse_job(
                {
                    "model": MODEL,
                    "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"},
                    "workload": {"global_batch_size": 8, "seq_length": 1024, **more},
                    "search": {"layer_strategies": True},
                },
                Path("job.yaml"),
            )
    with pytest.raises(JobError, match="move bytes to the host"):
        job_of(modes=["recompute", "offload"])


def _space(job: Any) -> list[Any]:
    return [entry.strategy for entry in list_space(job) if entry.reason is None]


def test_names_of_layouts() -> None:
    for layout in (LayerLayout(4, 2), LayerLayout(1, 8, 2, 3, False)):
        assert parse_layout(layout.name) == layout
    for name in ("", "tp4", "tp04_dp2_zero1", "tp4_dp2_zero4", "tp4_cp1_dp2_zero1", "tp0_dp2_zero1"):
        assert parse_layout(name) is None
