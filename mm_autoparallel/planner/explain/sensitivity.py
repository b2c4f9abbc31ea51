"""How sure: what plans owe to each cost source, and at which change of one their order turns.

Every step is one of `evaluate` with the plan as it is and one source's times multiplied; nothing is placed again. Along
one source a step is a maximum of sums that are linear in it, so it never falls, and between two kinks it is a line: a
flip is found by regula falsi, which is exact where both steps are lines in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.cost_source import CostSource
from mm_autoparallel.model.costs.scales import CostScales
from mm_autoparallel.model.costs.stage import list_sources
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.explain.settling import Rivalry, compare_pair
from mm_autoparallel.planner.plan import Plan

CHANGE_FRACTION = 0.05
"""What a source's times are changed by, either way."""

FAR_FACTORS = (0.8, 0.5, 1.25, 2.0)
"""Beyond the change asked for a flip is looked for between these, down to half and up to twice. Assumed: a figure that
is further off is no estimate."""

_FLIP_PRECISION_FRACTION = 1e-9
"""Of a step: two that differ by less are equal."""

_IDLE_FRACTION = 1e-9
"""Of a step: who owes no more than this to a source owes nothing; rounding is far below."""

_MAX_ROUNDS = 60


@dataclass(frozen=True)
class Response:
    """One plan's step with one source's times less and more by the change. elasticity_fraction: per cent of step that
    one per cent of the source makes, as the mean over both sides."""

    low_ms: float
    high_ms: float
    elasticity_fraction: float


@dataclass(frozen=True)
class Flip:
    """Where the order of two plans (their numbers) turns along one source: `change_fraction` is the least change of its
    times that makes both steps equal. within: it is no larger than the change that was asked for."""

    plan: int
    other: int
    change_fraction: float
    within: bool


