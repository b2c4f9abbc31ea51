"""`place PROBLEM.json`: the pipeline alone, for people who bring their own numbers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import seconds
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import Interrupted, NoFeasiblePlan, Unfinished
from mm_autoparallel.reports.terminal import Progress, check_writable, say, writing
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import format_ms

if TYPE_CHECKING:
    from mm_autoparallel.placement.result import PlacementResult
    from mm_autoparallel.problem import Problem

HELP = "place the layers of a pipeline whose costs are given"
DESCRIPTION = (
    "Choose how many layers of each kind every stage holds and recomputes, so that the step is shortest within the "
    "memory limits; and say how much shorter it could be at most."
)
SCHEMA = "mm-autoparallel/placement/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json")
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="end with the best so far after S seconds")
    parser.add_argument("--certificate", type=Path, metavar="OUT.json", help="write the proof for `verify`")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Place, print, write the certificate. Without a placement the exit code says why there is none."""
    from mm_autoparallel.problem_file import read_problem

    problem = read_problem(arguments.problem)
    if arguments.certificate is not None:
        check_writable(arguments.certificate)

    from mm_autoparallel.placement import compile_kernels
    from mm_autoparallel.placement.place import place

    compile_kernels()
    progress = Progress()
    with stop_on_signal() as stop:
        try:
            result = place(
                problem,
                time_limit_s=arguments.time_limit,
                should_stop=stop.is_set,
                on_better=lambda step_ms, _: progress.show(f"best so far: {format_ms(step_ms)}"),
            )
        finally:
            progress.close()
    if arguments.certificate is not None and result.placement is not None:
        from mm_autoparallel.placement.proof.certificate import write_certificate

        with writing(arguments.certificate):
            write_certificate(arguments.certificate, problem, result)
    if arguments.json:
        print_document(placement_document(problem, result))
    else:
        _print_tables(problem, result)
    if result.placement is not None:
        return 0
    if result.status == "infeasible":
        return NoFeasiblePlan.exit_code
    return Interrupted.exit_code if stop.is_set() else Unfinished.exit_code


def placement_document(problem: Problem, result: PlacementResult) -> dict[str, Any]:
    """What `--json` prints. Without a placement its figures are null and `reason` says why there is none."""

    def nested(of_virtual_stage: tuple[tuple[int, ...], ...], block: int) -> list[Any]:
        counts = [row[block] for row in of_virtual_stage]
        chunks = [counts[k : k + problem.num_stages] for k in range(0, len(counts), problem.num_stages)]
        return counts if problem.num_chunks == 1 else chunks

    placement = result.placement
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "status": result.status,
        "step_ms": _finite(result.step_ms),
        "lower_bound_ms": _finite(result.lower_bound_ms),
        "gap_fraction": result.gap_fraction if placement is not None else None,
        "solve_s": round(result.solve_s, 3),
        "num_cuts": result.num_cuts,
        "num_bounds": result.num_bounds,
        "proof": result.proof,
    }
    if placement is None:
        return document | {
            "layers": None,
            "recompute": None,
            "peak_memory_bytes": None,
            "reason": result.reason or "stopped before a placement was found, which does not mean that there is none",
        }
    from mm_autoparallel.problem import RECOMPUTE, counts_in_mode

    def of_mode(name: str, e: int) -> list[Any]:
        return nested(counts_in_mode(problem, placement, name), e)

    others = {
        block.name: {mode.name: of_mode(mode.name, e) for mode in block.modes}
        for e, block in enumerate(problem.chain)
        if any(mode.name != RECOMPUTE for mode in block.modes)
    }
    return (
        document
        | {
            "layers": {block.name: nested(placement.layers, e) for e, block in enumerate(problem.chain)},
            "recompute": {block.name: of_mode(RECOMPUTE, e) for e, block in enumerate(problem.chain)},
        }
        | ({"modes": others} if others else {})
        | {"peak_memory_bytes": [math.ceil(peak) for peak in result.peak_memory_bytes]}
        | ({"host_bytes": [math.ceil(peak) for peak in result.peak_host_bytes]} if any(result.peak_host_bytes) else {})
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print_tables(problem: Problem, result: PlacementResult) -> None:
    if result.placement is None or result.timeline is None:
        document = placement_document(problem, result)
        say(f"{'nothing feasible' if result.status == 'infeasible' else 'nothing found'}: {document['reason']}")
        return
    from mm_autoparallel.reports.console import print_rich
    from mm_autoparallel.reports.tables import stage_table, time_table

    print_rich(time_table(result.timeline))
    print_rich(stage_table(problem, result.placement, result.timeline, rows="name"))
    print_line(
        f"{result.status}: {result.step_ms:.3f} ms a step; no placement is below {result.lower_bound_ms:.3f} ms "
        f"(gap {result.gap_fraction * 100:.3f} %), found in {result.solve_s:.2f} s"
    )
