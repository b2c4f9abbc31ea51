"""A plan as Galvatron's strategy of every layer, and back.

Galvatron assigns a tensor or Ulysses degree, ZeRO and checkpointing to each layer; a plan counts layers of a stage by
layout and mode, which stand behind each other in a fixed order. Sources: hybrid_parallel_config.py of its runtime at
cea12ff.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.config_files import Totals, describe_config, need, read_totals, totals_of
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import only, patched_launch, read_exactly
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.galvatron.paddle import FILE as PADDLE_FILE
from mm_autoparallel.integrations.galvatron.paddle import format_fine_grained, map_to_trainer, parse_fine_grained
from mm_autoparallel.integrations.galvatron.strategies import (
    DpType,
    EndsStrategy,
    FlaggedEnds,
    LayerStrategy,
    dp_type_of,
)
from mm_autoparallel.integrations.galvatron.strategy_file import (
    WHAT,
    Assignment,
    format_strategy,
    parse_strategy,
    read_strategy,
)
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.model.job.layer_layout import LayerLayout, split_mode
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import RECOMPUTE
from mm_autoparallel.planner.plan import Plan

JSON, OVERRIDES = "galvatron_config.json", "overrides.txt"
PADDLE = "paddle"
"""The version that is Galvatron for Paddle."""
FLAGS = "trainer_flags.txt"
SCHEDULES = {"1f1b": "pipedream_flush", "gpipe": "gpipe"}
_ZEROS: dict[str, int] = {"ddp": 0, "zero2": 2, "zero3": 3}

_CHUNKS = "Galvatron's pipelines have one chunk a stage; plan with VPP 1"
_SCHEDULE = "Galvatron runs pipedream_flush, which is 1f1b, and gpipe; plan with one of them"
_ENCODER = "its layers are of one kind; plan the decoder by itself"
_CONTEXT = "its ring shares attention in zigzag, which no plan says; plan with search.cp_kind [all_to_all], or CP 1"
_EXPERTS = "its search and its figures are of dense layers; plan with EP 1"
_ZERO_1 = "Galvatron has ddp, zero2 and zero3; plan with search.zero [0, 2, 3]"
_SHARDED = "its zero3 gathers weights anew and shards over all ranks; plan so"
_SEQUENCES = "its cost model and its strategies divide sequences by TP; plan with search.sequence_parallel [true]"
_MODE = "Galvatron checkpoints whole layers; plan with search.modes [recompute]"
_NO_KEY = "its strategy has no key for it; plan without it"
REFUSED = (
    dict.fromkeys(("chunks", "uneven_chunks", "partial_group"), _CHUNKS)
    | dict.fromkeys(("low_memory_chunks", "split_backwards", "pieces"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), _ENCODER)
    | dict.fromkeys(("ring", "all_gather", "hierarchical"), _CONTEXT)
    | dict.fromkeys(("experts", "whole_experts", "dispatcher", "token_overlap"), _EXPERTS)
    | dict.fromkeys(("zero_1",), _ZERO_1)
    | dict.fromkeys(("kept_weights", "shards"), _SHARDED)
    | dict.fromkeys(("whole_sequences",), _SEQUENCES)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | {"overlaps": _NO_KEY}
    | dict.fromkeys(
        ("optimizer_offload", "rank_order", "precision", "graphs", "fused_products", "user_buffers"), _NO_KEY
    )
)
_UNCHECKED = ("without --job: heads and vocabulary are not held against the sizes",)
_CHECKED = ("read back: the strategy as written gives the plan",)


def is_strategy(path: Path) -> bool:
    """Whether the file at `path` is a strategy of Galvatron's."""
    try:
        return path.suffix == ".json" and {"pp_deg", "tp_sizes_enc"} <= set(read_document(path, "strategy"))
    except PlannerError:
        return False


