"""A plan as keywords of HybridParallelPlugin: plugin.json, and Python that calls it with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.colossalai.read import (
    CHECKPOINTS,
    CONTEXT_KINDS,
    COUNTS,
    PLUGIN,
    describe_launch,
    is_plugin,
    read_launch_plan,
    read_plan,
)
from mm_autoparallel.integrations.config_files import totals_of
from mm_autoparallel.integrations.export import only, patched_launch, read_exactly
from mm_autoparallel.integrations.features import list_features, refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER
from mm_autoparallel.planner.plan import Plan

JSON, PYTHON = "plugin.json", "planned_plugin.py"

_UNEVEN = "num_layers_per_stage has one number a stage; plan with VPP 1, or with a number of layers that divides"
_GROUPS = "Colossal-AI's interleaved schedule takes whole groups of PP micro-batches; plan with such a batch, or VPP 1"
_SCHEDULE = "the plugin runs 1f1b and interleaved (zbv needs nodes of its own); plan with search.schedule left out"
_ENCODER = "its policies divide decoders alone; plan the decoder by itself, or export --to torch"
_CONTEXT = "the plugin shares attention by all_to_all or ring_attn; plan with search.cp_kind [all_to_all, ring]"
_EXPERTS = "experts are another plugin's (MoeHybridParallelPlugin); plan with EP 1"
_SHARDED = "ZeRO 3 is another plugin's (GeminiPlugin); plan with search.zero [0, 1, 2]"
_STAGE = "the plugin asserts ZeRO 0 or 1 beside a pipeline; plan with search.zero [0, 1], or search.pp [1]"
_MODE = "the plugin recomputes whole layers; plan with search.modes [recompute]"
_NO_KEY = "the plugin has no keyword for it; plan without it"

REFUSED = (
    dict.fromkeys(("uneven_chunks",), _UNEVEN)
    | dict.fromkeys(("partial_group",), _GROUPS)
    | dict.fromkeys(("gpipe", "low_memory_chunks", "split_backwards", "pieces"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), _ENCODER)
    | dict.fromkeys(("all_gather", "hierarchical"), _CONTEXT)
    | dict.fromkeys(("experts", "whole_experts", "dispatcher", "token_overlap"), _EXPERTS)
    | dict.fromkeys(("zero_3", "zero_3_pipeline", "kept_weights", "shards"), _SHARDED)
    | dict.fromkeys(("zero_2_pipeline",), _STAGE)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | dict.fromkeys(("precision", "graphs", "fused_products", "user_buffers", "overlaps"), _NO_KEY)
)
_CHECKED = ("read back: the keywords as written give the plan",)


def export_new(plan: Plan, target: Target) -> Exported:
    """`plugin.json` and `planned_plugin.py`. Raises PlanError naming what Colossal-AI cannot run."""
    keywords = {key: value for key, value in decide_values(plan, target).items() if value is not None}
    keywords = {"precision": "bf16", **keywords}
    text = json.dumps(keywords, indent=2) + "\n"
    told = "".join(f"# {line}\n" for line in ("Colossal-AI's plugin under a plan.", *target.describe(plan)))
    lines = [f"        {key}={_format(key, value)},\n" for key, value in keywords.items()]
    code = (
        f"{told}\nfrom colossalai.booster.plugin import {PLUGIN}\n"
        "from colossalai.shardformer import PipelineGradientCheckpointConfig\n\n\n"
        f'def plugin(**more):\n    """The planned plugin. more: keywords that the plan does not decide."""\n'
        f"    return {PLUGIN}(\n{''.join(lines)}        **more,\n    )\n"
    )
    return _export(plan, target, keywords, {Path(JSON): text, Path(PYTHON): code})


def _format(key: str, value: Any) -> str:
    return f"PipelineGradientCheckpointConfig({COUNTS}={value[COUNTS]})" if key == CHECKPOINTS else repr(value)


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The keywords at the one of `paths`, a JSON, with `plan` in them."""
    (path,) = only(paths, "Colossal-AI", "its plugin's keywords")
    if path.suffix != ".json":
        raise JobError(f"{path}: a plan is written into keywords in JSON; import reads Python too")
    text, keywords = read_exactly(path, "keywords", "JSON file"), dict(read_document(path, "keywords"))
    for key, value in decide_values(plan, target).items():
        if value is None and keywords.get(key) is None:
            continue
        text = set_json_value(text, (key,), value, after=next(iter(keywords)))
        keywords[key] = value
    return _export(plan, target, keywords, {path: text})