@dataclass(frozen=True)
class SourceSensitivity:
    """One source and what the plans owe to it. responses: one a plan, of those that lack the source without effect."""

    source: CostSource
    responses: tuple[Response, ...]
    flips: tuple[Flip, ...]


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What is known of some plans of one job. estimates: theirs, the first one is what the others are held against.

    sources: those that any step owes something to, the first plan's largest first; num_idle: how many owe nothing.
    """

    estimates: tuple[Estimate, ...]
    change_fraction: float
    sources: tuple[SourceSensitivity, ...]
    rivals: tuple[Rivalry, ...]
    num_idle: int


def find_sensitivity(
    job: Job | CostModel, plans: Sequence[Plan], change_fraction: float = CHANGE_FRACTION
) -> Sensitivity:
    """What each of `plans` owes to each of their cost sources, one at a time and all together.

    change_fraction: between 0 and 1. Raises PlanError and ProfileError as `evaluate` does.
    """
    costs = CostModel.of(job)
    played = tuple(_Played(costs, plan) for plan in plans)
    sources: dict[object, CostSource] = {}
    for one in played:
        for key, source in one.sources.items():
            sources.setdefault(key, source)
    found = []
    for key, source in sources.items():
        responses = tuple(one.respond(key, change_fraction) for one in played)
        if any(response.elasticity_fraction > _IDLE_FRACTION for response in responses):
            found.append((key, SourceSensitivity(source, responses, _list_flips(played, key, change_fraction))))
    found.sort(key=lambda item: [-response.elasticity_fraction for response in item[1].responses])
    measured = tuple(item[1] for item in found)
    return Sensitivity(
        estimates=tuple(one.estimate for one in played),
        change_fraction=change_fraction,
        sources=measured,
        rivals=tuple(_compare(played, measured, rival) for rival in range(1, len(played))),
        num_idle=len(sources) - len(measured),
    )


@dataclass(eq=False)
class _Played:
    """One plan, its sources by what they are, and the steps asked for so far."""

    costs: CostModel
    plan: Plan
    sources: dict[object, CostSource] = field(init=False)
    known_ms: dict[tuple[object, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimate = evaluate(self.costs, self.plan)
        found = list_sources(self.costs.used_by(self.plan.strategy), self.plan.strategy)
        self.sources = {(one.name, one.at): one for one in found}

    def step_ms(self, key: object, factor: float) -> float:
        """The step with the times of one source multiplied; as it is where the plan has no such source."""
        if key not in self.sources or factor == 1.0:
            return self.estimate.step_ms
        if (key, factor) not in self.known_ms:
            scales = CostScales(((self.sources[key].name, factor),))
            self.known_ms[key, factor] = evaluate(self.costs, self.plan, scales).step_ms
        return self.known_ms[key, factor]

    def respond(self, key: object, change_fraction: float) -> Response:
        low_ms, high_ms = self.step_ms(key, 1 - change_fraction), self.step_ms(key, 1 + change_fraction)
        return Response(low_ms, high_ms, (high_ms - low_ms) / (2 * change_fraction * self.estimate.step_ms))


def _list_flips(played: Sequence[_Played], key: object, change_fraction: float) -> tuple[Flip, ...]:
    flips = []
    for plan in range(len(played)):
        for other in range(plan + 1, len(played)):
            factor = _find_flip(played[plan], played[other], key, change_fraction)
            if factor is not None:
                within = abs(factor - 1.0) <= change_fraction * (1 + _FLIP_PRECISION_FRACTION)
                flips.append(Flip(plan, other, factor - 1.0, within))
    return tuple(flips)


def _find_flip(first: _Played, second: _Played, key: object, change_fraction: float) -> float | None:
    """The factor nearest to 1 at which both steps are equal; None where the order holds, or where they always are."""

    def ahead_ms(factor: float) -> float:
        return second.step_ms(key, factor) - first.step_ms(key, factor)

    now_ms = ahead_ms(1.0)
    tiny_ms = _FLIP_PRECISION_FRACTION * first.estimate.step_ms
    if abs(now_ms) <= tiny_ms:
        return None  # they are equal as they are, and have no order that could turn
    found = []
    near = (1 - change_fraction, 1 + change_fraction)
    for side in (
        [near[0], *(factor for factor in FAR_FACTORS if factor < near[0])],
        [near[1], *(factor for factor in FAR_FACTORS if factor > near[1])],
    ):
        before = 1.0
        for factor in side:
            if ahead_ms(factor) * now_ms <= 0:
                found.append(find_root(ahead_ms, before, factor, tiny_ms))
                break
            before = factor
    return min(found, key=lambda factor: abs(factor - 1.0), default=None)


def find_root(value_ms: Callable[[float], float], low: float, high: float, tiny_ms: float) -> float:
    """Where `value_ms` is nothing, to `tiny_ms`, between two points at which its signs differ.

    Regula falsi after Illinois (Dowell & Jarratt 1971, BIT 11): where one end stays, its value is halved.
    """
    low_ms, high_ms = value_ms(low), value_ms(high)
    if low_ms == 0:
        return low
    for _ in range(_MAX_ROUNDS):
        if abs(high_ms) <= tiny_ms:
            break
        middle = high - high_ms * (high - low) / (high_ms - low_ms)
        middle_ms = value_ms(middle)
        if middle_ms * high_ms <= 0:
            low, low_ms = high, high_ms
        else:
            low_ms /= 2
        high, high_ms = middle, middle_ms
    return high


def _compare(played: Sequence[_Played], sources: Sequence[SourceSensitivity], rival: int) -> Rivalry:
    first_ms, rival_ms = played[0].estimate.step_ms, played[rival].estimate.step_ms
    slopes_ms = [
        one.responses[rival].elasticity_fraction * rival_ms - one.responses[0].elasticity_fraction * first_ms
        for one in sources
    ]
    return compare_pair(rival, rival_ms - first_ms, [one.source for one in sources], slopes_ms)