def describe_launch(path: Path, given: Given) -> Described:
    """What the strategy at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    plan, devices = read_launch_plan(path, given), given.world_size or 1
    found = read_strategy(path, devices, "gpipe", "ddp")
    layer, notes, start = found.layers[0].of_ends, [], 0
    if not plan.strategy.layouts and (found.ends.degree, found.ends.dp_type) != (layer.degree, layer.dp_type):
        notes.append(
            f"its vocabulary is {found.ends} and its layers are {layer}; a plan has one strategy for both, so "
            "embedding and head are simulated as the layers"
        )
    for stage, held in enumerate(found.division):
        names, order = _name_modes(plan.strategy, found.layers[start : start + held]), _list_modes(plan.strategy)
        if plan.strategy.layouts and names != sorted(names, key=order.index):
            told = ", ".join(name or plan.strategy.layout.name for name in order if name in names)
            notes.append(f"layers of stage {stage} are simulated in the order in which plans have them: {told}")
        start += held
    return describe_config(path, given, "transformers", plan, {}, notes)


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the strategy at `path` runs. Raises JobError naming what nobody says, PlanError naming the key that
    is malformed or says what no plan does."""
    document = read_document(path, WHAT, PlanError)
    devices = document.get("world_size", given.world_size)
    return _read_plan(document, f"{WHAT} {path}", read_totals(path, given), need(devices, path, "--world-size"))


def _read_plan(document: Mapping[str, Any], where: str, totals: Totals, num_devices: int) -> Plan:
    return plan_of(parse_strategy(document, where, num_devices, "gpipe", "ddp"), where, totals)


def plan_of(found: Assignment, where: str, totals: Totals) -> Plan:
    """The plan that a strategy runs. Raises PlanError naming `where` and key where it says what no plan does."""
    if set(totals) != {"text"} or totals["text"] != len(found.layers):
        told = ", ".join(f"{count} of {name}" for name, count in totals.items())
        raise PlanError(f"it is of {len(found.layers)} layers, and the model has {told}", where=where)
    kinds = {_layout_of(layer.of_ends) for layer in found.layers}
    own = _layout_of(found.ends) if len(kinds) > 1 else kinds.pop()  # a plan has embedding and head as it has all else
    schedule = next((name for name, word in SCHEDULES.items() if word == found.pipeline_type), "")
    if not schedule:
        known = " and ".join(SCHEDULES.values())
        raise PlanError(f"pipeline_type is {describe_value(found.pipeline_type)}; {known} are known", where=where)
    each, rest = divmod(found.num_samples, found.chunks * own.dp)
    if rest:
        raise PlanError(
            f"a batch of {found.num_samples} is no multiple of {found.chunks} micro-batches x DP {own.dp}",
            where=where,
        )
    has_ulysses = any(layer.sp > 1 for layer in found.layers) or own.cp > 1
    strategy = Strategy(
        pp=found.ends.pp,
        tp=own.tp,
        dp=own.dp,
        mbs=each,
        cp=own.cp,
        cp_kind="all_to_all" if has_ulysses else "",
        zero=own.zero,
        schedule=schedule,
        layouts=tuple(sorted({_layout_of(layer.of_ends) for layer in found.layers} - {own})),
    )
    counts, start = [], 0
    for stage, held in enumerate(found.division):
        counts.append(_count_modes(strategy, found.layers[start : start + held], f"stage {stage}", where))
        start += held
    names = [name for name in dict.fromkeys(name for of in counts for name in of) if name != RECOMPUTE]
    modes = {name: tuple(of.get(name, 0) for of in counts) for name in names}
    return Plan(
        strategy,
        {"text": found.division},
        {"text": tuple(of.get(RECOMPUTE, 0) for of in counts)},
        found.num_samples,
        modes={"text": modes} if modes else {},
    )


def _layout_of(strategy: EndsStrategy) -> LayerLayout:
    return LayerLayout(strategy.tp, strategy.dp, strategy.sp, _ZEROS[strategy.dp_type])


def _count_modes(strategy: Strategy, layers: Sequence[LayerStrategy], stage: str, where: str) -> dict[str, int]:
    """How many of a stage's layers run in which mode. Raises PlanError where one layout's are not behind each other."""
    layouts = [_layout_of(layer.of_ends) for layer in layers]
    runs = [layout for layout, _ in groupby(layouts)]
    if len({*runs}) < len(runs):
        raise PlanError(
            f"{stage}: its layers change strategies to and fro ({', '.join(layout.name for layout in runs)}), and a "
            "plan has those of one behind each other; `galvatron-score` tells its figures",
            where=where,
            key="tp_sizes_enc",
        )
    return dict(Counter(filter(None, _name_modes(strategy, layers))))


