"""Plan: the decision (strategy, layers, recompute) and its JSON, auto_parallel_search_optimal_config.json.

Reading is strict, because people edit the file: whatever does not fit the job is a PlanError naming stage or key.
Writing is deterministic and one list a line, because people compare these files.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value, read_document, write_text_atomically
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_layout import split_mode
from mm_autoparallel.model.job.overlaps import OVERLAPS, Overlaps
from mm_autoparallel.model.job.precision import PRECISIONS
from mm_autoparallel.model.job.stacks import Dispatcher, FusedProducts, Graphs
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, RANK_ORDERS, Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.job.workload import ContextParallel, Overlap
from mm_autoparallel.pipeline.schedules.catalog import GIVEN
from mm_autoparallel.planner.plan_layout import layout_document, list_unread_layout, parse_layout_section
from mm_autoparallel.planner.plan_lists import (
    MODES,
    Refused,
    away_reason,
    check_modes,
    check_order,
    edit_lists,
    edit_modes,
    list_key,
    list_unread_order,
    modes_document,
    nearest_given,
    nest,
    parse_integer,
    parse_layouts,
    parse_list,
    parse_mapping,
    parse_modes_of,
    parse_order,
    parse_orders,
)
from mm_autoparallel.validation import nearest

RESULT_FILE = "auto_parallel_search_optimal_config.json"
SCHEMA = "mm-autoparallel/plan/1"
PROVEN_GAP_FRACTION = 0.001
"""A plan is called proven where the bound over the whole space lies within this fraction of its step."""

_REQUIRED_SIZES = {"PP": "pp", "TP": "tp", "DP": "dp", "MBS": "mbs"}
_OPTIONAL_SIZES = {"CP": "cp", "EP": "ep", "VPP": "vpp", "ZERO": "zero"}
_EXPERT_TP, _RESHARD, _SHARD, _CP_KIND, _OFFLOAD = "ETP", "RESHARD", "SHARD", "CP_KIND", "OPTIMIZER_OFFLOAD"
_SEQUENCE_PARALLEL, _LAYOUTS = "SEQUENCE_PARALLEL", "LAYOUTS"
_OVERLAPS = {name.upper(): name for name in OVERLAPS}
_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    _CP_KIND: ("cp_kind", get_args(ContextParallel)),
    "PRECISION": ("precision", PRECISIONS),
    "DISPATCHER": ("dispatcher", get_args(Dispatcher)[1:]),
    "GRAPHS": ("graphs", get_args(Graphs)[1:]),
    "OVERLAP_ALL_TO_ALL": ("overlap_all_to_all", get_args(Overlap)),
    "TP_OVERLAP": ("tp_overlap", get_args(FusedProducts)[1:]),
}
"""Written where they are not the usual ones: of experts, where it is not TP; false where ZeRO 3 keeps weights until the
backward; ranks that share a copy of its weights; true where the host keeps the optimizer; false where tensor parallel
ranks do not divide sequences, as the workload has it; words and overlaps, where one was chosen; names of layers' other
layouts."""


@dataclass(frozen=True)
class Plan:
    """What is decided. `layers[modality][k]`: its layers on virtual stage k; `recompute` likewise: how many recompute.

    modes[modality][mode][k]: how many run in a mode but recompute, where any do (model/job/layer_modes.py).
    orders: what each stage runs, as schedules/action.py writes it, where it was found; a given one is the strategy's.
    warnings: what a person should know before trusting figures of this plan, one sentence each.
    """

    strategy: Strategy
    layers: Mapping[str, tuple[int, ...]]
    recompute: Mapping[str, tuple[int, ...]]
    global_batch_size: int
    warnings: tuple[str, ...] = field(default=(), compare=False)
    modes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    orders: tuple[str, ...] = ()

    @property
    def modes_used(self) -> tuple[str, ...]:
        """The modes in which some layer runs, in whatever layout."""
        others = dict.fromkeys(split_mode(name)[1] for of_mode in self.modes.values() for name in of_mode)
        return (*(("recompute",) if any(map(any, self.recompute.values())) else ()), *filter(None, others))

    def edited(
        self,
        layers: Mapping[str, Sequence[Any]] | None = None,
        recompute: Mapping[str, Sequence[Any]] | None = None,
        modes: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    ) -> Plan:
        """This plan with other lists for the modalities named, each [stage] or, with chunks, [chunk][stage].

        modes: modality → mode (but recompute) → how many of a stage's layers run in it.
        Raises PlanError naming list and stage where one does not fit the strategy, its layers add up to another number,
        a stage holds nothing, runs more layers in modes than it holds, or the modalities leave their order.
        """
        try:
            held = edit_lists(self.layers, layers or {}, "layers", self.strategy)
            again = edit_lists(self.recompute, recompute or {}, "recompute", self.strategy)
            others = edit_modes(held, self.modes, modes or {}, self.strategy)
            check_order(held, self.strategy)
            for modality, counts in held.items():
                check_modes(modality, counts, again[modality], others.get(modality, {}), self.strategy)
        except Refused as refusal:
            raise PlanError(f"the edited plan: {refusal}") from None
        return replace(self, layers=held, recompute=again, modes=others)

    @property
    def num_microbatches(self) -> int:
        """Of one step, on each data-parallel replica."""
        return self.strategy.num_microbatches(self.global_batch_size)

    @property
    def stage_orders(self) -> tuple[str, ...]:
        """What each stage runs, found or given; nothing where the schedule's rule says it."""
        return self.orders or self.strategy.orders


