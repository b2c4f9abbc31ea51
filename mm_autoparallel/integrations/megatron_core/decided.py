"""What Megatron-LM's flags say of a plan: each of its choices is written, rounded to the side that saves memory, or
refused by name.

What goes with what: validate_args (megatron/training/arguments.py), TransformerConfig.__post_init__
(megatron/core/transformer/transformer_config.py) and the schedules' own checks, all of core_r0.16.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.features import products_beside
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.layers import write_layers
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import rerun_operators
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.planner.plan import Plan

TEXT = "text"

DEEPSPEED = (
    "its experts run in DeepSpeed's layer (workload.ep_kind), which is MindSpeed's to 2.1.0_core_r0.8.0 alone "
    "(--moe-model-type deepspeed_moe --use-legacy-models, and --enable-token-rearrange-opt where "
    "workload.token_rearrange is true), whose parser lacks flags that plans are written in; plan with ep_kind megatron"
)
"""Why a plan or a script with such experts is not written."""

_DISPATCHERS = {
    "alltoall": {flags.DISPATCHER: ("alltoall",), flags.BACKEND: None, flags.DEEPEP: None},
    "deepep": {flags.DISPATCHER: ("flex",), flags.BACKEND: ("deepep",), flags.DEEPEP: None},
    "hybridep": {flags.DISPATCHER: ("flex",), flags.BACKEND: ("hybridep",), flags.DEEPEP: None},
}


@dataclass(frozen=True)
class Decided:
    """values: every flag that the plan decides, also those that must be absent. usual: flags that are passed where
    nobody says otherwise, since Megatron-LM's own defaults would do worse. plan: what the flags run by themselves, the
    plan itself where nothing was rounded. approximations: a sentence for each thing that was. unchecked: a sentence for
    each law that could not be looked at.
    """

    values: flags.Values
    usual: flags.Values
    plan: Plan
    approximations: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


RECOMPUTE_BESIDE = "recompute beside micro_batches"
"""Among what a code allows beyond Megatron-LM: whole layers recomputed where their exchange hides."""


def decide(
    plan: Plan, job: Job | None, num_mtp: int = 0, *, adapts: bool = False, allows: Collection[str] = ()
) -> Decided:
    """The flags of `plan`. job: what it was made for, whose workload's choices are then written too; None: only what
    the plan's file says. num_mtp: layers of multi-token prediction, where no job says it. adapts: whether what runs
    them trains adapters. allows: schedules by name, and RECOMPUTE_BESIDE, that the code beneath has beyond Megatron-LM.

    Raises PlanError with the first choice that Megatron-LM cannot run, and what to plan with in its place.
    """
    for reason in _refusals(plan, job, adapts, allows):
        raise PlanError(f"plan: {reason}")
    strategy = plan.strategy
    num_mtp = job.model.text.num_mtp if job else num_mtp
    run, modes, told = _write_modes(plan, job)
    values: dict[str, tuple[str, ...] | None] = {
        flag: (str(getattr(strategy, name)),) for flag, name in flags.SIZES.items()
    }
    values |= {flags.MICRO_BATCH: (str(strategy.mbs),), flags.GLOBAL_BATCH: (str(plan.global_batch_size),)}
    values |= write_layers(plan.layers[TEXT], strategy.pp, num_mtp) | {flags.GROUP: None} | modes
    values |= _write_sharding(strategy) | _write_experts(strategy, job) | _write_choices(strategy, job)
    deals = has_experts(strategy, job) and flags.DISPATCHER not in values
    usual = {flags.DISPATCHER: ("alltoall",)} if deals else {}
    return Decided(values, usual, run, told, _list_unchecked(job))


def _list_unchecked(job: Job | None) -> tuple[str, ...]:
    if job is None:
        return (
            "without --job: heads, vocabulary, experts and multi-token prediction are not held against the sizes, and "
            "the choices of the workload (context parallelism, overlaps, selective operators) are left as they are",
        )
    stack = job.workload.stack
    if stack in ("megatron-te", "megatron-local"):
        return ()
    return (f"workload.stack is {stack}, so what is predicted is of that framework's code and not of Megatron-LM's",)


# ---------------------------------------------------------------------------------------------------------- refusing


def _refusals(plan: Plan, job: Job | None, adapts: bool, allows: Collection[str]) -> Iterator[str]:
    yield from _refuse_parts(plan, job, adapts)
    if plan.strategy.schedule not in allows:
        yield from _refuse_schedule(plan)
    yield from _refuse_modes(plan, job, RECOMPUTE_BESIDE in allows)
    yield from _refuse_sharding(plan.strategy)
    yield from _refuse_choices(plan.strategy, job)


def _refuse_parts(plan: Plan, job: Job | None, adapts: bool) -> Iterator[str]:
    for modality, counts in plan.layers.items():
        if modality != TEXT and any(counts):
            stage = next(k for k, count in enumerate(counts) if count)
            yield (
                f"it places {counts[stage]} {modality} layers on {plan.strategy.name_stage(stage)}, and "
                "pipelines of megatron-core hold a decoder alone: its layouts (0.16) have no letter for an "
                "encoder's layers (NotImplementedError), and pretrain_vlm.py gives its encoder the decoder's layout; "
                "MindSpeed-MM runs such plans (plan --script), or plan the decoder by itself"
            )
    if job and job.model.adapters and not adapts:
        yield "its model has adapters, and what it is written for trains whole weights"
    if job and adapts and not job.model.adapters:
        yield "its model trains whole weights, and the script that it goes into trains adapters"
    counts = plan.layers.get(TEXT, ())
    if 0 in counts:
        yield (
            f"{plan.strategy.name_stage(counts.index(0))} holds no decoder layer; plan with at least one on every stage"
        )


def _refuse_schedule(plan: Plan) -> Iterator[str]:
    strategy = plan.strategy
    runs = "1f1b" if strategy.vpp == 1 else "interleaved_1f1b"
    if strategy.schedule != runs:
        yield (
            f"its schedule is {strategy.schedule}, and megatron-core 0.16 runs {runs} with VPP {strategy.vpp} "
            "(get_forward_backward_func); plan with search.schedule left out"
        )
    if strategy.vpp > 1 and strategy.pp == 1:
        yield f"VPP {strategy.vpp} needs a pipeline of at least 2 stages, and PP is 1"
    if strategy.vpp > 1 and plan.num_microbatches % strategy.pp:
        yield (
            f"VPP {strategy.vpp} with {plan.num_microbatches} micro-batches on PP {strategy.pp}: Megatron-LM ends with "
            f"an error where a last group is smaller than PP, and with {flags.GROUP} above PP it runs another order; "
            "plan with a global batch that gives a multiple of PP, or with VPP 1"
        )


def _refuse_modes(plan: Plan, job: Job | None, beside: bool) -> Iterator[str]:
    reasons = {
        "offload": "--fine-grained-activation-offloading moves modules of every layer, no whole layers of one stage; "
        "plan without it in search.modes",
        "recompute_offload": "Megatron-LM keeps the inputs of recomputed layers on the device; plan without it in "
        "search.modes",
    }
    for mode, counts in plan.modes.get(TEXT, {}).items():
        stage = next((k for k, count in enumerate(counts) if count), None)
        if stage is not None and mode in reasons:
            yield (
                f"it runs {counts[stage]} layers of {plan.strategy.name_stage(stage)} in the mode {mode}, and "
                f"{reasons[mode]}"
            )
    held = plan.layers[TEXT]
    for mode in flags.BY_ONE_SWITCH:
        counts = plan.modes.get(TEXT, {}).get(mode, ())
        stage = next((k for k, count in enumerate(counts) if count), None)
        if stage is not None and tuple(counts) != tuple(held):
            yield (
                f"it runs {counts[stage]} layers of {plan.strategy.name_stage(stage)} in the mode {mode}, in all "
                f"{sum(counts)} of {sum(held)} layers, for which MindSpeed has one switch and Megatron-LM none; plan "
                "without it in search.modes"
            )
    whole = any(plan.recompute[TEXT])
    if whole and not beside and job and plan.strategy.overlap_of(job.workload) == "micro_batches":
        yield f"it recomputes whole layers, which {flags.BATCH_OVERLAP} forbids; plan without search.modes [recompute]"
    operators = _operators(plan, job)
    unknown = [name for name in operators if name not in flags.MODULE_NAMES]
    if unknown:
        yield (
            f"layers run {', '.join(unknown)} once more, and {flags.MODULES} knows {', '.join(flags.MODULE_NAMES)}; "
            "name these in workload.selective_operators and workload.recompute_operators"
        )
    if "shared_experts" in operators and job and plan.strategy.overlap_of(job.workload) == "shared_experts":
        yield f"shared experts run once more, which {flags.SHARED_OVERLAP} forbids; plan without one of the two"
    if operators and whole:
        stage = next(k for k, count in enumerate(plan.recompute[TEXT]) if count)
        yield (
            f"it recomputes {plan.recompute[TEXT][stage]} whole layers on {plan.strategy.name_stage(stage)} beside "
            f"layers that run {', '.join(operators)} once more, and Megatron-LM has one {flags.GRANULARITY} for all; "
            "plan with search.modes [recompute] or [selective] alone"
        )


def _refuse_sharding(strategy: Strategy) -> Iterator[str]:
    if strategy.zero > 1 and strategy.pp > 1:
        yield (
            f"ZeRO {strategy.zero} with PP {strategy.pp}: Megatron-FSDP runs without a pipeline; plan with search.zero "
            "[0, 1] or search.pp [1]"
        )
    if not strategy.reshard:
        yield (
            "its weights are kept from forward to backward (RESHARD false), which is torch FSDP2's "
            f"({flags.TORCH_FSDP}) and is not written; plan with search.reshard [true]"
        )
    if strategy.shard:
        yield f"shards of {strategy.shard} ranks are torch FSDP2's hybrid sharding; plan with search.shard [0]"
    if strategy.optimizer_offload and strategy.zero != 1:
        yield (
            f"its optimizer lies on the host with ZeRO {strategy.zero}, and {flags.OPTIMIZER_OFFLOAD} goes with the "
            "distributed optimizer (ZeRO 1); plan with search.zero [1]"
        )


def _refuse_choices(strategy: Strategy, job: Job | None) -> Iterator[str]:
    if strategy.graphs not in ("", "none"):
        yield (
            f"it chooses CUDA graphs ({strategy.graphs}), whose scopes are yours to name ({flags.GRAPHS[0]}, "
            f"{flags.GRAPHS[1]}); plan with search.graphs [none] or without it"
        )
    if job and job.workload.ep_kind == "deepspeed":
        yield DEEPSPEED
    if strategy.precision not in ("", "bf16"):
        yield (
            f"it chooses {strategy.precision}, which is said by --fp8-format and its like and is not written; set it "
            "in workload.precision and in the script, and plan without search.precision"
        )
    kind = strategy.context_kind(job.workload) if job else strategy.cp_kind
    if strategy.cp > 1 and kind == "hierarchical" and not (job and job.workload.dealing_ranks):
        yield (
            f"CP {strategy.cp} is hierarchical, and {flags.CONTEXT_SIZES} must say how many near ranks deal heads; "
            "give workload.dealing_ranks and --job"
        )
    divides = strategy.divides_sequences(job.workload) if job else strategy.sequence_parallel
    if has_experts(strategy, job) and strategy.tp > 1 and not divides:
        yield (
            f"TP {strategy.tp} with experts and without sequence parallelism is refused by megatron-core's layers with "
            "experts; plan with sequence parallelism or TP 1"
        )
    if strategy.overlap_all_to_all and not job and strategy.overlap_all_to_all == "micro_batches":
        yield "it hides the exchange of tokens beside other micro-batches, which needs --job to be looked at"
    if job is None:
        return
    workload = strategy.overlaps.of(job.workload)
    if not workload.overlap_p2p and strategy.vpp > 1 and strategy.pp == 2:
        yield f"VPP {strategy.vpp} with PP 2 needs transfers beside compute; plan with workload.overlap_p2p true"
    if strategy.zero and workload.overlap_param_gather and not workload.overlap_grad_reduce:
        yield (
            f"weights are gathered behind the forward and gradients reduced in the open, and {flags.OVERLAP_GATHER} "
            f"goes with {flags.OVERLAP_REDUCE} alone; set workload.overlap_grad_reduce"
        )
    if strategy.overlap_of(workload) == "micro_batches":
        yield from _refuse_batch_overlap(strategy)


def _refuse_batch_overlap(strategy: Strategy) -> Iterator[str]:
    if strategy.ep == 1:
        yield f"{flags.BATCH_OVERLAP} hides the exchange between ranks of EP, and EP is 1; plan with EP above 1"
    if strategy.pp > 1 and strategy.vpp == 1:
        yield f"{flags.BATCH_OVERLAP} needs chunks beside PP {strategy.pp}; plan with VPP above 1 (search.max_vpp)"


# ---------------------------------------------------------------------------------------------------------- writing


def _operators(plan: Plan, job: Job | None) -> tuple[str, ...]:
    """What layers run once more that are not recomputed whole, in Megatron-LM's order of names."""
    always: tuple[str, ...] = job.workload.recompute_operators if job else ()
    selective = any(plan.modes.get(TEXT, {}).get("selective", ()))
    more: tuple[str, ...] = (rerun_operators("selective", job.workload) if job else ("core_attn",)) if selective else ()
    return (*always, *more)


