"""Problems of layouts: what each part holds and takes, and what the crossing between them takes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from two_modules import APART, PHASES, apart, make_job, shared

from mm_autoparallel.model.costs.away import handed_on_bytes
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.resharding import cross_between_ranks, cross_in_phases, cross_on_shared_ranks
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.layers import Window
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.planner.evaluate import evaluate

SIZE = 2.0 * 256 * 512  # bytes of one sample's image tokens, whole


def _ms(size_bytes: float, bytes_per_s: float) -> float:
    return size_bytes / bytes_per_s * 1e3


def test_what_an_encoder_hands_on() -> None:
    costs = CostModel(make_job())
    assert handed_on_bytes(costs, APART.strategy) == 4 * SIZE
    assert handed_on_bytes(costs, PHASES.strategy) == SIZE
    divided = Strategy(3, 2, 1, 1, arrangement=apart(1, 4, 1, 1))
    assert handed_on_bytes(costs, divided) == SIZE


def test_crossings_by_hand() -> None:
    costs = CostModel(make_job())
    cluster, workload = costs.cluster, costs.workload
    node, network = cluster.levels[0], cluster.levels[-1]
    # four encoder replicas to one decoder replica of TP 2: two lanes, then a gather of TP
    found = cross_between_ranks(cluster, None, workload, APART.strategy, 4 * SIZE)
    moved_ms = network.latency_ms + _ms(4 * SIZE / 2, network.bandwidth_bytes_per_s)
    gather_ms = _ms(4 * SIZE / 2, node.bandwidth_bytes_per_s) + node.latency_ms
    assert (found.forward_ms, found.blocks) == (pytest.approx(moved_ms + gather_ms), False)
    # Megatron's bridge: all of it through one link, shapes before, a broadcast after
    named = make_job(stack="megatron-te").workload
    found = cross_between_ranks(cluster, None, named, APART.strategy, 4 * SIZE)
    lead_ms = 3 * network.latency_ms + _ms(4 * SIZE, network.bandwidth_bytes_per_s)
    lead_ms += _ms(4 * SIZE, node.bandwidth_bytes_per_s) + node.latency_ms
    assert (found.forward_ms, found.blocks) == (pytest.approx(lead_ms), True)
    # shared devices: eight encoder replicas to two, gathered forward; two to eight, gathered backward
    more = Strategy(1, 4, 2, 4, arrangement=shared("inline", 1, 8, 1))
    found = cross_on_shared_ranks(cluster, None, more, 4 * SIZE)
    whole_ms = _ms(4 * SIZE * 3 / 4, node.bandwidth_bytes_per_s) + node.latency_ms
    assert (found.forward_ms, found.backward_ms) == (pytest.approx(whole_ms), 0.0)
    fewer = Strategy(1, 1, 8, 1, arrangement=shared("inline", 4, 2, 4))
    found = cross_on_shared_ranks(cluster, None, fewer, SIZE)
    assert (found.forward_ms, found.backward_ms) == (0.0, pytest.approx(whole_ms))


def test_mindspeed_gathers_pixels_and_outputs() -> None:
    job = make_job(stack="mindspeed-mm", freeze=True)
    costs = CostModel(job)
    node, network = costs.cluster.levels[0], costs.cluster.levels[-1]
    found = cross_in_phases(costs.cluster, None, costs.workload, PHASES.strategy, SIZE, 7 * SIZE)
    # pixels of 24 samples over two replicas in a node, outputs over eight in two nodes, lengths before either
    pixels_ms = _ms(24 * 7 * SIZE / 2, node.bandwidth_bytes_per_s) + node.latency_ms
    shared = 1.0 + 8 / network.scale_ranks if network.scale_ranks else 1.0
    slowest = min(node.bandwidth_bytes_per_s, 4 * network.bandwidth_bytes_per_s / shared)
    outputs_ms = _ms(24 * SIZE * 7 / 8, slowest) + node.latency_ms + network.latency_ms
    lengths_ms = 2 * (2 * node.latency_ms + network.latency_ms)
    assert found.forward_ms == pytest.approx(pixels_ms + outputs_ms + lengths_ms)
    assert found.backward_ms == pytest.approx(outputs_ms)


def test_each_part_is_priced_under_its_own_sizes() -> None:
    job = make_job()
    costs = CostModel(job)
    problem = build_problem(costs, APART.strategy)
    encoder = {b.name: b for b in build_problem(costs, Strategy(1, 1, 4, 1)).chain}
    decoder = {b.name: b for b in build_problem(costs, Strategy(2, 2, 1, 4)).chain}
    assert problem.num_stages == 3
    for block in problem.chain:
        own = (encoder if block.modality == "vision" else decoder)[block.name]
        assert (block.forward_ms, block.static_bytes, block.activation_bytes) == (
            own.forward_ms,
            own.static_bytes,
            own.activation_bytes,
        )
        assert block.within == ((0, 1) if block.modality == "vision" else (1, 3))
    # the other way: one encoder replica serves two decoder replicas, with the samples of both
    serves = Strategy(2, 2, 2, 1, arrangement=apart(1, 4, 1, 2))
    assert build_problem(costs, serves).chain[1].forward_ms == pytest.approx(
        build_problem(costs, Strategy(1, 4, 1, 2)).chain[1].forward_ms
    )


def test_phases_last_as_long_as_all_their_passes() -> None:
    costs = CostModel(make_job())
    alone = place(build_problem(costs, PHASES.strategy))
    recomputed = Strategy(2, 2, 2, 1, arrangement=shared("recomputed_phases", 1, 8, 3))
    again = place(build_problem(costs, recomputed))
    first = [b for b in build_problem(costs, Strategy(1, 1, 8, 3)).chain if b.modality == "vision"]
    forward_ms, backward_ms = (sum(b.count * getattr(b, name) for b in first) for name in ("forward_ms", "backward_ms"))
    # one call each of 24 / (8 x 3); run once more where only outputs are kept
    assert again.step_ms - alone.step_ms == pytest.approx(forward_ms)
    problem, decoder = build_problem(costs, PHASES.strategy), build_problem(costs, Strategy(2, 2, 2, 1))
    crossing = cross_in_phases(costs.cluster, None, costs.workload, PHASES.strategy, SIZE, 0.0)
    more_ms = forward_ms + backward_ms + sum(b.count * b.tail_ms for b in first)
    more_ms += crossing.forward_ms + crossing.backward_ms
    assert problem.stage_tail_ms[0] - decoder.stage_tail_ms[0] == pytest.approx(more_ms)
    # every device holds the encoder, and what it keeps: activations of three samples, outputs of twelve at the first
    kept_bytes = sum(b.count * b.activation_bytes for b in first)
    static_bytes = sum(b.count * b.static_bytes for b in first)
    assert [held.static_bytes for held in problem.beside] == [pytest.approx(static_bytes)] * 2
    assert [held.kept_bytes for held in problem.beside] == [
        pytest.approx(kept_bytes + 12 * SIZE),
        pytest.approx(kept_bytes + 3 * SIZE),
    ]
    told = evaluate(costs, PHASES)
    assert told.memory[0].weight_bytes > sum(b.footprint.weight_bytes * b.count for b in first if b.footprint)
    assert build_problem(costs, recomputed).beside[1].kept_bytes == pytest.approx(3 * SIZE)


@pytest.mark.parametrize(
    "strategy",
    [
        APART.strategy,
        PHASES.strategy,
        Strategy(1, 4, 2, 4, arrangement=shared("inline", 1, 8, 1)),
        Strategy(4, 2, 1, 2, arrangement=apart(2, 1, 2, 1)),
    ],
)
def test_the_least_step_is_a_bound(strategy: Strategy) -> None:
    costs = CostModel(make_job())
    found = place(build_problem(costs, strategy))
    least_ms = LeastSteps(costs).least_ms(strategy)
    assert 0.3 * found.step_ms < least_ms <= found.step_ms


def test_frozen_encoders_return_nothing() -> None:
    costs = CostModel(make_job(freeze=True))
    problem = build_problem(costs, PHASES.strategy)
    assert problem.beside[1].kept_bytes == pytest.approx(3 * SIZE)
    apart_problem = build_problem(costs, APART.strategy)
    assert not any(b.sends_gradient or b.backward_ms for b in apart_problem.chain if b.modality == "vision")


def test_ranks_that_share_an_image_are_priced_as_they_are_by_themselves() -> None:
    costs = CostModel(make_job())
    strategy = Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 2, 2, cp=2))
    alone = {b.name: b for b in build_problem(costs, Strategy(1, 1, 2, 2, cp=2)).chain}
    whole = {b.name: b for b in build_problem(costs, Strategy(1, 1, 2, 2)).chain}
    for block in build_problem(costs, strategy).chain:
        if block.modality == "vision":
            own = alone[block.name]
            assert (block.forward_ms, block.backward_ms) == (own.forward_ms, own.backward_ms)
            assert (block.static_bytes, block.activation_bytes) == (own.static_bytes, own.activation_bytes)
            assert block.activation_bytes < 0.6 * whole[block.name].activation_bytes
    assert handed_on_bytes(costs, strategy) == 4 * SIZE  # of all ranks together, as without
    # two replicas of two ranks to one decoder replica of TP 2: two lanes, then a gather of TP
    divided, less = (
        cross_between_ranks(costs.cluster, None, costs.workload, one, 4 * SIZE) for one in (strategy, APART.strategy)
    )
    assert divided == less


def test_what_ranks_that_share_an_image_gather_and_keep() -> None:
    costs = CostModel(make_job())
    node = costs.cluster.levels[0]
    # eight ranks: two encoder replicas of CP 4 beside two of the decoder; each gathers its replica's tokens forward
    inline = Strategy(1, 4, 2, 4, arrangement=shared("inline", 1, 2, 4, cp=4))
    found = cross_on_shared_ranks(costs.cluster, None, inline, 4 * SIZE)
    assert found.forward_ms == pytest.approx(_ms(4 * SIZE * 3 / 4, node.bandwidth_bytes_per_s) + node.latency_ms)
    assert found.backward_ms == 0.0
    # one encoder replica of CP 4 for two decoder replicas: both ways
    fewer = Strategy(1, 2, 2, 4, arrangement=shared("inline", 1, 1, 8, cp=4))
    both = cross_on_shared_ranks(costs.cluster, None, fewer, 4 * SIZE)
    assert both.forward_ms == pytest.approx(_ms(8 * SIZE * 3 / 4, node.bandwidth_bytes_per_s) + node.latency_ms)
    assert both.backward_ms == pytest.approx(_ms(8 * SIZE / 2, node.bandwidth_bytes_per_s) + node.latency_ms)
    # in phases a rank keeps its part of the step's outputs: of 24 / 4 samples a half
    phases = Strategy(2, 2, 2, 1, arrangement=shared("recomputed_phases", 1, 4, 1, cp=2))
    assert build_problem(costs, phases).beside[1].kept_bytes == pytest.approx(6 * SIZE / 2)


def test_keys_travel_as_the_workload_shares_them_and_not_where_a_window_lies_with_one_rank() -> None:
    def first_ms(kind: str, window: int = 0) -> float:
        job = make_job()
        (tower,) = job.model.encoders
        layers = tower.layers.model_copy(update={"window": Window(num_tokens=window)} if window else {})
        model = job.model.model_copy(update={"encoders": (tower.model_copy(update={"layers": layers}),)})
        job = replace(job, model=model, workload=job.workload.model_copy(update={"context_parallel": kind}))
        strategy = Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 1, 4, cp=4))
        return build_problem(CostModel(job), strategy).chain[1].forward_ms

    assert len({first_ms(kind) for kind in ("ring", "all_gather", "all_to_all")}) == 3
    # 1,024 patches, 256 a rank
    assert first_ms("ring", 64) == first_ms("all_gather", 64)
    assert first_ms("ring", 512) != first_ms("all_gather", 512)


@pytest.mark.parametrize("run", ["inline", "phases"])
def test_shards_are_gathered_within_each_module(run: str) -> None:
    costs = CostModel(make_job(freeze=True, zero=[3]))
    strategy = Strategy(1, 4, 2, 4, zero=3, arrangement=shared(run, 1, 8, 1))
    problem, alone = build_problem(costs, strategy), build_problem(costs, Strategy(1, 1, 8, 1, zero=3))
    plain = build_problem(costs, Strategy(1, 1, 8, 1, zero=0))
    vision = [block for block in alone.chain if block.modality == "vision"]
    # frozen weights are gathered in the forward alone, and nothing is reduced; they lie in eighths
    for shards, whole in zip(vision, plain.chain, strict=False):
        assert (shards.backward_ms, shards.tail_ms) == (0.0, 0.0)
        assert shards.static_bytes == pytest.approx(whole.static_bytes / 8)
    assert sum(b.forward_ms for b in vision) > sum(b.forward_ms for b in plain.chain if b.modality == "vision")
    held = {b.name: dict(b.footprint.held_once_bytes) for b in problem.chain if b.footprint}
    text = [block for block in build_problem(costs, Strategy(1, 4, 2, 4, zero=0)).chain if block.modality == "text"]
    weights = [block.footprint.weight_bytes for block in text if block.footprint]
    # of the decoder's first block its own neighbour counts, and nothing of the encoder's
    assert held[text[0].name]["gathered weights"] == pytest.approx(weights[0] + weights[1])
    if run == "inline":
        assert "gradients being reduced" not in {name for b in vision for name in held[b.name]}
        last = plain.chain[len(vision) - 2 : len(vision)]
        own = [block.footprint.weight_bytes for block in last if block.footprint]
        assert held[vision[-1].name]["gathered weights"] == pytest.approx(sum(own))
    else:
        calls_ms = 24 / 8 * sum(b.count * b.forward_ms for b in vision)
        crossing = cross_in_phases(costs.cluster, None, costs.workload, strategy, 4 * SIZE, 0.0)
        decoder = build_problem(costs, Strategy(1, 4, 2, 4, zero=3))
        more_ms = problem.stage_tail_ms[0] - decoder.stage_tail_ms[0]
        assert more_ms == pytest.approx(calls_ms + crossing.forward_ms)
        weight_bytes = sum(b.count * b.footprint.weight_bytes for b in vision if b.footprint)
        assert problem.beside[0].weight_bytes == pytest.approx(weight_bytes)
