"""A plan as files of a torch training: the decision, the order of each stage, and the code that trains by both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, LaunchKind, Target
from mm_autoparallel.integrations.torch.read import (
    PLANNED,
    SCHEDULE,
    SCHEMA,
    describe_launch,
    find_devices,
    is_planned,
    read_launch_plan,
    read_planned,
)
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.planner.plan import Plan, decision_document, format_document

CODE = Path(__file__).parent / "shipped" / "planned_pipeline.py"

_SEQUENCES = "the code divides matrices and no sequences; plan with search.sequence_parallel [false]"
_CONTEXT = "sharing attention is the model's own code; plan with CP 1, or export --to torchtitan"
_EXPERTS = "dealing experts is the model's own code; plan with EP 1, or export --to torchtitan"
_PIECES = "the code runs whole sequences; plan with search.schedule left out"
_MODE = "the code runs whole layers again; plan with search.modes [recompute]"
_HOST = "FSDP2 moves weights to the host with the optimizer; plan with search.optimizer_offload [false]"
_OWN = "it is the model's own code; plan without it"

REFUSED = (
    {"tensor": _SEQUENCES, "optimizer_offload": _HOST, "pieces": _PIECES}
    | dict.fromkeys(("ring", "all_to_all", "all_gather", "hierarchical"), _CONTEXT)
    | dict.fromkeys(("experts", "whole_experts", "dispatcher", "token_overlap"), _EXPERTS)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | dict.fromkeys(("precision", "graphs", "fused_products", "user_buffers", "overlaps"), _OWN)
)
ROUNDED = frozenset({"zero_2", "zero_2_pipeline"})
_KEPT = (
    "ZeRO 2: FSDP2 shards weights too and keeps them gathered from forward to backward, so less is held between steps "
    "and weights are gathered in each micro-batch"
)
_CHECKED = ("read back: the decision and the schedule as written give the plan",)


def export_new(plan: Plan, target: Target) -> Exported:
    """`planned.json`, `schedule.csv` and `planned_pipeline.py`. Raises PlanError naming what the code cannot run."""
    refuse_features(plan, target.job, REFUSED)
    strategy = plan.strategy
    if strategy.expert_tp != strategy.tp:
        raise PlanError(f"plan: ETP {strategy.expert_tp} beside TP {strategy.tp}, and {_EXPERTS}")
    if strategy.zero == 1 and strategy.tp > 1 and strategy.dp > 1:
        raise PlanError(
            f"plan: ZeRO 1 beside TP {strategy.tp}, and ZeroRedundancyOptimizer sends whole weights alone; plan with "
            "search.zero [0, 3]"
        )
    told: tuple[str, ...] = ()
    if strategy.zero == 2:
        plan, told = replace(plan, strategy=replace(strategy, zero=3, reshard=False)), (_KEPT,)
    document = {"schema": SCHEMA, "chain": [*plan.layers], **decision_document(plan)}
    check_decided(read_planned(document, PLANNED), plan, target.job)
    header = "".join(f"# {line}\n" for line in (*target.describe(plan), *told))
    texts = {
        Path(PLANNED): format_document(document),
        Path(SCHEDULE): write_csv(plan),
        Path(CODE.name): header + CODE.read_text(encoding="utf-8"),
    }
    unchecked = () if target.job else ("without --job: heads and vocabulary are not held against the sizes",)
    notes = [f"start your script with torchrun on {plan.strategy.world_size} devices; {CODE.name} says how it is used"]
    if plan.strategy.tp > 1:
        notes.append(f"TP {plan.strategy.tp}: give divide, which divides a part; divide_usual_names knows usual names")
    if plan.strategy.pp > 1 and target.job and target.job.model.text.tied:
        notes.append(
            "the head shares the embedding's table, and stages that hold it sum its gradients; where functions make "
            'parts, both name it alike, weight.shared_as = "table"'
        )
    return Exported(texts, plan, told, _CHECKED, unchecked, tuple(notes))


def planned_files(_: Path, out: Path, __: Given) -> tuple[Path, ...]:
    """What `plan --script planned.json` will write into `out`."""
    return tuple(out / name for name in (PLANNED, SCHEDULE, CODE.name))


def write_beside(plan: Plan, path: Path, out: Path, _: Given, overwrite: bool) -> Export:  # noqa: ARG001
    """The files of another plan than that at `path`, into the folder `out`. Raises as `export_new` does."""
    exported = export_new(plan, Target("", None, lambda _: ()))
    texts = {out / name: text for name, text in exported.texts.items()}
    write_files(texts, overwrite)
    return Export((*texts,), (*exported.approximations, *exported.notes))


EXPORTER = Exporter(("2.13",), PLANNED, export_new, None, ROUNDED, frozenset(REFUSED))
LAUNCHES = (
    LaunchKind(
        title="planned.json of export --to torch",
        is_one=is_planned,
        find_devices=find_devices,
        describe=describe_launch,
        read_plan=read_launch_plan,
        planned_files=planned_files,
        write_plan=write_beside,
        takes=frozenset({"seq_length"}),
    ),
)
