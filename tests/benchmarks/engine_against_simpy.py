"""Tasks per second of the compiled engine and of the same pipeline written for SimPy, in one run.

    python tests/benchmarks/engine_against_simpy.py

1F1B, 16 stages × 256 micro-batches. The engine's time includes the makespan, the critical path and the peak of every
stage. Times are printed, never asserted; that both find the same step is.
"""

from __future__ import annotations

import time

import numpy as np
import simpy

from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import neighbours

NUM_STAGES, NUM_MICROBATCHES, REPEATS = 16, 256, 2000


def with_simpy(durations_ms: np.ndarray) -> float:
    environment = simpy.Environment()
    done = {
        (kind, stage, mb): environment.event()
        for kind in (0, 1)
        for stage in range(NUM_STAGES)
        for mb in range(NUM_MICROBATCHES)
    }

    def run(stage: int) -> simpy.events.ProcessGenerator:
        for kind, _, mb in SCHEDULES["1f1b"].order(NUM_STAGES, 1, NUM_MICROBATCHES, stage).tolist():
            if kind == FORWARD and stage > 0:
                yield done[kind, stage - 1, mb]
            elif kind != FORWARD and stage < NUM_STAGES - 1:
                yield done[kind, stage + 1, mb]
            yield environment.timeout(durations_ms[kind * NUM_STAGES + stage])
            done[kind, stage, mb].succeed()

    for stage in range(NUM_STAGES):
        environment.process(run(stage))
    environment.run()
    return float(environment.now)


def main() -> None:
    graph = full_graph("1f1b", NUM_STAGES, 1, NUM_MICROBATCHES)
    rng = np.random.default_rng(0)
    durations = rng.uniform(1.0, 2.0, 2 * NUM_STAGES)
    activation = rng.uniform(1.0, 2.0, NUM_STAGES)
    hops, tails = np.zeros(2 * NUM_STAGES - 1), np.zeros(NUM_STAGES)
    ends, free = np.empty(graph.num_tasks + 1), np.empty(NUM_STAGES)
    counts, hop_counts = np.empty(2 * NUM_STAGES, dtype=np.int64), np.empty(len(hops), dtype=np.int64)
    arrays = (graph.stage, graph.dependency, graph.hop, graph.duration)
    in_flight = np.array([rows.max() for rows in graph.in_flight])

    def once() -> float:
        step = engine.play(*arrays, durations, hops, tails, ends, free)
        engine.critical_path(*arrays, hops, tails, ends, free, *neighbours(graph), counts, hop_counts)
        np.multiply(in_flight, activation).max()
        return float(step)

    step_ms = once()  # compiles on the first run of a machine
    began = time.perf_counter()
    for _ in range(REPEATS):
        once()
    engine_s = (time.perf_counter() - began) / REPEATS
    began = time.perf_counter()
    simpy_ms = with_simpy(durations)
    simpy_s = time.perf_counter() - began
    assert abs(simpy_ms - step_ms) < 1e-9 * step_ms
    print(f"tasks in a step      {graph.num_tasks}")
    print(f"compiled engine      {graph.num_tasks / engine_s:.3g} tasks/s ({engine_s * 1e6:.1f} us a step)")
    print(f"SimPy                {graph.num_tasks / simpy_s:.3g} tasks/s ({simpy_s * 1e3:.0f} ms a step)")
    print(f"ratio                {simpy_s / engine_s:.0f}")


if __name__ == "__main__":
    main()