def _write_modes(plan: Plan, job: Job | None) -> tuple[Plan, dict[str, tuple[str, ...] | None], tuple[str, ...]]:
    """What the flags run by themselves, the flags, and a sentence where that is more than the plan recomputes."""
    values: dict[str, tuple[str, ...] | None] = dict.fromkeys(
        (
            *(flags.GRANULARITY, flags.METHOD, flags.RECOMPUTED, flags.MODULES, flags.OLD_SELECTIVE, flags.OLD_FULL),
            *(flags.OFFLOAD, flags.OFFLOADED),
        )
    )
    held, recompute = plan.layers[TEXT], plan.recompute[TEXT]
    values |= {flag: () for mode, flag in flags.BY_ONE_SWITCH.items() if any(plan.modes.get(TEXT, {}).get(mode, ()))}
    operators = _operators(plan, job)
    if operators:
        values |= {flags.GRANULARITY: ("selective",), flags.MODULES: operators}
        values |= {flags.GROUPED: ()} if "moe_act" in operators else {}  # which Megatron-LM demands beside it
        selective = plan.modes.get(TEXT, {}).get("selective", ())
        if not any(selective) or tuple(selective) == tuple(held):
            return plan, values, ()
        told = (
            f"{sum(selective)} of {sum(held)} layers are to run {', '.join(operators)} once more, and Megatron-LM has "
            "one switch for all: every layer does, which takes longer and keeps less than planned"
        )
        return replace(plan, modes={**plan.modes, TEXT: {"selective": tuple(held)}}), values, (told,)
    most = max(recompute)
    if most == 0:
        return plan, values, ()
    values |= {flags.GRANULARITY: ("full",), flags.METHOD: ("block",), flags.RECOMPUTED: (str(most),)}
    all_recompute = tuple(min(most, count) for count in held)
    if all_recompute == tuple(recompute):
        return plan, values, ()
    told = (
        f"recompute differs between stages (from {min(recompute)} to {most} layers), and Megatron-LM has one number "
        f"for all: {flags.RECOMPUTED} {most} recomputes {sum(all_recompute)} layers in place of {sum(recompute)}, "
        "which takes longer and keeps less than planned"
    )
    return replace(plan, recompute={**plan.recompute, TEXT: all_recompute}), values, (told,)


