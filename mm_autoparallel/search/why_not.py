"""Why not another strategy: the best that it could do against a plan, or the law or the memory that stands against it.

All strategies that match the words are looked at, in the order of their bounds, and placed as long as their bound is
below the best found: the answer is the best of them, the others are counted by what became of them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mm_autoparallel.costs.stage import build_problem, overfull_reason
from mm_autoparallel.errors import JobError
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.placement.place import place
from mm_autoparallel.problem import Problem
from mm_autoparallel.search.bounds import bound_step, work_bound_ms
from mm_autoparallel.search.candidate import Status
from mm_autoparallel.search.causes import divide_step
from mm_autoparallel.search.space import SpaceEntry, list_entries
from mm_autoparallel.simulate.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.validation import nearest

_SIZES = ("PP", "TP", "DP", "MBS", "CP", "EP", "ETP", "VPP", "ZERO")
_SCHEDULE = "SCHEDULE"
_LISTS = ("pp", "tp", "dp", "mbs", "cp", "ep", "etp", "zero")
"""Sizes of which a job's search names a list."""

_OPEN = ("pp", "tp", "dp", "mbs", "cp")
"""Those of which a missing list means every lawful value."""

_GAP_FRACTION = 1e-4
_SETTLED_FRACTION = 2 * _GAP_FRACTION
"""Placements this close to the best one are good enough for an answer in words; the second is above rounding."""

_MOST_SHARE_FRACTION = 0.4
"""Of the time that is left, what placing one strategy may take. Assumed."""

Wish = Mapping[str, int | str]
"""Fields of a Strategy and their values."""


@dataclass(frozen=True)
class CauseDifference:
    """What one cause is of both steps, as means over the stages."""

    cause: str
    plan_ms: float
    other_ms: float


@dataclass(frozen=True, eq=False)
class WhyNot:
    """The answer. status: of the strategy that came furthest, `strategy`; reason: what stands against it, or how it
    ended. estimate: its best plan, None where there is none. outside: the job's limits of the search leave it out.
    counts: how many of the matching strategies ended how. causes: where the difference to the plan comes from.
    """

    strategy: Strategy
    status: Status
    reason: str
    outside: bool
    counts: Mapping[str, int]
    estimate: Estimate | None = None
    causes: tuple[CauseDifference, ...] = field(default=())


def parse_wish(text: str) -> Wish:
    """`PP=8,TP=4` → fields of a Strategy. Raises JobError naming the word that is not understood."""
    wish: dict[str, int | str] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        name = key.upper()
        if not equals or name not in (*_SIZES, _SCHEDULE):
            known = ", ".join((*_SIZES, _SCHEDULE))
            hint = nearest(name, (*_SIZES, _SCHEDULE)) if equals else ""
            raise JobError(
                f"--why-not {text!r}: {word.strip()!r} names no size of a strategy{hint}; it takes NAME=VALUE with "
                f"commas between, such as PP=8,TP=4, and knows {known}"
            )
        if name.lower() in wish:
            raise JobError(f"--why-not {text!r}: {name} stands there twice")
        if name == _SCHEDULE:
            wish["schedule"] = value
        elif value.isascii() and value.isdigit() and int(value) >= (name != "ZERO"):
            wish[name.lower()] = int(value)
        else:
            least = "a whole number" if name == "ZERO" else "a whole number of at least 1"
            raise JobError(f"--why-not {text!r}: {name} is {value!r}; {least} is expected")
    return wish


