"""Step, bound and time of every known-answer case, printed; nothing is asserted here.

    python tests/benchmarks/placement_cases.py [NAME ...]

Cases and their sources are in tests/fixtures/known_answers. `program` is the time of the published mixed-integer
program, which refuses fewer micro-batches than stages.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "placement"))

from known_cases import fixture, large_case, multimodal_case, taylor_case

from mm_autoparallel.pipeline.placement import compile_kernels, place

TIME_LIMIT_S = {"p64_v1_m1024_n200": 60.0}
OPEN_TIME_LIMIT_S = 10.0


def main() -> None:
    compile_kernels()
    cases = [(name, taylor_case) for name in fixture("taylor")["cases"]]
    cases += [(name, multimodal_case) for name in fixture("mindspeed_mm_milp")["cases"]]
    cases += [(name, large_case) for name in fixture("large")["cases"]]
    speedups = []
    print(f"{'case':20} {'step':>12} {'known':>12} {'gap':>9} {'status':9} {'s':>6} {'program, s':>10}")
    for name, load in cases:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        problem, case = load(name)
        result = place(problem, time_limit_s=TIME_LIMIT_S.get(name, OPEN_TIME_LIMIT_S))
        program_s = case.get("milp_seconds", case.get("milp", {}).get("seconds"))
        if load is multimodal_case and program_s is not None:
            speedups.append(program_s / result.solve_s)
        known = case.get("best_step", case.get("best_step_ms"))
        print(
            f"{name:20} {result.step_ms:12.3f} {known if known is not None else '':>12} {result.gap_fraction:9.1e} "
            f"{result.status:9} {result.solve_s:6.2f} {program_s if program_s is not None else '':>10}",
            flush=True,
        )
    if speedups:
        print(f"times faster than the multimodal program: median {statistics.median(speedups):.0f}")


if __name__ == "__main__":
    main()
