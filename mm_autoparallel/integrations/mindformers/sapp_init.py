"""SAPP's init file: peaks of stages that a dry run measured, and how that run held and recomputed its layers.

    pipeline_config: {pipeline_num: 16, num_layer: 96, offset: [-1, 1, …]}
    recompute_config: {recompute: false, select_recompute: [1, 0, …], select_comm_recompute: [1, 0, …]}
    time_config: {head: 90, body: 90, tail: 180}
    memory_usage: {head_memory: 77698, tail_memory: 21822, body_memories: {stage_id: [6, 9], memories: [49732, 50435]}}

Several runs stand as lists of lists in offset, in the recompute lists, in stage_id and in memories; head and tail are
of the first. Memory is in MB of 2^20 bytes, times in any unit (mindformers, toolkit/pipeline_balance). Without
time_config a layer counts 1, head and tail nothing, which balances layers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.mindformers.recompute_kinds import KindCounts, count_kinds
from mm_autoparallel.records import MAX_LAYERS, Few, Noun, Time, or_zero, within
from mm_autoparallel.units import MIB
from mm_autoparallel.validation import parse_record

WHAT = "SAPP init file"
_LISTS = ("recompute", "select_recompute", "select_comm_recompute")

Megabytes = Annotated[float, or_zero(1e12), within(1e-12, 1e12)]
"""Of 2^20 bytes, or 0; some are worked out from others, so that far less than a byte may be left."""

Duration = Time
"""In the file's own unit, whatever it is."""


class _Pipeline(Noun):
    pipeline_num: Few
    num_layer: Few
    offset: Any = 0


class _Times(Noun):
    head: Duration
    body: Duration
    tail: Duration


class _Bodies(Noun):
    stage_id: list[Any]
    memories: list[Any]


class _Usage(Noun):
    head_memory: Megabytes
    tail_memory: Megabytes
    body_memories: _Bodies


class _Recompute(Noun):
    recompute: Any = False
    select_recompute: Any = False
    select_comm_recompute: Any = False


class _Init(Noun):
    pipeline_config: _Pipeline
    recompute_config: _Recompute
    time_config: _Times | None = None
    memory_usage: _Usage


@dataclass(frozen=True)
class MeasuredStage:
    """One stage of a dry run: how many layers it held, of those by kind, and its peak."""

    run: int
    stage: int
    num_layers: int
    kinds: KindCounts
    peak_bytes: float


@dataclass(frozen=True)
class SappInit:
    """What an init file says. stages: all that were measured, first and last of the first run among them.

    head_ms, body_ms, tail_ms: forward and backward of each together, in the file's unit. notes: what its reader should
    know.
    """

    path: Path
    num_stages: int
    num_layers: int
    head_ms: float
    body_ms: float
    tail_ms: float
    stages: tuple[MeasuredStage, ...]
    notes: tuple[str, ...] = ()

    @property
    def base_layers(self) -> int:
        """Layers that every stage holds before its offset."""
        return self.num_layers // self.num_stages


def is_sapp_init(document: dict[str, Any]) -> bool:
    """Whether a YAML document is an init file, and not a pretrain YAML."""
    return "memory_usage" in document and "pipeline_config" in document


def check_other_sapp(document: dict[str, Any], path: Path) -> None:
    """Raise JobError, with what to give in its place, for SAPP's configurations that hold no memory of stages."""
    if _is_auto(document):
        raise JobError(
            f"{WHAT} {path}: it is the configuration of SAPP's automatic run, which starts dry runs of its "
            "training_config_path and reads timelines; give that training YAML itself (-head_loss says what its tail "
            "takes), or an init file with the memory of stages"
        )
    if _is_manual(document):
        raise JobError(
            f"{WHAT} {path}: it holds lists to compare with ({', '.join(map(str, document))}: SAPP's -manual), and no "
            "model; give the init file or the layer file that they are for"
        )


def _is_auto(document: dict[str, Any]) -> bool:
    return "memory_usage" not in document and {"profiling_config", "training_config"} <= document.keys()


def _is_manual(document: dict[str, Any]) -> bool:
    keys = {"offset", "interleave_num"}
    return bool(document) and all(isinstance(entry, dict) and keys <= entry.keys() for entry in document.values())


