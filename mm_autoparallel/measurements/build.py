"""From what a row says to its job, through parse_job, so that everything is checked once, and to its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE
from mm_autoparallel.measurements.table import LARGEST, SMALLEST, Row, Unrepresentable
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan


def build_job(
    row: Row,
    model: Mapping[str, Any],
    device: str | Mapping[str, Any],
    num_devices: int,
    workload: Mapping[str, Any],
    devices_per_node: int = DEVICES_PER_NODE,
    **cluster: Any,
) -> Job:
    """The job of a row: `model` in any form a job file knows, on `num_devices` of `device`.

    Devices that fill no node are one smaller node. cluster: further keys of a job's `cluster`. Raises Unrepresentable
    where the parts do not go together, or the devices are no whole nodes.
    """
    per_node = min(devices_per_node, num_devices)
    if num_devices % per_node:
        raise Unrepresentable(f"{num_devices} devices are no whole nodes of {per_node}")
    path = Path(f"{row.path}, row {row.index}")
    document = {
        "model": dict(model),
        "cluster": {
            "num_nodes": num_devices // per_node,
            "devices_per_node": per_node,
            "device": device if isinstance(device, str) else dict(device),
            **cluster,
        },
        "workload": dict(workload),
    }
    try:
        return parse_job(document, path)
    except JobError as failure:
        raise Unrepresentable(failure.reason) from None


def lay_layers(
    job: Job,
    strategy: Strategy,
    recompute_all: bool = False,
    num_recomputed: int = 0,
    layers: Sequence[int] | None = None,
) -> Plan:
    """The plan with `layers` of the text decoder on each stage and chunk, by default evenly.

    recompute_all: every layer recomputes; num_recomputed: so many of each chunk do.
    Raises Unrepresentable where they do not divide, the model has encoders, or the strategy is unlawful for the job.
    """
    check_lawful(job, strategy)
    if job.model.encoders:
        names = ", ".join(encoder.name for encoder in job.model.encoders)
        raise Unrepresentable(
            f"the model has {names} layers too, and the row does not say on which stages they lie; a table with the "
            "columns job and plan does"
        )
    laid = tuple(even_layers(job.model.text.layers.num_layers, strategy) if layers is None else layers)
    recomputed = laid if recompute_all else tuple(min(num_recomputed, held) for held in laid)
    return Plan(strategy, {"text": laid}, {"text": recomputed}, job.workload.global_batch_size)


def even_layers(num_layers: int, strategy: Strategy, first: int | None = None, last: int | None = None) -> list[int]:
    """Layers of each stage and chunk: evenly, but for the first and the last chunk where those have their own number.

    Raises Unrepresentable where they do not divide.
    """
    ends = [end for end in (first, last) if end is not None]
    rest, num_rest = num_layers - sum(ends), strategy.pp * strategy.vpp - len(ends)
    if num_rest <= 0 or rest <= 0 or rest % num_rest:
        raise Unrepresentable(
            f"{rest} layers do not lie evenly on {num_rest} chunks (PP {strategy.pp} x VPP {strategy.vpp}), and the "
            "row does not say how they lie"
        )
    even = [rest // num_rest] * num_rest
    return ([] if first is None else [first]) + even + ([] if last is None else [last])


def check_lawful(job: Job, strategy: Strategy) -> None:
    """Raises Unrepresentable with the rule that `strategy` breaks on `job`, if any."""
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason:
        raise Unrepresentable(reason)


def check_world(row: Row, strategy: Strategy, column: str) -> int:
    """The number of devices in `column`, which the strategy must use up. Raises TableError where it does not."""
    num_devices = row.count(column)
    if strategy.world_size != num_devices:
        raise row.error(
            column,
            f"{num_devices} devices, and PP {strategy.pp} x TP {strategy.tp} x CP {strategy.cp} x DP {strategy.dp} = "
            f"{strategy.world_size}",
        )
    return num_devices


_PARAMETERS_FRACTION = 0.05
"""Assumed: published counts are rounded to two or three digits and may leave positions out (at most 2.8 % off)."""


def check_parameters(row: Row, column: str, job: Job) -> None:
    """Raises TableError where the parameters in `column`, in 1e9, are not those that the row's sizes make."""
    told = row.positive(column)
    own = sum(count_parameters(block.structure) * block.count for block in expand(job.model).blocks) / 1e9
    if abs(told / own - 1) > _PARAMETERS_FRACTION:
        raise row.error(
            column, f"{told:g} B parameters, and the sizes of the row make {own:.4g} B; one of them is another model's"
        )


def read_peaks(row: Row, num_stages: int) -> dict[int, float] | float | None:
    """The cell `measured_bytes`: peak bytes of the fullest device, or of some stages (`0:71e9;3:64e9`); None if empty.

    Raises TableError where it is neither.
    """
    if not row.has("measured_bytes"):
        return None
    text = row.text("measured_bytes")
    if ":" not in text:
        return row.positive("measured_bytes")
    peaks: dict[int, float] = {}
    for part in text.split(";"):
        stage, _, value = part.partition(":")
        try:
            peaks[int(stage)] = float(value)
        except (ValueError, OverflowError):
            raise row.error("measured_bytes", f"{part!r} is no `stage:bytes`") from None
    if any(not 0 <= stage < num_stages or not SMALLEST <= peak <= LARGEST for stage, peak in peaks.items()):
        raise row.error("measured_bytes", f"{text!r}: stages are 0 to {num_stages - 1}, and bytes are above zero")
    return peaks
