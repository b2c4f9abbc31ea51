"""What `explain` found, as one document for programs and as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.catalog import is_built_live
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.stacks import describe_facts, facts_of
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.lanes import TRAFFIC
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.explain.headroom import GAP_FRACTION, Headroom
from mm_autoparallel.planner.explain.measuring import describe_point, describe_run
from mm_autoparallel.planner.explain.sensitivity import Sensitivity, SourceSensitivity
from mm_autoparallel.planner.explain.settling import Rivalry
from mm_autoparallel.planner.explain.teaching import RateSpread
from mm_autoparallel.planner.explain.why_not import WhyNot, describe_wish
from mm_autoparallel.planner.search.planner import TIE_FRACTION
from mm_autoparallel.planner.search.space import describe_strategy as name_strategy
from mm_autoparallel.reports.critical_path import describe_path, share_path
from mm_autoparallel.reports.estimates import describe_expected, describe_strategy, estimate_document
from mm_autoparallel.reports.tables import module_table, stage_time_table
from mm_autoparallel.units import GIB, format_bytes, format_ms, format_percent, format_signed

if TYPE_CHECKING:
    from mm_autoparallel.api.explanation import Explanation

SCHEMA = "mm-autoparallel/explanation/1"

_SHOWN_FRACTION = 1e-3
"""Of a step: sources that no plan owes more to are counted, not shown."""


# ------------------------------------------------------------------------------------------------------- for programs


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """What `--json` prints. Plans are named by their place in `plans`; what is unknown is null."""
    found, first = explanation.sensitivity, explanation.sensitivity.estimates[0]
    names = zip(explanation.names, found.estimates, strict=True)
    return {
        "schema": SCHEMA,
        "plans": [{"name": name} | estimate_document(estimate) for name, estimate in names],
        "critical_path": asdict(share_path(first.timeline)),
        "memory": asdict(explanation.headroom),
        "change_fraction": found.change_fraction,
        "sources": [_source_document(one) for one in found.sources],
        "num_sources_without_effect": found.num_idle,
        "rivals": [_rival_document(rival, explanation) for rival in found.rivals],
        "teaching": asdict(explanation.teaching),
        "overlaps": asdict(explanation.overlaps) if explanation.overlaps else None,
        "why_not": _why_not_document(explanation),
    }


def _source_document(one: SourceSensitivity) -> dict[str, Any]:
    return {
        **asdict(one.source),
        "plans": [
            {"step_ms_low": r.low_ms, "step_ms_high": r.high_ms, "elasticity": r.elasticity_fraction}
            for r in one.responses
        ],
        "flips": [asdict(flip) for flip in one.flips],
    }


def _rival_document(rival: Rivalry, explanation: Explanation) -> dict[str, Any]:
    builds_model = can_build(explanation.job)
    return {
        "plan": rival.rival,
        "difference_ms": rival.difference_ms,
        "error_ms": rival.error_ms,
        "faster_probability": rival.faster_fraction,
        "within_error": rival.within_error,
        "settling": [
            {
                "run": describe_run(one.sources, explanation.job, builds_model),
                "sources": [asdict(source) for source in one.sources],
                "explained_fraction": one.explained_fraction,
                "error_ms": one.error_ms,
            }
            for one in rival.settling
        ],
    }


def _why_not_document(explanation: Explanation) -> dict[str, Any] | None:
    why = explanation.why_not
    if why is None:
        return None
    return {
        "asked": dict(explanation.wish or {}),
        "strategy": asdict(why.strategy),
        "status": why.status,
        "reason": why.reason,
        "outside_search": why.outside,
        "counts": dict(why.counts),
        "plan": estimate_document(why.estimate) if why.estimate else None,
        "causes": [asdict(cause) for cause in why.causes],
    }


def can_build(job: Job) -> bool:
    """Whether `profile` can build the job's model: a Hugging Face config.json, in a file or in the job's own."""
    try:
        model = read_document(job.path, "job file").get("model")
        document = read_document(job.path.parent / model, "model file") if isinstance(model, str) else model
    except PlannerError:
        return False  # a job that never was a file
    return isinstance(document, dict) and is_built_live(document, str(job.path))


# --------------------------------------------------------------------------------------------------------- for people


def list_parts(explanation: Explanation) -> Iterator[RenderableType]:
    """Where the step goes, what memory would bring, how sure it is, what would settle it, and why not: tables and
    lines, in the order in which they are read."""
    found, first = explanation.sensitivity, explanation.sensitivity.estimates[0]
    yield describe_strategy(first.plan)
    expected = f"; {describe_expected(first)}" if first.interval else ""
    yield f"step {first.step_ms:.2f} ms{expected}"
    yield stage_time_table(first.timeline)
    if first.modules:
        yield module_table(first.modules)
    yield describe_path(first.timeline)
    yield _memory_table(explanation)
    yield from _describe_headroom(first, explanation.headroom)
    yield ""
    if len(found.estimates) > 1:
        yield _plans_table(explanation)
    yield _sources_table(found)
    yield from describe_sources(found)
    yield _describe_facts(explanation.job)
    yield from _describe_overlaps(explanation)
    for rival in found.rivals:
        yield ""
        yield from _describe_rival(rival, explanation)
    yield ""
    yield from _describe_teaching(explanation)
    if explanation.why_not is not None:
        yield ""
        yield from _describe_why_not(explanation.why_not, explanation)
        if explanation.why_not.causes:
            yield _causes_table(explanation.why_not)


def _memory_table(explanation: Explanation) -> Table:
    first, headroom = explanation.sensitivity.estimates[0], explanation.headroom
    more = f"{format_bytes(headroom.extra_bytes)} more saves, ms"
    hosts = first.problem.host_limit_bytes
    of_host = ["on its host, GiB", "limit there, GiB"] if hosts else []
    table = _table("memory of stage", "peak, GiB", "limit, GiB", "left, GiB", more, *of_host)
    rows = zip(first.peak_memory_bytes, first.problem.memory_limit_bytes, headroom.left_bytes, strict=True)
    for stage, figures in enumerate(rows):
        gain_ms = headroom.gain_ms[stage]
        gain = "not known in time" if gain_ms is None else f"{gain_ms:.2f}"
        on_host = [f"{figure / GIB:.2f}" for figure in (first.host_bytes[stage], hosts[stage])] if hosts else []
        table.add_row(str(stage), *(f"{figure / GIB:.2f}" for figure in figures), gain, *on_host)
    return table


def _describe_headroom(first: Estimate, headroom: Headroom) -> Iterator[str]:
    more = f"{format_bytes(headroom.extra_bytes)} more memory"
    if headroom.best_ms is not None and not first.fits:
        yield f"placed anew, within the memory that there is, this strategy takes {headroom.best_ms:.2f} ms"
    elif headroom.best_ms is not None and headroom.best_ms < first.step_ms * (1 - GAP_FRACTION):
        yield f"its layers could lie better: placed anew, this strategy takes {headroom.best_ms:.2f} ms"
    if headroom.best_ms is None:
        yield "no placement of this strategy was found that fits, so what memory would bring is not known"
    elif headroom.all_gain_ms == 0:
        held = "memory does not hold it back" if first.fits else "memory does not hold that back"
        yield f"{held}: {more} on every stage would not make it faster"
    elif headroom.all_gain_ms is None:
        yield "what memory would bring was not settled in time; a longer --time-limit would tell"
    else:
        yield f"{more} on every stage would save {headroom.all_gain_ms:.2f} ms"
        known = [(gain, stage) for stage, gain in enumerate(headroom.gain_ms) if gain]
        if known:
            gain_ms, stage = max(known, key=lambda one: one[0])
            yield f"stage {stage} is where it is worth most: alone there it would save {gain_ms:.2f} ms"
    if headroom.host_gain_ms:
        yield f"hosts without a limit would save {headroom.host_gain_ms:.2f} ms"


def _plans_table(explanation: Explanation) -> Table:
    found = explanation.sensitivity
    table = _table("plan", "", "step, ms", "against plan 1", "its error", "chance to be faster", left=1)
    by_rival = {rival.rival: rival for rival in found.rivals}
    for number, (name, estimate) in enumerate(zip(explanation.names, found.estimates, strict=True)):
        cells = ["", "", ""]
        if number in by_rival:
            rival = by_rival[number]
            cells = [
                format_signed(rival.difference_ms, 2), f"{rival.error_ms:.2f}", format_percent(rival.faster_fraction)
            ]  # fmt: skip
        told = f"{name}: {describe_strategy(estimate.plan)}"
        table.add_row(str(number + 1), told, f"{estimate.step_ms:.2f}", *cells)
    return table


def _sources_table(found: Sensitivity) -> Table:
    change = format_percent(found.change_fraction)
    alone = len(found.estimates) == 1
    headings = (
        ["share of step", f"step at -{change}", f"step at +{change}"]
        if alone
        else [*(f"share of plan {n}" for n in range(1, len(found.estimates) + 1)), "order turns at"]
    )
    table = _table("what the step owes to", "where", "from", "error, ±", *headings, left=2)
    for one in _shown(found):
        source = one.source
        shares = [format_percent(response.elasticity_fraction) for response in one.responses]
        if alone:
            response = one.responses[0]
            cells = [*shares, f"{response.low_ms:.2f}", f"{response.high_ms:.2f}"]
        else:
            cells = [*shares, describe_flips(one)]
        table.add_row(
            source.name, describe_point(source), source.time_source, format_percent(source.error_fraction), *cells
        )
    return table


def _shown(found: Sensitivity) -> list[SourceSensitivity]:
    return [
        one
        for one in found.sources
        if any(response.elasticity_fraction >= _SHOWN_FRACTION for response in one.responses)
        or any(flip.within for flip in one.flips)
    ]


def describe_flips(one: SourceSensitivity) -> str:
    """`1, 2: +0.5 %`, the nearest flip; marked where it is within the change that was asked for."""
    if not one.flips:
        return "-"
    flip = min(one.flips, key=lambda flip: abs(flip.change_fraction))
    mark = " *" if flip.within else ""
    return f"{flip.plan + 1}, {flip.other + 1}: {flip.change_fraction * 100:+.2g} %{mark}"


def describe_sources(found: Sensitivity) -> Iterator[str]:
    """What the table of sources leaves out, and whether the order of the plans hangs on one of them."""
    rest = len(found.sources) - len(_shown(found))
    if rest:
        yield f"and {rest} more, to each of which a step owes less than {format_percent(_SHOWN_FRACTION)}"
    for index in range(len(found.estimates)):
        sum_fraction = sum(one.responses[index].elasticity_fraction for one in found.sources)
        if abs(sum_fraction - 1.0) > _SHOWN_FRACTION:
            yield (
                f"the shares of plan {index + 1} add up to {format_percent(sum_fraction)}: within "
                f"{format_percent(found.change_fraction)} another path becomes the longest, and a share is the mean of "
                "both sides"
            )
    if len(found.estimates) > 1:
        change = format_percent(found.change_fraction)
        turning = [one.source.name for one in found.sources if any(flip.within for flip in one.flips)]
        if turning:
            told = ", ".join(dict.fromkeys(turning))
            yield f"* within {change}: the order of these plans turns if one of {told} is off by that much"
        else:
            yield f"the order of these plans holds whichever single source is off by {change}"


def _describe_rival(rival: Rivalry, explanation: Explanation) -> Iterator[str]:
    number = rival.rival + 1
    difference = f"{abs(rival.difference_ms):.2f} ms {'faster' if rival.difference_ms < 0 else 'slower'}"
    if rival.within_error:
        yield (
            f"plan {number} is {difference} than plan 1, and its costs leave {rival.error_ms:.2f} ms open (one "
            "standard deviation): they do not tell which is faster. What would settle it, in this order:"
        )
    else:
        yield (
            f"plan {number} is {difference} than plan 1 beyond the error of its costs ({rival.error_ms:.2f} ms, one "
            f"standard deviation)." + (" What would sharpen it:" if rival.settling else "")
        )
    builds_model = can_build(explanation.job)
    for step, one in enumerate(rival.settling, start=1):
        run = describe_run(one.sources, explanation.job, builds_model)
        yield f"  {step}. {run}; leaves {one.error_ms:.2f} ms ({format_percent(one.explained_fraction)} explained)"
    if not rival.settling:
        yield "  nothing that could be measured is left: what differs has been, or does not matter"


def _describe_facts(job: Job) -> str:
    """What the job's stack is taken to do."""
    software = job.workload.software_under(calibration_of(job).software)
    return describe_facts(software, facts_of(software, job.workload.facts))


