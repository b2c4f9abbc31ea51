"""Tables for a terminal: where a simulated step goes, and what each stage holds. All numbers come from a Timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Placement, Problem, counts_in_mode
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.loads import overfull_hosts
from mm_autoparallel.pipeline.simulate.memory import StageMemory
from mm_autoparallel.pipeline.simulate.step import Timeline, part_pairs
from mm_autoparallel.planner.by_module import ModuleShare
from mm_autoparallel.units import GIB, format_percent

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TimeShares:
    """Where each stage's time goes; all arrays [P], and together they are the step on every stage.

    forward_ms; backward_ms without recompute_ms; encoders_ms: passes of encoders beside the pipeline; idle by cause as
    in Timeline; tail_ms after the last backward.
    """

    forward_ms: Floats
    backward_ms: Floats
    recompute_ms: Floats
    encoders_ms: Floats
    idle_warmup_ms: Floats
    idle_communication_ms: Floats
    idle_imbalance_ms: Floats
    idle_cooldown_ms: Floats
    tail_ms: Floats

    @property
    def idle_ms(self) -> Floats:
        return self.idle_warmup_ms + self.idle_communication_ms + self.idle_imbalance_ms + self.idle_cooldown_ms


def share_time(timeline: Timeline) -> TimeShares:
    """Divide each stage's step by what it was spent on."""
    graph = timeline.graph
    start_ms, end_ms = part_pairs(timeline)
    length_ms = end_ms - start_ms
    forward, extra_ms = graph.kind == FORWARD, timeline.recompute_ms

    def per_stage(values_ms: Floats) -> Floats:
        sums: Floats = np.bincount(graph.stage, weights=values_ms, minlength=graph.num_stages).astype(np.float64)
        return sums

    return TimeShares(
        forward_ms=per_stage(np.where(forward, length_ms, 0.0)),
        backward_ms=per_stage(np.where(forward, 0.0, length_ms - extra_ms)),
        recompute_ms=per_stage(extra_ms),
        encoders_ms=timeline.encoders_ms,
        idle_warmup_ms=timeline.idle_warmup_ms,
        idle_communication_ms=timeline.idle_communication_ms,
        idle_imbalance_ms=timeline.idle_imbalance_ms,
        idle_cooldown_ms=timeline.idle_cooldown_ms,
        tail_ms=timeline.loads.tail_ms,
    )


ENCODERS = "encoders beside the pipeline"
_SHOWN_MS = 0.005
"""What is less prints as 0.00."""

_CAUSES = (
    ("forward", "forward_ms"),
    ("backward", "backward_ms"),
    ("recompute", "recompute_ms"),
    (ENCODERS, "encoders_ms"),
    ("idle: pipeline fills", "idle_warmup_ms"),
    ("idle: transfers", "idle_communication_ms"),
    ("idle: waits for other stages", "idle_imbalance_ms"),
    ("idle: pipeline drains", "idle_cooldown_ms"),
    ("after the last backward", "tail_ms"),
)


def time_table(timeline: Timeline) -> Table:
    """One row a cause, as the mean over stages; the rows add up to the step."""
    shares = share_time(timeline)
    table = plain_table("where the step goes", "ms, mean of stages", "share")
    for words, name in _CAUSES:
        mean_ms = float(np.mean(getattr(shares, name)))
        if words == ENCODERS and mean_ms < _SHOWN_MS:
            continue
        table.add_row(words, _ms(mean_ms), format_percent(mean_ms / timeline.step_ms if timeline.step_ms else 0.0))
    table.add_section()
    table.add_row("step", _ms(timeline.step_ms), format_percent(1.0))
    return table


def stage_time_table(timeline: Timeline) -> Table:
    """One row a stage: its share of the step by cause, in ms; the causes that any stage has."""
    shares = share_time(timeline)
    shown = [(words, getattr(shares, name)) for words, name in _CAUSES if np.max(getattr(shares, name)) >= _SHOWN_MS]
    table = plain_table("ms of stage", *(words for words, _ in shown), "step")
    for stage in range(len(timeline.busy_ms)):
        cells = (_ms(float(values[stage])) for _, values in shown)
        table.add_row(str(stage), *cells, _ms(timeline.step_ms))
    return table