def explain_why_not(
    job: Job,
    estimate: Estimate,
    wish: Wish,
    time_limit_s: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> WhyNot:
    """Why the plan of `estimate` is taken and not the best of the strategies that match `wish`.

    Raises JobError where no product of sizes makes the cluster's devices, ProfileError where a profile does not fit.
    """
    entries, outside = _match(job, wish)
    counts: Counter[str] = Counter()
    refused: list[tuple[Strategy, Status, str, float]] = []
    unfinished: list[Strategy] = []
    visits: list[tuple[float, int, bool]] = []  # bound, place in `problems`, whether the bound is the better one
    problems: list[tuple[Strategy, Problem]] = []
    for entry in entries:
        strategy = entry.strategy
        if entry.reason is not None:
            refused.append((strategy, "unlawful", entry.reason, np.inf))
        elif (overfull := overfull_reason(job, strategy)) is not None:
            refused.append((strategy, "infeasible", overfull, np.inf))
        else:
            problem = build_problem(job, strategy)
            visits.append((work_bound_ms(problem), len(problems), False))
            problems.append((strategy, problem))
    heapq.heapify(visits)
    best: Estimate | None = None
    status: Status = "unfinished"
    ends_s = time.monotonic() + time_limit_s
    while visits:
        bound_ms, number, is_refined = heapq.heappop(visits)
        strategy, problem = problems[number]
        best_ms = best.step_ms if best else np.inf
        left_s = ends_s - time.monotonic()
        if bound_ms >= best_ms * (1 - _GAP_FRACTION):
            counts["dominated"] += 1
        elif left_s <= 0 or should_stop():
            unfinished.append(strategy)
        elif not is_refined:
            bound = bound_step(problem)
            if bound.reason:
                refused.append((strategy, "infeasible", bound.reason, bound.overflow_bytes))
            else:
                heapq.heappush(visits, (bound.step_ms, number, True))
        else:
            result = place(
                problem,
                time_limit_s=_MOST_SHARE_FRACTION * left_s,
                should_stop=should_stop,
                cutoff_ms=best_ms,
                gap_fraction=_GAP_FRACTION,
            )
            if result.placement is not None and result.step_ms < best_ms:
                batch = job.workload.global_batch_size
                best = evaluate(job, plan_from_placement(problem, result.placement, strategy, batch))
                status = "solved" if result.gap_fraction <= _SETTLED_FRACTION else "unfinished"
                counts[status] += 1
            elif result.status == "infeasible":
                refused.append((strategy, "infeasible", result.reason, result.overflow_bytes))
            elif result.status == "unknown":
                unfinished.append(strategy)
            else:
                counts["dominated"] += 1
    counts["unfinished"] += len(unfinished)
    counts.update(status for _, status, _, _ in refused)
    if best:
        mine, theirs = divide_step(job, estimate.plan), divide_step(job, best.plan)
        causes = tuple(CauseDifference(cause, mine[cause], theirs[cause]) for cause in mine)
        reason = f"its best placement takes {best.step_ms:.3f} ms"
        if status == "unfinished":
            reason = f"the best placement of it that was found in time takes {best.step_ms:.3f} ms"
        return WhyNot(best.plan.strategy, status, reason, outside, +counts, best, causes)
    if unfinished:
        reason = "the time limit came before a placement of it was found; a longer --time-limit would tell"
        return WhyNot(unfinished[0], "unfinished", reason, outside, +counts)
    # what fits by the rules comes further than what does not, and what is over by less further than what is by more
    closest = min(refused, key=lambda one: (one[1] == "unlawful", one[3]))
    return WhyNot(*closest[:3], outside, +counts)


def describe_wish(wish: Wish) -> str:
    """`PP 8 TP 4`."""
    return " ".join(f"{name.upper()} {value}" for name, value in wish.items())


def _match(job: Job, wish: Wish) -> tuple[tuple[SpaceEntry, ...], bool]:
    """The strategies that match: of the job's limits, else of these without those on what is named, else of none."""
    named: dict[str, object] = {name: (wish[name],) for name in _LISTS if name in wish}
    named |= {"max_vpp": wish["vpp"]} if "vpp" in wish else {}
    named |= {"schedule": wish["schedule"]} if "schedule" in wish else {}
    for limits, outside in (
        (job.search, False),
        (job.search.model_copy(update=named), True),
        (job.search.model_copy(update=dict.fromkeys(_OPEN) | named), True),
    ):
        entries = list_entries(replace(job, search=limits))
        found = tuple(entry for entry in entries if _is_meant(entry.strategy, wish))
        if found:
            return found, outside
    number = job.cluster.num_devices
    product = math.prod(int(wish.get(name, 1)) for name in ("pp", "tp", "cp", "dp"))
    why = f", and {number} is no multiple of {product}" if number % max(product, 1) else ""
    raise JobError(
        f"--why-not {describe_wish(wish)}: there is no such strategy; PP x TP x CP x DP must make the cluster's "
        f"{number} devices{why}"
    )


def _is_meant(strategy: Strategy, wish: Wish) -> bool:
    own = vars(strategy) | {"etp": strategy.expert_tp}
    return all(own[name] == value for name, value in wish.items())
