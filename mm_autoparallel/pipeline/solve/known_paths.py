"""Path cuts that tasks of one engine found: each is a path of every problem whose schedule has the same graph."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes

#: Graphs whose cuts are kept, and cuts of each, at most: the first of them and the latest (assumed).
MOST_GRAPHS, MOST_CUTS = 64, 256

Graph = tuple[object, ...]


class KnownPaths:
    """What a task leaves to those after it: the same problem with more time, or with less memory."""

    def __init__(self) -> None:
        self._of: OrderedDict[Graph, tuple[Cut, ...]] = OrderedDict()

    def of(self, problem: Problem) -> tuple[Cut, ...]:
        """Those of its graph."""
        return self._of.get(_graph_of(problem), ())

    def keep(self, problem: Problem, cuts: tuple[Cut, ...]) -> None:
        """Take what a task ended with, in place of what it began with."""
        if not cuts or problem.encoders:
            return
        if len(cuts) > MOST_CUTS:
            cuts = cuts[: MOST_CUTS // 2] + cuts[-MOST_CUTS // 2 :]
        graph = _graph_of(problem)
        self._of[graph] = tuple(replace(cut, placement=None) for cut in cuts)  # which is none of another problem
        self._of.move_to_end(graph)
        if len(self._of) > MOST_GRAPHS:
            self._of.popitem(last=False)


def _graph_of(problem: Problem) -> Graph:
    of = (problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return (*of, microbatch_classes(problem)[0], problem.orders)