@dataclass(frozen=True)
class Figures:
    """What is known about a plan besides the decision: its simulated step and how good that is.

    throughput_tokens_per_s: text tokens per second and device, over the world. lower_bound_ms: the bound of the search
    in steps of this plan: no plan of the space ranks before one with this step and its chance to fit.
    peak_memory_bytes: per stage. bubble_fraction: share of the stages' time that is idle. provenance: where the costs
    came from. job_sha256: of the job it was planned for. host_bytes: per stage, on the host for each device;
    host_limit_bytes: what it may be at most, infinite where it is not limited. objective: of a search.
    step_over_batches: of drawn batches (planner/over_batches.py), where the job says what samples are like.
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
    host_bytes: tuple[float, ...] = ()
    host_limit_bytes: float = math.inf
    objective: Mapping[str, Any] = field(default_factory=dict)
    step_over_batches: Mapping[str, Any] = field(default_factory=dict)

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
    return parse_plan(read_document(path, "plan", PlanError), job, f"plan {path}")


def parse_plan(document: dict[str, Any], job: Job, where: str) -> Plan:
    """The plan of a result file's content, called `where` in messages. Raises PlanError as read_plan does."""
    try:
        return _parse_plan(document, job)
    except Refused as refusal:
        raise PlanError(f"{refusal}", where=where) from None


def _parse_plan(document: dict[str, Any], job: Job) -> Plan:
    strategy = parse_strategy(document)
    if reason := unlawful_reason(job.model, job.cluster, job.workload, strategy):
        raise Refused(f"parallel_config does not fit the job: {reason}")
    layers = _parse_lists(document, "layer_placement", job, strategy)
    recompute = _parse_lists(document, "layer_recompute", job, strategy)
    num_layers = {modality.name: modality.layers.num_layers for modality in job.model.modalities}
    for modality, counts in layers.items():
        if sum(counts) != num_layers[modality]:
            raise Refused(
                f"layer_placement.{list_key(modality, 'placement')} sums to {sum(counts)}; "
                f"{job.model.name} has {num_layers[modality]} {modality} layers"
            )
    check_order(layers, strategy)
    modes = parse_modes_of(document, job, strategy)
    for modality, held in layers.items():
        check_modes(modality, held, recompute[modality], modes.get(modality, {}), strategy)
    warnings = _warnings(document, job, strategy)
    orders = parse_orders(document, strategy)
    return Plan(strategy, layers, recompute, job.workload.global_batch_size, warnings, modes, orders)


def _warnings(document: dict[str, Any], job: Job, strategy: Strategy) -> tuple[str, ...]:
    """Sentences about a plan that can be simulated, but perhaps not as the person expects."""
    warnings = []
    used, there = strategy.world_size, job.cluster.num_devices
    if used < there:
        warnings.append(f"the plan uses {used} of the cluster's {there} devices and is simulated on that part alone")
    batch = job.workload.global_batch_size
    given = parse_integer(document.get("global_batch_size", batch), "global_batch_size", least=1)
    if given != batch:
        warnings.append(f"the plan was made for a global batch of {given}; it is simulated with the job's {batch}")
    elif document.get("job_sha256", job.sha256) != job.sha256:
        warnings.append(
            "model, cluster or workload have changed since the plan was made, so its old figures do not compare"
        )
    return (*warnings, *_list_unread(document), *list_unread_layout(document), *list_unread_order(document, strategy))


