"""An Estimate for people (a few lines and tables) and for programs (one document with the result file's keys)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mm_autoparallel.planner.by_module import ModuleShare
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.tables import (
    TimeShares,
    group_table,
    memory_table,
    module_table,
    share_time,
    stage_table,
    time_table,
)
from mm_autoparallel.units import GIB, format_bytes, format_ms, format_percent, format_signed

_OF_A_SEARCH = ("lower_bound_ms", "gap_fraction", "proven")


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """The result file's keys but for those that only a search can know, then where the time goes and every stage.

    replica_step_ms: as in Estimate. post_validated_ms: as in Timeline (null where encoders have sizes of their own).
    step_ms_low, step_ms_high: between which a measured step is expected (null where every block was measured).
    peak_allocated_bytes: per stage, without what lies outside the allocator. device_peak_bytes: per stage, with that
    and the allocator's fragments; oom_probability: the chance that the fullest device cannot hold it
    (planner/chance_to_fit.py). time_ms: means over the stages, which add up to e2e_time. stages: in order; counts by
    modality and chunk (of modes other than recompute by mode too, and what lies on the host, where a plan has some);
    `memory`: the peak by cause, which adds up to it. modules: of a layout, what each encoder and the decoder take of
    every stage (planner/by_module.py).
    """
    document = estimate.plan_document()
    for key in _OF_A_SEARCH:
        del document[key]
    shares = share_time(estimate.timeline)
    return document | {
        "fits": estimate.fits,
        "peak_allocated_bytes": [math.ceil(peak) for peak in estimate.peak_allocated_bytes],
        "device_peak_bytes": [math.ceil(peak) for peak in estimate.device_peak_bytes],
        "oom_probability": estimate.oom_probability,
        "replica_step_ms": estimate.replica_step_ms,
        "post_validated_ms": None if estimate.plan.strategy.arrangement else estimate.timeline.post_validated_ms,
        "step_ms_low": estimate.step_ms_low,
        "step_ms_high": estimate.step_ms_high,
        "calibration": estimate.provenance["calibration"],
        "time_ms": {name.removesuffix("_ms"): float(np.mean(values)) for name, values in vars(shares).items()},
        "stages": [_stage_document(estimate, shares, stage) for stage in range(estimate.problem.num_stages)],
        **({"modules": [_module_document(one) for one in estimate.modules]} if estimate.modules else {}),
        "warnings": list(estimate.warnings),
    }


def _stage_document(estimate: Estimate, shares: TimeShares, stage: int) -> dict[str, Any]:
    plan, num_stages, host_limits = estimate.plan, estimate.problem.num_stages, estimate.problem.host_limit_bytes
    modes = {
        modality: {mode: list(counts[stage::num_stages]) for mode, counts in of_mode.items()}
        for modality, of_mode in plan.modes.items()
    }
    return {
        "layers": {modality: list(counts[stage::num_stages]) for modality, counts in plan.layers.items()},
        "recompute": {modality: list(counts[stage::num_stages]) for modality, counts in plan.recompute.items()},
        **({"modes": modes} if modes else {}),
        **({"host_bytes": math.ceil(estimate.host_bytes[stage])} if modes or any(estimate.host_bytes) else {}),
        **({"host_limit_bytes": math.floor(host_limits[stage])} if host_limits else {}),
        **{name: float(values[stage]) for name, values in vars(shares).items()},
        "peak_memory_bytes": math.ceil(estimate.peak_memory_bytes[stage]),
        "peak_allocated_bytes": math.ceil(estimate.peak_allocated_bytes[stage]),
        "memory": dict(vars(estimate.memory[stage])),
        "memory_limit_bytes": math.floor(estimate.problem.memory_limit_bytes[stage]),
    }


def _module_document(share: ModuleShare) -> dict[str, Any]:
    sizes = {name.upper(): getattr(share.sizes, name) for name in ("pp", "tp", "cp", "dp", "mbs")}
    return {
        "name": share.name,
        "runs": share.layout,
        **sizes,
        "work_ms": list(share.work_ms),
        "held_bytes": [math.ceil(held) for held in share.held_bytes],
        "kept_bytes": [math.ceil(kept) for kept in share.kept_bytes],
    }


def render_estimate(estimate: Estimate) -> Group:
    """What a person reads: the strategy, where the step goes, what every stage holds, and the step."""
    step = (
        f"step {estimate.step_ms:.2f} ms, {estimate.throughput_tokens_per_s:.1f} tokens/s per device, "
        f"bubble {estimate.bubble_fraction * 100:.1f} %"
    )
    groups = estimate.provenance["groups"]
    return Group(
        Text(describe_strategy(estimate.plan)),
        time_table(estimate.timeline),
        stage_table(estimate.problem, estimate.placement, estimate.timeline, rows="modality"),
        memory_table(estimate.memory),
        *([module_table(estimate.modules)] if estimate.modules else []),
        *([group_table(groups)] if groups else []),
        *(Text(note) for note in estimate.provenance.get("devices", {}).get("notes", ())),
        Text(step),
        *([Text(after)] if (after := _describe_post_validation(estimate)) else []),
        Text(describe_chance(estimate)),
        *([Text(describe_expected(estimate))] if estimate.interval else []),
        *([Text(estimate.over_batches.words)] if estimate.over_batches else []),
    )


def _describe_post_validation(estimate: Estimate) -> str:
    """What stacks that part backwards may gain by not waiting at the end of a step; nothing of other plans."""
    apart_ms = estimate.timeline.post_validated_ms
    if not estimate.problem.splits or estimate.plan.strategy.arrangement or apart_ms >= estimate.step_ms:
        return ""
    return f"with post-validation of gradients (search.step_end) steps are {apart_ms:.2f} ms apart"


def describe_expected(estimate: Estimate) -> str:
    """`expected between 7.31 s and 16.72 s; uncalibrated: …`."""
    assert estimate.step_ms_low is not None
    assert estimate.step_ms_high is not None
    low, high = format_ms(estimate.step_ms_low), format_ms(estimate.step_ms_high)
    wider = (
        f", wider for: {', '.join(doubts)}" if (doubts := estimate.interval and estimate.interval.widened_by) else ""
    )
    return f"expected between {low} and {high}: {estimate.provenance['calibration']}{wider}"


def describe_chance(estimate: Estimate) -> str:
    """`out of memory with probability 3.1 %: stage 0 takes 70.12 GiB of 79.25 GiB, fragments included`."""
    stage = estimate.fullest_stage
    taken, held = format_bytes(estimate.device_peak_bytes[stage]), format_bytes(estimate.device_memory_bytes[stage])
    chance = format_percent(estimate.oom_probability)
    return f"out of memory with probability {chance}: stage {stage} takes {taken} of {held}, fragments included"


def describe_change(before: Estimate, after: Estimate) -> str:
    """`step 84.88 s, +350.00 ms (+0.4 %), highest peak 54.2 GiB (-1.1 GiB), fits`, signed against `before`."""
    peaks = [max(estimate.peak_memory_bytes) for estimate in (before, after)]
    sign = "-" if peaks[1] < peaks[0] else "+"
    return (
        f"step {format_ms(after.step_ms)}, {signed_step(after.step_ms, before.step_ms)}, highest peak "
        f"{format_bytes(peaks[1])} ({sign}{format_bytes(abs(peaks[1] - peaks[0]))}), "
        f"{'fits' if after.fits else 'does not fit'}"
    )


def signed_step(step_ms: float, before_ms: float) -> str:
    """`-12.50 ms (-0.1 %)`: how much longer a step is than the one before."""
    return f"{format_signed(step_ms - before_ms, 2)} ms ({format_signed(100 * (step_ms / before_ms - 1), 1)} %)"


def ranking_table(estimates: Sequence[Estimate]) -> Table:
    """The best plans of a search, best first: strategy, step, throughput, bubble, highest peak, chance to exceed it;
    where samples differ, the mean step over drawn batches too."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("strategy")
    for heading in ("step, ms", "tokens/s per device", "bubble", "highest peak, GiB", "out of memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    if estimates[0].over_batches:
        table.add_column("over batches, ms", justify="right", no_wrap=True)
    for rank, estimate in enumerate(estimates, start=1):
        table.add_row(
            str(rank),
            describe_strategy(estimate.plan),
            f"{estimate.step_ms:.2f}",
            f"{estimate.throughput_tokens_per_s:.1f}",
            format_percent(estimate.bubble_fraction),
            f"{max(estimate.peak_memory_bytes) / GIB:.2f}",
            format_percent(estimate.oom_probability),
            *([f"{estimate.over_batches.mean_ms:.2f}"] if estimate.over_batches else []),
        )
    return table


def describe_strategy(plan: Plan) -> str:
    """`PP 8, TP 2, CP 1, DP 4 on 64 devices; 1f1b, 128 micro-batches of 1`."""
    strategy = plan.strategy
    sizes = {
        "PP": strategy.pp,
        "VPP": strategy.vpp,
        "TP": strategy.tp,
        "CP": strategy.cp,
        "DP": strategy.dp,
        "EP": strategy.ep,
    }
    sizes |= {"ETP": strategy.etp} if strategy.etp else {}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("PP", "TP", "DP", "ETP")]
    told = ", ".join([*words, *strategy.choices])
    return (
        f"{told}, ZeRO {strategy.zero} on {strategy.world_size} devices; {strategy.schedule}, "
        f"{plan.num_microbatches} micro-batches of {strategy.mbs}"
    )