def _export(plan: Plan, target: Target, keywords: dict[str, Any], texts: dict[Path, str]) -> Exported:
    strategy = plan.strategy
    again = read_plan(keywords, JSON, totals_of(plan), strategy.world_size, plan.global_batch_size, strategy.mbs)
    check_decided(again, plan, target.job)
    unchecked = () if target.job else ("without --job: heads and vocabulary are not held against the sizes",)
    number = plan.num_microbatches
    batch = f"the training's code gives a replica {plan.global_batch_size // strategy.dp} samples a step"
    notes = (batch if strategy.pp > 1 else f"{batch}, in {number} micro-batches of {strategy.mbs} that it adds up",)
    return Exported(texts, plan, (), _CHECKED, unchecked, notes)


def decide_values(plan: Plan, target: Target) -> dict[str, Any]:
    """Keyword → its value; None: it must not be given."""
    refuse_features(plan, target.job, REFUSED)
    strategy, found = plan.strategy, list_features(plan, target.job)
    held, again = plan.layers["text"], plan.recompute["text"]
    if set(plan.layers) != {"text"}:
        raise PlanError(f"plan: it places {', '.join(plan.layers)} layers, and {_ENCODER}")
    if strategy.cp > 1 and "tensor" in found:
        raise PlanError(
            f"plan: TP {strategy.tp} with sequence parallelism beside CP {strategy.cp}, and the plugin has one "
            "sequence_parallelism_mode; plan with search.sequence_parallel [false], or with CP 1"
        )
    if any(again) and strategy.pp == 1:
        raise PlanError(
            "plan: it recomputes layers with PP 1, and the plugin counts checkpoints of pipelines alone; call "
            "model.gradient_checkpointing_enable() by yourself and plan without search.modes [recompute]"
        )
    if strategy.optimizer_offload and not strategy.zero:
        raise PlanError("plan: its optimizer lies on the host with ZeRO 0; plan with search.zero [1]")
    kind = strategy.context_kind(target.job.workload) if target.job else strategy.cp_kind
    if strategy.cp > 1 and not kind:
        kind = "ring"
    mode = CONTEXT_KINDS[kind] if strategy.cp > 1 else "split_gather" if "tensor" in found else None
    chunks = strategy.vpp > 1
    return {
        "tp_size": strategy.tp,
        "pp_size": strategy.pp,
        "sp_size": strategy.cp if strategy.cp > 1 else None,
        "zero_stage": strategy.zero,
        "enable_sequence_parallelism": mode is not None,
        "sequence_parallelism_mode": mode,
        "microbatch_size": strategy.mbs,
        "num_microbatches": None,
        "pp_style": "interleaved" if chunks else "1f1b",
        "num_model_chunks": strategy.vpp,
        "num_layers_per_stage": None if chunks or len({*held}) == 1 else [*held],
        CHECKPOINTS: {COUNTS: [*again]} if any(again) else None,
        "cpu_offload": strategy.optimizer_offload,
        "dp_outside": strategy.rank_order != DEFAULT_RANK_ORDER,
    }


EXPORTER = Exporter(("0.5",), JSON, export_new, export_patch, refused=frozenset(REFUSED))
LAUNCHES = (
    patched_launch(
        "keywords of Colossal-AI's HybridParallelPlugin (JSON, or Python that calls it)",
        is_plugin,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        takes=("seq_length", "global_batch_size", "micro_batch_size"),
    ),
)
