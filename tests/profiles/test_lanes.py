"""How far traffic and compute slow each other down: whose word counts, and what each lane makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import block_costs, build_problem, describe_provenance
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.tensor_traffic import SLOWED_FACTOR, pipelined_ms
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.collectives import exposed_ms
from mm_autoparallel.model.profiles.lanes import ASSUMED, Lanes, Slowdown, find_lanes
from mm_autoparallel.model.profiles.network import Fit, NetworkProfile, Operation, Overlap, hidden_part
from mm_autoparallel.model.profiles.store import NETWORK_SCHEMA, Timing
from mm_autoparallel.model.readers.job_file import parse_job

LAYERS: dict[str, Any] = {"num_layers": 8, "hidden_size": 4096, "ffn_size": 16384, "num_heads": 32, "norm": "rms"}
"""Wide enough that no layer waits for its host."""
EXPERTS = LAYERS | {"experts": {"num_experts": 8, "top_k": 2, "ffn_size": 2048, "shared_ffn_size": 4096}}


def device(**factors: float) -> Device:
    sources = DEVICES["h100-80g"].sources | {"slowdown_factors": "mine"}
    return DEVICES["h100-80g"].model_copy(update={"slowdown_factors": factors, "sources": sources})


def timed(ms: float) -> Timing:
    return Timing(median_ms=ms, mad_ms=0.0, num_samples=5)


def measured(*found: tuple[Operation, int, str, float]) -> NetworkProfile:
    """Overlaps of these operations, ranks, levels and slow-downs: 10 ms of traffic beside 20 ms of compute."""
    overlaps = tuple(
        Overlap(
            operation=operation,
            num_ranks=num_ranks,
            level=level,
            hidden_fraction=hidden_part(10.0, 20.0, 20.0 + (factor - 1.0) * 10.0),
            traffic_ms=timed(10.0),
            compute_ms=timed(20.0),
            together_ms=timed(20.0 + (factor - 1.0) * 10.0),
        )
        for operation, num_ranks, level, factor in found
    )
    fit = Fit(
        operation="all_reduce",
        num_ranks=2,
        level="node",
        latency_ms=1.0,
        bandwidth_bytes_per_s=1e9,
        residual_fraction=0.0,
    )
    origin = {"device": "h100-80g", "software": {}, "date": "2026-01-01", "command": "profile"}
    return NetworkProfile(schema=NETWORK_SCHEMA, fits=(fit,), overlaps=overlaps, **origin)


def lanes(network: NetworkProfile | None = None, software: str = "megatron-core", **factors: float) -> Lanes:
    calibration = assume_calibration("h100-80g", software)
    return find_lanes(device(**factors), calibration.figures, calibration.sources, network, "node")


def test_what_nobody_measured_slows_nothing_and_is_said_to_be_assumed() -> None:
    found = lanes()
    assert (found.data, found.pieces) == (ASSUMED, ASSUMED)
    assert (found.tensor.factor, found.tensor.source) == (1.0, "assumed")


def test_what_was_measured_counts_before_what_is_stated() -> None:
    stated = lanes(data=1.2, tensor=1.3, experts=2.5)
    assert stated.data == stated.shards == Slowdown(1.2, "mine")
    assert stated.tensor == stated.pieces == Slowdown(1.3, "mine")
    assert stated.experts == Slowdown(2.5, "mine")
    each = (("all_reduce", 16, "cluster", 1.5), ("all_reduce", 8, "node", 1.7), ("all_to_all", 16, "cluster", 2.25))
    found = lanes(measured(*each), data=1.2, tensor=1.3, experts=2.5)
    factors = [(one.factor, one.source) for one in (found.data, found.tensor, found.experts)]
    assert factors == [(pytest.approx(factor), "measured") for *_, factor in each]
    one = lanes(measured(("all_reduce", 2, "node", 1.25)))  # as older files have it
    assert {one.data.factor, one.tensor.factor, one.experts.factor} == {1.25}


def test_a_stack_that_sums_in_turn_does_so_however_little_is_lost() -> None:
    found = lanes(measured(("all_reduce", 8, "node", 1.1)), software="torchtitan")
    assert found.tensor.hidden_fraction == 0.0
    assert found.pieces.factor == found.data.factor == pytest.approx(1.1)


@pytest.mark.parametrize(("traffic_ms", "cover_ms"), [(4.0, 10.0), (10.0, 4.0), (3.0, 3.0), (5.0, 0.0)])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 2.6])
def test_both_take_the_longer_and_a_part_of_the_shorter(traffic_ms: float, cover_ms: float, factor: float) -> None:
    together_ms = cover_ms + exposed_ms(traffic_ms, cover_ms, Slowdown(factor, "measured").hidden_fraction)
    assert together_ms == pytest.approx(max(traffic_ms, cover_ms) + (factor - 1.0) * min(traffic_ms, cover_ms))
    # played in small steps: while both run each does 1 / factor of what it does alone
    left, clock_ms, step_ms = [traffic_ms, cover_ms], 0.0, 1e-3
    while max(left) > 0:
        speed = 1.0 / factor if min(left) > 0 else 1.0
        left, clock_ms = [max(0.0, one - speed * step_ms) for one in left], clock_ms + step_ms
    assert together_ms == pytest.approx(clock_ms, abs=0.02)


def test_products_in_pieces_are_slowed_by_what_passes() -> None:
    plain = pipelined_ms(10.0, 4.0, 4)
    assert pipelined_ms(10.0, 4.0, 4, Slowdown(1.5, "measured")) == pytest.approx(plain + 0.5 * 4.0)
    assert pipelined_ms(2.0, 8.0, 4, Slowdown(1.5, "measured")) == pytest.approx(8 + 2 * SLOWED_FACTOR * 0.75)


def job_of(layers: dict[str, Any] = LAYERS, stack: str = "megatron-te", **factors: float) -> Job:
    own = {"based_on": "h100-80g", **({"slowdown_factors": factors} if factors else {})}
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": layers}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": own},
        "workload": {"global_batch_size": 16, "seq_length": 8192, "stack": stack},
        "search": {"ep": [1, 8]} if layers is EXPERTS else {},
    }
    return parse_job(document, Path("job.json"))


def passes_ms(job: Job, strategy: Strategy) -> float:
    cost = block_costs(job, strategy)["text_layer"]
    return cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms


@pytest.mark.parametrize(
    ("lane", "strategy", "stack", "layers"),
    [
        ("tensor", Strategy(1, 8, 1, 1), "megatron-te", LAYERS),
        ("tensor", Strategy(1, 8, 1, 1, tp_overlap="mc2"), "mindspeed", LAYERS),
        ("tensor", Strategy(1, 1, 1, 1, cp=8), "megatron-te", LAYERS),
        ("experts", Strategy(1, 1, 8, 1, ep=8, overlap_all_to_all="shared_experts"), "megatron-te", EXPERTS),
        ("experts", Strategy(1, 1, 8, 1, ep=8, overlap_all_to_all="micro_batches"), "megatron-te", EXPERTS),
    ],
)
def test_a_slower_lane_never_shortens_a_layer_and_is_no_other_lane(
    lane: str, strategy: Strategy, stack: str, layers: dict[str, Any]
) -> None:
    factors = (1.0, 1.2, 1.6, 2.0, 3.0)
    found = [passes_ms(job_of(layers, stack, **{lane: factor}), strategy) for factor in factors]
    assert all(later >= first * (1 - 1e-12) for first, later in itertools.pairwise(found))
    assert found[-1] > found[0]
    assert passes_ms(job_of(layers, stack, data=3.0), strategy) == passes_ms(job_of(layers, stack), strategy)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_have_theirs(zero: int) -> None:
    strategy = Strategy(1, 1, 8, 1, zero=zero)
    in_the_open = replace(strategy, overlaps=Overlaps(False, False if zero else None))

    def total_ms(factor: float, strategy: Strategy = strategy) -> float:
        chain = build_problem(job_of(data=factor), strategy).chain
        return sum(one.count * (2 * (one.forward_ms + one.backward_ms) + one.tail_ms) for one in chain)

    found = [total_ms(factor) for factor in (1.0, 1.5, 2.0, 2.5)]
    assert found == sorted(found)
    open_ms = total_ms(1.0, in_the_open)
    assert total_ms(2.5, in_the_open) == open_ms
    assert found[0] < open_ms < found[-1]
    assert found[2] == pytest.approx(open_ms)


def test_provenance_says_which_and_whence() -> None:
    said = describe_provenance(job_of(tensor=1.25), Strategy(1, 4, 2, 1))["slowdowns"]
    assert said == {
        "data": {"factor": 1.0, "source": "assumed"},
        "tensor": {"factor": 1.25, "source": "job file"},
    }
    beside = Strategy(1, 4, 2, 1, tp_overlap="user_buffers")
    assert set(describe_provenance(job_of(tensor=1.25), beside)["slowdowns"]) == {"data"}
    assert "slowdowns" not in describe_provenance(job_of(), Strategy(8, 1, 1, 1))


def test_a_job_is_the_same_until_something_is_said() -> None:
    assert job_of().sha256 != job_of(data=1.1).sha256


@pytest.mark.parametrize(
    ("factors", "told"),
    [({"data": 0.5}, "slowdown_factors"), ({"data": "2"}, "slowdown_factors"), ({"p2p": 1.5}, "slowdown_factors")],
)
def test_what_is_no_slow_down_is_refused(factors: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told) as failure:
        job_of(**factors)
    print(failure.value)