def _list_unread(document: dict[str, Any]) -> Iterator[str]:
    """A sentence for each size or choice that nobody knows, and for what may be a decisive key, misspelt."""
    choices = (_EXPERT_TP, _RESHARD, _SHARD, _OFFLOAD, _SEQUENCE_PARALLEL, _LAYOUTS, *_WORDS, *_OVERLAPS)
    known = (*_REQUIRED_SIZES, *_OPTIONAL_SIZES, *choices)
    for key in document["parallel_config"]:
        if key not in known:
            yield f"parallel_config.{key} is not known here and decides nothing{nearest(key, known)}"
    for key in ("schedule", "rank_order", "layout", MODES):
        near = difflib.get_close_matches(key, document, n=1, cutoff=0.8)
        if near and key not in document:
            yield f"{near[0]} is not known here and decides nothing{nearest(near[0], (key,))}"


def parse_strategy(document: dict[str, Any]) -> Strategy:
    """The strategy of a result file's content. Raises Refused naming the key that is missing or malformed."""
    config = parse_mapping(document, "parallel_config")
    known = _REQUIRED_SIZES | _OPTIONAL_SIZES
    sizes: dict[str, Any] = {}
    for key, name in known.items():
        if key in config:
            sizes[name] = parse_integer(config[key], f"parallel_config.{key}", least=0 if key == "ZERO" else 1)
        elif key in _REQUIRED_SIZES:
            raise Refused(f"parallel_config.{key} is missing{nearest_given(key, config, known)}")
    for key, name, least in ((_EXPERT_TP, "etp", 1), (_SHARD, "shard", 0)):
        if key in config:
            sizes[name] = parse_integer(config[key], f"parallel_config.{key}", least=least)
    schedule = document.get("schedule", "")
    if not isinstance(schedule, str):
        raise Refused(f"schedule is {describe_value(schedule)}; the name of a schedule is expected")
    rank_order = document.get("rank_order", DEFAULT_RANK_ORDER)
    if not isinstance(rank_order, str):
        raise Refused(f"rank_order is {describe_value(rank_order)}; one of {', '.join(RANK_ORDERS)} is expected")
    orders = parse_order(document, sizes["pp"], "schedule given") if schedule == GIVEN else ()
    strategy = Strategy(**sizes, **_parse_choices(config), schedule=schedule, rank_order=rank_order, orders=orders)
    return parse_layout_section(document, strategy)


def _parse_choices(config: dict[str, Any]) -> dict[str, Any]:
    """Those of Strategy that are no sizes, as far as `config` has them."""
    choices: dict[str, Any] = {"layouts": parse_layouts(config.get(_LAYOUTS, []), f"parallel_config.{_LAYOUTS}")}
    flags = {_RESHARD: "reshard", _OFFLOAD: "optimizer_offload", _SEQUENCE_PARALLEL: "sequence_parallel"}
    for key, name in (flags | _OVERLAPS).items():
        if key in config:
            choices[name] = config[key]
            if not isinstance(config[key], bool):
                raise Refused(f"parallel_config.{key} is {describe_value(config[key])}; true or false is expected")
    choices["overlaps"] = Overlaps(*(choices.pop(name, None) for name in OVERLAPS))
    for key, (name, kinds) in _WORDS.items():
        if key in config:
            choices[name], said = config[key], describe_value(config[key])
            if config[key] not in kinds:
                raise Refused(f"parallel_config.{key} is {said}; {' or '.join(kinds)} is expected")
    return choices


