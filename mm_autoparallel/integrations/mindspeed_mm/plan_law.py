"""What MindSpeed-MM 2.x can run of what a plan can say. Each rule names what breaks it and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindspeed_mm.hetero_parallel import as_chain, list_reasons
from mm_autoparallel.integrations.mindspeed_mm.model_json import SECTIONS
from mm_autoparallel.model.job.mindspeed_mm_law import chunk_reasons, head_reasons, placement_reasons
from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.plan import Plan

WORKLOAD = Workload(global_batch_size=1, seq_length=1, stack="mindspeed-mm")
"""Of a workload the placement laws read the stack, and whether sequences are divided, which MindSpeed-MM is told to do
wherever the strategy does not deny it."""


def check_plan(plan: Plan, model: Model, path: Path, counts_chunks: bool = False, takes_layouts: bool = False) -> None:
    """Raises PlanError with the first rule that `plan` breaks for the model in the model.json at `path`.

    counts_chunks: the checkout is known to count layers of chunk 0 rightly (checkout.py); else the law of older ones.
    takes_layouts: what the plan is for can give an encoder sizes of its own; else such plans are refused.
    """
    if plan.strategy.arrangement and not takes_layouts:
        raise PlanError(
            f"plan: its layout is {plan.strategy.arrangement.name}, and what trains here is told of the chain alone; "
            "`mm-autoparallel export --to mindspeed-mm` writes layouts into model.json and launch script"
        )
    for reason in _broken(plan, model, path, counts_chunks):
        raise PlanError(f"plan: {reason}")


def has_frozen_stage(plan: Plan, model: Model) -> bool:
    """Whether some virtual stage holds nothing that trains, so that its optimizer is empty."""
    num_virtual = plan.strategy.pp * plan.strategy.vpp
    trains = [False] * num_virtual
    for modality in model.modalities:
        counts = plan.layers[modality.name]
        for k, count in enumerate(counts):
            trains[k] |= count > 0 and not modality.freeze
        if isinstance(modality, Encoder) and not modality.projector.freeze and not model.adapters:
            trains[_last(counts)] = True
    # The ranks of a stage have one optimizer for all its chunks.
    return not all(any(trains[stage :: plan.strategy.pp]) for stage in range(plan.strategy.pp))


def _broken(plan: Plan, model: Model, path: Path, counts_chunks: bool) -> Iterator[str]:
    if plan.strategy.arrangement:
        yield from list_reasons(plan, model)
        plan = as_chain(plan, model)
    yield from _break_model(plan, model, path)
    yield from _break_modes(plan)
    yield from _break_schedule(plan.strategy, plan.num_microbatches)
    yield from _break_sizes(plan.strategy, model)
    yield from placement_reasons(model, WORKLOAD, plan.strategy, plan.layers, counts_chunks)


def _break_model(plan: Plan, model: Model, path: Path) -> Iterator[str]:
    there = {modality.name: modality.layers.num_layers for modality in model.modalities}
    num_virtual = plan.strategy.pp * plan.strategy.vpp
    for name in plan.layers:
        if name not in SECTIONS:
            yield f"it places {name} layers, and a model.json has {', '.join(SECTIONS)} only"
        elif name not in there and any(plan.layers[name]):
            yield f"it places {name} layers, and {path} has {', '.join(there)} only"
    for name, number in there.items():
        for what, lists in (("layers", plan.layers), ("recompute", plan.recompute)):
            if len(lists.get(name, ())) != num_virtual:
                yield (
                    f"its {what} of {name} hold {len(lists.get(name, ()))} numbers, and PP {plan.strategy.pp} x VPP "
                    f"{plan.strategy.vpp} are {num_virtual} virtual stages"
                )
        if sum(plan.layers[name]) != number:
            yield (
                f"it places {sum(plan.layers[name])} {name} layers, and {path} has {number}; give the model.json that "
                "the plan was made for"
            )
        for k, (recomputed, held) in enumerate(zip(plan.recompute[name], plan.layers[name], strict=True)):
            if recomputed > held:
                yield f"it recomputes {recomputed} {name} layers on {plan.strategy.name_stage(k)}, which holds {held}"


_SWITCHES: dict[str, str] = {
    "selective": "selective recompute (--recompute-granularity selective) is one switch for all layers",
    "activation": "--recompute-activation-function is one switch for all layers and stages",
    "recompute_offload": "inputs of recomputed layers stay on the device",
    "offload": "--swap-attention moves what attention keeps, of all layers",
    "swap_attention": "--swap-attention is one switch for all layers of every part, towers included",
}
"""What MindSpeed has in place of each mode; its model.json says a number of layers for full recompute alone."""


def _break_modes(plan: Plan) -> Iterator[str]:
    for modality, modes in plan.modes.items():
        for mode, counts in modes.items():
            k = next(k for k, count in enumerate(counts) if count)
            yield (
                f"it runs {counts[k]} {modality} layers of {plan.strategy.name_stage(k)} in the mode {mode}, and in "
                f"MindSpeed-MM {_SWITCHES[mode]}; plan with search.modes [recompute]"
            )


def _break_schedule(strategy: Strategy, num_microbatches: int) -> Iterator[str]:
    runs = "1f1b" if strategy.vpp == 1 else "interleaved_1f1b"
    if strategy.schedule != runs:
        yield (
            f"its schedule is {strategy.schedule}, and MindSpeed-MM runs {runs} with VPP {strategy.vpp}; plan with "
            "that one"
        )
    if strategy.vpp > 1 and strategy.pp == 1:
        yield f"VPP {strategy.vpp} needs a pipeline of at least 2 stages, and PP is 1"
    yield from chunk_reasons(strategy, num_microbatches)


_WRITTEN: dict[str, tuple[str, ...]] = {
    "dispatcher": ("alltoall",),
    "graphs": ("none",),
    "overlap_all_to_all": ("none", "shared_experts"),
    "tp_overlap": ("none", "mc2"),
    "precision": ("bf16",),
}
"""What of a strategy's choices a launch script says: by its flag, or, of none and bf16, by having no flag."""


