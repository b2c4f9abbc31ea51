"""`place` against the oracle where the order is to be found too (`"schedule": "free"`), problem by problem.

    python tests/oracle/compare_free.py --problems 3000 --seed 1 --part 2/4 --out failures

prints how many are right and how many of those proven, wrong (by kind), and the slowest. Not proven is not wrong: a
bound below the best, and a step above it, are what is promised. Failing problems are written to --out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import compare
import free_orders
import generate_free
from compare import Verdict
from semantics import Document

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.pipeline.placement import PlacementResult, place

RELATIVE = 1e-9
OPTIMAL = 1e-6  # what is called optimal may be off by so much: solvers count time in whole units
TINY_MS = 1e-12
LIMIT_S = 10.0
SIMPLEST: Document = {
    "schema": "mm-autoparallel/problem/1",
    "num_stages": 2,
    "num_chunks": 1,
    "num_microbatches": 2,
    "schedule": "free",
    "memory_limit_bytes": 100.0,
    "chain": [
        {
            "name": "b",
            "modality": "text",
            "count": 2,
            "forward_ms": 1.0,
            "backward_ms": 2.0,
            "backward_weight_ms": 1.0,
            "static_bytes": 1.0,
            "activation_bytes": 1.0,
        }
    ],
}


def is_refused() -> bool:
    """Whether the package does not take the simplest of such problems."""
    try:
        place(compare.read(SIMPLEST), time_limit_s=LIMIT_S)
    except PlannerError:
        return True
    return False


def verdict_of(name: str, limit_s: float = LIMIT_S) -> tuple[Verdict, str]:
    """What `place` makes of the problem called `name`, and its status."""
    document = generate_free.problem(name)
    try:
        best = free_orders.best_free(document)
    except free_orders.TooLarge:
        return Verdict(name, document, math.nan, None), "too large"
    verdict = Verdict(name, document, best.step_ms, best.placement)
    begun, used = time.perf_counter(), time.process_time()
    try:
        with compare._ended_after(6 * limit_s):
            result = place(compare.read(document), time_limit_s=limit_s)
    except Exception as error:  # noqa: BLE001 - whatever escapes is what we look for
        lawful = next(free_orders.brute_force.cuts(document), None) is not None
        if lawful or not isinstance(error, PlannerError):
            verdict.wrong["crash"] = compare._told(error)
        return verdict, "refused"
    verdict.seconds = min(time.perf_counter() - begun, time.process_time() - used)
    verdict.wrong |= check_result(document, best.step_ms, result)
    return verdict, result.status


def check_result(document: Document, optimum_ms: float, result: PlacementResult) -> dict[str, str]:
    """What is wrong with the answer, by kind."""
    if result.placement is None:
        if result.status == "infeasible":
            return {"false_infeasible": f"{optimum_ms!r} ms is possible"} if math.isfinite(optimum_ms) else {}
        return {"no_placement": f"status {result.status}"}
    placement = {
        "layers": [list(map(int, row)) for row in result.placement.layers],
        "modes": [[list(map(int, counts)) for counts in row] for row in result.placement.modes],
        "order": list(result.placement.orders),
    }
    reason = free_orders.unlawful(document, placement)
    if reason:
        return {"unlawful": reason}
    cost = free_orders.play_words(document, placement["layers"], placement["modes"], placement["order"])
    wrong = {}
    if not close(result.step_ms, cost.step_ms):
        wrong["step"] = f"{result.step_ms!r} said, {cost.step_ms!r} right"
    for kind, said, right in (
        ("peak", result.peak_memory_bytes, cost.peak_bytes),
        ("host_peak", result.peak_host_bytes, cost.host_bytes),
    ):
        if len(said) != len(right) or not all(map(close, said, right)):
            wrong[kind] = f"{list(said)} said, {right} right"
    if cost.step_ms < optimum_ms * (1 - RELATIVE) - TINY_MS:
        wrong["oracle"] = f"{cost.step_ms!r} is below the best of all, {optimum_ms!r}"
    if result.lower_bound_ms > optimum_ms * (1 + RELATIVE) + TINY_MS:
        wrong["false_bound"] = f"{result.lower_bound_ms!r} is above {optimum_ms!r}"
    if result.status == "optimal" and cost.step_ms > optimum_ms * (1 + OPTIMAL) + TINY_MS:
        wrong["false_optimal"] = f"{cost.step_ms!r} said, {optimum_ms!r} right"
    return wrong


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=TINY_MS)


def main() -> int:
    """0 where all is right, 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; problems are MOOD-SEED")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th of the problems, from the i-th on")
    parser.add_argument("--moods", nargs="+", choices=generate_free.MOODS, default=generate_free.MOODS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="wall time that one problem gets")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", nargs="+", help="names of problems in place of seeds")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    moods = arguments.moods
    names = arguments.names or [
        f"{moods[i % len(moods)]}-{arguments.seed + i // len(moods)}" for i in range(arguments.problems)
    ]
    if is_refused():
        print("the package refuses problems whose order is to be found", file=sys.stderr)
        return 2
    statuses: dict[str, int] = {}

    def verdicts() -> Iterator[Verdict]:
        for name in names[part - 1 :: parts]:
            verdict, status = verdict_of(name, arguments.limit_s)
            statuses[status] = statuses.get(status, 0) + 1
            yield verdict

    begun = time.perf_counter()
    counts = compare.report(verdicts(), arguments.out)
    print(", ".join(f"{count} {status}" for status, count in sorted(statuses.items())))
    print(f"{time.perf_counter() - begun:.1f} s")
    return 1 if any(key.startswith("WRONG") for key in counts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
