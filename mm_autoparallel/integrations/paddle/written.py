"""A plan as arguments of PaddleFormers' and PaddleNLP's trainers: new ones, or in one's own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.config_files import round_recompute, totals_of
from mm_autoparallel.integrations.export import only, patched_launch, read_exactly
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.integrations.paddle.names import (
    DISPATCHER,
    FORMERS,
    MBS,
    NLP,
    ORDER,
    RECOMPUTE,
    SEGMENTS,
    SEQUENCE,
    SHARDING,
    SIZES,
    STEPS,
    USE_EXPERTS,
    find_version,
)
from mm_autoparallel.integrations.paddle.read import (
    ARGUMENTS,
    REPLICAS_OUTSIDE,
    describe_launch,
    is_arguments,
    read_launch_plan,
    read_plan,
)
from mm_autoparallel.integrations.yaml_text import set_file_values
from mm_autoparallel.planner.plan import Plan

_UNEVEN = "a list under pp_seg_method goes with one chunk a stage; plan with search.max_vpp 1"
_GROUPS = "paddle's interleaved pipeline takes whole groups of PP micro-batches; plan with such a batch, or VPP 1"
_SCHEDULE = "the trainers run 1f1b and its interleaved form; plan with search.schedule left out"
_ENCODER = "the trainers cut decoders alone; plan with search.pp [1], or export --to torch"
_CONTEXT = (
    "sep shares attention by all_to_all, and context_parallel divides sharding's ranks; plan with search.cp_kind "
)
_STAGE = "the trainer refuses stage 2 and 3 beside a pipeline; plan with search.zero [0, 1], or search.pp [1]"
_MODE = "the trainers run whole layers again; plan with search.modes [recompute]"
_COPIES = "the trainers share weights over all replicas and gather them twice; plan with ZeRO 3 as usual"
_NO_KEY = "the trainers have no key for it; plan without it"

REFUSED = (
    dict.fromkeys(("uneven_chunks",), _UNEVEN)
    | dict.fromkeys(("partial_group",), _GROUPS)
    | dict.fromkeys(("gpipe", "low_memory_chunks", "split_backwards", "pieces"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), _ENCODER)
    | dict.fromkeys(("ring", "all_gather", "hierarchical"), _CONTEXT)
    | dict.fromkeys(("zero_2_pipeline", "zero_3_pipeline"), _STAGE)
    | dict.fromkeys(("kept_weights", "shards"), _COPIES)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | {"overlaps": _NO_KEY}
    | dict.fromkeys(
        ("optimizer_offload", "precision", "graphs", "fused_products", "user_buffers", "token_overlap"), _NO_KEY
    )
)
ROUNDED = frozenset({"recompute_number", "recompute_stages"})
_OF_NLP = {
    "uneven_stages": "PaddleNLP's models cut themselves evenly; plan for PaddleFormers (--target-version 1.2)",
    "experts": "PaddleNLP deals experts in the model's code; plan for PaddleFormers (--target-version 1.2)",
}
_CHECKED = ("read back: the arguments as written give the plan that they are said to run",)
_EVENLY = "layer:DecoderLayer|EmptyLayer"
_USUAL = {"bf16": True, "fp16_opt_level": "O2", "amp_master_grad": True, "do_train": True}


def export_new(plan: Plan, target: Target) -> Exported:
    """`paddle_args.yaml`. Raises PlanError naming what cannot run."""
    if target.version == NLP:
        raise PlanError("PaddleNLP takes a JSON of yours, which --into names; new files are PaddleFormers' (1.2)")
    run, values, told = _decide(plan, target)
    document = {**_USUAL, **{key: value for key, value in values.items() if value is not None}}
    header = "".join(f"# {line}\n" for line in (*target.describe(run), *told))
    return _export(run, target, Path(ARGUMENTS), header + yaml.safe_dump(document, sort_keys=False), document, told)


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The arguments at the one of `paths` with `plan` in them."""
    (path,) = only(paths, "Paddle", "its arguments")
    before = dict(read_document(path, "arguments"))
    if (found := find_version(before, f"arguments {path}")) != target.version:
        raise JobError(f"arguments {path}: their keys are those of version {found}; say --target-version {found}")
    run, values, told = _decide(plan, target)
    changes = {key: value for key, value in values.items() if value is not None or before.get(key) is not None}
    if path.suffix == ".json":
        text = read_exactly(path, "arguments", "JSON file")
        for key, value in changes.items():
            text = set_json_value(text, (key,), value, after=next(iter(before)))
    else:
        text = set_file_values(path, "arguments", {(key,): value for key, value in changes.items()})
    return _export(run, target, path, text, before | changes, told)