def _name_modes(strategy: Strategy, layers: Sequence[LayerStrategy]) -> list[str]:
    """What a plan of `strategy` calls the modes of these layers; an empty name is that of its own layout's layers."""
    names = []
    for layer in layers:
        layout, mode = _layout_of(layer.of_ends), RECOMPUTE if layer.checkpoint else ""
        names.append(mode if layout == strategy.layout else layout.mode(mode))
    return names


def _list_modes(strategy: Strategy) -> list[str]:
    """The modes of a stage's layers in their order; an empty name is that of its own layout's layers."""
    return [*(layout.mode(mode) for layout in strategy.layouts for mode in (RECOMPUTE, "")), RECOMPUTE, ""]


def export_new(plan: Plan, target: Target) -> Exported:
    """`galvatron_config.json`, and overrides of its training's YAML; of Galvatron for Paddle
    `fine_grained_config.json`, and its trainer's flags. Raises PlanError naming what it cannot run."""
    if target.version == PADDLE:
        return _export_paddle(plan, target)
    text = format_strategy(_assign_upstream(plan, target)) + "\n"
    told = "".join(f"# {line}\n" for line in ("Galvatron under a plan.", *target.describe(plan)))
    overrides = told + (
        f"runtime.parallel.galvatron_config_path={JSON}\n"
        "runtime.train.sequence_parallel=true\n"
        f"runtime.train.global_batch_size={plan.global_batch_size}\n"
        f"runtime.train.chunks={plan.num_microbatches}\n"
    )
    return _export(plan, target, json.loads(text), {Path(JSON): text, Path(OVERRIDES): overrides})


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The strategy at the one of `paths` with `plan` in it."""
    (path,) = only(paths, "Galvatron", "its strategy")
    if path.suffix != ".json":
        raise JobError(f"{path}: a plan is written into a strategy in JSON")
    text, document = read_exactly(path, "strategy", "JSON file"), dict(read_document(path, "strategy"))
    if target.version == PADDLE:
        raise PlanError("Galvatron for Paddle takes a file of its own; leave --into out")
    for key, value in json.loads(format_strategy(_assign_upstream(plan, target))).items():
        text = set_json_value(text, (key,), value, after=next(iter(document)))
        document[key] = value
    return _export(plan, target, document, {path: text})


def _export(plan: Plan, target: Target, document: dict[str, Any], texts: dict[Path, str]) -> Exported:
    again = _read_plan(document, JSON, totals_of(plan), plan.strategy.world_size)
    check_decided(again, plan, target.job)
    unchecked = () if target.job else _UNCHECKED
    notes = ("its runtime takes sequence parallelism from the training's YAML: runtime.train.sequence_parallel true",)
    return Exported(texts, plan, (), _CHECKED, unchecked, notes if plan.strategy.tp > 1 else ())


def _export_paddle(plan: Plan, target: Target) -> Exported:
    """Its trainer takes each layer's ZeRO stage as it is, and the vocabulary's as 0 or 3."""
    found, own = assign(plan, target), plan.strategy.layout
    if plan.strategy.schedule != "1f1b":
        raise PlanError(f"plan: {plan.strategy.schedule}, and Paddle's trainer runs 1f1b; plan with it")
    if plan.strategy.layouts and own.zero == 2:
        raise PlanError(
            f"plan: its own layout is {own.name}, and Paddle's vocabulary has ZeRO 0 or 3 where layers have strategies "
            "of their own; plan with search.zero [0, 3]"
        )
    ends = found.ends
    sharded: DpType = "zero3" if own.zero == 3 else "ddp"
    flagged = FlaggedEnds(ends.pp, ends.tp, ends.sp, ends.dp, sharded, ends.sp > 1)
    text = format_fine_grained(replace(found, ends=flagged)) + "\n"
    flags, notes = map_to_trainer(found)
    again = parse_fine_grained(json.loads(text), PADDLE_FILE, plan.strategy.world_size)
    check_decided(plan_of(again, PADDLE_FILE, totals_of(plan)), plan, target.job)
    told = "".join(f"# {line}\n" for line in ("Galvatron for Paddle under a plan.", *target.describe(plan)))
    words = told + "".join(f"--{name} {str(value).lower()}\n" for name, value in flags.items())
    unchecked = () if target.job else _UNCHECKED
    return Exported({Path(PADDLE_FILE): text, Path(FLAGS): words}, plan, (), _CHECKED, unchecked, tuple(notes))


def _assign_upstream(plan: Plan, target: Target) -> Assignment:
    found = assign(plan, target)
    if {"ddp", "zero2"} <= {layer.dp_type for layer in (found.ends, *found.layers) if layer.dp > 1}:
        raise PlanError(
            "plan: layers with ZeRO 0 beside others with ZeRO 2, and Galvatron has one of them beside ZeRO 3"
        )
    return found


def assign(plan: Plan, target: Target) -> Assignment:
    """The strategy of every layer. Raises PlanError naming what Galvatron cannot run."""
    refuse_features(plan, target.job, REFUSED)
    strategy = plan.strategy
    if set(plan.layers) != {"text"}:
        raise PlanError(f"plan: it places {', '.join(plan.layers)} layers, and {_ENCODER}")
    kind = strategy.context_kind(target.job.workload) if target.job else strategy.cp_kind
    if strategy.cp > 1 and (kind or "all_to_all") != "all_to_all":
        raise PlanError(f"plan: CP {strategy.cp} by {kind}, and {_CONTEXT}")
    if strategy.schedule not in SCHEDULES:
        raise PlanError(f"plan: its schedule is {strategy.schedule}, and Galvatron runs {' and '.join(SCHEDULES)}")
    layers = [layer for stage, held in enumerate(plan.layers["text"]) for layer in _list_layers(plan, stage, held)]
    zeros = {layout.zero for layout in (strategy.layout, *strategy.layouts)}
    return Assignment(
        tuple(layers),
        _strategy_of(strategy, strategy.layout).of_ends,
        plan.layers["text"],
        plan.global_batch_size,
        plan.num_microbatches,
        SCHEDULES[strategy.schedule],
        "zero2" if 2 in zeros else "ddp",
    )


def _list_layers(plan: Plan, stage: int, held: int) -> list[LayerStrategy]:
    """The strategies of one stage's layers, in the order of a plan's modes."""
    strategy, modes = plan.strategy, plan.modes.get("text", {})
    counts = {mode: row[stage] for mode, row in (*modes.items(), (RECOMPUTE, plan.recompute["text"]))}
    counts[""] = held - sum(counts.values())
    layers: list[LayerStrategy] = []
    for name in _list_modes(strategy):
        layout_name, mode = split_mode(name)
        layout = next((of for of in strategy.layouts if of.name == layout_name), strategy.layout)
        layers += [_strategy_of(strategy, layout, mode == RECOMPUTE)] * counts.get(name, 0)
    return layers


def _strategy_of(strategy: Strategy, layout: LayerLayout, checkpoint: bool = False) -> LayerStrategy:
    """Raises PlanError where no layer of Galvatron's can be shared so."""
    if layout.cp > 1 and layout.tp > 1:
        raise PlanError(
            f"plan: TP {layout.tp} beside CP {layout.cp}, and a layer of Galvatron's has one of them; plan with one"
        )
    if layout.dp == 1 and layout.zero:
        raise PlanError(
            f"plan: ZeRO {layout.zero} with DP 1, and Galvatron shards over data parallel ranks; plan with ZeRO 0"
        )
    kind = dp_type_of(layout.dp, layout.zero == 3, "zero2" if layout.zero == 2 else "ddp")
    return LayerStrategy(strategy.pp, layout.tp, layout.cp, layout.dp, kind, checkpoint=checkpoint)


EXPORTER = Exporter(("2.4", "paddle"), JSON, export_new, export_patch, refused=frozenset(REFUSED), by_layer=True)
LAUNCHES = (
    patched_launch(
        "a strategy of Galvatron's (galvatron_config_….json)",
        is_strategy,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        takes=("seq_length",),
    ),
)
