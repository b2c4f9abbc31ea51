"""`verify` of a V whose order is to be found, against every placement with every word: what is confirmed is true."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import compare
import numpy as np
import pytest
import v_orders
from semantics import Document

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_v import confirm_v
from mm_autoparallel.pipeline.certify.v_pieces import Stage, bound_pairs
from mm_autoparallel.pipeline.certify.v_releases import bound_released
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

PARTS = [(0, 12), *(pytest.param(first, 150, marks=pytest.mark.nightly) for first in range(1_000, 11_000, 1_000))]


def solved(first: int) -> Iterator[tuple[str, Document, Problem, float]]:
    """Seeded problems with their best step, where there is one above nothing."""
    for seed in range(first, first + 100_000):
        document = v_orders.problem(f"v-{seed}")
        best_ms = v_orders.best(document)
        if 0.0 < best_ms < math.inf:
            yield f"v-{seed}", document, compare.read(document), best_ms


@pytest.mark.parametrize(("first", "number"), PARTS)
def test_true_bounds_are_confirmed_and_false_ones_never(first: int, number: int) -> None:
    answers: Counter[str] = Counter()
    for name, document, problem, best_ms in islice(solved(first), number):
        for factor in (1.0 - 1e-6, 1.0 + 1e-3):
            try:
                below = confirm_v(problem, best_ms * factor, lambda: False)
            except Unconfirmed:
                answers["open"] += 1
                continue
            if factor < 1.0:
                assert below is None, (name, document)
                answers["confirmed"] += 1
                continue
            assert below is not None, (name, document)
            timeline = simulate(problem, below)
            assert best_ms * (1.0 - 1e-9) <= timeline.step_ms < best_ms * factor, name
            assert not find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes), name
            answers["refuted"] += 1
    assert min(answers["confirmed"], answers["refuted"]) >= 0.9 * number, answers


def test_releases_hold_where_all_else_takes_no_time() -> None:
    """Forwards of 1, gradients of 1 and 2, nothing waits: all work. With a neighbour that takes longer: what that
    lets through; with room for one micro-batch: one after another."""
    piece = np.zeros((1, 17))
    piece[0, :4] = 1.0, 1.0, 1.0, 2.0  # forward, gradient of inputs, of weights, whole
    nothing = np.zeros(1)
    way, still = (nothing, nothing, nothing), (nothing, nothing, nothing, nothing)
    stage = Stage(math.inf, math.inf, 0.0)
    assert bound_released(piece, piece, stage, 4, (0.0, 0.0), way, still) == pytest.approx(24.0)
    slow = nothing, np.full(1, 5.0), nothing, np.full(1, 10.0)
    # the last micro-batch's gradient comes back 1 + 4 * 10 after the begin, and then the last two actions remain
    assert bound_released(piece, piece, stage, 4, (0.0, 0.0), way, slow) == pytest.approx(43.0)
    kept = piece.copy()
    kept[0, 7] = 1.0
    far = np.full(1, 3.0), np.full(1, 3.0), np.full(1, 3.0)
    alone = Stage(2.0, math.inf, 0.0)
    # each takes 4 actions and 3 ways of 3, one after another; weights' gradients lie between, but for the last one
    assert bound_released(kept, kept, alone, 3, (0.0, 0.0), far, still)[0] <= 3 * 13 + 1.0
    one = kept.copy()
    one[0, 7] = 0.0
    assert bound_released(kept, one, Stage(1.0, math.inf, 0.0), 3, (0.0, 0.0), far, still) == pytest.approx(40.0)


def test_a_mean_of_stages_tells_more_than_each_stage_alone() -> None:
    """Two stages of which the first holds one layer a chunk, and the second three: no pair's bounds know the others'
    load; what has come back by then does."""
    a = np.zeros((1, 17))
    a[0, :4] = 1.0, 1.0, 1.0, 2.0
    nothing = np.zeros(1)
    way = np.full(1, 6.0), nothing, np.full(1, 6.0)
    rates = nothing, np.full(1, 6.0), nothing, np.full(1, 12.0)
    stage = Stage(math.inf, math.inf, 0.0)
    plain = bound_pairs(a, a, stage, 8.0, np.zeros(1), np.zeros(1), way)
    released = bound_released(a, a, stage, 8, (0.0, 0.0), way, rates)
    assert plain[0] < 70.0
    assert released[0] == pytest.approx(1.0 + 8 * 12.0 + 2.0)
