"""Where each figure of a plan comes from, a sentence each: what counts it or measures it, and what it stands on.

Keys are those that the page has for the figures (studio/web/src/words.ts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.units import format_percent


def describe_figures(estimate: Estimate, cluster: Cluster) -> dict[str, str]:
    """The source of each figure of `estimate`, a plan on `cluster`."""
    found = estimate.provenance
    times, memory = _by_source(found["blocks"], "time"), _by_source(found["blocks"], "memory")
    times += _describe_operators(found.get("operators"))
    traffic, calibration = _list_traffic(found["communication"]), found["calibration"]
    rates = f"times of blocks are {times}; {calibration}"
    waits = f"simulated from the times of blocks ({times}) and transfers ({traffic})"
    tail = f"gradients, optimizer and gathered weights in the open: traffic {traffic}, optimizer {found['optimizer']}"
    simulated = (
        f"simulated task by task; times of blocks are {times}, traffic {traffic}, optimizer {found['optimizer']}"
    )
    limit = f"{format_percent(cluster.memory_fraction)} of the device's memory (cluster.memory_fraction)"
    return {
        "step": f"{simulated}; {calibration}",
        "expected": calibration,
        "throughput": f"text tokens of a step, by the step and the devices that the plan uses; the step is {simulated}",
        "bubble": f"the part of all stages' time in which they compute nothing; {simulated}",
        "oom": "worked out from the device peak of the fullest stage by a formula that was fitted to published runs",
        "forward": rates,
        "backward": rates,
        "recompute": rates,
        "encoders": rates,
        "idle_warmup": f"{waits}: before a stage's first task",
        "idle_communication": f"{waits}: while a transfer is on its way",
        "idle_imbalance": f"{waits}: while another stage works",
        "idle_cooldown": f"{waits}: after all that a stage does",
        "tail": tail,
        "onPath": f"what the stage has on the longest chain of tasks that wait for each other; {simulated}",
        **_describe_memory(memory, cluster, estimate.plan.strategy.zero),
        "peak": f"the sum of its causes at the stage's fullest moment; bytes of blocks are {memory}; limit: {limit}",
        "limit": limit,
        "device": "the peak with the allocator's fragments and what lies outside the allocator, worked out",
    }


def _describe_memory(memory: str, cluster: Cluster, zero: int) -> dict[str, str]:
    static = f"counted: parameters that the stage holds, bytes of each, shared as ZeRO {zero} does; blocks are {memory}"
    blocks = f"bytes of blocks are {memory}"
    return {
        **dict.fromkeys(("weight", "gradient", "optimizer"), static),
        "activation": f"kept for backward by the micro-batches in flight, which the schedule tells; {blocks}",
        "restored": f"what the layer at work in its backward had kept less of; {blocks}",
        "transient": f"the working set of the block at work; {blocks}",
        "workspace": f"held once for all blocks; matrix workspaces: {_of_devices(cluster, 'matrix_workspace_bytes')}",
        "communicator": f"counted: communicators, times what one takes ({_of_devices(cluster, 'communicator_bytes')})",
        "context": _of_devices(cluster, "context_bytes"),
        "reserve": "what placement counts beyond all other causes, left to the allocator's rounding and fragments",
    }


def describe_group(estimate: Estimate, cluster: Cluster, group: Mapping[str, Any]) -> str:
    """The source of what passes each rank of a row of `provenance["groups"]`."""
    traffic, level = _list_traffic(estimate.provenance["communication"]), group["level"]
    link = _source_of_level(cluster, level)
    return f"level {level}, and what shares it with these ranks; traffic is {traffic}, the level's link: {link}"


def describe_bounds(num_strategies: int) -> dict[str, str]:
    """Of what a search tells beside its plan."""
    least = f"the least bound of the {num_strategies} strategies, of which each has its own below"
    return {"bound": least, "gap": f"how far the bound lies below what the plan is ranked by; the bound is {least}"}


def _source_of_level(cluster: Cluster, name: str) -> str:
    """Where the figures of a level come from: the device's link that it is, else the job."""
    (level,) = (level for level in cluster.levels if level.name == name)
    for figure in ("node_link", "network_link"):
        link = getattr(cluster.device, figure)
        same = link.bandwidth_bytes_per_s, link.latency_ms
        if same == (level.bandwidth_bytes_per_s, level.latency_ms):
            return _of_devices(cluster, figure)
    return "job file"


def _of_devices(cluster: Cluster, figure: str) -> str:
    """`ascend-910b-64g: assumed`."""
    devices = {kind.device.name: kind.device for kind in cluster.kinds}
    return ", ".join(f"{name}: {device.sources.get(figure, 'job file')}" for name, device in devices.items())


def _by_source(blocks: Mapping[str, Mapping[str, str]], what: str) -> str:
    """`analytic`, or `measured (text_layer), analytic (text_pre)`."""
    of_source: dict[str, list[str]] = {}
    for name, sources in blocks.items():
        of_source.setdefault(sources[what], []).append(name)
    if len(of_source) == 1:
        return next(iter(of_source))
    return ", ".join(f"{source} ({', '.join(names)})" for source, names in of_source.items())


def _describe_operators(operators: Mapping[str, Any] | None) -> str:
    """`; operators.sqlite has 41.0 % of the time of their traced operators, 12 calls are regressed (8.0 %)`; of no base
    nothing."""
    if operators is None:
        return ""
    return (
        f"; {operators['base']} has {format_percent(operators['coverage'])} of the time of their traced operators, "
        f"{operators['regressed']} calls are regressed ({format_percent(operators['regressed_share'])}) and "
        f"{operators['misses']} analytic ({format_percent(operators['analytic_share'])})"
    )


def _list_traffic(communication: str | Mapping[str, Any]) -> str:
    """`analytic`, or `measured and analytic (profile network.json)`."""
    if isinstance(communication, str):
        return communication
    operations = [value for value in communication.values() if isinstance(value, Mapping)]
    found = sorted({source for of_group in operations for source in of_group.values()}, reverse=True)
    return f"{' and '.join(found) or 'none'} (profile {communication['profile']})"
