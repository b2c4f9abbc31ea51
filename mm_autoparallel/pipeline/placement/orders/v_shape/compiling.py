"""Compile the kernels of this room before any clock runs, where this machine never did; Vs alone need them."""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import list_pieces
from mm_autoparallel.pipeline.placement.orders.v_shape.run import VSearch
from mm_autoparallel.pipeline.placement.orders.v_shape.space import Space
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.rooms import compile_rooms


def compile_v() -> None:
    """Compile them, or wait for a process that does; standard error says why."""
    compile_rooms(V_ORDERS)


def _compile() -> None:
    chain = (ChainBlock("layer", "text", 2, 1.0, 2.0, 1.0, 1.0, backward_weight_ms=1.0),)
    ones = (0.0,)
    problem = Problem(1, 2, 1, "free", chain, (9.0,), ones, ones, ones, ones)
    space = Space(list_pieces(cut_into_segments(problem), np.inf, lambda: False), np.inf)
    nothing_ms = 0.0  # no order is below it, so local search has its runs
    VSearch(problem, space, nothing_ms, lambda: False, lambda *_: None, nothing_ms, 0.0).search()


V_ORDERS = (_compile,)
"""Rooms whose kernels free orders of two chunks a stage run."""
