"""Why not another strategy: the best that it could do against a plan, or the law or the memory that stands against it.

All strategies that match the words are searched as `plan` searches them: the answer is the best, the others are counted
by what became of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.arrangement import ENCODER_RUNS, MODULE_KINDS
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.mindspeed_mm_law import describe_whole
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.explain import modules
from mm_autoparallel.planner.explain.causes import divide_step
from mm_autoparallel.planner.explain.modules import Wish
from mm_autoparallel.planner.search.arrangements import Bough, Branch, Sizes
from mm_autoparallel.planner.search.candidate import Status
from mm_autoparallel.planner.search.planner import examine
from mm_autoparallel.planner.search.space import SpaceEntry, list_all_boughs, list_entries
from mm_autoparallel.units import format_percent
from mm_autoparallel.validation import nearest

_SIZES = ("PP", "TP", "DP", "MBS", "CP", "EP", "ETP", "VPP", "ZERO", "SHARD")
_SCHEDULE, _LAYOUT = "SCHEDULE", "LAYOUT"
_OF_MODULE = (_LAYOUT, *(size.upper() for size in modules.SIZES))
"""Of a single encoder, named before it with a point between."""
_LISTS = ("pp", "tp", "dp", "mbs", "cp", "ep", "etp", "zero", "shard")
"""Sizes of which a job's search names a list."""

_OPEN = ("pp", "tp", "dp", "mbs", "cp")
"""Those of which a missing list means every lawful value."""

TOLD_PROBABILITY = 0.01
"""Of running out of memory: what is less likely goes without saying."""


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


def parse_wish(text: str, flag: str = "--why-not") -> Wish:
    """`PP=8,TP=4` → fields of a Strategy, `vision.TP=1` → those of an encoder's module. flag: what messages call it.
    Raises JobError naming the word that is not understood."""
    wish: dict[str, int | str] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        module, of = modules.split_key(key)
        name, known = of.upper(), _OF_MODULE if module else (*_SIZES, _SCHEDULE, _LAYOUT)
        if not equals or name not in known:
            hint = nearest(name, known) if equals else ""
            what = f"no size of an encoder {module}" if module else "no size of a strategy"
            raise JobError(
                f"{flag} {text!r}: {word.strip()!r} names {what}{hint}; it takes NAME=VALUE with commas between, such "
                f"as PP=8,TP=4 or vision.TP=1, and knows {', '.join(known)}"
            )
        field = f"{module}.{of.lower()}" if module else of.lower()
        if field in wish:
            raise JobError(f"{flag} {text!r}: {modules.format_key(field)} stands there twice")
        wish[field] = _parse_value(f"{flag} {text!r}: {modules.format_key(field)}", name, value)
    return wish


def _parse_value(where: str, name: str, value: str) -> int | str:
    if name == _SCHEDULE:
        return value
    if name == _LAYOUT:
        if value not in modules.LAYOUTS:
            known = ", ".join(modules.LAYOUTS)
            raise JobError(f"{where} is {value!r}{nearest(value, modules.LAYOUTS)}; known are {known}")
        return value
    if value.isascii() and value.isdigit() and int(value) >= (name != "ZERO"):
        return int(value)
    least = "a whole number" if name == "ZERO" else "a whole number of at least 1"
    raise JobError(f"{where} is {value!r}; {least} is expected")


