"""The rules of plans: what does not fit, and what is wasted, as the simulated step tells. Whatever files say the plan.

Each takes a Study and gives Advice; RULES is what documentation and SARIF list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mm_autoparallel.integrations.findings import Rule
from mm_autoparallel.lint.study import Advice, Study, describe_gain, gains, list_lists, whole_groups
from mm_autoparallel.model.costs.topology import place_groups
from mm_autoparallel.model.job.overlaps import AS_SAID
from mm_autoparallel.pipeline.simulate.loads import overfull_hosts, overfull_stages
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.units import format_bytes, format_percent

GAIN_FRACTION = 0.02
"""Of a step: what saves less is not told. Assumed: predictions of one strategy's variants are no better than that."""

BUBBLE_FRACTION = 0.20
"""Of all stages' time, idle: a finding says more."""

LIKELY_PROBABILITY, SAFE_PROBABILITY = 0.2, 0.05
"""Of running out of memory: a finding says a higher one, and a plan that is advised has a lower one. Assumed."""

_MAX_MOVES = 12
"""Layers that are moved to balance stages, at most; assumed, some hundred simulated steps each."""

MEMORY = Rule(
    "out-of-memory",
    "error",
    "a stage whose simulated peak is above what a device may hold",
    "more recompute, a smaller micro-batch, or a sharded optimizer, the first of these that fits",
)
UNSURE = Rule(
    "memory-unsure",
    "warning",
    "a stage whose simulated peak is above what a device may hold, beside a flag that keeps less than is simulated",
    "as for out-of-memory, where the run shows that it is needed",
)
HOST = Rule("host-memory", "error", "a stage that keeps more on its host than the cluster allows", "fewer layers there")
TIGHT = Rule(
    "memory-tight",
    "warning",
    f"a plan that fits by count and runs out of memory with a chance above {LIKELY_PROBABILITY:.0%}",
    "more recompute, a smaller micro-batch, or a sharded optimizer",
)
BALANCE = Rule(
    "stage-imbalance",
    "warning",
    f"layers dealt so that one stage holds up the others: others would save {GAIN_FRACTION:.0%} of the step",
    "the layers of every stage",
)
RECOMPUTE = Rule(
    "needless-recompute",
    "warning",
    "layers that are recomputed though memory would hold what they keep",
    "the number of layers that is enough",
)
LEVEL = Rule(
    "tensor-across-level",
    "warning",
    "tensor parallel groups that cross a slower level of the network than one within reach",
    "a TP that stays within the level",
)
OVERLAP = Rule(
    "overlap-off",
    "warning",
    f"an overlap of communication and compute that is off and would save {GAIN_FRACTION:.0%} of the step",
    "the flag that turns it on",
)
BUBBLE = Rule(
    "few-micro-batches",
    "warning",
    f"a pipeline that idles for more than {BUBBLE_FRACTION:.0%} of the time for want of micro-batches",
    "a smaller micro-batch where that is faster, else a larger batch",
)
SHARDED = Rule(
    "optimizer-not-sharded",
    "note",
    "optimizer states that every data-parallel rank keeps whole",
    "ZeRO 1",
)


def _relief(study: Study, is_enough: Callable[[Estimate], bool]) -> tuple[Estimate, str] | None:
    """The first plan with less on its devices that is enough, and what decides it."""
    plan, strategy = study.plan, study.plan.strategy
    if strategy.zero == 0 and strategy.dp > 1:
        found = study.simulate(replace(plan, strategy=replace(strategy, zero=1)))
        if found and is_enough(found):
            return found, "zero"
    most = max(max(counts) for counts in plan.layers.values())
    for number in range(1, most + 1):
        better = study.raised(number)
        found = study.simulate(better) if better != plan else None
        if found and is_enough(found):
            return found, "recompute"
    for mbs in whole_groups(strategy.mbs):
        found = study.simulate(replace(plan, strategy=replace(strategy, mbs=mbs)))
        if found and is_enough(found):
            return found, "mbs"
    return None


def _describe_relief(plan: Plan, about: str) -> str:
    words = {
        "zero": "ZeRO 1",
        "mbs": f"MBS {plan.strategy.mbs}",
        "recompute": f"recompute of {max(max(counts) for counts in plan.recompute.values())} layers a stage",
    }
    return words[about]


