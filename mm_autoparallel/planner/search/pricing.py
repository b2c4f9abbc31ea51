"""Pricing: what a linear program over parts of layers shows of a pipeline of several chunks before it is placed.

Other bounds count what stages hold, not which chunk holds it, and such pipelines are the dearest to place. The program
(`placement/relaxation`) raises their bound by percents in tenths of a second, which rules most of them out, or lowers
what their devices may be filled to, and so raises the bound again. It works in turns, each longer than the one before,
so that the pipeline that holds the bound of the space down always has the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

#: Iterations of each turn, for each virtual stage and block; the last one only after the pipeline was placed. Assumed.
TURNS = (0.5, 4.0)


class Pricing:
    """That of the placements of one problem. lower_bound_ms: none of them is below. num_turns: had so far. is_over: it
    says no more.
    """

    def __init__(self, problem: Problem, known: Iterable[Cut]) -> None:
        """known: paths of the same graph."""
        self._problem, self._known = problem, tuple(known)
        self._tree: FractionalTree | None = None
        self.num_turns = 0
        self.lower_bound_ms = 0.0
        self.is_over = not _is_priced(problem)

    def has_turns(self, before_placing: bool) -> bool:
        """Whether there are turns left; before_placing: without the last one."""
        return not self.is_over and self.num_turns < len(TURNS) - before_placing

    def advance(self, ceiling_ms: float, should_stop: Callable[[], bool]) -> None:
        """Have the next turn. ceiling_ms: what is not below it is of no interest."""
        from mm_autoparallel.pipeline.placement.relaxation.linear_program import Unrelaxable  # loads OR-Tools
        from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

        problem = self._problem
        size = problem.num_virtual_stages * sum(block.count for block in problem.chain)
        num_iterations = int(TURNS[self.num_turns] * size)
        self.num_turns += 1
        try:
            self._tree = self._tree or FractionalTree(problem, ceiling_ms, self._known)
            self._tree.raise_bound(ceiling_ms, num_iterations, should_stop)
        except Unrelaxable:
            self.is_over = True
        else:
            self.lower_bound_ms = max(self.lower_bound_ms, self._tree.lower_bound_ms)
            self.is_over = self._tree.exhausted

    def list_cuts(self) -> tuple[Cut, ...]:
        """The paths that its bounds rest on, for a problem of the same graph."""
        return self._tree.list_cuts() if self._tree else self._known


def _is_priced(problem: Problem) -> bool:
    """Whether the program knows its order, one of forwards and whole backwards by a rule, with several chunks."""
    if problem.num_chunks < 2 or problem.encoders or problem.orders or has_layouts(problem):
        return False
    by_rule = find_schedule(problem.schedule, problem.num_chunks).given_by == "rule"
    return by_rule and not (problem.splits or problem.pairs or problem.v_shaped)
