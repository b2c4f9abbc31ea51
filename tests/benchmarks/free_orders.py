"""Step, bound and time of problems whose order is free, printed; nothing is asserted here.

    python tests/benchmarks/free_orders.py [--limit SECONDS] [--names NAME ...] [--gap FRACTION] [--v-shape]

The problems are tests/fixtures/free_orders; `known` is the best step that is stored there, `bound` what is proven of
all placements and orders. --limit: seconds for each problem. --gap: the proof that ends it early. --v-shape: with two
chunks a stage, there and back; `known` is that of one chunk all the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.v_shape.compiling import compile_v
from mm_autoparallel.pipeline.problem import Problem
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
    arguments = parser.parse_args()
    compile_orders()
    if arguments.v_shape:
        compile_v()
    print(f"{'case':18} {'step, ms':>10} {'bound, ms':>11} {'gap':>9} {'s':>7} {'known, ms':>10}")
    for name in arguments.names or list_names():
        path = FIXTURES / f"{name}.problem.json"
        known = json.loads(path.read_text(encoding="utf-8")).get("known", {}).get("best_step_ms", "")
        problem = there_and_back(read_problem(path)) if arguments.v_shape else read_problem(path)
        result = place(problem, time_limit_s=arguments.limit, gap_fraction=arguments.gap)
        print(
            f"{name:18} {result.step_ms:10.2f} {result.lower_bound_ms:11.2f} {result.gap_fraction:9.3%} "
            f"{result.solve_s:7.1f} {known:>10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
