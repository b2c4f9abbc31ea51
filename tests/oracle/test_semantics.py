"""The oracle itself: against closed forms, grids and sums worked out by hand, and against itself by another way."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from brute_force import brute_force, count_placements, cuts, held_between, mode_counts
from generate import MOODS, problem
from semantics import Document, evaluate, in_flight, stage_order, unlawful


def uniform(schedule: str, stages: int, chunks: int, count: int, **more: object) -> Document:
    block = {"name": "b", "modality": "t", "count": stages * chunks, "forward_ms": 1.0, "backward_ms": 2.0}
    shape = {"num_stages": stages, "num_chunks": chunks, "num_microbatches": count, "schedule": schedule}
    return shape | {"memory_limit_bytes": 1e9, "chain": [block | {"activation_bytes": 1.0}]} | more


def evenly(problem: Document) -> Document:
    total = problem["num_stages"] * problem["num_chunks"]
    return {"layers": [[1]] * total, "modes": [[[]]] * total}


def text(problem: Document, stage: int) -> str:
    stages = problem["num_stages"]
    return " ".join(f"{of.index}{'FB'[of.backward]}{of.k // stages}" for of in stage_order(problem, stage))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 5), (4, 3), (4, 8)])
def test_uniform_pipelines_have_their_closed_form(schedule: str, stages: int, count: int) -> None:
    pipeline = uniform(schedule, stages, 1, count)
    cost = evaluate(pipeline, evenly(pipeline))
    assert cost.step_ms == (count + stages - 1) * 3.0
    held = [count if schedule == "gpipe" else min(count, stages - s) for s in range(stages)]
    assert cost.peak_bytes == held


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 2, 2), (2, 3, 3), (4, 2, 2), (3, 3, 1)])
def test_interleaving_divides_the_bubble_by_its_chunks(stages: int, chunks: int, groups: int) -> None:
    pipeline = uniform("interleaved_1f1b", stages, chunks, stages * groups)
    assert evaluate(pipeline, evenly(pipeline)).step_ms == (stages * groups * chunks + stages - 1) * 3.0


def test_orders_are_those_of_megatron() -> None:
    pipeline = uniform("interleaved_1f1b", 2, 2, 4)
    assert text(pipeline, 0) == "0F0 1F0 0F1 1F1 2F0 0B1 3F0 1B1 2F1 0B0 3F1 1B0 2B1 3B1 2B0 3B0"
    assert text(pipeline, 1) == "0F0 1F0 0F1 0B1 1F1 1B1 2F0 0B0 3F0 1B0 2F1 2B1 3F1 3B1 2B0 3B0"
    low = uniform("interleaved_1f1b_low_memory", 2, 2, 4)
    assert text(low, 0).startswith("0F0 1F0 0F1 1F1 0B1 2F0")
    rest = uniform("interleaved_1f1b", 2, 2, 5)  # the first group takes the micro-batch that is left over
    assert text(rest, 1).startswith("0F0 1F0 2F0 0F1 0B1 1F1 1B1 2F1 2B1 3F0")
    few = uniform("interleaved_1f1b", 4, 2, 2)
    assert text(few, 3) == "0F0 1F0 0F1 0B1 1F1 1B1 0B0 1B0"
    assert in_flight(few, 0).max(axis=0).tolist() == [2, 2]


def test_every_figure_by_hand() -> None:
    """Two stages, two micro-batches of lengths 1 and 2, a mode that offloads, hops, tails, a slow stage."""
    pipeline = uniform("1f1b", 2, 1, 2) | {
        "p2p_ms": 0.5,
        "p2p_ms_per_byte": 0.25,
        "stage_static_bytes": [100, 200],
        "stage_tail_ms": [0.0, 7.0],
        "stage_time_factor": [1.0, 2.0],
        "host_ms_per_byte": 1.0,
        "host_limit_bytes": 50.0,
    }
    mode = {"name": "offload", "extra_forward_ms": 0.5, "activation_bytes": 1.0, "restored_bytes": 4.0, "host_bytes": 5}
    pipeline["chain"] = [
        {
            "name": "b",
            "modality": "t",
            "count": 2,
            "forward_ms": 1.0,
            "backward_ms": 2.0,
            "activation_bytes": 10.0,
            "static_bytes": 20.0,
            "transient_bytes": 3.0,
            "tail_ms": 0.125,
            "output_bytes": 2.0,
            "sends_gradient": False,
            "microbatch_scale": [1.0, 2.0],
            "host_static_bytes": 6.0,
            "modes": [mode],
        }
    ]
    cost = evaluate(pipeline, {"layers": [[1], [1]], "modes": [[[1]], [[0]]]})
    # Stage 0 moves 5 and 10 bytes beside 1.5 and 3 ms of compute, each way: F0 to 5, F1 to 15. Stage 1: F0 from 6 to 8,
    # B0 to 12, F1 from 16 to 20, B1 to 28, tails to 35.125. Back over the cut at no cost: B0 15 to 20, B1 28 to 38.
    assert cost.step_ms == 38.125
    assert cost.peak_bytes == [100 + 20 + 2 * 1 + 4 + 3, 200 + 20 + 10 + 3]
    assert cost.host_bytes == [6 + 2 * 5, 6]


@pytest.mark.parametrize(
    ("shard", "peaks"), [({}, [108.0, 208.0]), ({"step_shard_bytes": 1.0}, [106.0, 206.0])], ids=["whole", "shard"]
)
def test_the_optimizer_s_step_by_hand(shard: Document, peaks: list[float]) -> None:
    """Two blocks a stage keep 4 and 2 bytes in flight; 2 · 2 + 4, or 2 · 2 + 2 of their shards, pass at the end."""
    pipeline = uniform("1f1b", 2, 1, 3) | {"stage_static_bytes": [100, 200]}
    pipeline["chain"][0] |= {"count": 4, "step_bytes": 2.0, "step_once_bytes": 4.0} | shard
    cost = evaluate(pipeline, {"layers": [[2], [2]], "modes": [[[]], [[]]]})
    assert cost.peak_bytes == peaks


@pytest.mark.slow
@pytest.mark.parametrize("mood", MOODS)
def test_brute_force_equals_a_plain_loop(mood: str) -> None:
    """Placements one by one, each checked by all rules: what is kept, counted and found is the same."""
    checked = 0
    for seed in range(60):
        document = problem(f"{mood}-{seed}")
        if not 0 < count_placements(document, 200) <= 200:
            continue
        checked += 1
        loop = [
            {"layers": layers, "modes": list(modes)}
            for cut in cuts(document)
            for layers in [[held_between(document, *ends) for ends in pairwise(cut)]]
            for modes in product(*[mode_counts(document, held) for held in layers])
        ]
        assert len(loop) == count_placements(document)
        steps = [evaluate(document, one).step_ms for one in loop if not unlawful(document, one)]
        best = brute_force(document)
        assert best.placements == len(steps)
        assert best.step_ms == pytest.approx(min(steps, default=float("inf")), rel=1e-12)
        assert brute_force(document, prune=True).step_ms == best.step_ms
    assert checked > 10
