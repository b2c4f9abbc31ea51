"""CP-SAT with critical-path cuts: the loop that makes the master exact.

Master → simulate its placement → add the critical path found as a cut → again, until the master can show no placement
below the best step: then that step is optimal for the simulator itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.cuts.model import (
    Master,
    add_cut,
    build_master,
    forbid,
    read_placement,
    run_blocks,
)
from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut, cut_of_timeline
from mm_autoparallel.pipeline.placement.limits import limit_memory, limit_stage_host, limit_stage_memory
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import ChainBlock, Placement
from mm_autoparallel.pipeline.simulate.loads import (
    find_misfits,
    overfull_hosts,
    overfull_stages,
    peak_bytes,
    peak_host_bytes,
    sum_loads,
)
from mm_autoparallel.pipeline.simulate.step import simulate

#: Placements better than the best by less than this are not looked for: what rounding times down can hide.
PROOF_TOLERANCE = 2e-6
#: What a stage holds at most, in integers, where its memory may be exceeded.
EXCESS_UNITS = 2**29


@dataclass(frozen=True, eq=False)
class CutResult:
    """lower_bound_ms holds for every placement. exhausted: none is better than the best by more than the gap."""

    lower_bound_ms: float
    exhausted: bool
    cuts: list[Cut]


def solve_with_cuts(
    segments: Segments,
    upper_ms: float,
    first_cuts: list[Cut],
    solver_s: float,
    gap_fraction: float,
    should_stop: Callable[[], bool],
    left_s: Callable[[], float],
    offer: Callable[[Placement], object],
) -> CutResult:
    """The loop of the module's first lines, below a step that is already reached (or that limits the interest).

    first_cuts: cuts to begin with. solver_s: deterministic time of the solver in all. gap_fraction: how close to the
    best the proof may end. offer: called with every placement found; the caller simulates and keeps the best.
    """
    problem = segments.problem
    master = build_master(segments, upper_ms)
    limit_memory(master)
    cuts = list(first_cuts)
    for cut in cuts:
        add_cut(master, cut.path)
    keep = 1.0 - max(gap_fraction, PROOF_TOLERANCE)
    best_ms, lower, spent_s = upper_ms, 0.0, 0.0
    while not should_stop() and spent_s < solver_s:
        solver = _solver(solver_s - spent_s, left_s())
        master.model.add(master.step <= math.floor(best_ms * keep / master.step_unit_ms))
        status = _solve(solver, master.model, should_stop)
        spent_s += solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return CutResult(best_ms * keep, True, cuts)
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"the placement model is invalid: {master.model.validate()}")
        lower = max(lower, min(solver.best_objective_bound * master.step_unit_ms, best_ms * keep))
        if status == cp_model.UNKNOWN:
            break
        placement = read_placement(master, solver)
        timeline = simulate(problem, placement)
        over = find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        for stage in over:
            forbid(master, solver, stage)
        if not over and timeline.step_ms < best_ms:
            best_ms = timeline.step_ms
            offer(placement)
        cuts.append(cut_of_timeline(timeline, placement))
        add_cut(master, timeline.critical_path)
        _hint(master, solver)
    return CutResult(lower, False, cuts)


def minimise_overflow(
    segments: Segments,
    should_stop: Callable[[], bool],
    left_s: Callable[[], float],
    soft: Literal["device", "host", "host alone"] = "device",
    solver_s: float = 60.0,
) -> tuple[Placement | None, bool]:
    """The placement whose worst stage exceeds one memory least, within the other, and whether it is proven that every
    placement exceeds one of them; None where none was found within the other (proven: there is none).

    soft: the one that may be exceeded; `host alone` leaves the device's out. solver_s: deterministic time. What the
    solver's rounding lets slip is cut off one by one, so what is proven holds to the byte.
    """
    problem = segments.problem
    master = build_master(segments, math.inf)
    blocks = [run_blocks(segments, r) for r in range(len(segments.run_size))]
    limit = limit_stage_memory if soft == "device" else limit_stage_host
    limit_other = {"device": limit_stage_host, "host": limit_stage_memory}.get(soft)
    unit = _overflow_unit(segments, soft)
    excess = master.model.new_int_var(0, EXCESS_UNITS, "excess")
    for s in range(problem.num_stages):
        limit(master, blocks, s, excess, unit)
        if limit_other is not None:
            limit_other(master, blocks, s)
    master.model.minimize(excess)
    least: tuple[float, Placement] | None = None
    while True:
        solver = _solver(solver_s, left_s())
        status = _solve(solver, master.model, should_stop)
        solver_s -= solver.response_proto.deterministic_time
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"the placement model is invalid: {master.model.validate()}")
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return least[1] if least else None, status == cp_model.INFEASIBLE
        placement = read_placement(master, solver)
        loads = sum_loads(problem, placement)
        device, host = peak_bytes(problem, loads), peak_host_bytes(problem, loads)
        over, over_host = overfull_stages(problem, device), overfull_hosts(problem, host)
        exceeded, slipped = (over, over_host) if soft == "device" else (over_host, over if soft == "host" else [])
        if not slipped:
            if not exceeded:
                return placement, False
            limits = problem.memory_limit_bytes if soft == "device" else problem.host_limit_bytes
            most = float(np.max((device if soft == "device" else host) - np.array(limits)))
            if least is None or most < least[0]:
                least = (most, placement)
            if solver.best_objective_bound >= 1.0 or status == cp_model.FEASIBLE or solver_s <= 0.0:
                return least[1], solver.best_objective_bound >= 1.0
        for stage in {*slipped, *exceeded}:
            forbid(master, solver, stage)


def _overflow_unit(segments: Segments, soft: Literal["device", "host", "host alone"]) -> float:
    """Bytes so large that what all stages hold together, and each limit, are at most EXCESS_UNITS."""
    problem = segments.problem
    if soft == "device":
        everything = sum(
            b.count * (b.static_bytes + problem.num_microbatches * _most_kept_bytes(b) + b.transient_bytes)
            + max((b.count * mode.restored_bytes for mode in b.modes), default=0.0)
            + b.count * (b.step_bytes + b.shard_bytes)
            + b.step_once_bytes
            for b in problem.chain
        )
        largest = max(*problem.memory_limit_bytes, *problem.stage_static_bytes)
    else:
        everything = sum(
            b.count
            * (b.host_static_bytes + problem.num_microbatches * max((mode.host_bytes for mode in b.modes), default=0.0))
            for b in problem.chain
        )
        largest = max(problem.host_limit_bytes)
    return max(largest + everything, 1.0) / EXCESS_UNITS


def _most_kept_bytes(block: ChainBlock) -> float:
    """Of one micro-batch, in no mode or in the one that keeps most."""
    return max(block.activation_bytes, block.pending_bytes, *(mode.activation_bytes for mode in block.modes))


def _solver(deterministic_s: float, left_s: float) -> cp_model.CpSolver:
    """One worker and a fixed seed: the same model gives the same answer in every process."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.search_branching = cp_model.PORTFOLIO_SEARCH
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.catch_sigint_signal = False  # the one handler there is belongs to the program, not to the solver
    solver.parameters.max_deterministic_time = max(deterministic_s, 0.01)
    if math.isfinite(left_s):
        solver.parameters.max_time_in_seconds = max(left_s, 0.01)
    return solver


def _hint(master: Master, solver: cp_model.CpSolver) -> None:
    master.model.clear_hints()  # type: ignore[no-untyped-call]
    for row in master.count:
        for n in row:
            master.model.add_hint(n, solver.value(n))


def _solve(solver: cp_model.CpSolver, model: cp_model.CpModel, should_stop: Callable[[], bool]) -> int:
    """Solve in a worker thread, so that a signal handled by the main one ends it at once."""
    status: list[int] = []
    worker = threading.Thread(target=lambda: status.append(int(solver.solve(model))), daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(timeout=0.05)
        if should_stop():
            solver.stop_search()
    return status[0]