def _break_sizes(strategy: Strategy, model: Model) -> Iterator[str]:
    experts = model.text.layers.experts
    if strategy.ep > 1 and experts is None:
        yield f"EP {strategy.ep} divides experts, and the model has none; plan with EP 1"
    elif strategy.ep > 1 and experts and experts.num_experts % strategy.ep:
        yield f"EP {strategy.ep} does not divide the model's {experts.num_experts} experts"
    if strategy.expert_tp != strategy.tp:
        yield (
            f"ETP {strategy.expert_tp} divides experts otherwise than all else, and older checkouts know only TP "
            f"{strategy.tp} for both"
        )
    if strategy.zero > 1:
        yield (
            f"ZeRO stage {strategy.zero} has no flag beside a pipeline in MindSpeed-MM; its distributed optimizer is "
            "stage 1"
        )
    if strategy.optimizer_offload:
        yield (
            "the optimizer's states lie on the host, and MindSpeed has no step there (its --swap-optimizer steps on "
            "the device); plan without optimizer offload"
        )
    if strategy.rank_order != DEFAULT_RANK_ORDER:
        yield (
            f"its ranks stand in the order {strategy.rank_order}, and a launch script says that by "
            f"--use-tp-pp-dp-mapping, which is not written; plan with {DEFAULT_RANK_ORDER}"
        )
    if strategy.cp_kind:
        yield (
            f"it chooses CP by {strategy.cp_kind}, and a launch script says that by --context-parallel-algo, which is "
            "not written; say it in workload.context_parallel and plan without search.cp_kind"
        )
    for name, flag in (
        ("dispatcher", "--moe-token-dispatcher-type"),
        ("graphs", "--cuda-graph-impl"),
        ("overlap_all_to_all", "--moe-fb-overlap"),
        ("precision", "--fp8-format"),
        ("tp_overlap", "--tp-comm-overlap"),
    ):
        choice = getattr(strategy, name)
        if choice and choice not in _WRITTEN[name]:
            yield (
                f"it chooses {name} {choice}, and a launch script says that by {flag}: MindSpeed-MM is planned with "
                f"{' or '.join(_WRITTEN[name])} alone; plan without search.{name}"
            )
    yield from head_reasons(model, strategy)


def _last(counts: tuple[int, ...]) -> int:
    return max(k for k, count in enumerate(counts) if count)