def _write_sharding(strategy: Strategy) -> dict[str, tuple[str, ...] | None]:
    """ZeRO 2 and 3 stand beside the distributed optimizer, as Megatron-LM's guide to its FSDP has them."""
    fsdp = strategy.zero > 1
    return {
        flags.SHARDED_OPTIMIZER: () if strategy.zero else None,
        flags.MEGATRON_FSDP: () if fsdp else None,
        flags.SHARDING: (flags.SHARDINGS[strategy.zero],) if fsdp else None,
        flags.CHECKPOINT: (flags.FSDP_CHECKPOINT,) if fsdp else None,
        flags.CUSTOM_FSDP: None,
        flags.TORCH_FSDP: None,
        flags.OPTIMIZER_COPIES: None,
        flags.OPTIMIZER_OFFLOAD: () if strategy.optimizer_offload else None,
        **({flags.PRECISION_AWARE: ()} if strategy.optimizer_offload else {}),
    }


def has_experts(strategy: Strategy, job: Job | None) -> bool:
    """Whether layers have experts, as far as the job or, without one, the plan tells."""
    return job.model.text.layers.experts is not None if job else strategy.ep > 1 or strategy.etp > 0


def _write_experts(strategy: Strategy, job: Job | None) -> dict[str, tuple[str, ...] | None]:
    """The default of ETP is TP, so it is written wherever there are experts."""
    if not has_experts(strategy, job):
        return {flags.EXPERT_TENSOR: None}
    values: dict[str, tuple[str, ...] | None] = {flags.EXPERT_TENSOR: (str(strategy.expert_tp),)}
    dispatcher = strategy.dispatcher or (job.workload.known_facts.dispatcher if job else "")
    if dispatcher:
        values |= _DISPATCHERS[dispatcher]
    overlap = strategy.overlap_of(job.workload) if job else strategy.overlap_all_to_all
    if overlap:
        values |= {
            flags.SHARED_OVERLAP: () if overlap == "shared_experts" else None,
            flags.BATCH_OVERLAP: () if overlap == "micro_batches" else None,
        }
    return values


