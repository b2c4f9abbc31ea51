"""Plans ranked by how far apart their steps are, and bounds of that: against a plain loop over many steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from many_steps import apart_ms

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.placement.bounds.apart import apart_bound_ms
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.plan import plan_document
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.planner.search.watched import describe_end

SPLIT = ("zb_h1", "zb_h2", "zbv", "v_half", "v_min", "interleaved_zb")


def draw(seed: int) -> Problem:
    """Two or three stages, a few layers of two kinds and a head, tails, and devices of unequal speed now and then."""
    rng = random.Random(seed)
    name = rng.choice(SPLIT)
    num_stages, num_chunks = rng.choice((2, 3)), 1 if name.startswith("zb_h") else 2

    def block(kind: str, count: int, **more: Any) -> ChainBlock:
        backward_ms = float(rng.randint(2, 8))
        return ChainBlock(
            name=kind,
            modality="text",
            count=count,
            forward_ms=float(rng.randint(1, 5)),
            backward_ms=backward_ms,
            backward_weight_ms=float(rng.randint(0, int(backward_ms))),
            split_extra_ms=rng.choice((0.0, 0.0, 0.5)),
            tail_ms=rng.choice((0.0, 1.0, 4.0)),
            **more,
        )

    most = num_stages * num_chunks + 2
    first = rng.randint(1, most - 2)
    chain = (block("a", first), block("b", most - first), block("head", 1, layer=False, pinned="last"))
    hops = num_stages * num_chunks - 1
    return Problem(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=rng.choice((4, 6)),
        schedule=name,
        chain=chain,
        memory_limit_bytes=(1e12,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=tuple(rng.choice((0.0, 2.0)) for _ in range(num_stages)),
        p2p_ms=tuple(rng.choice((0.0, 0.5)) for _ in range(hops)),
        p2p_ms_per_byte=(0.0,) * hops,
        stage_time_factor=() if rng.random() < 0.6 else tuple(rng.choice((1.0, 1.5)) for _ in range(num_stages)),
    )


def placements(problem: Problem) -> list[Placement]:
    """Every one: where each virtual stage begins in the flat chain, none without a layer."""
    flat = [e for e, block in enumerate(problem.chain) for _ in range(block.count)]
    num_virtual, found = problem.num_virtual_stages, []
    for cuts in itertools.combinations(range(1, len(flat) - 1), num_virtual - 1):
        bounds = [0, *cuts, len(flat)]
        rows = tuple(
            tuple(flat[begin:end].count(e) for e in range(len(problem.chain)))
            for begin, end in itertools.pairwise(bounds)
        )
        found.append(Placement(rows, tuple(tuple(() for _ in problem.chain) for _ in rows)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_is_below_its_bound_and_none_above_what_is_told(seed: int) -> None:
    problem = draw(seed)
    told = []
    bound_ms = apart_bound_ms(problem)
    for placement in placements(problem):
        timeline = simulate(problem, placement)
        told.append(timeline.post_validated_ms)
        assert timeline.post_validated_ms <= timeline.step_ms + 1e-9
        if len(told) % 3 == 1:
            true_ms = apart_ms(problem, placement)
            busiest_ms = float((timeline.busy_ms + timeline.loads.tail_ms).max())
            assert bound_ms <= busiest_ms * (1 + 1e-12)
            assert busiest_ms - 1e-6 <= true_ms <= timeline.post_validated_ms + 1e-6
    assert told
    assert bound_ms <= min(told)


@pytest.mark.parametrize("is_v", [False, True])
def test_the_busiest_stage_of_the_best_cut_is_met(is_v: bool) -> None:
    """Where no stage would rather hold nothing and parting costs nothing, by one chunk a stage and by two of a V."""
    num_met = num_above_work = 0
    for seed in range(200):
        problem = draw(seed)
        if problem.v_shaped != is_v or problem.num_chunks != 1 + is_v:
            continue
        least_ms = min(
            float((one.busy_ms + one.loads.tail_ms).max())
            for one in (simulate(problem, each) for each in placements(problem))
        )
        bound_ms = apart_bound_ms(problem)
        assert bound_ms <= least_ms
        if not any(block.split_extra_ms for block in problem.chain):
            num_met += bound_ms >= least_ms * (1 - 2e-5)
            num_above_work += bound_ms > work_bound_ms(problem) * (1 + 2e-5)
    assert num_met > 10
    assert num_above_work > 10


def test_bounds_of_single_steps_are_none_of_it() -> None:
    """Which is why they are not used: one of these lies above what steps are apart."""
    problem = replace(draw(3), schedule="free", num_chunks=1, p2p_ms=(0.0,), p2p_ms_per_byte=(0.0,), num_stages=2)
    problem = replace(
        problem, memory_limit_bytes=(1e12,) * 2, stage_static_bytes=(0.0,) * 2, stage_tail_ms=(0.0,) * 2,
        stage_time_factor=(),
    )  # fmt: skip
    named = replace(problem, schedule="zb_h2", num_microbatches=8)
    least_ms = min(simulate(named, each).post_validated_ms for each in placements(named))
    assert apart_bound_ms(named) <= least_ms < bound_step(replace(named, schedule="1f1b")).step_ms


LAYERS = {"num_layers": 16, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16, "norm": "rms"}


def job_of(limits: dict[str, Any] | None = None, **said: Any) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "h100-80g"},
        "workload": {"global_batch_size": 16, "seq_length": 2048, **said},
        "search": {
            "pp": [4, 8],
            "tp": [1],
            "cp": [1],
            "mbs": [1],
            "max_vpp": 2,
            "schedule": ["zb_h1", "zb_h2", "zbv", "v_half"],
            "step_end": "post_validation",
        }
        | (limits or {}),
    }
    return parse_job(document, Path("job.json"))


def test_a_search_ranks_by_it_and_tells_a_bound() -> None:
    found = search(job_of(), num_workers=1, top_k=3)
    ranking, answer = found.step_end, found.estimates[0]
    assert ranking is not None
    assert ranking.apart_ms == answer.timeline.post_validated_ms < answer.step_ms
    assert [one.timeline.post_validated_ms for one in found.estimates] == sorted(
        one.timeline.post_validated_ms for one in found.estimates
    )
    assert ranking.rank_bound_ms <= ranking.rank_ms
    by_step = search(job_of({"step_end": "barrier"}), num_workers=1).estimates[0]
    assert by_step.step_ms <= answer.step_ms * (1 + 1e-9)
    assert by_step.timeline.post_validated_ms >= answer.timeline.post_validated_ms
    text = describe_end(found)
    assert f"this one's are {ranking.apart_ms:.2f} ms apart" in text
    assert "by its step alone" in text
    said = plan_document(found.plan, found.figures)["objective"]["post_validation"]
    assert said["post_validated_ms"] == ranking.apart_ms
    assert said["rank_lower_bound_ms"] == ranking.rank_bound_ms
    assert found.lower_bound_ms <= answer.step_ms


@pytest.mark.slow
def test_its_bound_is_below_every_strategy_by_itself() -> None:
    job = job_of()
    bound = search(job, num_workers=1).step_end
    assert bound is not None
    for entry in list_space(job):
        strategy = entry.strategy
        if entry.reason is None:
            own = {"pp": [strategy.pp], "schedule": [strategy.schedule], "dp": [strategy.dp]}
            alone = search(job_of(own), num_workers=1).step_end
            assert alone is not None
            assert bound.rank_bound_ms <= alone.rank_bound_ms * (1 + 1e-12)
            assert bound.rank_ms <= alone.rank_ms * (1 + 1e-12)


def test_whole_backwards_wait_and_are_unlawful() -> None:
    job = job_of({"schedule": ["1f1b", "zb_h1"], "pp": [1, 4], "max_vpp": 1})
    reasons = {entry.strategy.schedule: entry.reason for entry in list_space(job) if entry.strategy.pp > 1}
    assert reasons["zb_h1"] is None
    assert "schedule 1f1b parts no backward, and search.step_end is post_validation" in (reasons["1f1b"] or "")
    assert {entry.strategy for entry in list_space(job) if entry.strategy.pp == 1 and entry.reason is None} == {
        Strategy(1, 1, 8, 1)
    }


@pytest.mark.parametrize(
    ("limits", "said", "told"),
    [
        ({}, {"stack": "transformers"}, "zero bubble's own code runs it, and workload.stack is transformers"),
        ({"schedule": None}, {}, "search.schedule names none"),
        ({"layouts": "all"}, {}, "encoders in the chain"),
        ({"step_end": "none"}, {}, "step_end"),
    ],
)
def test_what_cannot_be_ranked_so_is_refused(limits: dict[str, Any], said: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        job_of(limits, **said)
