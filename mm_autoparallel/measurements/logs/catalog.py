"""read_cases: which framework printed a log, told by what stands in it, and its run as a measured case.

A case is refused where the log's own figures cannot be: parameters that its sizes do not make, throughput above the
device's peak, a device that is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.build import build_job, check_lawful, even_layers, lay_layers
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.cluster_columns import list_levels
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.impossible import fastest_flops_per_s, impossible_reason
from mm_autoparallel.measurements.logs import llm_foundry, megatron, megatron_deepspeed, mindspeed, torchtitan
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log, read_log
from mm_autoparallel.measurements.logs.run import Run
from mm_autoparallel.measurements.logs.steady import LEAST_STEPS, Steady, find_steady
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.records import MAX_NAME
from mm_autoparallel.validation import nearest


@dataclass(frozen=True)
class Reader:
    """One framework. fits: whether it printed the log, by what stands in it; the first that fits reads it."""

    name: str
    fits: Callable[[Log], bool]
    read_run: Callable[[Log, Facts], Run]


READERS = (
    Reader("Megatron-DeepSpeed", megatron_deepspeed.is_megatron_deepspeed, megatron_deepspeed.read_run),
    Reader("MindSpeed-LLM and MindSpeed-MM", mindspeed.is_mindspeed, mindspeed.read_run),
    Reader("Megatron-LM", megatron.is_megatron, megatron.read_run),
    Reader("torchtitan", torchtitan.is_torchtitan, torchtitan.read_run),
    Reader("LLM Foundry", llm_foundry.is_llm_foundry, llm_foundry.read_run),
)

_PARAMETERS_FRACTION = 0.005
"""Assumed: what sizes leave out (masks, buffers, a padding of their own); another form of layers is off by more."""


_STARTS_FRACTION = 0.05
"""Two starts of one job that differ by more did not run the same. Assumed: what steps of one run may drift by."""


def read_cases(paths: Sequence[Path], device_name: str, facts: Facts) -> list[MeasuredCase]:
    """One case a log, in their order. Raises TableError or JobError naming the log and what is wrong or missing.

    device_name: of the catalog, what all of them ran on.
    """
    if device_name not in DEVICES:
        raise JobError(
            f"the device {device_name!r} is not in the catalog{nearest(device_name, list(DEVICES))}; known are "
            f"{', '.join(DEVICES)}: a log tells no figures of a device"
        )
    cases = [_read_case(read_log(path), index, device_name, facts) for index, path in enumerate(paths)]
    facts.check_all_asked()
    return cases


def find_reader(log: Log) -> Reader:
    """The reader of `log`. Raises TableError where it is of no framework that is known."""
    for reader in READERS:
        if reader.fits(log):
            return reader
    known = ", ".join(reader.name for reader in READERS)
    raise log.error(
        f"it has neither the arguments nor the steps of a framework that is known ({known}); give the whole log of "
        "rank 0 from its beginning"
    )


def _read_case(log: Log, index: int, device_name: str, facts: Facts) -> MeasuredCase:
    reader = find_reader(log)
    run = reader.read_run(log, facts)
    _check_device(log, run, device_name)
    steady = None if run.out_of_memory and len(run.steps) <= LEAST_STEPS else _find_steady(log, run)
    try:
        job, plan = _build(log, index, run, device_name, facts)
    except Unrepresentable as reason:
        raise log.error(f"its run cannot be predicted: {reason}") from None
    _check_parameters(log, run, job, plan)
    peaks = _by_stage(log, run, run.rank_peak_bytes) or run.peak_bytes
    strategy = run.strategy
    content = _content(log, run, job, plan, steady, device_name)
    case = MeasuredCase(
        table=log.path.name[-MAX_NAME:],
        row=index,
        name=f"{log.path.name}: PP{strategy.pp} TP{strategy.tp} DP{strategy.dp} MBS{strategy.mbs}",
        job=job,
        plan=plan,
        software=run.software,
        measured_ms=steady.median_ms if steady else None,
        measured_bytes=peaks if steady else None,
        out_of_memory=steady is None,
        source=f"log {log.path.name} of {reader.name}",
        content=content,
        remarks=(steady.remark if steady else "it ran out of memory", *run.remarks),
        first_step=run.first_step,
        resting_bytes=_by_stage(log, run, run.rank_resting_bytes) or None,
    )
    _check_rate(log, run, case)
    return case


def _check_device(log: Log, run: Run, device_name: str) -> None:
    if run.device is None:
        return
    try:
        found = find_device(run.device)
    except Unrepresentable as reason:
        raise log.error(f"it ran on {run.device}, and --device is {device_name}: {reason}") from None
    if found != device_name:
        raise log.error(f"it ran on {run.device}, and --device is {device_name}; calibrate each device by its own runs")


def _find_steady(log: Log, run: Run) -> Steady:
    """The steady step among entries of the whole batch: a batch that is ramped up does less before.

    Of a job that was started several times the longest start counts, and the others must agree with it.
    """
    batch = run.workload["global_batch_size"]
    whole = [step for step in run.steps if step.samples in (None, batch)]
    if run.steps and not whole:
        raise log.error(
            f"no step has the batch of {batch} samples that its arguments say; the last one has {run.steps[-1].samples}"
        )
    starts: list[list[float]] = [[]]
    for index, step in enumerate(whole):
        if index and step.number <= whole[index - 1].number:
            starts.append([])
        starts[-1].append(step.step_ms)
    found = [find_steady(times_ms) for times_ms in sorted(starts, key=len, reverse=True)]
    longest = found[0]
    if isinstance(longest, str):
        raise log.error(longest)
    for other in found[1:]:
        if isinstance(other, Steady) and abs(other.median_ms / longest.median_ms - 1) > _STARTS_FRACTION:
            raise log.error(
                f"the job was started {len(starts)} times, and its steady step is {longest.median_ms:.6g} ms of one "
                f"start and {other.median_ms:.6g} ms of another: what differs is not told; divide the log"
            )
    return longest


def _build(log: Log, index: int, run: Run, device_name: str, facts: Facts) -> tuple[Job, Plan]:
    """Raises Unrepresentable where the parts do not go together."""
    strategy = run.strategy
    world = strategy.world_size
    per_node = run.devices_per_node
    if world > DEVICES_PER_NODE or per_node is not None or "devices_per_node" in facts.given:
        per_node = facts.count(log, "devices_per_node", per_node)
    per_node = per_node or world
    rate = facts.optional(log, "network_bytes_per_s")
    row = Row(log.path, index, 0, {} if rate is None else {"network_bytes_per_s": rate})
    levels = list_levels(row, device_name, world, per_node, strategy.tp)
    job = build_job(row, run.model, device_name, world, run.workload, devices_per_node=per_node, **levels)
    if run.placed is not None:
        check_lawful(job, strategy)
        layers, recompute = run.placed
        return job, Plan(strategy, layers, recompute, job.workload.global_batch_size)
    laid = run.layers or even_layers(job.model.text.layers.num_layers, strategy, run.first_layers, run.last_layers)
    return job, lay_layers(job, strategy, run.recompute_all, run.num_recomputed, laid)


def _check_parameters(log: Log, run: Run, job: Job, plan: Plan) -> None:
    """Raises TableError where what the framework counted is not what these sizes make."""
    chain, pp = expand(job.model), plan.strategy.pp
    if run.parameters is not None:
        own = sum(count_parameters(block.structure) * block.count for block in chain.blocks)
        _compare_parameters(log, "it", run.parameters, own)
    if job.model.encoders or plan.strategy.ep > 1 or not run.stage_parameters:
        return
    tp = plan.strategy.tp
    of_layers = [block for block in chain.blocks if block.role == "layer"]
    if len(of_layers) != 1:
        return  # layers of several kinds
    layer = count_parameters(of_layers[0].structure, tp)
    ends = [
        sum(count_parameters(block.structure, tp) for block in chain.blocks if block.role == role)
        for role in ("pre", "post")
    ]
    if job.model.text.tied and pp > 1:  # the last stage holds a copy of the table
        ends[1] += job.model.text.layers.hidden_size * -(-job.model.text.vocab_size // tp)
    for stage, told in run.stage_parameters.items():
        if stage >= pp:
            raise log.error(f"it counts parameters of pipeline rank {stage}, and PP is {pp}")
        own = layer * sum(plan.layers["text"][stage::pp])
        own += (ends[0] if stage == 0 else 0) + (ends[1] if stage == pp - 1 else 0)
        _compare_parameters(log, f"pipeline rank {stage}", told, own)


def _compare_parameters(log: Log, who: str, told: int, own: int) -> None:
    if abs(own / told - 1) > _PARAMETERS_FRACTION:
        raise log.error(
            f"{who} has {told:,} parameters by its own count, and the sizes that it prints make {own:,}: the model has "
            "layers of another form than its arguments say, or two jobs wrote this log"
        )


def _check_rate(log: Log, run: Run, case: MeasuredCase) -> None:
    """Raises TableError where the step, or the framework's own figure, is above the device's peak."""
    reason = impossible_reason(case)
    if reason:
        raise log.error(reason)
    device, most_flops_per_s = case.job.cluster.device, fastest_flops_per_s(case)
    told = max(run.flops_per_s, default=0.0)
    if told > most_flops_per_s:
        raise log.error(
            f"it counts {told / 1e12:.4g} TFLOP/s a device, and {device.name} has {most_flops_per_s / 1e12:.4g}, "
            "so it ran on another device, or the figure is of something else"
        )


def _by_stage(log: Log, run: Run, of_rank: Mapping[int, float]) -> dict[int, float]:
    """Pipeline stage → bytes of its fullest rank."""
    strategy = run.strategy
    peaks: dict[int, float] = {}
    for rank, peak_bytes in of_rank.items():
        if rank >= strategy.world_size:
            raise log.error(f"it tells memory of rank {rank}, and there are {strategy.world_size} ranks")
        stage = rank // strategy.stride_of("pp") % strategy.pp
        peaks[stage] = max(peak_bytes, peaks.get(stage, 0.0))
    return peaks


def _content(log: Log, run: Run, job: Job, plan: Plan, steady: Steady | None, device_name: str) -> dict[str, str]:
    """What the calibration keeps of a log, so that the same run is known again: facts, no paths."""
    strategy = run.strategy
    return {
        "log": log.path.name[-MAX_NAME:],
        "software": run.software,
        "device": device_name,
        "model": json.dumps(dict(run.model), sort_keys=True),
        "workload": json.dumps(dict(run.workload), sort_keys=True),
        "layers": json.dumps({name: list(counts) for name, counts in plan.layers.items()}),
        "recompute": json.dumps({name: list(counts) for name, counts in plan.recompute.items()}),
        **{name: str(getattr(strategy, name)) for name in ("pp", "tp", "cp", "dp", "ep", "vpp", "mbs", "zero")},
        "devices_per_node": str(job.cluster.devices_per_node),
        "measured_ms": f"{steady.median_ms:.6g}" if steady else "",
        "spread_fraction": f"{steady.spread_fraction:.4f}" if steady else "",
    }
