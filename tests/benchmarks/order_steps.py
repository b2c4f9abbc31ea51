"""Steps of orders as simulated and as torch runs them: blocks that sleep on four processes, the example on two.

    python tests/benchmarks/order_steps.py [--micro-batches 8] [--repeats 3] [--sleeping-only]

Sleeping blocks: a chain of eight layers with given times of forward, input gradient and weight gradient, on four
stages or in eight chunks, under 1F1B, orders by name whose backwards are in two parts, and an order that `place` finds.
Each is written as torch's CSV, so with whole backwards on the first virtual stage, and simulated so. The example: what
a backward in two parts costs its layers, and its step under 1F1B and ZB-H1 beside the prediction from its stages'
measured times. Times are printed, never asserted; that both simulators here find the same step is.
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
EXAMPLE, RUN_FLAGS = HERE.parents[1] / "examples" / "qwen2vl", HERE.parent / "examples" / "run_flags.py"

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

FLAGS = (
    "--num-layers 8 --vision-num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --vocab-size 2048 --seq-length 256 "
    "--image-size 112 --global-batch-size 4 --train-iters 9"
)
VISION, TEXT = (4, 0), (3, 5)
"""Layers of the example's two stages."""


# ----------------------------------------------------------------------------------------------------------- simulated


def play(orders: Orders, ms: Sequence[Layer]) -> float:
    """The step of `orders` with `ms` of each virtual stage, hops free. Those of a pair begin and end together, and run
    one after the other between: torch sends what both gave at its end."""
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
                        BACKWARD: input_ms + weight_ms, INPUT: input_ms, WEIGHT: weight_ms
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
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])


def compare_sleeping(num_microbatches: int, repeats: int, time_limit_s: float) -> None:
    """The table of blocks that sleep."""
    rows, tasks = [], []
    for case, layers in CASES.items():
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


def compare_example() -> None:
    """What parting costs the example's layers, and its step under both orders, predicted and measured."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from parting_costs import Example

    from model import Piece

    torch.set_num_threads(1)
    example = Example(FLAGS)
    vision, text = Piece("vision", "layer", 1), Piece("text", "layer", 1)
    head = Piece("text", "post")
    print("The example, one thread; ms of a micro-batch, medians")
    print(f"{'what':<24}{'F':>8}{'B':>8}{'I':>8}{'W':>8}{'(I+W)/B':>9}")

    def tell(what: str, pieces: tuple[Piece, ...], before: Piece | None) -> Layer | tuple[float, ...]:
        times = example.measure(pieces, before)
        print(
            f"{what:<24}{times.forward_ms:>8.2f}{times.whole_ms:>8.2f}{times.input_ms:>8.2f}{times.weight_ms:>8.2f}"
            f"{times.parted_factor:>9.2f}"
        )
        return times.forward_ms, times.whole_ms, times.input_ms, times.weight_ms

    tell("vision layer", (vision,), vision)
    tell("text layer", (text,), text)
    tell("text layer, recomputed", (Piece("text", "layer", 1, 1, 1),), text)
    tell("head and loss", (head,), text)
    pieces = (
        (Piece("vision", "pre"), Piece("vision", "layer", 0, VISION[0]), Piece("vision", "post"),
         Piece("text", "pre"), Piece("text", "layer", 0, TEXT[0])),
        (Piece("text", "layer", TEXT[0], TEXT[1]), head),
    )  # fmt: skip
    first = tell("stage 0", pieces[0], None)
    second = tell("stage 1", pieces[1], text)

    predicted, tasks, count = {}, [], 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = f"{FLAGS} --pipeline-model-parallel-size 2 --vit-layer-placement {VISION[0]},{VISION[1]} "
        flags += f"--llm-layer-placement {TEXT[0]},{TEXT[1]}"
        for schedule in ("1f1b", "zb_h1", "1f1b", "zb_h1"):
            stages = tuple(SCHEDULES[schedule].order(2, 1, count, stage) for stage in range(2))
            orders, _ = join_untrained(Orders(stages, 1, count, v_shaped=False), 0)
            parted = SCHEDULES[schedule].splits
            ms = [
                (first[0], 0.0, first[1]),
                (second[0], second[2], second[3]) if parted else (second[0], second[1], 0.0),
            ]
            predicted[schedule] = play(orders, ms)
            (folder / f"{schedule}.csv").write_text(write_rows(orders.stages, orders.v_shaped), encoding="utf-8")
            tasks.append(f"{flags} --pipeline-order {schedule}.csv --log-file {len(tasks)}.jsonl")
        (folder / "flags.txt").write_text("\n".join(tasks), encoding="utf-8")
        launch(2, RUN_FLAGS, "flags.txt", folder=folder)
        taken_ms: dict[str, list[float]] = {"1f1b": [], "zb_h1": []}
        for number, schedule in enumerate(("1f1b", "zb_h1", "1f1b", "zb_h1")):
            lines = (folder / f"{number}.jsonl").read_text(encoding="utf-8").splitlines()
            steps_ms = [entry["elapsed_ms"] for entry in map(json.loads, lines) if "elapsed_ms" in entry]
            taken_ms[schedule] += steps_ms[2:]
    print(
        f"\nIts step on two processes, {count} micro-batches; ms (predicted: stages alone, no messages, no optimizer)"
    )
    for schedule, steps_ms in taken_ms.items():
        low_ms, step_ms, high_ms = min(steps_ms), statistics.median(steps_ms), max(steps_ms)
        print(
            f"{schedule:<8}predicted {predicted[schedule]:>8.1f}   "
            f"measured {step_ms:>8.1f} ({low_ms:.1f} to {high_ms:.1f})"
        )
    gains = [
        base_ms / parted_ms - 1
        for base_ms, parted_ms in (
            (predicted["1f1b"], predicted["zb_h1"]),
            (statistics.median(taken_ms["1f1b"]), statistics.median(taken_ms["zb_h1"])),
        )
    ]
    sign = "the same sign" if gains[0] * gains[1] > 0 else "another sign"
    print(f"ZB-H1 against 1F1B: predicted {gains[0]:+.1%}, measured {gains[1]:+.1%}: {sign}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each order that is found")
    parser.add_argument("--sleeping-only", action="store_true")
    arguments = parser.parse_args()
    load_solver(for_search=False)
    compare_sleeping(arguments.micro_batches, arguments.repeats, arguments.time_limit)
    if not arguments.sleeping_only:
        compare_example()


if __name__ == "__main__":
    main()
