"""Fractional placements: a bound of all placements by a linear program over parts of layers, with path cuts.

A placement is counts of blocks, of each virtual stage, block and mode. The program lets them be any numbers that keep
the memory of every stage, and of its host, in every state of its schedule, give each chunk a layer, and add up; their
order along the chain is left open. It minimises a step that is at least as long as each of a growing list of paths (as
`cpsat` does over whole layers). Which path is missing, the simulator says, played on the program's times and between
them and the best seen so far (the cutting planes of Kelley 1960, in and out as Ben-Ameur & Neto 2007 have it).

What the solver says is not trusted: its prices of paths, bytes and counts are made into a bound by a sum of its own,
which holds whatever the prices are (Lagrange): the step of the weighted mean of paths, less the price of all room, with
every block where it is cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut, cut_of_times, stage_cuts
from mm_autoparallel.pipeline.placement.relaxation.columns import find_main, least_transient_bytes, list_columns
from mm_autoparallel.pipeline.placement.relaxation.duals import Prices
from mm_autoparallel.pipeline.placement.relaxation.linear_solver import pywraplp
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes, graph_of, microbatch_classes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Times of virtual stages in all classes of micro-batches beyond which the program grows too slow (assumed).
MAX_TIMES = 1_024
#: The program's step and the simulated one may differ by this before no more paths are looked for.
CLOSE_FRACTION = 2e-4
#: A bound this share of the target is near it (assumed).
NEAR_FRACTION = 0.98
#: Solves end early where the last LOOK_BACK of them brought less than this share of what is missing (assumed).
LOOK_BACK, SLOW_FRACTION = 4, 0.2
#: The program counts memory in this part of the largest limit, and overlooks so many of it: no matter for the bound.
MEMORY_UNIT_FRACTION, MEMORY_TOLERANCE = 1.0 / 64.0, 1e-6
#: The price of a unit that does not fit, as a share of a stage's mean work: above what modes cost for it (assumed).
OVERFLOW_FRACTION = 0.1
#: Shares of the program's times where, beside the program's own, a path is looked for between them and the best seen.
SHARES = (0.3, 0.7)
#: Of the solver: new paths leave its last basis dual feasible, and preprocessing would forget it.
PARAMETERS = "use_preprocessing: false use_dual_simplex: true"
#: How it goes about it, and how where that leads nowhere.
USUAL = "use_scaling: true perturb_costs_in_dual_simplex: false"
OTHER = "use_scaling: false perturb_costs_in_dual_simplex: true"
#: Iterations of a solve at most, for each variable and row: plans of 72B needed 1.2, and one that cycles needs all.
ITERATIONS_EACH = 20
#: Far above the rounding of sums, far below what matters; always to the side that keeps a bound true.
ROUNDING_FRACTION = 1e-9
#: The same of a sum of terms that cancel, as a fraction of their sizes.
CANCELLED_FRACTION = 1e-12


class Unrelaxable(Exception):
    """The program would be too large, or the solver finds no solution."""


@dataclass(frozen=True, eq=False)
class Limits:
    """Least and most blocks of the main kind on each stage [P] and in each virtual stage [K]."""

    stage_least: Ints
    stage_most: Ints
    virtual_least: Ints
    virtual_most: Ints


class FractionalMaster:
    """The program of one problem. It keeps its paths between solves, so that those with other limits begin from them.

    main: the block with the most work, whose counts can be limited. counts: [n] of the latest solution. prices: of the
    latest bound. cuts: its paths. num_iterations: of the solver in all; a measure of work that repeats exactly.
    """

    def __init__(self, problem: Problem, ceiling_ms: float, known: Sequence[Cut] = ()) -> None:
        """ceiling_ms: only placements below it are bounded. known: paths of the same graph, which it begins with.

        Raises Unrelaxable.
        """
        self.problem, self.graph = problem, graph_of(problem)
        num_stages, num_virtual = problem.num_stages, problem.num_virtual_stages
        classes, self._scales = microbatch_classes(problem)
        if num_virtual * self.graph.num_classes > MAX_TIMES:
            raise Unrelaxable
        self.main = find_main(problem)
        self.columns = list_columns(problem, self._scales)
        self.counts = np.zeros(len(self.columns.virtual))
        self.prices: Prices | None = None
        self.num_iterations = 0
        self._stage_of_row = np.repeat(np.arange(num_stages), [len(rows) for rows in self.graph.in_flight])
        room = allowed_bytes(problem) * (1.0 + ROUNDING_FRACTION) - np.array(problem.stage_static_bytes)
        self._unit_bytes = MEMORY_UNIT_FRACTION * max(*problem.memory_limit_bytes, 1.0)
        self._room_bytes = (room - least_transient_bytes(problem, bool(classes), ceiling_ms))[self._stage_of_row]
        of_stage, of_chunk = self.columns.virtual % num_stages, self.columns.virtual // num_stages
        in_flight = np.concatenate(self.graph.in_flight)[:, of_chunk]
        held = in_flight * self.columns.activation_bytes + self.columns.held_bytes
        if problem.host_limit_bytes:
            held = np.concatenate([held, in_flight * self.columns.host_bytes + self.columns.host_held_bytes])
            host_room = allowed_host_bytes(problem) * (1.0 + ROUNDING_FRACTION)
            self._room_bytes = np.concatenate([self._room_bytes, host_room[self._stage_of_row]])
            self._stage_of_row = np.tile(self._stage_of_row, 2)
        # [rows, n] bytes of one of each, 0 on other stages; rows of devices, then those of hosts
        self._bytes = np.where(self._stage_of_row[:, None] == of_stage, held, 0.0)
        least_output = min(block.output_bytes for block in problem.chain)
        hops = np.zeros(num_virtual - 1)
        if num_stages > 1:
            hops = np.array(problem.p2p_ms) + np.array(problem.p2p_ms_per_byte) * least_output
        back = hops * all(block.sends_gradient for block in problem.chain)
        self._hops_ms = np.concatenate([hops, back, [0.0]])
        self._build()
        for cut in (*stage_cuts(problem), *known):
            self._add(cut)

    # ------------------------------------------------------------------------------------------------------- building

    def _build(self) -> None:
        solver = pywraplp.Solver.CreateSolver("GLOP")
        problem, columns, infinity = self.problem, self.columns, solver.infinity()
        num_stages, num_virtual, num_classes = problem.num_stages, problem.num_virtual_stages, self.graph.num_classes
        of_stage = columns.virtual % num_stages
        self._solver = solver
        self._step = solver.NumVar(0.0, infinity, "step")
        self._variables = [solver.NumVar(0.0, infinity, "") for _ in columns.virtual]
        self._times = [solver.NumVar(0.0, infinity, "") for _ in range(2 * num_virtual * num_classes)]
        self._tails = [solver.NumVar(0.0, infinity, "") for _ in range(num_stages)]

        def rows(number: int, least: float, most: float) -> list[pywraplp.Constraint]:
            return [solver.Constraint(least, most) for _ in range(number)]

        most_layers = float(problem.max_layers_per_chunk or infinity)
        self._totals = [solver.Constraint(float(b.count), float(b.count)) for b in problem.chain]
        self._layers = rows(num_virtual, 1.0, most_layers)
        self._compute, self._host = rows(len(self._times), 0.0, infinity), rows(len(self._times), 0.0, infinity)
        self._ends = [solver.Constraint(tail_ms, infinity) for tail_ms in problem.stage_tail_ms]
        self._memory: dict[int, pywraplp.Constraint] = {}
        self._of_stage, self._of_virtual = rows(num_stages, 0.0, infinity), rows(num_virtual, 0.0, infinity)
        for i, variable in enumerate(self._times):
            self._compute[i].SetCoefficient(variable, 1.0)
            self._host[i].SetCoefficient(variable, 1.0)
        for s, variable in enumerate(self._tails):
            self._ends[s].SetCoefficient(variable, 1.0)
        for n, variable in enumerate(self._variables):
            k, s = int(columns.virtual[n]), int(of_stage[n])
            self._totals[columns.block[n]].SetCoefficient(variable, 1.0)
            if columns.is_layer[n]:
                self._layers[k].SetCoefficient(variable, 1.0)
            if columns.block[n] == self.main:
                self._of_stage[s].SetCoefficient(variable, 1.0)
                self._of_virtual[k].SetCoefficient(variable, 1.0)
            for c in range(num_classes):
                for begin, times_ms in ((0, columns.forward_ms), (num_virtual * num_classes, columns.backward_ms)):
                    self._compute[begin + k * num_classes + c].SetCoefficient(variable, -float(times_ms[n, c]))
                    if columns.host_ms[n, c] > 0.0:
                        self._host[begin + k * num_classes + c].SetCoefficient(variable, -float(columns.host_ms[n, c]))
            if columns.tail_ms[n] > 0.0:
                self._ends[s].SetCoefficient(variable, -float(columns.tail_ms[n]))
        # what does not fit costs much, so that there is always a solution
        price_ms = sum(b.count * (b.forward_ms + b.backward_ms) for b in problem.chain) * problem.num_microbatches
        price_ms *= OVERFLOW_FRACTION / num_stages
        self._over = [solver.NumVar(0.0, infinity, "") for _ in range(num_stages)]
        for variable in self._over:
            solver.Objective().SetCoefficient(variable, max(price_ms, 1.0))
        solver.Objective().SetCoefficient(self._step, 1.0)
        solver.Objective().SetMinimization()
        self.cuts: list[Cut] = []
        self._paths: list[pywraplp.Constraint] = []
        self._path_counts: list[Floats] = []
        self._path_ends: list[int] = []
        self._path_hops_ms: list[float] = []

    def _add_memory(self) -> bool:
        """Of each stage the state of the schedule whose memory the latest solution exceeds most; whether one does."""
        num_before = len(self._memory)
        for s in range(self.problem.num_stages):
            mine = np.flatnonzero(self._stage_of_row == s)
            r = int(mine[self._excess[mine].argmax()])
            if self._excess[r] <= MEMORY_TOLERANCE or r in self._memory:
                continue
            row = self._memory[r] = self._solver.Constraint(
                -self._solver.infinity(), float(self._room_bytes[r] / self._unit_bytes)
            )
            row.SetCoefficient(self._over[s], -1.0)
            for n in np.flatnonzero(self._bytes[r]).tolist():
                row.SetCoefficient(self._variables[n], float(self._bytes[r, n] / self._unit_bytes))
        return len(self._memory) > num_before

    def _add(self, cut: Cut) -> None:
        path = cut.path
        counts = np.concatenate([path.forward.ravel(), path.backward.ravel()]).astype(np.float64)
        hops_ms = float(np.concatenate([path.hop_forward, path.hop_backward]) @ self._hops_ms[:-1])
        row = self._solver.Constraint(hops_ms, self._solver.infinity())
        row.SetCoefficient(self._step, 1.0)
        for i in np.flatnonzero(counts).tolist():
            row.SetCoefficient(self._times[i], -float(counts[i]))
        row.SetCoefficient(self._tails[path.end_stage], -1.0)
        self.cuts.append(cut)
        self._paths.append(row)
        self._path_counts.append(counts)
        self._path_ends.append(path.end_stage)
        self._path_hops_ms.append(hops_ms)

    # -------------------------------------------------------------------------------------------------------- solving

    def bound(
        self,
        limits: Limits,
        target_ms: float,
        max_rounds: int,
        far_rounds: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> float:
        """No placement within `limits` is below it, in ms.

        It ends once target_ms is reached, or paths are no longer missing, or after max_rounds solves; after far_rounds
        where the bound is then far from target_ms. Raises Unrelaxable.
        """
        for row, least, most in zip(self._of_stage, limits.stage_least, limits.stage_most, strict=True):
            row.SetBounds(float(least), float(most))
        for row, least, most in zip(self._of_virtual, limits.virtual_least, limits.virtual_most, strict=True):
            row.SetBounds(float(least), float(most))
        best_ms, self.prices = 0.0, None
        history_ms: list[float] = []
        reached: tuple[float, Floats, Floats] | None = None  # the least played step, and its times
        for n in range(max_rounds):
            step_ms = self._solve()
            bound_ms, prices = self._lagrange(limits)
            if bound_ms > best_ms:
                best_ms, self.prices = bound_ms, prices
            times_ms = np.maximum([v.solution_value() for v in self._times], 0.0)
            tails_ms = np.maximum([v.solution_value() for v in self._tails], 0.0)
            is_far = n + 1 >= far_rounds and best_ms < NEAR_FRACTION * target_ms
            if is_far or best_ms >= target_ms or should_stop():
                break
            history_ms.append(best_ms)
            if len(history_ms) > LOOK_BACK:
                gained_ms = best_ms - history_ms[-1 - LOOK_BACK]
                if gained_ms < SLOW_FRACTION * (target_ms - best_ms) and np.isfinite(target_ms):
                    break
            points = [(times_ms, tails_ms)]
            if reached is not None:
                points += [(a * times_ms + (1 - a) * reached[1], a * tails_ms + (1 - a) * reached[2]) for a in SHARES]
            for times_ms, tails_ms in points:
                cut = cut_of_times(self.problem, times_ms, self._hops_ms, tails_ms)
                counts = np.concatenate([cut.path.forward.ravel(), cut.path.backward.ravel()])
                hop_counts = np.concatenate([cut.path.hop_forward, cut.path.hop_backward, [0.0]])
                played_ms = counts @ times_ms + hop_counts @ self._hops_ms + tails_ms[cut.path.end_stage]
                if reached is None or played_ms < reached[0]:
                    reached = (played_ms, times_ms, tails_ms)
                self._add(cut)
            if not self._add_memory() and reached is not None and step_ms >= reached[0] * (1.0 - CLOSE_FRACTION):
                break
        return best_ms * (1.0 - ROUNDING_FRACTION)

    def _solve(self) -> float:
        """The program's step in ms; its counts are kept, and what they exceed memory by. Raises Unrelaxable."""
        most = ITERATIONS_EACH * (self._solver.NumVariables() + self._solver.NumConstraints())
        parameters = f"{PARAMETERS} max_number_of_iterations: {most}"
        self._solver.SetSolverSpecificParametersAsString(f"{parameters} {USUAL}")
        status = self._solver.Solve()
        self.num_iterations += self._solver.iterations()
        if status != pywraplp.Solver.OPTIMAL:  # the basis that it went on from leads nowhere: begin anew, another way
            afresh = pywraplp.MPSolverParameters()
            afresh.SetIntegerParam(afresh.INCREMENTALITY, afresh.INCREMENTALITY_OFF)
            self._solver.SetSolverSpecificParametersAsString(f"{parameters} {OTHER}")
            status = self._solver.Solve(afresh)
            self.num_iterations += self._solver.iterations()
        if status != pywraplp.Solver.OPTIMAL:
            raise Unrelaxable
        self.counts = np.array([v.solution_value() for v in self._variables])
        over = np.array([v.solution_value() for v in self._over])[self._stage_of_row]
        self._excess = (self._bytes @ self.counts - self._room_bytes) / self._unit_bytes - over
        return float(self._step.solution_value())

    def no_limits(self) -> Limits:
        """Limits that leave everything open."""
        num_stages, num_virtual = self.problem.num_stages, self.problem.num_virtual_stages
        most = self.problem.chain[self.main].count
        least_of_stage, least_of_virtual = np.zeros(num_stages, dtype=np.int64), np.zeros(num_virtual, dtype=np.int64)
        return Limits(least_of_stage, least_of_stage + most, least_of_virtual, least_of_virtual + most)

    def _lagrange(self, limits: Limits) -> tuple[float, Prices | None]:
        """The bound that the solver's latest prices give, by a sum of its own, and those prices."""
        problem, columns = self.problem, self.columns
        num_stages, num_virtual, num_classes = problem.num_stages, problem.num_virtual_stages, self.graph.num_classes
        weight = np.maximum([row.dual_value() for row in self._paths], 0.0)
        if weight.sum() <= 0.0:
            return 0.0, None
        weight /= weight.sum()
        used = np.flatnonzero(weight)
        passes = sum((weight[i] * self._path_counts[i] for i in used), np.zeros(len(self._times)))
        ends = np.bincount(np.array(self._path_ends)[used], weight[used], num_stages)
        fixed_ms = float(weight @ np.array(self._path_hops_ms) + ends @ np.array(problem.stage_tail_ms))
        moved = np.zeros(len(passes))
        if columns.host_ms.any():
            moved = passes - np.minimum(np.maximum([row.dual_value() for row in self._compute], 0.0), passes)
        by_column = (x.reshape(2, num_virtual, num_classes)[:, columns.virtual] for x in (passes - moved, moved))
        computes, moves = by_column
        cost_ms = (computes[0] * columns.forward_ms + computes[1] * columns.backward_ms).sum(axis=1)
        cost_ms += (moves.sum(axis=0) * columns.host_ms).sum(axis=1)
        cost_ms += ends[columns.virtual % num_stages] * columns.tail_ms
        memory_ms = {r: -row.dual_value() / self._unit_bytes for r, row in self._memory.items() if row.dual_value() < 0}
        fixed_size_ms = fixed_ms
        for r, price in memory_ms.items():
            cost_ms += price * self._bytes[r]
            fixed_ms -= price * float(self._room_bytes[r])
            fixed_size_ms += price * abs(float(self._room_bytes[r]))
        size_ms = cost_ms.copy()

        def limit(
            rows: list[pywraplp.Constraint], counted: Ints, least: Floats | Ints, most: Floats | Ints
        ) -> dict[int, float]:
            """Price counts that may not be below `least` or above `most`: counted [n] row of each column, or -1."""
            nonlocal fixed_ms, cost_ms, fixed_size_ms, size_ms
            prices = np.array([row.dual_value() for row in rows])
            prices = np.where(np.isfinite(np.where(prices > 0.0, least, most)), prices, 0.0)
            bounds = np.where(prices > 0.0, least, most)
            fixed_ms += float(prices[prices != 0.0] @ bounds[prices != 0.0])
            fixed_size_ms += float(abs(prices[prices != 0.0]) @ bounds[prices != 0.0])
            cost_ms = cost_ms - np.where(counted >= 0, prices[counted], 0.0)
            size_ms = size_ms + np.where(counted >= 0, abs(prices[counted]), 0.0)
            return _named(prices)

        is_main = columns.block == self.main
        most_layers = float(problem.max_layers_per_chunk or np.inf)
        ones = np.ones(num_virtual)
        of_stage = np.where(is_main, columns.virtual % num_stages, -1)
        prices = Prices(
            _named(weight),
            _named(moved),
            memory_ms,
            limit(self._layers, np.where(columns.is_layer, columns.virtual, -1), ones, most_layers * ones),
            limit(self._of_stage, of_stage, limits.stage_least, limits.stage_most),
            limit(self._of_virtual, np.where(is_main, columns.virtual, -1), limits.virtual_least, limits.virtual_most),
        )
        least, size = np.full(len(problem.chain), np.inf), np.zeros(len(problem.chain))
        np.minimum.at(least, columns.block, cost_ms)
        np.maximum.at(size, columns.block, size_ms)
        counts = np.array([block.count for block in problem.chain])
        cancelled_ms = CANCELLED_FRACTION * (fixed_size_ms + float(size @ counts))
        return fixed_ms + float(least @ counts) - cancelled_ms, prices


def _named(values: Floats) -> dict[int, float]:
    """Those that are not 0, by their index."""
    return {int(i): float(values[i]) for i in np.flatnonzero(values)}