def stage_table(problem: Problem, placement: Placement, timeline: Timeline, rows: Literal["modality", "name"]) -> Table:
    """One row a stage: its layers and how many recompute, its time and bubble, its peak against the limit.

    Of modes but recompute those are shown in which some layer runs. rows: whether layers are counted by modality or by
    name of their block. With chunks, counts are joined by `+`, in the order of the chunks. What lies on the host stands
    behind, where something does. A peak above its limit is marked `OVER`.
    """

    def key(block: ChainBlock) -> str:
        return block.modality if rows == "modality" else block.name

    counted = [block for block in problem.chain if block.layer or rows == "name"]
    groups = list(dict.fromkeys(key(block) for block in counted))
    counts = {group: _list_modes(problem, placement, [b for b in counted if key(b) == group]) for group in groups}
    headings = [
        word for group in groups for word in (group, *("recomputed" if m == RECOMPUTE else m for m in counts[group]))
    ]
    of_host = ["host, GiB", *(["host limit, GiB"] if problem.host_limit_bytes else [])]
    headings += ["compute, ms", "recompute, ms", "bubble", "peak, GiB", "limit, GiB", "used"]
    table = plain_table("stage", *headings, *(of_host if timeline.peak_host_bytes.any() else []))
    shares = share_time(timeline)
    for stage in range(problem.num_stages):
        cells = []
        for group in groups:
            chosen = [e for e, block in enumerate(problem.chain) if block in counted and key(block) == group]
            cells.append(_per_chunk(problem, placement.layers, stage, chosen))
            cells += [_per_chunk(problem, in_mode, stage, chosen) for in_mode in counts[group].values()]
        peak, limit = float(timeline.peak_memory_bytes[stage]), problem.memory_limit_bytes[stage]
        over = " OVER" if peak > limit else ""
        compute_ms = float(shares.forward_ms[stage] + shares.backward_ms[stage])
        table.add_row(
            str(stage),
            *cells,
            _ms(compute_ms),
            _ms(float(shares.recompute_ms[stage])),
            format_percent(float(shares.idle_ms[stage]) / timeline.step_ms if timeline.step_ms else 0.0),
            f"{peak / GIB:.2f}",
            f"{limit / GIB:.2f}",
            (format_percent(peak / limit) if limit else "-") + over,
            *_host_cells(problem, timeline, stage),
        )
    return table


def _host_cells(problem: Problem, timeline: Timeline, stage: int) -> list[str]:
    """What lies on a stage's host, and its limit where there is one; nothing where no stage keeps anything there."""
    if not timeline.peak_host_bytes.any():
        return []
    peak_bytes, cells = float(timeline.peak_host_bytes[stage]), []
    if problem.host_limit_bytes:
        over = " OVER" if stage in overfull_hosts(problem, timeline.peak_host_bytes) else ""
        cells = [f"{problem.host_limit_bytes[stage] / GIB:.2f}{over}"]
    return [f"{peak_bytes / GIB:.2f}", *cells]


def _list_modes(
    problem: Problem, placement: Placement, blocks: Sequence[ChainBlock]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The modes that `blocks` have, recompute first and of the others those that are used: counts [k][e]."""
    names = dict.fromkeys(mode.name for block in blocks for mode in block.modes)
    mine = [e for e, block in enumerate(problem.chain) if block in blocks]
    found = {name: counts_in_mode(problem, placement, name) for name in sorted(names, key=lambda n: n != RECOMPUTE)}
    return {
        name: rows for name, rows in found.items() if name == RECOMPUTE or any(row[e] for row in rows for e in mine)
    }


_PARTS = (
    ("weights", "weight_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("restored", "restored_bytes"),
    ("at work", "transient_bytes"),
    ("workspaces", "workspace_bytes"),
    ("allocated", "allocated_bytes"),
    ("communicators", "communicator_bytes"),
    ("context", "context_bytes"),
    ("reserve", "reserve_bytes"),
    ("peak", "total_bytes"),
)


def memory_table(memory: Sequence[StageMemory]) -> Table:
    """One row a stage: what its peak consists of, in GiB. Parts before `allocated` add up to it, and all to `peak`."""
    table = plain_table("memory of stage, GiB", *(words for words, _ in _PARTS))
    for stage, parts in enumerate(memory):
        table.add_row(str(stage), *(f"{getattr(parts, name) / GIB:.2f}" for _, name in _PARTS))
    return table


def module_table(modules: Sequence[ModuleShare]) -> Table:
    """One row a module: how it runs, its sizes, its work as the mean over stages and the most of any, and what it holds
    (weights, gradients, optimizer) and keeps (activations, outputs) on the stage that has most of it."""
    heads = ("runs", "PP", "TP", "CP", "DP", "MBS", "work, ms", "most of a stage", "holds, GiB", "keeps, GiB")
    table = plain_table("module", *heads)
    for one in modules:
        sizes = (getattr(one.sizes, name) for name in ("pp", "tp", "cp", "dp", "mbs"))
        work = _ms(float(np.mean(one.work_ms))), _ms(max(one.work_ms))
        most = (f"{max(each) / GIB:.2f}" for each in (one.held_bytes, one.kept_bytes))
        table.add_row(one.name, one.layout, *map(str, sizes), *work, *most)
    return table


def group_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """One row a kind of group, as costs/topology.py places it: its ranks, the outermost level it crosses, and what
    passes each rank there."""
    table = plain_table("group", "ranks", "apart", "level", "GB/s past each", "how many")
    for group in groups:
        bytes_per_s = group["bandwidth_bytes_per_s"]
        cells = (group["size"], group["stride"], group["level"], f"{bytes_per_s / 1e9:.2f}", group["num_groups"])
        table.add_row(group["name"], *map(str, cells))
    return table


def _ms(value_ms: float) -> str:
    """In one unit throughout, so that stages compare at a glance; what rounds to nothing has no sign."""
    return f"{round(value_ms, 2) + 0.0:.2f}"


def _per_chunk(problem: Problem, counts: tuple[tuple[int, ...], ...], stage: int, blocks: list[int]) -> str:
    of_chunk = (counts[k] for k in problem.virtual_stages[stage])
    return "+".join(str(sum(row[e] for e in blocks)) for row in of_chunk)


def plain_table(first: str, *others: str) -> Table:
    """An empty table: the first column to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, justify="left", no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
