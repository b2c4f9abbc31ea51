"""MindSpeed-MM's laws of placement: a search finds the best of the plans that they allow, and why-not names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layers import Experts, Layers, Window
from mm_autoparallel.model.job.mindspeed_mm_law import placement_reasons
from mm_autoparallel.model.job.model import Encoder, MelFrames, Model, Projector
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.planner import examine, search
from mm_autoparallel.planner.search.space import list_entries

MakeJob = Callable[..., Job]
STACK = {"stack": "mindspeed-mm"}

pytestmark = pytest.mark.usefixtures("no_clock")


def with_layers(model: Model, vision: dict[str, Any], text: dict[str, Any] | None = None) -> Model:
    """`model` with other fields of its layers."""
    (encoder,) = model.encoders
    encoder = encoder.model_copy(update={"layers": encoder.layers.model_copy(update=vision)})
    decoder = model.text.model_copy(update={"layers": model.text.layers.model_copy(update=text or {})})
    return model.model_copy(update={"encoders": (encoder,), "text": decoder})


def with_audio(model: Model) -> Model:
    """`model` with two layers of audio before its text."""
    audio = Encoder(
        name="audio",
        stem=MelFrames(num_mel_bins=128),
        layers=Layers(num_layers=2, hidden_size=1024, ffn_size=4096, num_heads=16, norm="layer", gated=False),
        projector=Projector(merge_tokens=2, layer_sizes=(1024, 2048)),
    )
    return model.model_copy(update={"encoders": (*model.encoders, audio)})


def placements(model: Model, strategy: Strategy) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every way to cut the layers, in the order data flows, into a piece for each virtual stage."""
    names = [m.name for m in model.modalities for _ in range(m.layers.num_layers)]
    for cuts in combinations(range(1, len(names)), strategy.pp * strategy.vpp - 1):
        ends = (0, *cuts, len(names))
        pieces = [names[a:b] for a, b in pairwise(ends)]
        yield {m.name: tuple(piece.count(m.name) for piece in pieces) for m in model.modalities}


def best_lawful_ms(job: Job, strategy: Strategy) -> tuple[float, int]:
    """The least step of all placements that the laws allow, played without marks on the chain; how many it forbids."""
    plain = replace(job, workload=job.workload.model_copy(update={"stack": "mindspeed"}))
    steps_ms, num_forbidden = [], 0
    for layers in placements(job.model, strategy):
        none = {name: (0,) * len(counts) for name, counts in layers.items()}
        if any(placement_reasons(job.model, job.workload, strategy, layers)):
            num_forbidden += 1
        else:
            plan = Plan(strategy, layers, none, job.workload.global_batch_size)
            steps_ms.append(evaluate(plain, plan).step_ms)
    return min(steps_ms), num_forbidden


def found(job: Job, strategy: Strategy) -> Estimate:
    entries = tuple(entry for entry in list_entries(job) if entry.strategy == strategy)
    assert [entry.reason for entry in entries] == [None]
    estimate, _ = examine(job, entries, 60.0)
    assert estimate
    return estimate


PACKED = {"packed": True, "num_layers": 4, "num_heads": 16}
WINDOWS = PACKED | {"window": Window(num_tokens=64, full_layers=(3,))}
UNEVEN = Experts(num_experts=2, top_k=1, ffn_size=1024, dense_layers=(0,))


@pytest.mark.parametrize(
    ("vision", "text", "sizes", "forbids"),
    [
        (PACKED, {}, {"pp": 2, "tp": 2, "dp": 1}, True),
        (PACKED, {}, {"pp": 2, "tp": 2, "dp": 1, "sequence_parallel": False}, False),
        (PACKED, {}, {"pp": 4, "tp": 1, "dp": 1}, False),
        ({"num_layers": 4}, {}, {"pp": 2, "tp": 2, "dp": 1}, False),
        ({"num_layers": 4}, {}, {"pp": 2, "tp": 1, "dp": 1, "cp": 2}, True),
        (WINDOWS, {}, {"pp": 2, "tp": 1, "dp": 2, "vpp": 2}, True),
        (WINDOWS, {}, {"pp": 2, "tp": 1, "dp": 2}, False),
        (PACKED, {"experts": UNEVEN}, {"pp": 4, "tp": 1, "dp": 1}, True),
        (PACKED, {"experts": UNEVEN}, {"pp": 2, "tp": 1, "dp": 2, "vpp": 2}, True),
    ],
)
def test_the_best_plan_is_the_best_lawful_one(
    make_job: MakeJob, vision: dict[str, Any], text: dict[str, Any], sizes: dict[str, Any], forbids: bool
) -> None:
    """The tower is heavy, so that the best placement would spread it if it may."""
    strategy = Strategy(mbs=1, **sizes)
    limits = {"cp": [1, 2], "mbs": [1], "max_vpp": 2, "modes": (), "sequence_parallel": (True, False)}
    workload = STACK | {"image_tokens_per_sample": 3072}
    job = make_job(memory_bytes=60e9, workload=workload, freeze_vision=False, **limits)
    job = replace(job, model=with_layers(job.model, vision, text))
    best_ms, num_forbidden = best_lawful_ms(job, strategy)
    assert bool(num_forbidden) is forbids
    estimate = found(job, strategy)
    assert estimate.step_ms == pytest.approx(best_ms, rel=1e-6)
    assert not [*placement_reasons(job.model, job.workload, strategy, estimate.plan.layers)]
    anywhere = replace(job, workload=job.workload.model_copy(update={"stack": "mindspeed"}))
    if forbids and not text:
        assert found(anywhere, strategy).step_ms < best_ms