def _describe_overlaps(explanation: Explanation) -> Iterator[str]:
    """What the plan's overlaps bring, where its search may choose them, and why one is left open."""
    taken, first = explanation.overlaps, explanation.sensitivity.estimates[0]
    if taken is None:
        return
    yield f"overlaps taken: {taken.words}"
    for other in taken.others:
        if other.step_ms is None:
            yield f"  not {other.words}: {other.reason or 'it does not fit'}"
        else:
            change = f"{format_signed((other.step_ms / first.step_ms - 1) * 100, 2)} %"
            yield f"  {other.words}: {other.step_ms:.2f} ms, {change}"
    for name, slowdown in taken.slowdowns.items():
        yield (
            f"  beside {TRAFFIC[name]} both take {slowdown.factor:g} times as long while both run ({slowdown.source}; "
            "above 2 nothing is won by it)"
        )


def _describe_teaching(explanation: Explanation) -> Iterator[str]:
    """Which plan to run first for a calibration, what it would tell, and what none of them would."""
    teaching, estimates = explanation.teaching, explanation.sensitivity.estimates
    if not teaching.runs:
        yield "no run of these would teach a calibration: their steps hardly stand on what the device reaches"
        return
    yield "what runs would teach (`calibrate --logs` reads their logs), in this order:"
    for step, run in enumerate(teaching.runs, start=1):
        plan = f"plan {run.plan + 1} ({describe_strategy(estimates[run.plan].plan)})"
        yield f"  {step}. {plan} tells {', '.join(map(_describe_spread, run.narrowed[:3])) or 'a little of several'}"
    if teaching.untold:
        yield f"none of them tells {', '.join(teaching.untold)}, which these steps stand on too"