def _parse_lists(document: dict[str, Any], section: str, job: Job, strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """`layer_placement` or `layer_recompute` as modality → one number per virtual stage."""
    what, lists = section.removeprefix("layer_"), parse_mapping(document, section)
    of_model = {list_key(modality.name, what): modality.name for modality in job.model.modalities}
    keys = {key: modality for key, modality in of_model.items() if modality not in strategy.away}
    parsed: dict[str, tuple[int, ...]] = {}
    for key, modality in keys.items():
        if key not in lists:
            known = (*of_model, list_key("vision", what))  # which files have, zeros, of models without it too
            raise Refused(f"{section}.{key} is missing{nearest_given(key, lists, known)}")
        parsed[modality] = parse_list(lists[key], f"{section}.{key}", strategy, last_may_miss=what == "recompute")
    for key in lists.keys() - keys.keys():
        if key.endswith(f"_layer_{what}") and any(parse_list(lists[key], f"{section}.{key}", strategy, True)):
            if key in of_model:
                why = away_reason(of_model[key], strategy)
                raise Refused(f"{section}.{key} holds layers, and {why}; its numbers are 0")
            raise Refused(
                f"{section}.{key} holds layers, and {job.model.name} has no such part: its parts are "
                f"{', '.join(keys.values())}, so the keys are {', '.join(keys)}"
            )
    return parsed


# ---------------------------------------------------------------------------------------------------------- writing


def parallel_config(strategy: Strategy) -> dict[str, Any]:
    """The sizes of a strategy under their names in the result file, and its choices that are not the usual ones."""
    sizes = {key: getattr(strategy, name) for key, name in (_REQUIRED_SIZES | _OPTIONAL_SIZES).items()}
    choices: dict[str, Any] = {
        _EXPERT_TP: strategy.etp,
        _SHARD: strategy.shard,
        _CP_KIND: strategy.cp_kind,
        _OFFLOAD: strategy.optimizer_offload,
        _LAYOUTS: [layout.name for layout in strategy.layouts],
    } | {key: getattr(strategy, name) for key, (name, _) in _WORDS.items()}
    kept = {key: choice for key, choice in choices.items() if choice}
    denied = {_RESHARD: strategy.reshard, _SEQUENCE_PARALLEL: strategy.sequence_parallel}
    overlaps = {name.upper(): value for name, value in strategy.overlaps.chosen.items()}
    return sizes | kept | overlaps | {key: False for key, has in denied.items() if not has}


def decision_document(plan: Plan) -> dict[str, Any]:
    """What decides, of the result file: sizes, lists, schedule and batch, in the order they are written."""
    strategy = plan.strategy
    modalities = dict.fromkeys(("vision", "text", *plan.layers))
    none, orders = (0,) * (strategy.pp * strategy.vpp), plan.stage_orders
    return {
        "parallel_config": parallel_config(strategy),
        "layer_placement": {list_key(m, "placement"): nest(plan.layers.get(m, none), strategy) for m in modalities},
        "layer_recompute": {list_key(m, "recompute"): nest(plan.recompute.get(m, none), strategy) for m in modalities},
        **modes_document(plan.modes, strategy),
        **layout_document(strategy),
        "schedule": strategy.schedule,
        **({"order": [order.split() for order in orders]} if orders else {}),
        **({} if strategy.rank_order == DEFAULT_RANK_ORDER else {"rank_order": strategy.rank_order}),
        "global_batch_size": plan.global_batch_size,
    }


_LISTS = ("parallel_config", "layer_placement", "layer_recompute", MODES)


def plan_document(plan: Plan, figures: Figures) -> dict[str, Any]:
    """The result file as a mapping, its keys in the order they are written. Parts that the model lacks are zeros."""
    decision = decision_document(plan)
    batch = decision.pop("global_batch_size")
    of_search = {"objective": dict(figures.objective)} if figures.objective else {}
    of_batches = {"step_over_batches": dict(figures.step_over_batches)} if figures.step_over_batches else {}
    return {
        **{key: decision.pop(key) for key in _LISTS if key in decision},
        "e2e_time": figures.step_ms,
        "throughput": figures.throughput_tokens_per_s,
        "schema": SCHEMA,
        **decision,
        "num_microbatches": plan.num_microbatches,
        "global_batch_size": batch,
        "world_size": plan.strategy.world_size,
        "lower_bound_ms": figures.lower_bound_ms,
        "gap_fraction": figures.gap_fraction,
        "proven": figures.proven,
        "peak_memory_bytes": [math.ceil(peak) for peak in figures.peak_memory_bytes],
        "memory_limit_bytes": math.floor(figures.memory_limit_bytes),
        **_host_document(figures),
        "bubble_fraction": figures.bubble_fraction,
        "provenance": dict(figures.provenance),
        "job_sha256": figures.job_sha256,
        **of_search,
        **of_batches,
    }


def _host_document(figures: Figures) -> dict[str, Any]:
    """What lies on hosts, where something does, and its limit, where it has one."""
    if not any(figures.host_bytes):
        return {}
    most = figures.host_limit_bytes
    limit = {"host_limit_bytes": math.floor(most)} if math.isfinite(most) else {}
    return {"host_bytes": [math.ceil(peak) for peak in figures.host_bytes]} | limit


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