def test_audio_lies_where_text_begins(make_job: MakeJob) -> None:
    workload = STACK | {"audio_tokens_per_sample": 512}
    job = make_job(memory_bytes=60e9, workload=workload, num_layers=3, cp=[1], mbs=[1], modes=())
    job = replace(job, model=with_audio(job.model))
    strategy = Strategy(pp=4, tp=1, dp=1, mbs=1)
    best_ms, num_forbidden = best_lawful_ms(job, strategy)
    assert num_forbidden
    estimate = found(job, strategy)
    assert estimate.step_ms == pytest.approx(best_ms, rel=1e-6)
    begins = next(k for k, count in enumerate(estimate.plan.layers["text"]) if count)
    assert estimate.plan.layers["audio"][begins] == 2


def test_without_sequence_parallel_where_that_is_better(make_job: MakeJob) -> None:
    """A tower of two thirds of the step on two stages: to spread it is worth more than what sequence parallel saves."""
    workload = STACK | {"image_tokens_per_sample": 3072}
    limits: dict[str, Any] = {"pp": [2], "tp": [2], "cp": [1], "mbs": [1]}

    def plan(memory_bytes: float, **more: Any) -> Estimate:
        job = make_job(memory_bytes=memory_bytes, workload=workload, freeze_vision=False, **(limits | more))
        job = replace(job, model=with_layers(job.model, PACKED | {"num_layers": 12}))
        return search(job, num_workers=1).estimates[0]

    divided, either = plan(60e9), plan(60e9, sequence_parallel=(True, False))
    assert divided.plan.layers["vision"] == (12, 0)
    assert either.plan.strategy == replace(divided.plan.strategy, sequence_parallel=False)
    assert min(either.plan.layers["vision"]) > 0
    assert either.step_ms < divided.step_ms
    # what it costs: whole norms, residuals and boundaries on every rank
    kept = evaluate(
        make_job(memory_bytes=60e9, workload=workload), Plan(Strategy(2, 2, 1, 1), *_even(), global_batch_size=16)
    )
    whole = evaluate(
        make_job(memory_bytes=60e9, workload=workload),
        Plan(Strategy(2, 2, 1, 1, sequence_parallel=False), *_even(), global_batch_size=16),
    )
    said = evaluate(
        make_job(memory_bytes=60e9, workload=workload | {"sequence_parallel": False}),
        Plan(Strategy(2, 2, 1, 1), *_even(), global_batch_size=16),
    )
    assert max(whole.peak_memory_bytes) > max(kept.peak_memory_bytes)
    assert whole.peak_memory_bytes == said.peak_memory_bytes
    assert whole.step_ms == said.step_ms


def _even() -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    return {"vision": (2, 0), "text": (1, 3)}, {"vision": (0, 0), "text": (0, 0)}


def test_why_not_names_the_law(make_job: MakeJob) -> None:
    job = make_job(memory_bytes=60e9, workload=STACK, cp=[1], mbs=[1], max_vpp=2)
    job = replace(job, model=with_layers(job.model, PACKED))
    estimate = search(job, num_workers=1).estimates[0]
    told = explain_why_not(job, estimate, parse_wish("PP=2,TP=2,VPP=1"), 20.0)
    assert told.reason.startswith("its best placement takes")
    law = "vision lies whole on one virtual stage, because in MindSpeed-MM with TP 2 with sequence parallel"
    assert law in told.reason
    assert "whole" not in explain_why_not(job, estimate, parse_wish("PP=2,TP=1,VPP=1"), 20.0).reason
    tight = replace(job, cluster=make_job(memory_bytes=3e9).cluster)
    told = explain_why_not(tight, estimate, parse_wish("PP=2,TP=2,VPP=1"), 20.0)
    assert told.status == "infeasible"
    assert "whole on one virtual stage" in told.reason


def test_a_plan_by_hand_is_told_the_law(make_job: MakeJob) -> None:
    job = make_job(memory_bytes=60e9, workload=STACK, cp=[1], mbs=[1])
    job = replace(job, model=with_layers(job.model, PACKED))
    plan = Plan(Strategy(2, 2, 1, 1), {"vision": (3, 1), "text": (0, 4)}, {"vision": (0, 0), "text": (0, 0)}, 16)
    with pytest.raises(PlanError, match="places vision layers on stage 0, stage 1, and MindSpeed-MM cannot run that"):
        evaluate(job, plan)
    odd = replace(job, workload=job.workload.model_copy(update={"global_batch_size": 14}))
    with pytest.raises(PlanError, match="7 micro-batches are no multiple of PP 2"):
        evaluate(odd, replace(plan, strategy=Strategy(2, 1, 2, 1, vpp=2), global_batch_size=14))
