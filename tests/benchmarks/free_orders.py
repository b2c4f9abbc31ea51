"""Step, bound and time of problems whose order is free, printed; nothing is asserted here.

    python tests/benchmarks/free_orders.py [--limit SECONDS] [--names NAME ...] [--gap FRACTION] [--v-shape]
        [--drawn NUMBER --seed SEED]

The problems are tests/fixtures/free_orders; `known` is the best step that is stored there, `bound` what is proven of
all placements and orders. --limit: seconds for each problem. --gap: the proof that ends it early. --v-shape: with two
chunks a stage, there and back; `known` is that of one chunk all the same. --drawn: so many problems of 8 stages and 16
micro-batches in place of the stored ones, drawn from the seed and those after it: layers, times, an encoder that is
frozen or not, hops, and memory for two to ten of the mean stage's micro-batches beside what stays.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.v_shape.compiling import compile_v
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.problem_file import read_problem

FIXTURES = Path(__file__).parents[1] / "fixtures" / "free_orders"
PROVEN_GAP_FRACTION = 1e-3


def list_names() -> list[str]:
    """The stored problems, the smallest first."""
    sizes = {}
    for path in FIXTURES.glob("*.problem.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        sizes[path.name.split(".")[0]] = (document["num_stages"] * document["num_microbatches"], path.name)
    return sorted(sizes, key=sizes.__getitem__)


def draw(seed: int) -> Problem:
    """A problem of the stored ones' kind: one block before and one after an encoder's layers and a decoder's."""
    rng = random.Random(seed)
    is_frozen = rng.random() < 0.4
    num_stages, num_microbatches = 8, 16
    counts = rng.randint(8, 32), rng.randint(32, 80)
    blocks = []
    for name, count in zip(("vision", "text"), counts, strict=True):
        forward_ms = float(rng.randint(2, 24))
        input_ms, weight_ms = forward_ms + rng.randint(0, 4), max(1.0, forward_ms - rng.randint(0, 4))
        has_backward = name == "text" or not is_frozen
        blocks.append(
            ChainBlock(
                name,
                name,
                count,
                forward_ms,
                (input_ms + weight_ms) * has_backward,
                static_bytes=float(rng.randint(1, 4)),
                activation_bytes=float(rng.randint(1, 4)) * has_backward,
                backward_weight_ms=weight_ms * has_backward,
            )
        )
    first_ms, last_ms = float(rng.randint(1, 6)), float(rng.randint(1, 12))
    first = ChainBlock(
        "first", "vision", 1, first_ms, 0.0 if is_frozen else first_ms, layer=False, pinned="first",
        backward_weight_ms=0.0 if is_frozen else first_ms,
    )  # fmt: skip
    last = ChainBlock("last", "text", 1, last_ms, 2.0 * last_ms, layer=False, pinned="last", backward_weight_ms=last_ms)
    static = sum(block.count * block.static_bytes for block in blocks) / num_stages
    kept = sum(block.count * block.activation_bytes for block in blocks) / num_stages
    return Problem(
        num_stages=num_stages,
        num_chunks=1,
        num_microbatches=num_microbatches,
        schedule="free",
        chain=(first, *blocks, last),
        memory_limit_bytes=(1.3 * static + rng.uniform(2.0, 10.0) * kept,) * num_stages,
        stage_static_bytes=(0.0,) * num_stages,
        stage_tail_ms=(0.0,) * num_stages,
        p2p_ms=(float(rng.randint(0, 2)),) * (num_stages - 1),
        p2p_ms_per_byte=(0.0,) * (num_stages - 1),
    )


def there_and_back(problem: Problem) -> Problem:
    """`problem` with two chunks a stage: virtual stage k on stage k or 2P - 1 - k, hops as the first one."""
    num_hops = 2 * problem.num_stages - 1
    return replace(
        problem,
        num_chunks=2,
        p2p_ms=problem.p2p_ms[:1] * num_hops,
        p2p_ms_per_byte=problem.p2p_ms_per_byte[:1] * num_hops,
    )


def main() -> None:
    """Place each problem and print one row of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for each problem")
    parser.add_argument("--names", nargs="*", choices=list_names(), metavar="NAME", help="these alone (default: all)")
    parser.add_argument("--gap", type=float, default=PROVEN_GAP_FRACTION, metavar="FRACTION", help="proof to end at")
    parser.add_argument("--v-shape", action="store_true", help="two chunks a stage, there and back")
    parser.add_argument("--drawn", type=int, default=0, metavar="NUMBER", help="drawn problems in place of the stored")
    parser.add_argument("--seed", type=int, default=1, metavar="SEED", help="of the first drawn problem")
    arguments = parser.parse_args()
    compile_orders()
    if arguments.v_shape:
        compile_v()
    seeds = range(arguments.seed, arguments.seed + arguments.drawn)
    cases: list[tuple[str, Problem, str]] = [(f"drawn_{seed}", draw(seed), "") for seed in seeds]
    for name in () if arguments.drawn else arguments.names or list_names():
        path = FIXTURES / f"{name}.problem.json"
        known = json.loads(path.read_text(encoding="utf-8")).get("known", {}).get("best_step_ms", "")
        cases.append((name, read_problem(path), str(known)))
    print(f"{'case':18} {'step, ms':>10} {'bound, ms':>11} {'gap':>9} {'s':>7} {'known, ms':>10}")
    for name, problem, known in cases:
        problem = there_and_back(problem) if arguments.v_shape else problem
        result = place(problem, time_limit_s=arguments.limit, gap_fraction=arguments.gap)
        if result.placement is None:
            print(f"{name:18} {result.status}: {result.reason}", flush=True)
            continue
        print(
            f"{name:18} {result.step_ms:10.2f} {result.lower_bound_ms:11.2f} {result.gap_fraction:9.3%} "
            f"{result.solve_s:7.1f} {known:>10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