def _describe_spread(rate: RateSpread) -> str:
    return f"{rate.name} (±{format_percent(rate.before_fraction)} before, ±{format_percent(rate.after_fraction)} after)"


def _describe_why_not(why: WhyNot, explanation: Explanation) -> Iterator[str]:
    strategy = why.strategy
    asked = describe_wish(explanation.wish or {})
    counted = ", ".join(f"{number} {status}" for status, number in sorted(why.counts.items()))
    outside = "; the job's `search` leaves it out" if why.outside else ""
    yield f"why not {asked}: {sum(why.counts.values())} strategies match ({counted}){outside}"
    if why.estimate is None:
        yield f"{name_strategy(strategy)} is {why.status}: {why.reason}"
        return
    mine_ms, other_ms = explanation.sensitivity.estimates[0].step_ms, why.estimate.step_ms
    ahead_fraction = other_ms / mine_ms - 1
    compared = f"{format_percent(abs(ahead_fraction))} {'slower' if ahead_fraction > 0 else 'faster'} than the plan"
    if abs(ahead_fraction) <= TIE_FRACTION:
        compared = "as long as the plan's"
    found = "" if why.status == "solved" else " that was found in time"
    yield f"the best of them{found}, {describe_strategy(why.estimate.plan)}, takes {format_ms(other_ms)}: {compared}"


def _causes_table(why: WhyNot) -> Table:
    table = _table("ms, mean of stages", "the plan", "the other", "difference")
    for cause in why.causes:
        difference_ms = cause.other_ms - cause.plan_ms
        if cause.plan_ms or cause.other_ms:
            table.add_row(cause.cause, f"{cause.plan_ms:.2f}", f"{cause.other_ms:.2f}", format_signed(difference_ms, 2))
    table.add_section()
    sums = sum(cause.plan_ms for cause in why.causes), sum(cause.other_ms for cause in why.causes)
    table.add_row("step", f"{sums[0]:.2f}", f"{sums[1]:.2f}", format_signed(sums[1] - sums[0], 2))
    return table


def _table(first: str, *others: str, left: int = 0) -> Table:
    """The first column and `left` more to the left, the others, which are numbers, to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate((first, *others)):
        table.add_column(heading, justify="left" if index <= left else "right", no_wrap=index != 1 or left == 0)
    return table
