"""Confirm a bound by path cuts with a second solver: SCIP shows that no placement keeps all of them below the bound.

Mixed-integer model over chain blocks e and virtual stages k, written from the problem alone, times in floating point:

    before[k, e]    how many of block e virtual stages 0 … k-1 hold; held[k, e] = before[k+1, e] - before[k, e]
    reached[k, e]   whether before[k, e] ≥ 1; then all of block e-1 lies before k as well: the chain keeps its order
    modes[k, e, m]  how many of held[k, e] run in mode m; along a group modes only go up
    memory(s, row)  Σ static held + Σ_chunk row · (activation held - saved modes) + restored modes
                    + largest transient ≤ limit, for every row of chunks in flight
    host(s, row)    Σ host static held + Σ_chunk row · moved modes ≤ limit, likewise, where there is one
    passes[k, c]    F and B of a class of micro-batches where bytes move: at least what is computed, and what is moved
    cut(path)       Σ path forward · F + path backward · B + path hops · H + tail of its last stage ≤ bound, parts of
                    backwards likewise; a pair takes at least either pass and what the overlap leaves of the other

Every cut is a path of the schedule's graph, so a placement below the bound would keep all of them below it. Rows are
scaled to ROW_SCALE at their limit, and the solver may exceed those of memory by SLACK: it errs towards finding a
placement, and what it finds is looked at exactly. That it finds none is its word, in floating point, given twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.passes import Way, block_ms, extra_ms
from mm_autoparallel.pipeline.placement.relaxation.linear_solver import pywraplp
from mm_autoparallel.pipeline.problem import Placement, Problem, list_host_links
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import (
    Loads,
    allowed_bytes,
    allowed_host_bytes,
    find_misfits,
    graph_of,
    hop_ms,
    microbatch_classes,
    never_fits,
    peak_bytes,
    peak_host_bytes,
    sum_loads,
)
from mm_autoparallel.pipeline.simulate.step import CriticalPath, list_pairs, list_passes

ROW_SCALE = 1000.0
#: What the solver may exceed a row by: its default. With a thousandth of that it called a possible model impossible.
TOLERANCE = 1e-6
#: What it is given beyond each limit of memory, so that it errs towards finding a placement.
SLACK = 10.0 * TOLERANCE
#: Ways to go about it that must all find nothing: with the solver's own reductions, and without.
WAYS = ("randomization/randomseedshift = 1\n", "randomization/randomseedshift = 2\npresolving/maxrounds = 0\n")
#: Placements below the bound by no more than this are not told apart from it: a thousand times the solver's tolerance.
CONFIRMED_FRACTION = 1e-6

Terms = list[tuple[Any, float]]


def path_ms(path: CriticalPath, loads: Loads) -> float:
    """The length of `path` under these loads."""
    return float(
        np.sum(path.forward * loads.forward_ms)
        + np.sum(path.backward * loads.backward_ms)
        + np.sum(path.input * loads.input_ms)
        + np.sum(path.weight * loads.weight_ms)
        + path.pairs @ loads.pair_ms
        + path.hop_forward @ loads.hop_forward_ms
        + path.hop_backward @ loads.hop_backward_ms
        + loads.tail_ms[path.end_stage]
    )


def confirm_cuts(
    problem: Problem, paths: Sequence[CriticalPath], bound_ms: float, should_stop: Callable[[], bool]
) -> Placement | None:
    """A placement that fits its memory and on which every path is shorter than bound_ms, or None where there is none

    (but for CONFIRMED_FRACTION). Raises Unconfirmed where the solver cannot tell or is stopped.
    """
    if bound_ms <= 0:
        return None
    model = _Model(problem)
    model.order_chain()
    for stage in range(problem.num_stages):
        model.limit_memory(stage)
        if problem.host_limit_bytes:
            model.limit_host(stage)
    for path in paths:
        model.limit_path(path, bound_ms * (1.0 - CONFIRMED_FRACTION))
    while True:
        placement = model.solve(should_stop)
        if placement is None:
            return None
        try:
            check_placement(problem, placement)
        except PlanError as error:
            raise Unconfirmed(f"the second solver's answer is no placement of this problem: {error}") from None
        loads = sum_loads(problem, placement)
        misfits = find_misfits(problem, peak_bytes(problem, loads), peak_host_bytes(problem, loads))
        for stage in misfits:
            model.forbid_stage(placement, stage)
        if not misfits and max(path_ms(path, loads) for path in paths) < bound_ms:
            return placement
        if not misfits:  # a path is as long as the bound, but for the solver's rounding
            model.forbid(placement)


class _Model:
    """The model of the module's first lines, and its solver."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.solver = pywraplp.Solver.CreateSolver("SCIP")
        num_virtual, chain = problem.num_virtual_stages, problem.chain

        def integers(rows: int, most: Sequence[int]) -> list[list[Any]]:
            return [[self.solver.IntVar(0, m, "") for m in most] for _ in range(rows)]

        counts = [block.count for block in chain]
        self.before = integers(num_virtual + 1, counts)
        self.reached = integers(num_virtual + 1, [1] * len(chain))
        self.held = integers(num_virtual, counts)
        self.modes = [
            [[self.solver.IntVar(0, block.count, "") for _ in block.modes] for block in chain]
            for _ in range(num_virtual)
        ]
        self.passes: dict[tuple[int, Way, int], Any] = {}
        self.pairs: dict[int, Any] = {}
        self.moves_bytes = any(mode.host_bytes for block in chain for mode in block.modes)

    def _at_most(self, terms: Terms, limit: float) -> None:
        """Require Σ variable · coefficient ≤ limit; each variable once."""
        row = self.solver.Constraint(-self.solver.infinity(), limit)
        for variable, coefficient in terms:
            if coefficient:
                row.SetCoefficient(variable, coefficient)

    def order_chain(self) -> None:
        """Blocks in order, each in one place; layers, pins, attachments, recompute groups as the problem has them."""
        problem, chain = self.problem, self.problem.chain
        num_virtual = problem.num_virtual_stages
        for k, (before, reached) in enumerate(zip(self.before, self.reached, strict=True)):
            for e, block in enumerate(chain):
                self._at_most([(before[e], 1.0), (reached[e], -block.count)], 0.0)
                self._at_most([(reached[e], block.count if block.attach else 1.0), (before[e], -1.0)], 0.0)
                if k in (0, num_virtual):
                    before[e].SetBounds(block.count * (k > 0), block.count * (k > 0))
                if e == 0:
                    continue
                earlier = chain[e - 1]
                self._at_most([(reached[e], earlier.count), (before[e - 1], -1.0)], 0.0)
                if earlier.attach == "next" or block.attach == "previous":  # no chunk ends between the two
                    self._at_most([(before[e - 1], 1.0), (reached[e], -1.0)], earlier.count - 1)
        for k, (held, modes) in enumerate(zip(self.held, self.modes, strict=True)):
            num_layers: Terms = []
            for e, block in enumerate(chain):
                step = [(held[e], 1.0), (self.before[k + 1][e], -1.0), (self.before[k][e], 1.0)]
                self._at_most(step, 0.0)
                self._at_most([(variable, -sign) for variable, sign in step], 0.0)
                self._at_most([*((in_mode, 1.0) for in_mode in modes[e]), (held[e], -1.0)], 0.0)
                if (block.pinned == "first" and k > 0) or (block.pinned == "last" and k < num_virtual - 1):
                    held[e].SetUb(0)
                if block.within and not block.within[0] <= k < block.within[1]:
                    held[e].SetUb(0)
                if block.layer:
                    num_layers.append((held[e], 1.0))
            self._at_most([(variable, -1.0) for variable, _ in num_layers], -1.0)
            if problem.max_layers_per_chunk is not None:
                self._at_most(num_layers, problem.max_layers_per_chunk)
            self._modes_in_order(k)

    def _modes_in_order(self, k: int) -> None:
        """A block takes one of the first m modes only where all layers of its group before it in the chunk do."""
        groups: dict[tuple[str, str], list[int]] = {}
        for e, block in enumerate(self.problem.chain):
            if block.modes:
                groups.setdefault(block.group, []).append(e)
        for members in groups.values():
            for earlier, later in pairwise(members):
                count = self.problem.chain[earlier].count
                for m in range(1, len(self.modes[k][later]) + 1):
                    whole = self.solver.BoolVar("")
                    before = [(in_mode, -1.0) for in_mode in self.modes[k][earlier][:m]]
                    behind = [(in_mode, 1.0) for in_mode in self.modes[k][later][:m]]
                    self._at_most([(self.held[k][earlier], 1.0), *before, (whole, count)], count)
                    self._at_most([*behind, (whole, -self.problem.chain[later].count)], 0.0)

    def limit_memory(self, stage: int) -> None:
        """Whatever is in flight, with the largest transient of what the stage holds; and the optimizer's step."""
        problem, chain = self.problem, self.problem.chain
        available_bytes = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]
        unit_bytes = max(available_bytes, 1.0) / ROW_SCALE
        mine, graph = problem.virtual_stages[stage], graph_of(problem)
        present: Terms = []
        for e, block in enumerate(chain):
            if block.transient_bytes > 0:
                flag = self.solver.BoolVar("")
                present.append((flag, block.transient_bytes / unit_bytes))
                self._at_most([*((self.held[k][e], 1.0) for k in mine), (flag, -block.count)], 0.0)
        for row, rests in zip(graph.in_flight[stage].tolist(), graph.pending[stage].tolist(), strict=True):
            terms: Terms = []
            for in_flight, pending, k in zip(row, rests, mine, strict=True):
                for e, block in enumerate(chain):
                    of_layer = block.static_bytes + in_flight * block.activation_bytes + pending * block.pending_bytes
                    terms.append((self.held[k][e], of_layer / unit_bytes))
                    for in_mode, mode in zip(self.modes[k][e], block.modes, strict=True):
                        saved = in_flight * (block.activation_bytes - mode.activation_bytes)
                        terms.append((in_mode, (mode.restored_bytes - saved) / unit_bytes))
            limit = available_bytes / unit_bytes + SLACK
            for transient in [[term] for term in present] or [[]]:
                self._at_most(terms + transient, limit)
        if any(block.step_bytes for block in chain):  # the largest step_once is left to `forbid`
            each_bytes = [block.static_bytes + block.step_bytes for block in chain]
            at_step = [(self.held[k][e], each / unit_bytes) for k in mine for e, each in enumerate(each_bytes)]
            self._at_most(at_step, available_bytes / unit_bytes + SLACK)

    def limit_host(self, stage: int) -> None:
        """Whatever is in flight, with what blocks keep on the host anyway."""
        problem = self.problem
        limit_bytes = float(allowed_host_bytes(problem)[stage])
        unit_bytes = max(limit_bytes, 1.0) / ROW_SCALE
        mine = problem.virtual_stages[stage]
        for row in graph_of(problem).in_flight[stage].tolist():
            terms: Terms = []
            for in_flight, k in zip(row, mine, strict=True):
                for e, block in enumerate(problem.chain):
                    terms.append((self.held[k][e], block.host_static_bytes / unit_bytes))
                    for in_mode, mode in zip(self.modes[k][e], block.modes, strict=True):
                        terms.append((in_mode, in_flight * mode.host_bytes / unit_bytes))
            self._at_most(terms, limit_bytes / unit_bytes + SLACK)

    def limit_path(self, path: CriticalPath, bound_ms: float) -> None:
        """Require the path to be no longer than bound_ms."""
        problem, chain = self.problem, self.problem.chain
        _, scales = microbatch_classes(problem)
        unit_ms = bound_ms / ROW_SCALE
        terms: Terms = [
            (self._pair(index, unit_ms), float(path.pairs[index])) for index in np.flatnonzero(path.pairs).tolist()
        ]
        for k, stage in enumerate(problem.stage_of):
            ends_here, factor = stage == path.end_stage, problem.time_factors[stage]
            if self.moves_bytes:
                for way, passes in list_passes(path, k):
                    for c in np.flatnonzero(passes).tolist():
                        terms.append((self._pass(k, way, c, unit_ms), float(passes[c])))
                if ends_here:
                    terms += [(self.held[k][e], block.tail_ms / unit_ms) for e, block in enumerate(chain)]
                continue
            scaled = [(way, passes @ scales.T) for way, passes in list_passes(path, k)]  # [E] passes of each block
            for e, block in enumerate(chain):
                of_layer = sum(float(passes[e]) * factor * block_ms(way, block) for way, passes in scaled)
                terms.append((self.held[k][e], (of_layer + (block.tail_ms if ends_here else 0.0)) / unit_ms))
                for in_mode, mode in zip(self.modes[k][e], block.modes, strict=True):
                    added_ms = sum(float(passes[e]) * factor * extra_ms(way, mode) for way, passes in scaled)
                    terms.append((in_mode, added_ms / unit_ms))
        for k in np.flatnonzero(path.hop_forward + path.hop_backward).tolist():
            # The hop's time is that of the last block before it: the last one reached.
            earlier_ms = 0.0
            for reached, block in zip(self.reached[k + 1], chain, strict=True):
                there_ms, back_ms = hop_ms(problem, k, block)
                length_ms = float(path.hop_forward[k]) * there_ms + float(path.hop_backward[k]) * back_ms
                terms.append((reached, (length_ms - earlier_ms) / unit_ms))
                earlier_ms = length_ms
        self._at_most(terms, (bound_ms - problem.stage_tail_ms[path.end_stage]) / unit_ms)

    def _pass(self, k: int, way: Way, c: int, unit_ms: float) -> Any:
        """One pass of class c through virtual stage k, in unit_ms; a weight gradient moves no bytes."""
        if (k, way, c) not in self.passes:
            variable = self.passes[k, way, c] = self.solver.NumVar(0.0, self.solver.infinity(), "")
            problem, stage = self.problem, self.problem.stage_of[k]
            factor, link = problem.time_factors[stage], list_host_links(problem)[stage]
            computed: Terms = [(variable, -1.0)]
            moved: Terms = [(variable, -1.0)]
            for e, (block, scale) in enumerate(zip(problem.chain, microbatch_classes(problem)[1][:, c], strict=True)):
                computed.append((self.held[k][e], scale * factor * block_ms(way, block) / unit_ms))
                for in_mode, mode in zip(self.modes[k][e], block.modes, strict=True):
                    computed.append((in_mode, scale * factor * extra_ms(way, mode) / unit_ms))
                    moved.append((in_mode, scale * link * mode.host_bytes / unit_ms))
            self._at_most(computed, 0.0)
            if way != "weight":
                self._at_most(moved, 0.0)
        return self.passes[k, way, c]

    def _pair(self, index: int, unit_ms: float) -> Any:
        """One of the pairs of the problem's graph, in unit_ms."""
        if index not in self.pairs:
            variable = self.pairs[index] = self.solver.NumVar(0.0, self.solver.infinity(), "")
            places = list_pairs(self.problem)[index]
            num_classes = microbatch_classes(self.problem)[1].shape[1]
            (k, c), (other_k, other_c) = (divmod(place, num_classes) for place in places)
            forward = self._pass(k, "forward", c, unit_ms)
            backward = self._pass(other_k, "backward", other_c, unit_ms)
            left = 1.0 - self.problem.pair_overlap_fraction
            self._at_most([(variable, -1.0), (forward, 1.0), (backward, left)], 0.0)
            self._at_most([(variable, -1.0), (forward, left), (backward, 1.0)], 0.0)
        return self.pairs[index]

    def forbid(self, placement: Placement) -> None:
        """Require any other placement."""
        self._differ(placement, range(self.problem.num_virtual_stages), (-1, 1), (-1, 1))

    def forbid_stage(self, placement: Placement, stage: int) -> None:
        """Require less than `stage` holds in `placement`, or other modes if one could help: it exceeds its limit, if by
        rounding only."""
        of_modes = () if never_fits(self.problem, placement, stage) else (-1, 1)
        self._differ(placement, self.problem.virtual_stages[stage], (-1,), of_modes)

    def _differ(
        self, placement: Placement, virtual: Iterable[int], of_blocks: tuple[int, ...], of_modes: tuple[int, ...]
    ) -> None:
        """Require that some count on these virtual stages is lower (-1) or higher (1), of blocks or of modes."""
        escapes: Terms = []
        for k in virtual:
            for e, block in enumerate(self.problem.chain):
                counted = [(self.held[k][e], placement.layers[k][e], of_blocks)]
                counted += [(x, n, of_modes) for x, n in zip(self.modes[k][e], placement.modes[k][e], strict=True)]
                for variable, n, ways in counted:
                    for way in ways:
                        escape = self.solver.BoolVar("")
                        # way · variable ≥ way · n + 1 where it is taken; else any count from 0 to that of the block
                        room = block.count - n + 1.0 if way < 0 else n + 1.0
                        self._at_most([(variable, -float(way)), (escape, room)], room - 1.0 - way * n)
                        escapes.append((escape, -1.0))
        self._at_most(escapes, -1.0)

    def solve(self, should_stop: Callable[[], bool]) -> Placement | None:
        """A placement within all rows, or None where none is found in any of the solver's WAYS."""
        for way in WAYS:
            placement = self._solve(way, should_stop)
            if placement is not None:
                return placement
        return None

    def _solve(self, way: str, should_stop: Callable[[], bool]) -> Placement | None:
        """The same in one way. The solver runs in a thread, so that signals reach the main one."""
        self.solver.SetSolverSpecificParametersAsString(
            f"numerics/feastol = {TOLERANCE}\nmisc/catchctrlc = FALSE\n{way}"
        )
        afresh = pywraplp.MPSolverParameters()  # nothing of an earlier way is taken over
        afresh.SetIntegerParam(afresh.INCREMENTALITY, afresh.INCREMENTALITY_OFF)
        status: list[int] = []
        worker = threading.Thread(target=lambda: status.append(int(self.solver.Solve(afresh))), daemon=True)
        worker.start()
        stopped = False
        try:
            while worker.is_alive() and not stopped:
                worker.join(timeout=0.05)
                stopped = should_stop()
        finally:  # also on Ctrl-C
            while worker.is_alive():  # a solver that has not begun yet does not hear it the first time
                self.solver.InterruptSolve()
                worker.join(timeout=0.05)
        if status and status[0] == pywraplp.Solver.INFEASIBLE:
            return None
        if status and status[0] in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
            held = tuple(tuple(round(variable.solution_value()) for variable in row) for row in self.held)
            modes = tuple(
                tuple(tuple(round(variable.solution_value()) for variable in of_block) for of_block in row)
                for row in self.modes
            )
            return Placement(held, modes)
        raise Unconfirmed("the second solver was stopped" if stopped else "the second solver gave no answer")
