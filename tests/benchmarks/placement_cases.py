"""Step, bound and time of every known-answer case, or of drawn ones, printed; nothing is asserted here.

    python tests/benchmarks/placement_cases.py [NAME ...] [--limit SECONDS]
    python tests/benchmarks/placement_cases.py --drawn N [--seed S] [--limit SECONDS]

Cases and their sources are in tests/fixtures/known_answers, the drawing in drawn_pipelines.py. `program` is the time of
the published mixed-integer program, which refuses fewer micro-batches than stages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "placement"))

from drawn_pipelines import drawn_problem
from known_cases import fixture, large_case, multimodal_case, taylor_case

from mm_autoparallel.pipeline.placement import compile_kernels, place
from mm_autoparallel.pipeline.problem import Problem

TIME_LIMIT_S = {"p64_v1_m1024_n200": 60.0}
OPEN_TIME_LIMIT_S, DRAWN_TIME_LIMIT_S = 10.0, 20.0


def known_cases() -> Iterator[tuple[str, Problem, float | None, float | None, bool]]:
    """Name, problem, known step and time of the published program of each, and whether it is the multimodal one."""
    cases = [(name, taylor_case) for name in fixture("taylor")["cases"]]
    cases += [(name, multimodal_case) for name in fixture("mindspeed_mm_milp")["cases"]]
    cases += [(name, large_case) for name in fixture("large")["cases"]]
    for name, load in cases:
        problem, case = load(name)
        known = case.get("best_step", case.get("best_step_ms"))
        program_s = case.get("milp_seconds", case.get("milp", {}).get("seconds"))
        yield name, problem, known, program_s, load is multimodal_case


def main() -> None:
    parser = argparse.ArgumentParser(description="Step, bound and time of placement cases.")
    parser.add_argument("names", nargs="*", help="of known cases; all where none is named")
    parser.add_argument("--drawn", type=int, metavar="N", help="N drawn pipelines of several chunks in their place")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of wall time; 10 but for the largest, or 20")
    arguments = parser.parse_args()
    if arguments.drawn is not None and arguments.names:
        parser.error("drawn cases have no names: leave out --drawn, or the names")
    compile_kernels()
    if arguments.drawn is not None:
        numbers = range(arguments.drawn)
        cases = ((f"drawn-{arguments.seed}-{n}", drawn_problem(arguments.seed, n), None, None, False) for n in numbers)
    else:
        cases = (case for case in known_cases() if not arguments.names or case[0] in arguments.names)
    usual_s = OPEN_TIME_LIMIT_S if arguments.drawn is None else DRAWN_TIME_LIMIT_S
    speedups = []
    columns = f"{'gap':>9} {'status':9} {'proof':8} {'s':>6} {'CPU s':>6} {'program, s':>10}"
    print(f"{'case':20} {'step':>12} {'known':>12} {columns}")
    for name, problem, known, program_s, is_multimodal in cases:
        began_s = time.process_time()
        result = place(problem, time_limit_s=arguments.limit or TIME_LIMIT_S.get(name, usual_s))
        spent_s = time.process_time() - began_s
        if is_multimodal and program_s is not None:
            speedups.append(program_s / result.solve_s)
        print(
            f"{name:20} {result.step_ms:12.3f} {known if known is not None else '':>12} {result.gap_fraction:9.1e} "
            f"{result.status:9} {result.proof:8} {result.solve_s:6.2f} {spent_s:6.2f} "
            f"{program_s if program_s is not None else '':>10}",
            flush=True,
        )
    if speedups:
        print(f"times faster than the multimodal program: median {statistics.median(speedups):.0f}")


if __name__ == "__main__":
    main()
