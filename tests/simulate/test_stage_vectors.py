"""The vector of times and the terms of the memory rule say what `sum_loads` and `peak_bytes` work out."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import random_problem

from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import graph_of, peak_bytes, peak_host_bytes, sum_loads
from mm_autoparallel.pipeline.simulate.stage_times import times_layout
from mm_autoparallel.pipeline.stage_memory import held_by


def placed(seed: int) -> tuple[Problem, Placement]:
    """A random problem and a placement of it, of the next seed where nothing fits."""
    while True:
        problem = random_problem(seed, ("round", "real")[seed % 2])
        placement = place(problem, gap_fraction=0.5).placement
        if placement is not None:
            return problem, placement
        seed += 100


@pytest.mark.parametrize("seed", range(8))
def test_the_layout_is_that_of_loads(seed: int) -> None:
    problem, placement = placed(seed)
    loads, at = sum_loads(problem, placement), times_layout(problem.num_virtual_stages, problem.num_stages)
    times_ms = np.concatenate([loads.durations_ms, loads.hops_ms, loads.tail_ms])
    assert at.num_times == len(times_ms)
    parts = {
        (at.forward, at.backward): loads.forward_ms.ravel(),
        (at.backward, at.hop_forward): loads.backward_ms.ravel(),
        (at.hop_forward, at.hop_backward): loads.hop_forward_ms,
        (at.hop_backward, at.zero): loads.hop_backward_ms,
        (at.zero, at.tail): [0.0],
        (at.tail, at.num_times): loads.tail_ms,
    }
    for (first, last), expected in parts.items():
        np.testing.assert_array_equal(times_ms[first:last], expected)


@pytest.mark.parametrize("seed", range(8))
def test_the_terms_add_up_to_the_peak(seed: int) -> None:
    problem, placement = placed(seed)
    loads = sum_loads(problem, placement)
    peaks, host_peaks = peak_bytes(problem, loads), peak_host_bytes(problem, loads)
    for stage, rows in enumerate(graph_of(problem).in_flight):
        at_work, on_host = 0.0, 0.0
        for row in rows.tolist():
            held = [
                (count, held_by(block, mode), in_flight)
                for in_flight, layers, modes in zip(
                    row,
                    placement.layers[stage :: problem.num_stages],
                    placement.modes[stage :: problem.num_stages],
                    strict=True,
                )
                for block, n, counts in zip(problem.chain, layers, modes, strict=True)
                for count, mode in [(n - sum(counts), None), *zip(counts, block.modes, strict=True)]
            ]
            at_work = max(at_work, sum(count * one.at_work(in_flight) for count, one, in_flight in held))
            on_host = max(on_host, sum(count * one.on_host(in_flight) for count, one, in_flight in held))
        step_bytes = loads.static_bytes[stage] + loads.step_bytes[stage]
        expected = max(problem.stage_static_bytes[stage] + at_work + loads.transient_bytes[stage], step_bytes)
        assert peaks[stage] == pytest.approx(expected, rel=1e-12)
        assert host_peaks[stage] == pytest.approx(on_host, rel=1e-12)
