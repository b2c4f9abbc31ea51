"""find_outliers: measured steps that the same run with smaller micro-batches contradicts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from mm_autoparallel.measurements.case import MeasuredCase


def find_outliers(cases: Sequence[MeasuredCase]) -> tuple[int, ...]:
    """The rows that took longer than a run that differs in a smaller micro-batch alone, the bubble taken out of both.

    Larger micro-batches do the same work in fewer and larger operators and messages: where they were slower, something
    beside the configuration slowed them (a node, a neighbour on the network), or sped up the other. Taken out is the
    pipeline's filling and draining, (PP - 1) / VPP of its micro-batches (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).
    """
    runs: dict[Hashable, list[tuple[int, float, int]]] = {}
    for case in cases:
        if case.measured_ms is not None:
            strategy, num_microbatches = case.plan.strategy, case.plan.num_microbatches
            filling = (strategy.pp - 1) / strategy.vpp
            busy_ms = case.measured_ms * num_microbatches / (num_microbatches + filling)
            runs.setdefault(_all_but_micro_batch(case), []).append((strategy.mbs, busy_ms, case.row))
    return tuple(
        sorted(
            row
            for points in runs.values()
            for mbs, busy_ms, row in points
            if any(smaller < mbs and other_ms < busy_ms for smaller, other_ms, _ in points)
        )
    )


def _all_but_micro_batch(case: MeasuredCase) -> Hashable:
    plan = case.plan
    laid = tuple((modality, plan.layers[modality], plan.recompute[modality]) for modality in sorted(plan.layers))
    return case.job.sha256, case.software, replace(plan.strategy, mbs=1), laid
