"""Check a certificate by other means than those that found it: the simulator, a second solver, a plain search.

Nothing here uses the solvers of `place`. The placement is played again. A bound proven by path cuts is confirmed where
the same paths are found again and SCIP shows that no placement keeps all of them below it; a bound of the pattern tree
where an own branch and bound finds no placement below it; a bound by mixtures of paths where own mixtures show that; a
bound by prices where own sums of the same prices show it of every part of the space; a bound of free orders where own
bounds and models of the orders leave nothing below it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import (
    Certificate,
    Times,
    Unconfirmed,
    Witness,
    check_method,
)
from mm_autoparallel.pipeline.placement.relaxation.duals import Proof
from mm_autoparallel.pipeline.problem import RECOMPUTE, Placement, Problem
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import (
    graph_of,
    overfull_hosts,
    overfull_stages,
    sum_loads,
)
from mm_autoparallel.pipeline.simulate.step import CriticalPath, simulate, trace_critical_path
from mm_autoparallel.units import GB

#: Steps and bounds this close are equal: sums of the same times in another order.
EQUAL_FRACTION = 1e-9
#: To what part of it a bound of free orders is confirmed: models of orders count time in whole units.
ORDERS_FRACTION = 1e-6


@dataclass(frozen=True)
class Verification:
    """What was confirmed: all that the certificate claims. lower_bound_ms is None where it claims none.

    The bound is confirmed to one part in 10^6 by cuts (what solvers' tolerances tell apart) and by orders, in 10^7 by
    prices, in 10^9 by the others; beside encoders, as that of their decoder.
    """

    step_ms: float
    lower_bound_ms: float | None
    gap_fraction: float | None
    method: Proof | Literal["beside"]
    num_cuts: int
    verify_s: float


def verify(certificate: Certificate, time_limit_s: float = np.inf) -> Verification:
    """Confirm every claim of `certificate`.

    Raises PlanError naming the claim that fails, or, where the bound is neither confirmed nor refuted within
    time_limit_s, saying that the placement was checked and the bound was not confirmed.
    """
    began = time.monotonic()

    def stop() -> bool:
        return time.monotonic() - began > time_limit_s

    _check_placement(certificate)
    if certificate.lower_bound_ms is not None:
        try:
            _check_bound(certificate, certificate.lower_bound_ms, stop)
        except Unconfirmed as reason:
            raise PlanError(
                f"placement checked, bound not confirmed: the placement fits and takes {certificate.step_ms:.6f} ms as "
                f"claimed, but whether none takes less than {certificate.lower_bound_ms:.6f} ms is left open after "
                f"{time.monotonic() - began:.1f} s: {reason}"
            ) from None
    return Verification(
        step_ms=certificate.step_ms,
        lower_bound_ms=certificate.lower_bound_ms,
        gap_fraction=certificate.gap_fraction,
        method=certificate.method,
        num_cuts=len(certificate.cuts),
        verify_s=time.monotonic() - began,
    )


def _check_placement(certificate: Certificate) -> None:
    problem = certificate.problem
    try:
        timeline = simulate(problem, certificate.placement)
    except PlanError as error:
        raise PlanError(f"placement: {error}") from None
    for stage in overfull_stages(problem, timeline.peak_memory_bytes):
        raise PlanError(
            f"placement: stage {stage} holds {timeline.peak_memory_bytes[stage] / GB:.3f} GB and its limit is "
            f"{problem.memory_limit_bytes[stage] / GB:.3f} GB, so the placement does not fit its problem"
        )
    for stage in overfull_hosts(problem, timeline.peak_host_bytes):
        raise PlanError(
            f"placement: stage {stage} keeps {timeline.peak_host_bytes[stage] / GB:.3f} GB on its host and its limit "
            f"there is {problem.host_limit_bytes[stage] / GB:.3f} GB, so the placement does not fit its problem"
        )
    if abs(timeline.step_ms - certificate.step_ms) > EQUAL_FRACTION * timeline.step_ms:
        raise PlanError(
            f"step_ms is {certificate.step_ms!r}, but the simulator plays this placement in {timeline.step_ms!r} ms"
        )


def _check_bound(certificate: Certificate, bound_ms: float, should_stop: Callable[[], bool]) -> None:
    problem, step_ms = certificate.problem, certificate.step_ms
    check_method(problem, certificate.method)
    if bound_ms > step_ms * (1.0 + EQUAL_FRACTION):
        raise PlanError(
            f"lower_bound_ms is {bound_ms!r}, but the placement beside it takes {step_ms!r} ms: it is no bound"
        )
    gap_fraction = max(0.0, 1.0 - bound_ms / step_ms) if step_ms > 0 else 0.0
    if certificate.gap_fraction is None or abs(certificate.gap_fraction - gap_fraction) > EQUAL_FRACTION:
        raise PlanError(
            f"gap_fraction is {certificate.gap_fraction}, but lower_bound_ms is {gap_fraction:.3g} below step_ms"
        )
    below: Placement | None = None
    if certificate.method == "cuts":
        from mm_autoparallel.pipeline.certify.confirm_cuts import confirm_cuts

        paths = [_find_path(problem, witness, f"proof.cuts[{i}]") for i, witness in enumerate(certificate.cuts)]
        below = confirm_cuts(problem, paths, bound_ms, should_stop)
    elif certificate.method == "prices":
        from mm_autoparallel.pipeline.certify.confirm_prices import confirm_prices

        paths = [_find_path(problem, witness, f"proof.cuts[{i}]") for i, witness in enumerate(certificate.cuts)]
        confirm_prices(problem, certificate.main, paths, certificate.prices, certificate.parts, bound_ms, should_stop)
    elif certificate.method == "mixtures":
        from mm_autoparallel.pipeline.certify.confirm_mixtures import confirm_mixtures

        below = confirm_mixtures(problem, bound_ms * (1.0 - EQUAL_FRACTION), should_stop)
    elif certificate.method == "orders":
        from mm_autoparallel.pipeline.certify.confirm_orders import confirm_orders

        below = confirm_orders(problem, bound_ms * (1.0 - ORDERS_FRACTION), should_stop)
    else:
        from mm_autoparallel.pipeline.certify.confirm_tree import confirm_tree

        below = confirm_tree(problem, bound_ms * (1.0 - EQUAL_FRACTION), should_stop)
    if below is not None:
        _refute(problem, below, bound_ms)


def _find_path(problem: Problem, witness: Witness, where: str) -> CriticalPath:
    """The cut that `witness` tells: the longest path through the schedule's graph under its times."""
    if isinstance(witness, Times):
        times = (witness.durations_ms, witness.hops_ms, witness.tails_ms)
    else:
        try:
            check_placement(problem, witness)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None
        loads = sum_loads(problem, witness)
        times = (loads.durations_ms, loads.hops_ms, loads.tail_ms)
    return trace_critical_path(graph_of(problem), *times)[1]


def _refute(problem: Problem, below: Placement, bound_ms: float) -> NoReturn:
    """Say what a placement that undercuts the bound, or all cuts for it, shows."""
    step_ms = simulate(problem, below).step_ms
    layers = "; ".join(
        ", of them ".join(
            [
                f"{block.name} {[row[e] for row in below.layers]}",
                *(
                    f"{'recomputed' if mode.name == RECOMPUTE else mode.name} {[row[e][m] for row in below.modes]}"
                    for m, mode in enumerate(block.modes)
                ),
            ]
        )
        for e, block in enumerate(problem.chain)
    )
    if step_ms < bound_ms:
        raise PlanError(
            f"lower_bound_ms is {bound_ms!r}, but another placement takes {step_ms!r} ms and fits its memory: "
            f"{'; '.join([layers, *(f'stage {s} runs {order}' for s, order in enumerate(below.orders))])}"
        )
    raise PlanError(
        f"lower_bound_ms is {bound_ms!r}, but its cuts do not prove it: all of them stay below it on this placement, "
        f"whose step is {step_ms!r} ms: {layers}"
    )