def find_overfull(study: Study) -> Iterator[Advice]:
    """Stages above their limits on device or host, or near the device's memory."""
    estimate = study.estimate
    over = overfull_stages(estimate.problem, estimate.timeline.peak_memory_bytes)
    likely = estimate.oom_probability
    if over or likely > LIKELY_PROBABILITY:
        rule = TIGHT if not over else UNSURE if study.keeps_less else MEMORY
        less = f"; {study.keeps_less[0]} keeps less than that" if over and study.keeps_less else ""
        relief = _relief(study, lambda one: one.fits and one.oom_probability < SAFE_PROBABILITY)
        better, about = (relief[0].plan, relief[1]) if relief else (None, "recompute")
        with_it = (
            f"; with {_describe_relief(better, about)} it fits"
            if better
            else "; neither ZeRO 1 nor recompute nor a smaller MBS makes it fit, `plan` looks for sizes that do"
        )
        for stage in over or [estimate.fullest_stage]:
            peak, limit = estimate.peak_memory_bytes[stage], estimate.problem.memory_limit_bytes[stage]
            said = (
                f"stage {stage} peaks at {format_bytes(peak)}, above its limit of {format_bytes(limit)}"
                if over
                else f"stage {stage} peaks at {format_bytes(peak)} of {format_bytes(limit)}, and runs out of memory "
                f"with a chance of {format_percent(likely)}"
            )
            figures = {"peak_bytes": peak, "limit_bytes": limit, "oom_probability": likely}
            words = _describe_relief(better, about) if better else ""
            yield Advice(rule, said + less + with_it, about, stage, figures, better, words)
    for stage in overfull_hosts(estimate.problem, estimate.timeline.peak_host_bytes):
        kept, limit = estimate.host_bytes[stage], estimate.problem.host_limit_bytes[stage]
        yield Advice(
            HOST,
            f"stage {stage} keeps {format_bytes(kept)} on its host for each device, above {format_bytes(limit)}",
            "optimizer_offload",
            stage,
            {"host_bytes": kept, "limit_bytes": limit},
        )


def _is_safe(study: Study, better: Estimate) -> bool:
    """Fits, and no less surely than the plan that is looked at does."""
    most = max(SAFE_PROBABILITY, study.estimate.oom_probability)
    return better.fits and better.oom_probability <= most


def find_imbalance(study: Study) -> Iterator[Advice]:
    """Layers are moved one by one as long as the step gets shorter; told where that is worth it."""
    now = study.estimate
    if study.plan.strategy.pp == 1 or not now.fits:
        return
    best = now
    for _ in range(_MAX_MOVES):
        better = min(_neighbours(study, best), key=lambda one: one.step_ms, default=best)
        if better.step_ms >= best.step_ms:
            break
        best = better
    if gains(study, best) < GAIN_FRACTION:
        return
    busy = now.timeline.busy_ms
    stage = int(busy.argmax())
    mean = float(busy.mean())
    yield Advice(
        BALANCE,
        f"stage {stage} computes for {busy[stage] / mean - 1:.0%} longer than the mean of all; "
        f"{list_lists(best.plan)} take {describe_gain(study, best)}",
        "layers",
        stage,
        {"busy_ms": float(busy[stage]), "mean_busy_ms": mean, "step_ms": now.step_ms, "better_step_ms": best.step_ms},
        best.plan,
        list_lists(best.plan),
    )


def _neighbours(study: Study, estimate: Estimate) -> Iterator[Estimate]:
    """Every plan with one layer elsewhere, of the virtual stages of the stage that computes longest or shortest."""
    plan, busy = estimate.plan, estimate.timeline.busy_ms
    pp, number = plan.strategy.pp, plan.strategy.pp * plan.strategy.vpp
    slowest, fastest = int(busy.argmax()), int(busy.argmin())
    for modality in plan.layers:
        for source in range(number):
            for target in range(number):
                if source == target or (source % pp != slowest and target % pp != fastest):
                    continue
                other = study.moved(plan, modality, source, target)
                found = study.simulate(other) if other else None
                if found and _is_safe(study, found):
                    yield found


def find_needless_recompute(study: Study) -> Iterator[Advice]:
    """The fewest recomputed layers that memory asks for."""
    now = max((max(counts) for counts in study.plan.recompute.values()), default=0)
    if not now or not study.estimate.fits:
        return
    for number in range(now):
        better = study.simulate(study.capped(number))
        if better is None or not _is_safe(study, better):
            continue
        if gains(study, better) < GAIN_FRACTION:
            return
        stopped = sum(map(sum, study.plan.recompute.values())) - sum(map(sum, better.plan.recompute.values()))
        peak, limit = max(better.peak_memory_bytes), better.memory_limit_bytes
        words = f"recompute of {number} layers a stage" if number else "no recompute"
        yield Advice(
            RECOMPUTE,
            f"{stopped} layers are recomputed that memory would hold: with {words} the highest peak is "
            f"{format_bytes(peak)} of {format_bytes(limit)}, and a step takes {describe_gain(study, better)}",
            "recompute",
            None,
            {
                "needless_layers_count": float(stopped),
                "peak_bytes": peak,
                "limit_bytes": limit,
                "step_ms": study.estimate.step_ms,
                "better_step_ms": better.step_ms,
            },
            better.plan,
            words,
        )
        return


