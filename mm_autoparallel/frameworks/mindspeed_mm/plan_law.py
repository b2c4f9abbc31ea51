"""What MindSpeed-MM 2.x can run of what a plan can say. Each rule names what breaks it and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.frameworks.mindspeed_mm.model_json import SECTIONS
from mm_autoparallel.job.model import Encoder, Model
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.plan import Plan


def check_plan(plan: Plan, model: Model, path: Path) -> None:
    """Raises PlanError with the first rule that `plan` breaks for the model in the model.json at `path`."""
    for reason in _broken(plan, model, path):
        raise PlanError(f"plan: {reason}")


def has_frozen_stage(plan: Plan, model: Model) -> bool:
    """Whether some virtual stage holds nothing that trains, so that its optimizer is empty."""
    num_virtual = plan.strategy.pp * plan.strategy.vpp
    trains = [False] * num_virtual
    for modality in model.modalities:
        counts = plan.layers[modality.name]
        for k, count in enumerate(counts):
            trains[k] |= count > 0 and not modality.freeze
        if isinstance(modality, Encoder) and not modality.projector.freeze:
            trains[_last(counts)] = True
    # The ranks of a stage have one optimizer for all its chunks.
    return not all(any(trains[stage :: plan.strategy.pp]) for stage in range(plan.strategy.pp))


def _broken(plan: Plan, model: Model, path: Path) -> Iterator[str]:
    yield from _break_model(plan, model, path)
    yield from _break_modes(plan)
    yield from _break_schedule(plan.strategy, plan.num_microbatches)
    yield from _break_sizes(plan.strategy, model)
    yield from _break_audio(plan)
    yield from _break_layer_numbers(plan, model)


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
                yield f"it recomputes {recomputed} {name} layers on {_stage(k, plan.strategy)}, which holds {held}"


_SWITCHES: dict[str, str] = {
    "selective": "selective recompute (--recompute-granularity selective) is one switch for all layers",
    "activation": "--recompute-activation-function is one switch for all layers and stages",
    "offload": "--swap-attention moves what attention keeps, of all layers",
}
"""What MindSpeed has in place of each mode; its model.json says a number of layers for full recompute alone."""


def _break_modes(plan: Plan) -> Iterator[str]:
    for modality, modes in plan.modes.items():
        for mode, counts in modes.items():
            k = next(k for k, count in enumerate(counts) if count)
            yield (
                f"it runs {counts[k]} {modality} layers of {_stage(k, plan.strategy)} in the mode {mode}, and in "
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
    # megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving, core 0.8 and 0.12.
    if strategy.vpp > 1 and num_microbatches % strategy.pp:
        yield (
            f"its {num_microbatches} micro-batches are no multiple of PP {strategy.pp}, which Megatron asks for with "
            f"VPP {strategy.vpp}; plan with a global batch that is"
        )


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
    if strategy.cp_kind:
        yield (
            f"it chooses CP by {strategy.cp_kind}, and a launch script says that by --context-parallel-algo, which is "
            "not written; say it in workload.context_parallel and plan without search.cp_kind"
        )
    for modality in model.modalities:
        heads, ranks = modality.layers.num_heads, strategy.tp * strategy.cp
        # Every context parallel form that all parts share (Ulysses) gives each rank whole heads.
        if strategy.cp > 1 and heads % ranks:
            yield (
                f"CP {strategy.cp} with TP {strategy.tp} divides the {heads} attention heads of {modality.name} among "
                f"{ranks} ranks, and MindSpeed-MM gives each rank whole heads; plan with another CP"
            )


def _break_audio(plan: Plan) -> Iterator[str]:
    """Audio tokens join the text on the rank that made them: they are not sent on (vlm_model.py, forward)."""
    audio = plan.layers.get("audio", ())
    if not any(audio):
        return
    joins = next(k for k, count in enumerate(plan.layers["text"]) if count)
    for k, count in enumerate(audio):
        if count and k != joins:
            yield (
                f"it places {count} audio layers on {_stage(k, plan.strategy)}, and MindSpeed-MM keeps the whole audio "
                f"encoder where the text decoder begins, on {_stage(joins, plan.strategy)}; move them there"
            )


def _break_layer_numbers(plan: Plan, model: Model) -> Iterator[str]:
    """A layer's number decides whether it has experts, and Megatron numbers as if all stages held equally many.

    A stage's first layer gets the number (virtual stage) x (layers held), as get_transformer_layer_offset of
    megatron/core/transformer/transformer_layer.py works it out from what vlm_model.py gives it.
    """
    experts = model.text.layers.experts
    if experts is None or not experts.dense_layers:
        return
    before = 0
    for k, count in enumerate(plan.layers["text"]):
        if count and before != k * count:
            yield (
                f"it places {count} text layers on {_stage(k, plan.strategy)} behind {before} others, and Megatron "
                f"would number them from {k * count}: in this model the number decides which layers have experts "
                f"({len(experts.dense_layers)} have none), so every stage must hold equally many text layers"
            )
        before += count


def _last(counts: tuple[int, ...]) -> int:
    return max(k for k, count in enumerate(counts) if count)


def _stage(virtual_stage: int, strategy: Strategy) -> str:
    chunk, stage = divmod(virtual_stage, strategy.pp)
    return f"stage {stage}" if strategy.vpp == 1 else f"stage {stage}, chunk {chunk}"
