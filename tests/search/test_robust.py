"""Plans weighed against what may be wrong with the rates, and the runs to try first."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.measurements.fit import move
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.profiles.calibration import Posterior, calibration_of
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.search import robust
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.robust import RISKY_PROBABILITY, first_runs, weigh

CASE = {"memory_bytes": 9e9, "cp": (1,), "pp": (1, 2, 4), "mbs": (1, 2)}


def test_expected_regret_is_that_of_playing_every_draw(make_job, no_clock) -> None:
    """Slopes stand for evaluating every plan anew under every draw of the rates."""
    job = make_job(**CASE)
    result = search(job, num_workers=1, top_k=4)
    found = weigh(job, result.estimates, 3)
    assert found is not None
    calibration = calibration_of(job)
    names, covariance = robust._spreads(calibration, job)
    random = np.random.default_rng(0)
    draws = random.multivariate_normal(np.zeros(len(names)), covariance, robust.NUM_DRAWS, method="eigh")
    own = robust.OWN_LOG_SPREAD * random.standard_normal((robust.NUM_DRAWS, len(result.estimates)))
    few = 40
    steps = np.empty((few, len(result.estimates)))
    for d, i in itertools.product(range(few), range(len(result.estimates))):
        figures = move(calibration.figures, dict(zip(names, map(float, draws[d]), strict=True)))
        moved = calibration.model_copy(update={"figures": figures})
        steps[d, i] = evaluate(CostModel(job, moved), result.estimates[i].plan).step_ms * np.exp(own[d, i])
    played = (steps / steps.min(axis=1, keepdims=True)).mean(axis=0) - 1
    told = {id(one.estimate): one.expected_regret_fraction for one in found.contenders}
    for estimate, regret in zip(result.estimates, played, strict=True):
        assert told[id(estimate)] == pytest.approx(regret, abs=0.02)
    regrets = [one.expected_regret_fraction for one in found.contenders]
    assert regrets == sorted(regrets)
    assert found.contenders[found.answer].estimate is result.estimates[0]


def test_rates_of_another_campaign_lie_around_the_fitted_ones(make_job) -> None:
    """No narrower than what rows told, no wider than where there are none."""
    job = make_job(**CASE)
    calibration = calibration_of(job)
    narrow = Posterior(names=("matrix", "network", "step"), covariance=((1e-4, 0, 0), (0, 1e-4, 0), (0, 0, 1e-4)))
    names, covariance = robust._spreads(calibration.model_copy(update={"posterior": narrow}), job)
    spreads = dict(zip(names, np.sqrt(np.diag(covariance)), strict=True))
    assert spreads["step"] == pytest.approx(0.01)
    assert spreads["network"] == pytest.approx(np.hypot(0.01, 0.6))
    assert spreads["matrix"] == pytest.approx(np.hypot(0.01, 0.04))
    wide = narrow.model_copy(update={"covariance": ((0.01, 0, 0), (0, 0.48, 0), (0, 0, 1))})
    _, covariance = robust._spreads(calibration.model_copy(update={"posterior": wide}), job)
    assert np.sqrt(np.diag(covariance)) == pytest.approx([0.1, 0.7, 1.0])


def test_a_plan_that_hangs_on_no_rate_is_the_robust_one(make_job, no_clock, monkeypatch) -> None:
    """Of two plans within a hair, the one whose rivals are sometimes far better is worse off."""
    job = make_job(**CASE)
    first, second, *_ = search(job, num_workers=1, top_k=2).estimates
    near = replace(second, step_ms=first.step_ms * 1.001)
    monkeypatch.setattr(robust, "_slopes", lambda *_: np.array([[3.0], [0.0]]))
    monkeypatch.setattr(robust, "_spreads", lambda *_: (("memory",), np.array([[0.04]])))
    found = weigh(job, (first, near), 2)
    assert found is not None
    assert found.hangs_on_fraction[0][0] == "memory"
    assert found.hangs_on_fraction[0][1] > 0.9
    assert {id(one.estimate) for one in found.contenders} == {id(first), id(near)}


def test_the_search_tells_runs_to_try_first_and_keeps_its_answer(make_job, no_clock) -> None:
    point = search(make_job(choice="point", **CASE), num_workers=1)
    found = search(make_job(**CASE), num_workers=1)
    assert point.robust is None
    assert found.robust is not None
    assert found.plan == point.plan
    assert len(found.robust.first_runs) == min(3, len(found.robust.contenders))
    assert len(set(found.robust.first_runs)) == len(found.robust.first_runs)
    assert found.robust.document()["answer"] == found.robust.answer


def expected_best(steps: np.ndarray, probabilities: np.ndarray, chosen: tuple[int, ...], price: float) -> float:
    """By the definition: the best of those that fit, or what was lost and the safest plan, over the best of all."""
    luck = np.random.default_rng(1).random(len(steps))
    safest, total = int(np.argmin(probabilities)), 0.0
    for row, number in zip(steps, luck, strict=True):
        able = [row[i] for i in range(len(row)) if probabilities[i] <= number]
        mine = [row[i] for i in chosen if probabilities[i] <= number]
        total += (min(mine) if mine else (1 + price) * row[safest]) / (min(able) if able else row[safest])
    return total / len(steps)


@pytest.mark.parametrize("seed", range(6))
def test_runs_to_try_first_are_as_good_as_any(seed: int) -> None:
    """Against every set that is not all at the edge: greedy choice of a submodular gain is near the best."""
    random = np.random.default_rng(seed)
    steps = np.exp(random.normal(0, 0.05, (200, 7)) + random.normal(0, 0.05, 7))
    probabilities = random.uniform(0, 0.8, 7) ** 2
    chosen = first_runs(steps, probabilities, 3, 0.1)
    assert len(set(chosen)) == 3
    assert min(probabilities[list(chosen)]) <= RISKY_PROBABILITY
    sets = [s for s in itertools.combinations(range(7), 3) if min(probabilities[list(s)]) <= RISKY_PROBABILITY]
    best = min(expected_best(steps, probabilities, s, 0.1) for s in sets)
    assert expected_best(steps, probabilities, chosen, 0.1) <= best * 1.005
    alone = first_runs(steps, probabilities, 1, 0.1)
    assert probabilities[alone[0]] <= RISKY_PROBABILITY
