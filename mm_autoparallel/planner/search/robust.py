"""Robust choice: plans that could be fastest, weighed against what may be wrong with the rates their times stand on.

A rate that is off (what part of its peak a device reaches in matrix products, what a network gives) moves all plans
together, and some more than others. So rates are drawn jointly, from the posterior of the calibration where it has one
and what campaigns differ by beside it, else from the priors of `measurements/fit.py`; every plan follows by the slopes
of its log step, one evaluation a rate, and by an error of its own. A plan's expected regret is the mean, over draws,
of what it ranks by over the least of all, less one. It stands beside the proven optimum of the rates as they are, and
replaces nothing.

Of runs to try first the set counts: greedily that with the least expected best, when a run that does not fit is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.measurements.fit import FREE, begin, move, rates_of
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.solve.dominated_modes import drop_dominated_modes
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.plan import parallel_config
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.scouting import was_placed

Floats = NDArray[np.float64]

NUM_DRAWS = 128
OWN_LOG_SPREAD = 0.03
"""Of a plan, beside what rates explain: what published rows repeat to and lie apart under the best of models."""
CAMPAIGN_LOG_SPREADS = {
    "network": 0.6,
    "hop": 0.5,
    "micro_batch": 0.3,
    "layer_launch": 0.3,
    "layer_gap": 0.3,
    "node": 0.2,
    "attention": 0.15,
    "memory": 0.1,
    "matrix": 0.04,
}
"""By what a rate of one software on one device differs from campaign to campaign, beside what fitted rows leave open:
other switches, clocks and hosts. Assumed."""
RISKY_PROBABILITY = 0.2
"""Of running out of memory: of a set of runs to try first one at least is below."""
NEAR_FRACTION = 0.1
"""Pipelines whose bound lies this far above the best may be better. Assumed: two of three uncalibrated differences."""
MOST_CONTENDERS = 10
PLACING_S, SLICE_S = 0.6, 0.15
"""For placing all contenders that the search had no need to place, and for one of them. Assumed."""
_PLACED_FACTOR = 1.01
"""Contenders are placed where their chance adds a hundredth to their step."""
_STEP = 0.02
"""A change of a rate's logarithm whose effect is measured."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A plan that could win. rank_ms: its step with the price of its chance; expected_regret_fraction: by how much more
    than the best of all it is expected to rank."""

    estimate: Estimate
    rank_ms: float
    expected_regret_fraction: float


@dataclass(frozen=True, eq=False)
class RobustChoice:
    """contenders: the least expected regret first. answer: the number among them of the search's own answer.

    first_runs: numbers of those to try first, in this order. hangs_on_fraction: rates that the order of the first two
    (or of the first and the answer) hangs on and their shares of its variance, the largest first.
    """

    contenders: tuple[Contender, ...]
    answer: int
    first_runs: tuple[int, ...]
    hangs_on_fraction: tuple[tuple[str, float], ...]

    def document(self) -> dict[str, Any]:
        """`robust` of --json: every contender, the number of the answer and of the runs to try first."""
        return {
            "contenders": [
                {
                    "parallel_config": parallel_config(one.estimate.plan.strategy),
                    "e2e_time": one.estimate.step_ms,
                    "rank_ms": one.rank_ms,
                    "oom_probability": one.estimate.oom_probability,
                    "expected_regret_fraction": one.expected_regret_fraction,
                }
                for one in self.contenders
            ],
            "answer": self.answer,
            "first_runs": list(self.first_runs),
            "hangs_on": [{"rate": name, "share_fraction": share} for name, share in self.hangs_on_fraction],
        }


def weigh(job: Job | CostModel, estimates: Sequence[Estimate], num_runs: int, seed: int = 0) -> RobustChoice | None:
    """What draws of the rates say of these plans, of which the first is the answer; None where there is nothing to
    weigh: one plan, or times that were measured. num_runs: how many to try first."""
    if len(estimates) < 2 or any(estimate.interval is None for estimate in estimates):
        return None
    known = CostModel.of(job)
    job, calibration = known.job, known.calibration
    caution = Caution(job)
    names, covariance = _spreads(calibration, job)
    slopes = _slopes(job, estimates, calibration, names)
    factors = np.array([caution.price_factor(one.oom_probability) for one in estimates])
    steps = np.array([one.step_ms for one in estimates])
    log_ranks = np.log(steps * factors) + _draw(slopes, covariance, seed)
    ranks = np.exp(log_ranks)
    regrets = (ranks / ranks.min(axis=1, keepdims=True)).mean(axis=0) - 1.0
    order = [int(i) for i in np.argsort(np.round(regrets, 9), kind="stable")]
    probabilities = np.array([one.oom_probability for one in estimates])
    runs = first_runs(np.exp(log_ranks - np.log(factors)), probabilities, num_runs, caution.price, seed)
    other = order[1] if order[0] == 0 else 0
    differences = np.square(slopes[order[0]] - slopes[other]) * np.diag(covariance)
    total = float(differences.sum()) + 2 * OWN_LOG_SPREAD**2
    shares = sorted(zip(names, differences / total, strict=True), key=lambda pair: -pair[1])
    return RobustChoice(
        contenders=tuple(Contender(estimates[i], float(steps[i] * factors[i]), float(regrets[i])) for i in order),
        answer=order.index(0),
        first_runs=tuple(order.index(i) for i in runs),
        hangs_on_fraction=tuple((name, float(share)) for name, share in shares[:2] if share > 0.01),
    )


def first_runs(steps: Floats, oom_probabilities: Floats, num_runs: int, price: float, seed: int = 0) -> tuple[int, ...]:
    """Numbers of the plans to try first, greedily: each makes the expected best of the set least.

    steps: [draws, plans]. What makes one plan take more memory than was counted makes all take more: in each draw one
    number decides which plans fit. Where none of the set does, what was tried is lost (`price` of the run) and the
    safest plan is run. Not all of several have more than RISKY_PROBABILITY, if any plan has less.
    """
    num_plans = steps.shape[1]
    luck = np.random.default_rng(seed + 1).random(len(steps))
    fits = oom_probabilities[None, :] <= luck[:, None]
    safest = int(np.argmin(oom_probabilities))
    best = np.where(fits, steps, np.inf).min(axis=1)
    best = np.where(np.isfinite(best), best, steps[:, safest])
    lost = (1.0 + price) * steps[:, safest]
    reached = np.full(len(steps), np.inf)
    chosen: list[int] = []
    while len(chosen) < min(num_runs, num_plans):
        able = [i for i in range(num_plans) if i not in chosen]
        is_last = len(chosen) == num_runs - 1
        safe = [i for i in able if oom_probabilities[i] <= RISKY_PROBABILITY]
        if is_last and safe and all(oom_probabilities[i] > RISKY_PROBABILITY for i in chosen):
            able = safe
        with_each = {i: np.minimum(reached, np.where(fits[:, i], steps[:, i], np.inf)) for i in able}

        def expected(i: int, of: dict[int, Floats] = with_each) -> float:
            return float(np.mean(np.where(np.isfinite(of[i]), of[i], lost) / best))

        chosen.append(min(able, key=lambda i: (round(expected(i), 9), i)))
        reached = with_each[chosen[-1]]
    return tuple(chosen)


def find_contenders(
    costs: CostModel,
    pipelines: Sequence[Pipeline],
    answer: Estimate,
    rank_ms: float,
    is_late: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    near_fraction: float = NEAR_FRACTION,
    placing_s: float = PLACING_S,
    expect: Callable[[Strategy], float] | None = None,
) -> tuple[Estimate, ...]:
    """The answer and the best plans found of other pipelines whose bound is near; those without a plan are placed, for
    placing_s in all. rank_ms: of the answer. near_fraction: how far above it a bound is near. expect: how many times
    its step a strategy is expected to rank at; those that promise most come first then, placed or not."""
    caution, found, batch = Caution(costs.job), [answer], costs.job.workload.global_batch_size
    factor = {p.number: expect(p.strategies[0]) if expect else 1.0 for p in pipelines}
    near_ms = rank_ms * (expect(answer.plan.strategy) if expect else 1.0) * (1 + near_fraction)
    fit = (p for p in pipelines if not p.infeasible and p.twin is None)
    near = [p for p in fit if factor[p.number] * p.bound_ms <= near_ms]
    placed = {p.number for p in near if p.placement is not None and was_placed(p)}

    def promise(p: Pipeline) -> tuple[bool, float, int]:
        return not expect and p.number not in placed, factor[p.number] * min(p.rank_ms, p.bound_ms), p.number

    near.sort(key=promise)
    began_s = clock()
    for pipeline in near:
        strategy, left_s = pipeline.strategies[0], placing_s - (clock() - began_s)
        if len(found) == MOST_CONTENDERS or is_late():
            break
        if answer.plan.strategy in pipeline.strategies:
            continue
        problem, placement = pipeline.problem, pipeline.placement
        if pipeline.number not in placed:
            if left_s <= 0:
                continue
            problem = drop_dominated_modes(build_problem(costs, strategy))
            fill = min(caution.fill_at(_PLACED_FACTOR), caution.most_fill)
            limited = caution.limited(problem, fill, strategy)
            placement = place(
                limited, time_limit_s=min(left_s, SLICE_S), should_stop=is_late, gap_fraction=0.01
            ).placement
        if placement is None or problem is None:
            continue
        estimate = evaluate(costs, plan_from_placement(problem, placement, strategy, batch))
        if estimate.fits and caution.allows(estimate.oom_probability):
            found.append(estimate)
    return tuple(found)


def _spreads(calibration: Calibration, job: Job) -> tuple[tuple[str, ...], Floats]:
    """Names of rates and the covariance of their logarithms: what was fitted, else the priors of those that count.

    Rows tell the rates of the runs that they are from: those of another campaign lie around them, and no wider than
    where nothing was fitted.
    """
    if calibration.posterior is not None:
        fitted, told = calibration.posterior.names, np.array(calibration.posterior.covariance)
        room = np.square([FREE[name].log_spread_fraction for name in fitted]) - np.diag(told)
        own = np.square([CAMPAIGN_LOG_SPREADS.get(name, 0.0) for name in fitted])
        return fitted, told + np.diag(np.clip(room, 0.0, own))
    figures = calibration.figures
    names = tuple(
        name
        for name in rates_of(figures, [job])
        if name != "grouped_matrix" and any(getattr(figures, figure) for figure in FREE[name].figures)
    )
    return names, np.diag([FREE[name].log_spread_fraction ** 2 for name in names])


def _slopes(job: Job, estimates: Sequence[Estimate], calibration: Calibration, names: Sequence[str]) -> Floats:
    """[plans, rates] what the logarithm of a plan's step moves for one of a rate's."""
    rows, figures = [], begin(calibration.figures, names)
    for one in estimates:
        used = job.with_modes(one.plan.modes_used).used_by(one.plan.strategy)
        row = []
        for name in names:
            at_largest = any((getattr(figures, each) or 0.0) >= FREE[name].largest for each in FREE[name].figures)
            step = -_STEP if at_largest else _STEP
            moved = calibration.model_copy(update={"figures": move(figures, {name: step})})
            step_ms = simulate(build_problem(CostModel(used, moved), one.plan.strategy), one.placement).step_ms
            row.append(float(np.log(step_ms / one.step_ms)) / step)
        rows.append(row)
    return np.array(rows)


def _draw(slopes: Floats, covariance: Floats, seed: int) -> Floats:
    """[draws, plans] errors of the logarithms of the plans' steps, the rates drawn jointly."""
    random = np.random.default_rng(seed)
    rates = random.multivariate_normal(np.zeros(len(covariance)), covariance, NUM_DRAWS, method="eigh")
    return rates @ slopes.T + OWN_LOG_SPREAD * random.standard_normal((NUM_DRAWS, len(slopes)))
