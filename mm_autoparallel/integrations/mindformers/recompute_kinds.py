"""The five kinds of recompute of a layer, as SAPP pipeline balance names them in its files.

none, select (operators that cost little), comm (exchanges between ranks), both, full. In MindFormers' lists a layer is
recomputed whole if it is among a chunk's first `recompute` layers, else it runs its selected operators again if it is
among the first `select_recompute`, its exchanges if among the first `select_comm_recompute` (mindformers, toolkit/
pipeline_balance/utils/recompute.py). One chunk can so hold layers of `select` or of `comm` alone, but not of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.pipeline.problem import RECOMPUTE

FULL, BOTH, SELECT, COMM = RECOMPUTE, "both", "select", "comm"
KINDS = (FULL, BOTH, SELECT, COMM)
"""Modes of a block, in the order in which a chunk's layers take them."""

BACKWARD_SHARE = {FULL: 0.5, BOTH: 0.165, SELECT: 0.04, COMM: 0.125}
"""What each kind adds to a layer's backward where nothing else is said, as shares of it (SAPP's defaults)."""


@dataclass(frozen=True)
class KindCounts:
    """Layers of one chunk by kind; the rest are not recomputed."""

    full: int
    both: int
    select: int
    comm: int


def count_kinds(recompute: int, select: int, comm: int) -> KindCounts:
    """What three entries of MindFormers' lists say of one chunk."""
    both = max(min(select, comm) - recompute, 0)
    return KindCounts(recompute, both, max(select - recompute - both, 0), max(comm - recompute - both, 0))