def find_wide_tensor(study: Study) -> Iterator[Advice]:
    """Tensor parallel groups beyond the innermost level, where TP fits into a level within."""
    strategy, levels = study.plan.strategy, study.job.cluster.levels
    place = next((one for one in place_groups(study.job.cluster, strategy) if one.name == "TP"), None)
    if place is None or place.level == levels[0].name:
        return
    inner = levels[[level.name for level in levels].index(place.level) - 1]
    yield Advice(
        LEVEL,
        f"TP {strategy.tp} crosses level {place.level} ({place.bandwidth_bytes_per_s / 1e9:.0f} GB/s a rank), and "
        f"level {inner.name} joins {inner.num_devices} devices",
        "tp",
        None,
        {"bandwidth_bytes_per_s": place.bandwidth_bytes_per_s},
        None,
        f"TP {inner.num_devices}",
    )


def find_overlaps_off(study: Study) -> Iterator[Advice]:
    """Overlaps of data-parallel communication that are off, each with what it would save by itself."""
    strategy = study.plan.strategy
    workload = strategy.overlaps.of(study.job.workload)
    if strategy.dp * strategy.cp == 1 or not study.estimate.fits:
        return
    said, plan = strategy.overlaps.chosen, replace(study.plan, strategy=replace(strategy, overlaps=AS_SAID))
    choices = {"overlap_grad_reduce": True, "overlap_param_gather": strategy.zero > 0 and workload.overlap_grad_reduce}
    for name in (key for key, applies in choices.items() if applies and not getattr(workload, key)):
        better = study.simulate(plan, **(said | {name: True}))
        if better and _is_safe(study, better) and gains(study, better) >= GAIN_FRACTION:
            yield Advice(
                OVERLAP,
                f"{name} is off; with it a step takes {describe_gain(study, better)}",
                name,
                None,
                {"step_ms": study.estimate.step_ms, "better_step_ms": better.step_ms},
                None,
                f"{name} true",
            )


def find_bubble(study: Study) -> Iterator[Advice]:
    """Idle stages, where more micro-batches would fill them."""
    strategy, now = study.plan.strategy, study.estimate
    number = study.plan.num_microbatches
    filling = (strategy.pp - 1) / (number * strategy.vpp + strategy.pp - 1)
    if now.bubble_fraction <= BUBBLE_FRACTION or filling <= BUBBLE_FRACTION / 2:
        return
    tried = (
        study.simulate(replace(study.plan, strategy=replace(strategy, mbs=mbs))) for mbs in whole_groups(strategy.mbs)
    )
    better = min((one for one in tried if one and _is_safe(study, one)), key=lambda one: one.step_ms, default=None)
    is_faster = better is not None and gains(study, better) >= GAIN_FRACTION
    least = -(-round((1 - BUBBLE_FRACTION) / BUBBLE_FRACTION * (strategy.pp - 1)) // strategy.vpp)
    batch = max(least, number + 1) * strategy.dp * strategy.mbs
    plan = better.plan if better and is_faster else None
    larger = replace(study.plan, global_batch_size=batch)
    advice = (
        f"MBS {plan.strategy.mbs} takes {describe_gain(study, better)}"
        if plan and better
        else f"a batch of {batch} would give {max(least, number + 1)}"
    )
    yield Advice(
        BUBBLE,
        f"stages idle for {format_percent(now.bubble_fraction)} of the step: {number} micro-batches on PP "
        f"{strategy.pp}, VPP {strategy.vpp}; {advice}",
        "mbs" if plan else "global_batch_size",
        None,
        {"bubble_fraction": now.bubble_fraction, "microbatches_count": float(number)},
        plan or larger,
        f"MBS {plan.strategy.mbs}" if plan else f"GBS {batch}",
    )


def find_whole_optimizer(study: Study) -> Iterator[Advice]:
    """What ZeRO 1 would free."""
    strategy = study.plan.strategy
    if strategy.zero or strategy.dp * strategy.cp == 1:
        return
    better = study.simulate(replace(study.plan, strategy=replace(strategy, zero=1)))
    if better is None or better.step_ms > study.estimate.step_ms * (1 + GAIN_FRACTION):
        return
    freed = max(study.estimate.peak_memory_bytes) - max(better.peak_memory_bytes)
    if freed < GAIN_FRACTION * study.estimate.memory_limit_bytes:
        return
    yield Advice(
        SHARDED,
        f"{strategy.dp} data-parallel ranks keep the optimizer's states each; sharded, the fullest stage holds "
        f"{format_bytes(freed)} less",
        "zero",
        None,
        {"freed_bytes": freed},
        better.plan,
        "ZeRO 1",
    )


FINDERS: tuple[Callable[[Study], Iterator[Advice]], ...] = (
    find_overfull,
    find_imbalance,
    find_needless_recompute,
    find_wide_tensor,
    find_overlaps_off,
    find_bubble,
    find_whole_optimizer,
)

RULES = (MEMORY, UNSURE, HOST, TIGHT, BALANCE, RECOMPUTE, LEVEL, OVERLAP, BUBBLE, SHARDED)


def advise(study: Study) -> Iterator[Advice]:
    """All that the rules of plans find."""
    for finder in FINDERS:
        yield from finder(study)