def read_sapp_init(path: Path) -> SappInit:
    """The init file at `path`. Raises JobError naming the file, the key and what would be right."""
    document = read_document(path, WHAT)
    record = parse_record(
        _Init, {key: value for key, value in document.items() if key != "profiling_config"}, WHAT, path
    )
    pipeline, usage = record.pipeline_config, record.memory_usage
    if pipeline.num_layer < pipeline.pipeline_num:
        raise _wrong(path, "pipeline_config.num_layer", f"is {pipeline.num_layer} for {pipeline.pipeline_num} stages")
    runs = _split_runs(path, pipeline, record.recompute_config, usage.body_memories)
    stages, notes = [], []
    for run, (offset, lists, stage_ids, memories) in enumerate(runs):
        counts = [pipeline.num_layer // pipeline.pipeline_num + shift for shift in offset]
        if min(counts) < 1:
            raise _wrong(
                path, "pipeline_config.offset", f"of run {run} leaves {min(counts)} layers to some stage; each has one"
            )
        if max(counts) > MAX_LAYERS:
            raise _wrong(path, "pipeline_config.offset", f"of run {run} gives a stage more than {MAX_LAYERS:,} layers")
        if sum(counts) != pipeline.num_layer:
            notes.append(
                f"pipeline_config.offset of run {run} makes {sum(counts)} layers of num_layer {pipeline.num_layer}; "
                "its memory is taken as that of these, and the plan is for all"
            )
        measured = dict(zip(stage_ids, memories, strict=True))
        if run == 0:
            measured |= {0: usage.head_memory, pipeline.pipeline_num - 1: usage.tail_memory}
        for stage, peak in measured.items():
            kinds = count_kinds(*(_of_stage(path, name, lists[name], stage, counts) for name in _LISTS))
            stages.append(MeasuredStage(run, stage, counts[stage], kinds, peak * MIB))
    times = record.time_config
    if times is None:
        named = "; profiling_config names timelines, which are not read here" if "profiling_config" in document else ""
        notes.append(
            f"there is no time_config{named}: a layer counts 1, head and tail 0; give time_config with head, body and "
            "tail where you know them"
        )
        times = _Times(head=0.0, body=1.0, tail=0.0)
    if times.body <= 0:
        raise _wrong(path, "time_config.body", "is 0; a layer takes time")
    return SappInit(
        path,
        pipeline.pipeline_num,
        pipeline.num_layer,
        times.head,
        times.body,
        times.tail,
        tuple(stages),
        tuple(dict.fromkeys(notes)),
    )


_Run = tuple[list[int], dict[str, Any], list[int], list[float]]


def _split_runs(path: Path, pipeline: _Pipeline, recompute: _Recompute, bodies: _Bodies) -> list[_Run]:
    """offset, recompute lists, stage_id and memories of each dry run."""
    several = isinstance(pipeline.offset, list) and any(isinstance(entry, list) for entry in pipeline.offset)
    if not several:
        lists = {name: getattr(recompute, name) for name in _LISTS}
        groups = [(pipeline.offset, lists, bodies.stage_id, bodies.memories)]
    else:
        number = len(pipeline.offset)
        keys: list[tuple[str, Any]] = [(f"recompute_config.{name}", getattr(recompute, name)) for name in _LISTS]
        keys += [("memory_usage.body_memories.stage_id", bodies.stage_id)]
        keys += [("memory_usage.body_memories.memories", bodies.memories)]
        for key, value in keys:
            if isinstance(value, list) and len(value) != number:
                raise _wrong(path, key, f"has {len(value)} entries; pipeline_config.offset tells of {number} runs")
        groups = [
            (
                pipeline.offset[run],
                {n: v[run] if isinstance(v := getattr(recompute, n), list) else v for n in _LISTS},
                bodies.stage_id[run],
                bodies.memories[run],
            )
            for run in range(number)
        ]
    return [
        (
            _numbers(path, "pipeline_config.offset", [0] * pipeline.pipeline_num if offset == 0 else offset, pipeline),
            lists,
            *_bodies(path, stage_ids, memories, pipeline),
        )
        for offset, lists, stage_ids, memories in groups
    ]


def _numbers(path: Path, key: str, value: Any, pipeline: _Pipeline) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise _wrong(path, key, f"is {describe_value(value)}; a whole number for each stage is expected")
    if len(value) != pipeline.pipeline_num:
        raise _wrong(path, key, f"has {len(value)} numbers; pipeline_num is {pipeline.pipeline_num}")
    return value


def _bodies(path: Path, stage_ids: Any, memories: Any, pipeline: _Pipeline) -> tuple[list[int], list[float]]:
    key = "memory_usage.body_memories"
    if not isinstance(stage_ids, list) or not isinstance(memories, list) or len(stage_ids) != len(memories):
        raise _wrong(path, key, "needs as many memories as stage_id has stages")
    for stage in stage_ids:
        if not isinstance(stage, int) or not 0 < stage < pipeline.pipeline_num - 1 or stage_ids.count(stage) > 1:
            raise _wrong(
                path,
                f"{key}.stage_id",
                f"holds {describe_value(stage)}; stages between the first and the last, 1 to "
                f"{pipeline.pipeline_num - 2}, are expected, each once",
            )
    for memory in memories:
        if isinstance(memory, bool) or not isinstance(memory, (int, float)) or memory <= 0:
            raise _wrong(path, f"{key}.memories", f"holds {describe_value(memory)}; MB above 0 are expected")
    return stage_ids, [float(memory) for memory in memories]


def _of_stage(path: Path, name: str, value: Any, stage: int, counts: list[int]) -> int:
    key = f"recompute_config.{name}"
    if value is None or isinstance(value, bool):
        return counts[stage] if value else 0
    if not isinstance(value, list) or len(value) != len(counts):
        raise _wrong(path, key, f"is {describe_value(value)}; true, false or {len(counts)} numbers are expected")
    count = value[stage]
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= counts[stage]:
        raise _wrong(path, key, f"holds {describe_value(count)} for stage {stage}, which has {counts[stage]} layers")
    return count


def _wrong(path: Path, key: str, problem: str) -> JobError:
    return JobError(f"{WHAT} {path}: {key} {problem}")