def _write_choices(strategy: Strategy, job: Job | None) -> dict[str, tuple[str, ...] | None]:
    divides = strategy.divides_sequences(job.workload) if job else strategy.sequence_parallel and strategy.tp > 1
    values: dict[str, tuple[str, ...] | None] = {
        **(
            {flags.SEQUENCE_PARALLEL: () if divides else None} if strategy.tp > 1 else {}
        ),  # else it is turned off there
        flags.RANK_ORDER: () if strategy.rank_order != DEFAULT_RANK_ORDER and strategy.pp > 1 else None,
    }
    kind = strategy.context_kind(job.workload) if job else strategy.cp_kind
    if strategy.cp == 1:
        values |= {flags.CONTEXT_KIND: None, flags.CONTEXT_SIZES: None}
    elif kind:
        near = job.workload.dealing_ranks if job and kind == "hierarchical" else 0
        values[flags.CONTEXT_KIND] = (flags.CONTEXT_KINDS[kind],)
        values[flags.CONTEXT_SIZES] = (str(near), str(strategy.cp // near)) if near else None
    if strategy.precision:
        values |= dict.fromkeys(flags.LOW_PRECISION) | {flags.BF16: ()}
    if strategy.graphs:
        values |= dict.fromkeys(flags.GRAPHS)
    if job or strategy.tp_overlap:
        beside = products_beside(strategy, job.workload if job else None)
        values[flags.FUSED] = () if beside == "mc2" else None
        values[flags.USER_BUFFERS] = () if beside == "user_buffers" else None
    return values | _write_overlaps(strategy, job)


def _write_overlaps(strategy: Strategy, job: Job | None) -> dict[str, tuple[str, ...] | None]:
    """Those of the job's workload and those that the strategy chooses in their place; without a job these alone."""
    said = strategy.overlaps.of(job.workload) if job else strategy.overlaps
    passed = {
        flags.OVERLAP_REDUCE: said.overlap_grad_reduce,
        flags.OVERLAP_GATHER: said.overlap_param_gather and strategy.zero > 0,
        flags.NO_P2P_OVERLAP: said.overlap_p2p is False and strategy.vpp > 1 if said.overlap_p2p is not None else None,
    }
    return {flag: () if value else None for flag, value in passed.items() if value is not None}