def _export(
    run: Plan, target: Target, path: Path, text: str, document: Mapping[str, Any], told: tuple[str, ...]
) -> Exported:
    check_decided(read_plan(document, ARGUMENTS, totals_of(run), run.strategy.world_size), run, target.job)
    unchecked = () if target.job else ("without --job: heads, vocabulary and experts are not held against the sizes",)
    notes = [f"start it on {run.strategy.world_size} devices"]
    if document.get(SEGMENTS, _EVENLY) != _EVENLY:
        notes.append(f"{SEGMENTS} is read by PaddleFormers' own pipelines; with PaddleFleet installed it cuts evenly")
    return Exported({path: text}, run, told, _CHECKED, unchecked, tuple(notes))


def decide_values(plan: Plan, target: Target) -> dict[str, Any]:
    """The keys that the plan decides. Raises PlanError."""
    return _decide(plan, replace(target, version=target.version or FORMERS))[1]


def _decide(plan: Plan, target: Target) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """What the arguments run, their decided keys (None: must not stand there), and sentences for what was rounded."""
    refuse_features(plan, target.job, REFUSED)
    strategy, names = plan.strategy, SIZES[target.version]
    if target.version == NLP:
        refuse_features(plan, target.job, _OF_NLP)
    if strategy.pp > 1 and set(plan.layers) != {"text"}:
        raise PlanError(f"plan: it places {', '.join(plan.layers)} layers on PP {strategy.pp}, and {_ENCODER}")
    if not strategy.zero and strategy.pp > 1 and strategy.dp > 1 and strategy.rank_order != REPLICAS_OUTSIDE:
        raise PlanError(
            "plan: ZeRO 0 with replicas within a stage's neighbours, and fleet lays replicas that share nothing "
            f"outermost; plan with search.zero [1], or search.rank_order [{REPLICAS_OUTSIDE}]"
        )
    if strategy.expert_tp != (1 if strategy.ep > 1 else strategy.tp):
        raise PlanError(
            f"plan: EP {strategy.ep} with ETP {strategy.expert_tp} beside TP {strategy.tp}, and the trainer has whole "
            "experts with EP above 1, and divides them with EP 1; plan with search.etp [1] and EP 2 at least"
        )
    if strategy.ep > 1 and (not strategy.zero or strategy.dispatcher not in ("", "alltoall", "deepep")):
        raise PlanError(
            "plan: it deals experts, which the trainer does with ZeRO 1 and by alltoall or deepep; plan with "
            "search.zero [1] and search.dispatcher [alltoall, deepep]"
        )
    runs_again = any(any(plan.recompute[modality]) for modality in plan.layers)
    recompute = {key: counts if runs_again else plan.recompute[key] for key, counts in plan.layers.items()}
    told = round_recompute(plan, recompute, "the trainers run all layers again, or none")
    is_uneven = strategy.pp > 1 and len({*plan.layers["text"]}) > 1
    cuts = [0, *(1 + sum(plan.layers["text"][:stage]) for stage in range(1, strategy.pp))]
    values = {
        MBS: strategy.mbs,
        STEPS: plan.num_microbatches,
        names["tp"]: strategy.tp,
        SEQUENCE: strategy.tp > 1 and strategy.sequence_parallel,
        names["pp"]: strategy.pp,
        names["vpp"]: strategy.vpp,
        names["sep"]: strategy.cp,
        names["cp"]: None,
        SHARDING: f"stage{strategy.zero}" if strategy.zero else "",
        names["shard"]: strategy.dp if strategy.zero else -1,
        "sharding_degree": None,
        names["ep"]: strategy.ep if strategy.ep > 1 else None,
        names["etp"]: None,
        USE_EXPERTS: True if strategy.ep > 1 else None,
        DISPATCHER: strategy.dispatcher or None,
        "reorder_pipeline_priority": None,
        ORDER: "sharding_first" if strategy.rank_order == REPLICAS_OUTSIDE else "pp_first",
        **{key: value if runs_again else None for key, value in RECOMPUTE[target.version].items()},
        **(
            {"recompute": runs_again}
            if target.version == NLP
            else {"recompute": None, SEGMENTS: str(cuts) if is_uneven else _EVENLY}
        ),
    }
    return replace(plan, recompute=recompute), values, told


EXPORTER = Exporter((FORMERS, NLP), ARGUMENTS, export_new, export_patch, ROUNDED, frozenset(REFUSED))
LAUNCHES = (
    patched_launch(
        "arguments of PaddleFormers' or PaddleNLP's trainer (JSON or YAML)",
        is_arguments,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        takes=("seq_length",),
    ),
)
