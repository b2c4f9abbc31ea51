"""What a plan can decide, feature by feature: every exporter says of each what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.layer_layout import split_mode
from mm_autoparallel.pipeline.schedules.catalog import GIVEN, SCHEDULES

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.job.stacks import TensorOverlap
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.model.job.workload import Workload
    from mm_autoparallel.planner.plan import Plan

Handling = Literal["written", "rounded", "refused"]
"""Of a plan that has the feature: the files say it; they say something that keeps less memory, told in a sentence; or
no file is written, and the refusal names it."""

FEATURES: dict[str, str] = {
    "pipeline": "PP, equal stages",
    "uneven_stages": "any number of layers a stage",
    "chunks": "VPP, equal chunks",
    "uneven_chunks": "any number of layers a chunk",
    "partial_group": "VPP with micro-batches that are no multiple of PP",
    "encoder_first": "an encoder whole on the first stage",
    "encoder_stages": "an encoder over several stages",
    "gpipe": "gpipe",
    "low_memory_chunks": "interleaved_1f1b_low_memory",
    "split_backwards": "backwards in two parts or an order of its own: zb_h1, zbv, a free or given order",
    "pieces": "seq_1f1b, pieces of sequences",
    "tensor": "TP with sequence parallelism",
    "whole_sequences": "TP without sequence parallelism",
    "ring": "CP by ring",
    "all_to_all": "CP by all_to_all",
    "all_gather": "CP by all_gather",
    "hierarchical": "CP hierarchical",
    "experts": "EP",
    "whole_experts": "ETP 1 beside TP",
    "zero_0": "ZeRO 0",
    "zero_1": "ZeRO 1",
    "zero_2": "ZeRO 2 with PP 1",
    "zero_3": "ZeRO 3 with PP 1",
    "zero_2_pipeline": "ZeRO 2 with PP above 1",
    "zero_3_pipeline": "ZeRO 3 with PP above 1",
    "kept_weights": "ZeRO 3, weights kept from forward to backward",
    "shards": "ZeRO 3, several copies of the weights",
    "recompute_all": "recompute of all layers",
    "recompute_number": "recompute, the same number a stage",
    "recompute_stages": "recompute, any number a stage",
    "selective_all": "selective, all layers",
    "selective_some": "selective, some layers",
    "activation": "activation",
    "offload": "offload of activations",
    "recompute_offload": "recompute with inputs on the host",
    "swap_attention": "swap_attention, all layers",
    "swap_some": "swap_attention, some layers",
    "optimizer_offload": "optimizer on the host",
    "rank_order": "ranks tp-cp-ep-pp-dp",
    "precision": "a precision below bf16 that was chosen",
    "graphs": "CUDA graphs that were chosen",
    "dispatcher": "a dispatcher of tokens that was chosen",
    "token_overlap": "an overlap of the experts' exchange that was chosen",
    "fused_products": "products fused with TP's traffic (MC2)",
    "overlaps": "overlaps of gradients, weights or transfers that were chosen",
    "user_buffers": "products beside TP's traffic in user buffers, which were chosen",
    "layer_strategies": "layers of one stage shared in several ways",
    "layout": "an encoder with parallel sizes of its own",
}
"""Key → what it is, for people. tests/frameworks/featured_plans.py has a plan of each."""


def list_features(plan: Plan, job: Job | None) -> dict[str, str]:
    """The features that `plan` has, each with what it says there, for a sentence: `PP 4`, `2 vision layers on stage 1`.

    job: what it was made for, whose workload says what the plan leaves to it; None: the plan alone.
    """
    return {**dict(_list_places(plan)), **dict(_list_sharing(plan, job)), **dict(_list_modes(plan))}


def products_beside(strategy: Strategy, workload: Workload | None) -> TensorOverlap:
    """How products run beside tensor parallel traffic, empty where they do not; workload None: as far as the strategy
    says."""
    kind = strategy.facts_of(workload).tp_overlap if workload else strategy.tp_overlap
    divides = strategy.divides_sequences(workload) if workload else strategy.tp > 1
    return kind if divides and kind != "none" else ""


def refuse_features(plan: Plan, job: Job | None, refused: Mapping[str, str]) -> None:
    """Raises PlanError for the first feature of `plan` that a framework cannot run. refused: feature → why, and what to
    plan with instead."""
    for feature, said in list_features(plan, job).items():
        if feature in refused:
            raise PlanError(f"plan: it has {said}, and {refused[feature]}")


def _list_places(plan: Plan) -> Iterator[tuple[str, str]]:
    strategy = plan.strategy
    for modality, counts in plan.layers.items():
        held = [stage for stage, count in enumerate(counts) if count]
        if modality != "text" and held and strategy.pp > 1:
            where = strategy.name_stage(held[-1])
            kind = "encoder_first" if held == [0] else "encoder_stages"
            yield kind, f"{counts[held[-1]]} {modality} layers on {where}"
    if strategy.pp > 1:
        yield "pipeline", f"PP {strategy.pp}"
    uneven = any(len({*counts}) > 1 for counts in plan.layers.values())
    if uneven and strategy.vpp == 1:
        yield "uneven_stages", f"layers {list(plan.layers['text'])} on PP {strategy.pp}"
    if strategy.vpp > 1:
        yield "chunks", f"VPP {strategy.vpp}"
        if uneven:
            yield "uneven_chunks", f"layers {list(plan.layers['text'])} on PP {strategy.pp} x VPP {strategy.vpp}"
        if plan.num_microbatches % strategy.pp:
            yield "partial_group", f"{plan.num_microbatches} micro-batches with VPP {strategy.vpp} on PP {strategy.pp}"
    orders = {"gpipe": "gpipe", "interleaved_1f1b_low_memory": "low_memory_chunks"}
    order = "pieces" if strategy.schedule.startswith("seq_1f1b") else orders.get(strategy.schedule)
    if order:
        yield order, f"the schedule {strategy.schedule}"
    elif strategy.schedule == GIVEN:
        yield "split_backwards", "an order of its own"
    elif SCHEDULES[strategy.schedule].splits:
        yield "split_backwards", f"the schedule {strategy.schedule}, which parts backwards"


def _list_sharing(plan: Plan, job: Job | None) -> Iterator[tuple[str, str]]:
    strategy = plan.strategy
    divides = strategy.divides_sequences(job.workload) if job else strategy.sequence_parallel
    if strategy.tp > 1:
        without = "" if divides else " without sequence parallelism"
        yield "tensor" if divides else "whole_sequences", f"TP {strategy.tp}{without}"
    kind = strategy.context_kind(job.workload) if job else strategy.cp_kind
    if strategy.cp > 1 and kind:
        yield kind, f"CP {strategy.cp} by {kind}"
    if strategy.ep > 1:
        yield "experts", f"EP {strategy.ep}"
    if strategy.etp not in (0, strategy.tp):
        yield "whole_experts", f"ETP {strategy.etp} beside TP {strategy.tp}"
    in_pipeline = strategy.pp > 1 and strategy.zero > 1
    yield f"zero_{strategy.zero}{'_pipeline' if in_pipeline else ''}", f"ZeRO {strategy.zero} with PP {strategy.pp}"
    if strategy.zero == 3 and not strategy.reshard:
        yield "kept_weights", "weights that are kept from forward to backward (RESHARD false)"
    if strategy.shard:
        yield "shards", f"shards of {strategy.shard} ranks"
    if strategy.optimizer_offload:
        yield "optimizer_offload", f"the optimizer on the host with ZeRO {strategy.zero}"
    if strategy.rank_order == "tp-cp-ep-pp-dp":
        yield "rank_order", f"ranks in the order {strategy.rank_order}"
    if strategy.precision not in ("", "bf16"):
        yield "precision", f"the precision {strategy.precision} as its choice"
    if strategy.graphs not in ("", "none"):
        yield "graphs", f"CUDA graphs ({strategy.graphs}) as its choice"
    if strategy.dispatcher:
        yield "dispatcher", f"the dispatcher {strategy.dispatcher} as its choice"
    if strategy.layouts:
        yield "layer_strategies", f"layers that are shared as {' and '.join(of.name for of in strategy.layouts)}"
    if strategy.arrangement:
        yield "layout", f"the layout {strategy.arrangement.name}"
    if strategy.overlap_all_to_all:
        yield "token_overlap", f"experts' exchange beside {strategy.overlap_all_to_all} as its choice"
    if strategy.overlaps.chosen:
        yield "overlaps", f"{' and '.join(strategy.overlaps.words)} as its choice"
    if strategy.tp_overlap == "mc2":
        yield "fused_products", "products fused with TP's traffic (mc2) as its choice"
    if strategy.tp_overlap == "user_buffers":
        yield "user_buffers", "products beside TP's traffic (user_buffers) as its choice"


def _list_modes(plan: Plan) -> Iterator[tuple[str, str]]:
    held = [count for counts in plan.layers.values() for count in counts]
    recompute = [count for modality in plan.layers for count in plan.recompute[modality]]
    most = max(recompute, default=0)
    if most:
        is_all, is_number = recompute == held, recompute == [min(most, count) for count in held]
        said = f"{sum(recompute)} of {sum(held)} layers recomputed"
        yield "recompute_all" if is_all else "recompute_number" if is_number else "recompute_stages", said
    modes: dict[str, int] = {}
    for of_mode in plan.modes.values():
        for mode, counts in of_mode.items():
            name = split_mode(mode)[1]
            modes[name] = modes.get(name, 0) + sum(counts)
    modes.pop("", None)
    if number := modes.pop("recompute", 0):
        yield "recompute_stages", f"{number} of {sum(held)} layers recomputed in other layouts"
    for mode, number in modes.items():
        said = f"{number} of {sum(held)} layers in the mode {mode}"
        by_all = {"selective": ("selective_all", "selective_some"), "swap_attention": ("swap_attention", "swap_some")}
        if number:
            yield by_all.get(mode, (mode, mode))[number < sum(held)], said
