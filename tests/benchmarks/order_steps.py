"""Steps of orders as simulated and as torch runs them, of blocks that sleep on four processes.

    python tests/benchmarks/order_steps.py [--micro-batches 8] [--repeats 3] [--stretch 3]

Sleeping blocks: a chain of eight layers with given times of forward, input gradient and weight gradient, on four
stages or in eight chunks, under 1F1B, orders by name whose backwards are in two parts, and an order that `place` finds.
Each is written as torch's CSV, so with whole backwards on the first virtual stage, and simulated so. Longer layers
(--stretch) make less of what torch and the machine add to every action, which the table gives beside. Times are
printed, never asserted; that both simulators here find the same step is. The example's own: example_orders.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mm_autoparallel.api import load_solver, place
from mm_autoparallel.integrations.torch.schedule_csv import join_untrained
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_from_entry
from mm_autoparallel.pipeline.schedules.action import BACKWARD, INPUT, PAIRED, WEIGHT
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS
from mm_autoparallel.pipeline.schedules.orders import read_orders
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, write_rows
from mm_autoparallel.pipeline.schedules.virtual_stages import virtual_stage
from mm_autoparallel.pipeline.simulate.step import simulate

HERE = Path(__file__).parent

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Of glibc: memory that was freed stays the process's, as on an accelerator; else pages come anew in every step."""
NUM_STAGES, NUM_LAYERS = 4, 8
NAMED = ("1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "dualpipev")
Layer = tuple[float, float, float]
"""Milliseconds of its forward, of its input's gradient and of its weight's."""

_RNG = random.Random(7)
CASES: dict[str, list[Layer]] = {
    "even": [(30.0, 30.0, 30.0)] * NUM_LAYERS,
    "uneven": [tuple(_RNG.uniform(12.0, 48.0) for _ in range(3)) for _ in range(NUM_LAYERS)],  # type: ignore[misc]
    "front heavy": [(54.0, 54.0, 18.0)] * 3 + [(21.0, 21.0, 27.0)] * (NUM_LAYERS - 3),
}


# ----------------------------------------------------------------------------------------------------------- simulated


def play(orders: Orders, ms: Sequence[Layer], whole_ms: Sequence[float] | None = None) -> float:
    """The step of `orders` with `ms` of each virtual stage, hops free. Those of a pair begin and end together, and run
    one after the other between: torch sends what both gave at its end. whole_ms: of each virtual stage's backward in
    one part, both parts where None."""
    num_stages = len(orders.stages)
    ended: dict[tuple[bool, int, int], float] = {}
    free, at = [0.0] * num_stages, [0] * num_stages
    rows = [order.tolist() for order in orders.stages]
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        for stage, row in enumerate(rows):
            while at[stage] < len(row):
                some = row[at[stage] : at[stage] + (2 if row[at[stage]][0] == PAIRED else 1)]
                needed: list[tuple[bool, int, int]] = []
                given: list[tuple[bool, int, int]] = []
                took_ms = 0.0
                for kind, chunk, micro_batch in some:
                    k = virtual_stage(chunk, stage, num_stages, orders.v_shaped)
                    forward_ms, input_ms, weight_ms = ms[k]
                    took_ms += {
                        BACKWARD: input_ms + weight_ms if whole_ms is None else whole_ms[k],
                        INPUT: input_ms, WEIGHT: weight_ms,
                    }.get(kind, forward_ms)  # fmt: skip
                    if kind != WEIGHT:
                        is_gradient = kind in (BACKWARD, INPUT)
                        before = k + 1 if is_gradient else k - 1
                        needed += [(is_gradient, before, micro_batch)] if 0 <= before < len(ms) else []
                        given.append((is_gradient, k, micro_batch))
                if any(need not in ended for need in needed):
                    break
                free[stage] = max([free[stage], *(ended[need] for need in needed)]) + took_ms
                ended |= dict.fromkeys(given, free[stage])
                at[stage] += len(some)
    return max(free)


def describe(layers: Sequence[Layer], schedule: str, num_chunks: int, num_microbatches: int) -> Problem:
    """`layers` as a problem in which each keeps one byte of a micro-batch, and a stage as many as 1F1B needs."""
    chain = [
        {"name": f"layer {number}", "modality": "text", "count": 1, "forward_ms": forward_ms,
         "backward_ms": input_ms + weight_ms, "backward_weight_ms": weight_ms, "activation_bytes": 1.0}
        for number, (forward_ms, input_ms, weight_ms) in enumerate(layers)
    ]  # fmt: skip
    return problem_from_entry(
        ProblemEntry.model_validate(
            {
                "num_stages": NUM_STAGES,
                "num_chunks": num_chunks,
                "num_microbatches": num_microbatches,
                "schedule": schedule,
                "chain": tuple(chain),
                "memory_limit_bytes": float(NUM_LAYERS * max(NUM_STAGES, num_microbatches)),
            }
        )
    )


def find_named(name: str, layers: Sequence[Layer], num_microbatches: int) -> tuple[Orders, list[Layer], float]:
    """The order of a schedule, times of its virtual stages, and its simulated step as it is named."""
    schedule = SCHEDULES[name]
    num_chunks = V_CHUNKS if schedule.v_shaped else 1
    each = NUM_LAYERS // (NUM_STAGES * num_chunks)
    stages = tuple(schedule.order(NUM_STAGES, num_chunks, num_microbatches, stage) for stage in range(NUM_STAGES))
    orders = Orders(stages, num_chunks, num_microbatches, schedule.v_shaped)
    held = [[k * each <= number < (k + 1) * each for number in range(NUM_LAYERS)] for k in range(NUM_LAYERS // each)]
    counts = tuple(tuple(int(holds) for holds in row) for row in held)
    placement = Placement(counts, tuple(((),) * NUM_LAYERS for _ in counts))
    ms = sum_layers(layers, counts)
    step_ms = simulate(describe(layers, name, num_chunks, num_microbatches), placement).step_ms
    assert abs(play(orders, ms) - step_ms) < 1e-6 * step_ms, name
    return orders, ms, step_ms


def find_free(layers: Sequence[Layer], num_microbatches: int, time_limit_s: float) -> tuple[Orders, list[Layer], float]:
    """The same of the order and the layers that `place` finds together."""
    result = place(describe(layers, "free", 1, num_microbatches), time_limit_s=time_limit_s)
    placement = result.placement
    assert placement is not None, result.reason
    stages = read_orders(placement.orders, NUM_STAGES, 1, num_microbatches)
    orders, ms = Orders(stages, 1, num_microbatches, v_shaped=False), sum_layers(layers, placement.layers)
    assert abs(play(orders, ms) - result.step_ms) < 1e-6 * result.step_ms
    return orders, ms, result.step_ms


def sum_layers(layers: Sequence[Layer], held: Sequence[Sequence[int]]) -> list[Layer]:
    """Times of virtual stages that hold these numbers of each layer."""
    return [
        tuple(sum(count * layer[part] for count, layer in zip(row, layers, strict=True)) for part in range(3))  # type: ignore[misc]
        for row in held
    ]


# ------------------------------------------------------------------------------------------------------------ measured


def launch(num_processes: int, script: Path, *words: str, folder: Path) -> None:
    """Run a script under torch's launcher in `folder`. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
         str(script), *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **KEEPS_MEMORY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])


def compare_sleeping(num_microbatches: int, repeats: int, stretch: float, time_limit_s: float) -> None:
    """The table of blocks that sleep `stretch` times as long as CASES have it."""
    rows, tasks = [], []
    for case, short in CASES.items():
        layers: list[Layer] = [(stretch * f, stretch * i, stretch * w) for f, i, w in short]
        found = {name: find_named(name, layers, num_microbatches) for name in NAMED if name in SCHEDULES}
        found["free"] = find_free(layers, num_microbatches, time_limit_s)
        for name, (orders, ms, named_ms) in found.items():
            written, _ = join_untrained(orders, 0)
            rows.append((case, name, named_ms, play(written, ms), max(map(len, written.stages))))
            tasks.append({"csv": write_rows(written.stages, written.v_shaped), "ms": ms, "repeats": repeats})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
        launch(NUM_STAGES, HERE / "sleeping_pipeline.py", "tasks.json", "out.json", folder=folder)
        measured = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    print(f"Blocks that sleep, {NUM_STAGES} processes, {num_microbatches} micro-batches; ms, median of {repeats} steps")
    columns = ("as named", "as torch", "measured", "error", "an action", "to 1F1B")
    print(f"{'times':<12}{'order':<10}" + "".join(f"{column:>11}" for column in columns))
    errors, base_ms = [], 0.0
    for (case, name, named_ms, written_ms, count), taken_ms in zip(rows, measured, strict=True):
        step_ms = statistics.median(taken_ms)
        base_ms = step_ms if name == "1f1b" else base_ms
        errors.append(written_ms / step_ms - 1)
        print(
            f"{case:<12}{name:<10}{named_ms:>11.1f}{written_ms:>11.1f}{step_ms:>11.1f}{errors[-1]:>+11.1%}"
            f"{(step_ms - written_ms) / count:>+11.2f}{step_ms / base_ms - 1:>+11.1%}"
        )
    print(f"median error {statistics.median(map(abs, errors)):.2%}, largest {max(map(abs, errors)):.2%}\n")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each order that is found")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor of all times")
    arguments = parser.parse_args()
    load_solver(for_search=False)
    compare_sleeping(arguments.micro_batches, arguments.repeats, arguments.stretch, arguments.time_limit)


if __name__ == "__main__":
    main()