def explain_why_not(
    job: Job | CostModel,
    estimate: Estimate,
    wish: Wish,
    time_limit_s: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> WhyNot:
    """Why the plan of `estimate` is taken and not the best of the strategies that match `wish`.

    Raises JobError where no product of sizes makes the cluster's devices, ProfileError where a profile does not fit.
    """
    costs = CostModel.of(job)
    job = costs.job
    entries, boughs, limits = match_strategies(job, wish)
    outside = limits is not job.search
    if boughs and outside:
        costs = CostModel(replace(job, search=limits))
    best, candidates = examine(costs, entries, time_limit_s, should_stop, boughs)
    counts: Counter[str] = Counter(candidate.status for candidate in candidates)
    if best:
        strategy = best.plan.strategy
        (status,) = (candidate.status for candidate in candidates if candidate.strategy == strategy)
        mine, theirs = divide_step(costs, estimate.plan), divide_step(costs, best.plan)
        causes = tuple(CauseDifference(cause, mine[cause], theirs[cause]) for cause in mine)
        found = "its best placement" if status == "solved" else "the best placement of it that was found in time"
        chance = best.oom_probability
        risk = f", out of memory with probability {format_percent(chance)}" if chance >= TOLD_PROBABILITY else ""
        reason = f"{found} takes {best.step_ms:.3f} ms{risk}{_describe_law(job, strategy)}"
        return WhyNot(strategy, status, reason, outside, counts, best, causes)
    if counts["unfinished"]:
        (first, *_) = (candidate.strategy for candidate in candidates if candidate.status == "unfinished")
        reason = "the time limit came before a placement of it was found; a longer --time-limit would tell"
        return WhyNot(first, "unfinished", reason, outside, +counts)
    # what fits by the rules comes further than what does not, and what is over by less further than what is by more
    closest = min(candidates, key=lambda one: (one.status == "unlawful", one.overflow_bytes or np.inf))
    law = _describe_law(job, closest.strategy) if closest.status == "infeasible" else ""
    return WhyNot(closest.strategy, closest.status, f"{closest.reason}{law}", outside, +counts)


def _describe_law(job: Job, strategy: Strategy) -> str:
    """What every placement of the strategy keeps to, as more of a sentence; empty where that is nothing."""
    law = describe_whole(job.model, job.workload, strategy)
    return f"; {law}" if law else ""


def describe_wish(wish: Wish) -> str:
    """`PP 8 TP 4 vision.TP 1`."""
    return " ".join(f"{modules.format_key(key)} {value}" for key, value in wish.items())


def match_strategies(
    job: Job, wish: Wish, flag: str = "--why-not", lazily: bool = False
) -> tuple[tuple[SpaceEntry, ...], tuple[Bough, ...], SearchSpace]:
    """The strategies that match, with what lists those of a module for each of several encoders, and the limits that
    have them: the job's, else these without those on what is named, else none. lazily: those of encoders that are one
    module are left to be listed too. Raises JobError where no product of sizes makes the cluster's devices, or an
    encoder is named that the model has not."""
    modules.check_modules(job, wish, f"{flag} {describe_wish(wish)}")
    named: dict[str, object] = {name: (wish[name],) for name in _LISTS if name in wish}
    named |= {"max_vpp": wish["vpp"]} if "vpp" in wish else {}
    named |= {"schedule": (wish["schedule"],)} if "schedule" in wish else {}
    kinds = modules.kinds_of(wish)
    if "layout" in wish:
        kinds |= {"colocated" if wish["layout"] in ENCODER_RUNS else str(wish["layout"])}
    if kinds:
        named["layouts"] = tuple(kind for kind in MODULE_KINDS if kind in kinds)
        for size, limit in (("cp", "encoder_cp"), ("pieces", "encoder_pieces")):
            sizes = {int(of[size]) for of in modules.parts_of(wish).values() if size in of}
            named |= {limit: tuple(sorted({1} | sizes))} if sizes else {}
    for limits in (
        job.search,
        job.search.model_copy(update=named),
        job.search.model_copy(update=dict.fromkeys(_OPEN) | named),
    ):
        limited = replace(job, search=limits)
        entries = list_entries(limited, boughs=() if lazily else None, with_several=False)
        found = tuple(entry for entry in entries if _is_meant(entry.strategy, wish))
        left: tuple[Bough, ...] = ()
        if lazily or len(job.model.encoders) > 1:
            left = tuple(_narrow(bough, wish, lazily) for bough in list_all_boughs(limited))
        if found or any(True for branch in modules.list_branches(left) for _ in branch.strategies()):
            return found, left, limits
    number, num_layers = job.cluster.num_devices, job.model.num_layers
    if int(wish.get("vpp", 1)) > num_layers:
        raise JobError(
            f"{flag} {describe_wish(wish)}: there is no such strategy; each of a stage's chunks holds a layer, and "
            f"the model has {num_layers}"
        )
    if kinds - {"chain"}:
        reason = modules.absence_reason(job, wish)
        why = f": {reason}" if reason else f" on {number} devices: no sizes of the encoder go with one of the decoder"
        raise JobError(f"{flag} {describe_wish(wish)}: there is no such strategy{why}")
    product = math.prod(int(wish.get(name, 1)) for name in ("pp", "tp", "cp", "dp"))
    why = f", and {number} is no multiple of {product}" if number % max(product, 1) else ""
    raise JobError(
        f"{flag} {describe_wish(wish)}: there is no such strategy; PP x TP x CP x DP must make the cluster's "
        f"{number} devices{why}"
    )


def _narrow(bough: Bough, wish: Wish, with_one: bool) -> Bough:
    """What a bough has of several modules that matches. with_one: of all encoders as one module too."""
    of_decoder = {name: value for name, value in wish.items() if name not in ("layout", "pp") and "." not in name}

    def list_branches(sizes: Sequence[Sizes]) -> Iterator[Branch]:
        for branch in bough.list_branches(sizes):
            if _is_meant(branch.decoder, of_decoder) and _may_have_stages(branch, wish):
                several = partial(modules.narrow_options, branch, wish)
                is_meant = partial(_is_meant, wish=wish)
                together = branch.together if with_one else lambda: iter(())
                yield replace(branch, together=together, several=several, is_meant=is_meant)

    return replace(bough, list_branches=list_branches)


def _may_have_stages(branch: Branch, wish: Wish) -> bool:
    """Whether the decoder's stages and those of encoders on ranks of their own may be as many as a wish says."""
    if "pp" not in wish:
        return True
    own, wanted = branch.decoder.pp, int(wish["pp"])
    return own < wanted if branch.apart else own == wanted


def _is_meant(strategy: Strategy, wish: Wish) -> bool:
    arrangement = strategy.arrangement
    each = arrangement.each if arrangement else ()
    layouts = {word for one in each for word in modules.words_of(one)} or {"chain"}
    own = vars(strategy) | {"etp": strategy.expert_tp, "shard": strategy.shard_ranks}
    plain = ((name, value) for name, value in wish.items() if "." not in name)
    return modules.meets(strategy, wish) and all(
        value in layouts if name == "layout" else own[name] == value for name, value in plain
    )
