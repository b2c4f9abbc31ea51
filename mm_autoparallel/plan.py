"""Plan: the decision (strategy, layers, recompute) and its JSON, auto_parallel_search_optimal_config.json.

Reading is strict, because people edit the file: whatever does not fit the job is a PlanError naming stage or key.
Writing is deterministic and one list a line, because people compare these files.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value, read_document, write_text_atomically
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import DEFAULT_RANK_ORDER, RANK_ORDERS, Strategy, unlawful_reason

RESULT_FILE = "auto_parallel_search_optimal_config.json"
SCHEMA = "mm-autoparallel/plan/1"
PROVEN_GAP_FRACTION = 0.001
"""A plan is called proven where the bound over the whole space lies within this fraction of its step."""

_FILE_NAMES = {"vision": "vit", "text": "llm"}
_REQUIRED_SIZES = {"PP": "pp", "TP": "tp", "DP": "dp", "MBS": "mbs"}
_OPTIONAL_SIZES = {"CP": "cp", "EP": "ep", "VPP": "vpp", "ZERO": "zero"}
_EXPERT_TP = "ETP"
"""Of experts, where it is not TP."""


@dataclass(frozen=True)
class Plan:
    """What is decided. `layers[modality][k]`: its layers on virtual stage k; `recompute` likewise: how many recompute.

    warnings: what a person should know before trusting figures of this plan, one sentence each.
    """

    strategy: Strategy
    layers: Mapping[str, tuple[int, ...]]
    recompute: Mapping[str, tuple[int, ...]]
    global_batch_size: int
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_microbatches(self) -> int:
        """Of one step, on each data-parallel replica."""
        return self.strategy.num_microbatches(self.global_batch_size)


@dataclass(frozen=True)
class Figures:
    """What is known about a plan besides the decision: its simulated step and how good that is.

    throughput_tokens_per_s: text tokens per second and device, over the world. lower_bound_ms: no plan of the searched
    space is faster. peak_memory_bytes: per stage. bubble_fraction: share of the stages' time that is idle.
    provenance: where the costs came from. job_sha256: of the job it was planned for.
    """

    step_ms: float
    throughput_tokens_per_s: float
    lower_bound_ms: float
    gap_fraction: float
    peak_memory_bytes: tuple[float, ...]
    memory_limit_bytes: float
    bubble_fraction: float
    provenance: Mapping[str, Any]
    job_sha256: str

    @property
    def proven(self) -> bool:
        """Whether no plan of the searched space can be noticeably faster."""
        return self.gap_fraction <= PROVEN_GAP_FRACTION


# ---------------------------------------------------------------------------------------------------------- reading


def read_plan(path: Path, job: Job) -> Plan:
    """The plan in the result file at `path`, checked against `job`.

    Accepts files that hold only PP, TP, DP, MBS, placements and recompute (the other sizes are then 1), and recompute
    lists without their last entry, which is then 0. Keys that decide nothing are not read.
    Raises PlanError where a key is missing, of another type, of another length, where sums or order do not fit the
    model, where a stage holds nothing, where the strategy is unlawful for the job or needs more devices than it has.
    """
    document = read_document(path, "plan", PlanError)
    try:
        return _parse_plan(document, job)
    except _Refused as refusal:
        raise PlanError(f"plan {path}: {refusal}") from None


class _Refused(Exception):
    """What is wrong with a plan, before its file is named."""


def _parse_plan(document: dict[str, Any], job: Job) -> Plan:
    strategy = _parse_strategy(document)
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason is not None:
        raise _Refused(f"parallel_config does not fit the job: {reason}")
    layers = _parse_lists(document, "layer_placement", job, strategy)
    recompute = _parse_lists(document, "layer_recompute", job, strategy)
    num_layers = {modality.name: modality.layers.num_layers for modality in job.model.modalities}
    for modality, counts in layers.items():
        if sum(counts) != num_layers[modality]:
            raise _Refused(
                f"layer_placement.{_key(modality, 'placement')} sums to {sum(counts)}; "
                f"{job.model.name} has {num_layers[modality]} {modality} layers"
            )
    _check_order(layers, strategy)
    for modality, counts in recompute.items():
        for k, (recomputed, held) in enumerate(zip(counts, layers[modality], strict=True)):
            if recomputed > held:
                raise _Refused(
                    f"layer_recompute.{_key(modality, 'recompute')} recomputes {recomputed} layers on "
                    f"{_stage(k, strategy)}, which holds {held} {modality} layers"
                )
    return Plan(strategy, layers, recompute, job.workload.global_batch_size, _warnings(document, job, strategy))


def _warnings(document: dict[str, Any], job: Job, strategy: Strategy) -> tuple[str, ...]:
    """Sentences about a plan that can be simulated, but perhaps not as the person expects."""
    warnings = []
    used, there = strategy.world_size, job.cluster.num_devices
    if used < there:
        warnings.append(f"the plan uses {used} of the cluster's {there} devices and is simulated on that part alone")
    batch = job.workload.global_batch_size
    given = _integer(document.get("global_batch_size", batch), "global_batch_size", least=1)
    if given != batch:
        warnings.append(f"the plan was made for a global batch of {given}; it is simulated with the job's {batch}")
    elif document.get("job_sha256", job.sha256) != job.sha256:
        warnings.append(
            "model, cluster or workload have changed since the plan was made, so its old figures do not compare"
        )
    return tuple(warnings)


def _parse_strategy(document: dict[str, Any]) -> Strategy:
    config = _mapping(document, "parallel_config")
    known = _REQUIRED_SIZES | _OPTIONAL_SIZES
    sizes: dict[str, Any] = {}
    for key, name in known.items():
        if key in config:
            sizes[name] = _integer(config[key], f"parallel_config.{key}", least=0 if key == "ZERO" else 1)
        elif key in _REQUIRED_SIZES:
            raise _Refused(f"parallel_config.{key} is missing{_nearest(key, config, known)}")
    if _EXPERT_TP in config:
        sizes["etp"] = _integer(config[_EXPERT_TP], f"parallel_config.{_EXPERT_TP}", least=1)
    schedule = document.get("schedule", "")
    if not isinstance(schedule, str):
        raise _Refused(f"schedule is {describe_value(schedule)}; the name of a schedule is expected")
    rank_order = document.get("rank_order", DEFAULT_RANK_ORDER)
    if not isinstance(rank_order, str):
        raise _Refused(f"rank_order is {describe_value(rank_order)}; one of {', '.join(RANK_ORDERS)} is expected")
    return Strategy(**sizes, schedule=schedule, rank_order=rank_order)


def _parse_lists(document: dict[str, Any], section: str, job: Job, strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """`layer_placement` or `layer_recompute` as modality → one number per virtual stage."""
    what = section.removeprefix("layer_")
    lists = _mapping(document, section)
    modalities = [modality.name for modality in job.model.modalities]
    keys = {_key(modality, what): modality for modality in modalities}
    parsed: dict[str, tuple[int, ...]] = {}
    for key, modality in keys.items():
        if key not in lists:
            raise _Refused(f"{section}.{key} is missing{_nearest(key, lists, keys)}")
        parsed[modality] = _parse_list(lists[key], f"{section}.{key}", strategy, last_may_miss=what == "recompute")
    for key in lists.keys() - keys.keys():
        if key.endswith(f"_layer_{what}") and any(_parse_list(lists[key], f"{section}.{key}", strategy, True)):
            raise _Refused(
                f"{section}.{key} holds layers, and {job.model.name} has no such part: its parts are "
                f"{', '.join(modalities)}, so the keys are {', '.join(keys)}"
            )
    return parsed


def _parse_list(value: Any, where: str, strategy: Strategy, last_may_miss: bool) -> tuple[int, ...]:
    """[stage] or, with chunks, [chunk][stage] → one number per virtual stage."""
    if strategy.vpp == 1:
        return _parse_row(value, where, strategy, last_may_miss)
    if not isinstance(value, list) or any(not isinstance(row, list) for row in value):
        raise _Refused(
            f"{where} must nest [chunk][stage], {strategy.vpp} lists of {strategy.pp}, because VPP is {strategy.vpp}"
        )
    if len(value) != strategy.vpp:
        raise _Refused(f"{where} has {len(value)} chunks, and VPP is {strategy.vpp}")
    rows = [_parse_row(row, f"{where}[{chunk}]", strategy, last_may_miss) for chunk, row in enumerate(value)]
    return tuple(count for row in rows for count in row)


def _parse_row(value: Any, where: str, strategy: Strategy, last_may_miss: bool) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _Refused(
            f"{where} is {describe_value(value)}; a list of {strategy.pp} whole numbers is expected, one per stage"
        )
    if value and isinstance(value[0], list):
        raise _Refused(f"{where} is nested, and parallel_config.VPP is {strategy.vpp}: give one whole number per stage")
    counts = tuple(_integer(count, f"{where}, stage {stage},", least=0) for stage, count in enumerate(value))
    if last_may_miss and len(counts) == strategy.pp - 1:
        counts = (*counts, 0)
    if len(counts) != strategy.pp:
        or_less = f" or {strategy.pp - 1}" if last_may_miss else ""
        raise _Refused(f"{where} has {len(counts)} entries; PP is {strategy.pp}, so it needs {strategy.pp}{or_less}")
    return counts


def _check_order(layers: Mapping[str, tuple[int, ...]], strategy: Strategy) -> None:
    """Every virtual stage holds a layer, and a modality ends before the next begins (one stage may hold both ends)."""
    for k in range(strategy.pp * strategy.vpp):
        if not any(counts[k] for counts in layers.values()):
            raise _Refused(f"layer_placement gives {_stage(k, strategy)} no layer; every stage (and chunk) needs one")
    latest, latest_modality = 0, ""
    for modality, counts in layers.items():
        held = [k for k, count in enumerate(counts) if count]
        if held[0] < latest:
            raise _Refused(
                f"layer_placement puts {modality} layers on {_stage(held[0], strategy)}, before the {latest_modality} "
                f"layers of {_stage(latest, strategy)}; data flows {' → '.join(layers)}, so {latest_modality} must end "
                f"before {modality} begins (one stage may hold both)"
            )
        latest, latest_modality = held[-1], modality


def _mapping(document: dict[str, Any], key: str) -> dict[str, Any]:
    if key not in document:
        raise _Refused(f"{key} is missing{_nearest(key, document, ())}")
    value = document[key]
    if not isinstance(value, dict):
        raise _Refused(f"{key} is {describe_value(value)}; a mapping is expected")
    return value


def _integer(value: Any, where: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Refused(f"{where} is {describe_value(value)}; a whole number is expected")
    if value < least:
        raise _Refused(f"{where} is {value}; it must be at least {least}")
    return value


def _nearest(key: str, given: Mapping[str, Any], known: Mapping[str, Any] | tuple[()]) -> str:
    """A hint at the given key that `key` was probably meant to be."""
    strangers = [name for name in given if name not in known]
    near = difflib.get_close_matches(key, strangers, n=1)
    return f"; the key {near[0]!r} stands there, which is not known" if near else ""


def _key(modality: str, what: str) -> str:
    """`vit_layer_placement` and its like."""
    return f"{_FILE_NAMES.get(modality, modality)}_layer_{what}"


def _stage(virtual_stage: int, strategy: Strategy) -> str:
    chunk, stage = divmod(virtual_stage, strategy.pp)
    return f"stage {stage}" if strategy.vpp == 1 else f"stage {stage}, chunk {chunk}"


# ---------------------------------------------------------------------------------------------------------- writing


def plan_document(plan: Plan, figures: Figures) -> dict[str, Any]:
    """The result file as a mapping, its keys in the order they are written. Parts that the model lacks are zeros."""
    strategy = plan.strategy
    known = _REQUIRED_SIZES | _OPTIONAL_SIZES
    modalities = dict.fromkeys(("vision", "text", *plan.layers))
    none = (0,) * (strategy.pp * strategy.vpp)
    expert_tp = {_EXPERT_TP: strategy.etp} if strategy.etp else {}
    return {
        "parallel_config": {key: getattr(strategy, name) for key, name in known.items()} | expert_tp,
        "layer_placement": {_key(m, "placement"): _nested(plan.layers.get(m, none), strategy) for m in modalities},
        "layer_recompute": {_key(m, "recompute"): _nested(plan.recompute.get(m, none), strategy) for m in modalities},
        "e2e_time": figures.step_ms,
        "throughput": figures.throughput_tokens_per_s,
        "schema": SCHEMA,
        "schedule": strategy.schedule,
        **({} if strategy.rank_order == DEFAULT_RANK_ORDER else {"rank_order": strategy.rank_order}),
        "num_microbatches": plan.num_microbatches,
        "global_batch_size": plan.global_batch_size,
        "world_size": strategy.world_size,
        "lower_bound_ms": figures.lower_bound_ms,
        "gap_fraction": figures.gap_fraction,
        "proven": figures.proven,
        "peak_memory_bytes": [math.ceil(peak) for peak in figures.peak_memory_bytes],
        "memory_limit_bytes": math.floor(figures.memory_limit_bytes),
        "bubble_fraction": figures.bubble_fraction,
        "provenance": dict(figures.provenance),
        "job_sha256": figures.job_sha256,
    }


def write_result(path: Path, plan: Plan, figures: Figures) -> None:
    """Write the result file at `path` in one step; the same plan and figures give the same bytes. Raises OSError."""
    write_text_atomically(path, format_document(plan_document(plan, figures)))


def format_document(document: Mapping[str, Any]) -> str:
    """JSON in which a list of numbers stays on one line, so that an edit of one stage is a diff of one line."""
    return _format(document, "") + "\n"


def _format(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        items = [f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        items = [inner + _format(item, inner) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def _nested(counts: tuple[int, ...], strategy: Strategy) -> list[int] | list[list[int]]:
    if strategy.vpp == 1:
        return list(counts)
    return [list(counts[chunk * strategy.pp : (chunk + 1) * strategy.pp]) for chunk in range(strategy.vpp)]
