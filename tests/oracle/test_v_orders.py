"""Free orders of a V, two chunks a stage: `place` against every placement with every word."""

from __future__ import annotations

import json
import math

import compare
import pytest
import v_orders

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.planner.search.watched import compile_search

RELATIVE = 1e-9
OPTIMAL = 1e-6


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    """What searches of orders run is compiled before any clock does."""
    compile_search(("free",), 2)


def judge(name: str, limit_s: float) -> tuple[str, list[str]]:
    """The status of the problem called `name`, and what is wrong with the answer."""
    document = v_orders.problem(name)
    result = place(compare.read(document), time_limit_s=limit_s)
    if result.placement is None:
        step_ms = v_orders.best(document)
        wrong = result.status != "infeasible" or math.isfinite(step_ms)
        return result.status, [f"{result.status}: {step_ms!r} ms is possible"] if wrong else []
    placement = json.loads(json.dumps({"layers": result.placement.layers, "modes": result.placement.modes}))
    played_ms = v_orders.play(document, placement | {"order": result.placement.orders})
    best_ms = min(played_ms, v_orders.best(document, played_ms * (1.0 - RELATIVE)))
    wrong = []
    if not math.isclose(played_ms, result.step_ms, rel_tol=RELATIVE, abs_tol=1e-12):
        wrong.append(f"step {result.step_ms!r}, {played_ms!r} right")
    if result.lower_bound_ms > best_ms * (1.0 + RELATIVE) + 1e-12:
        wrong.append(f"bound {result.lower_bound_ms!r} above the best, {best_ms!r}")
    if result.status == "optimal" and played_ms > best_ms * (1.0 + OPTIMAL) + 1e-12:
        wrong.append(f"{played_ms!r} called optimal, {best_ms!r} is possible")
    return result.status, wrong


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 40))])
def test_place_against_every_order_of_a_v(part: int) -> None:
    wrong, statuses = {}, []
    for seed in range(20 * part, 20 * part + 20):
        status, found = judge(f"v-{seed}", 2.0)
        statuses.append(status)
        if found:
            wrong[seed] = found
    assert not wrong
    assert statuses.count("optimal") > 7
