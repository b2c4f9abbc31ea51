"""A plan back from Megatron-LM's flags, as its own parser and schedules understand them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.accounting import Lost, check_decided
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import TEXT
from mm_autoparallel.integrations.megatron_core.layers import read_layers
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import rerun_operators
from mm_autoparallel.model.job.stacks import Dispatcher
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.megatron_choices import read_megatron_choices
from mm_autoparallel.planner.plan import Plan

DEEPSPEED = "--deepspeed"
_STRANGERS = {
    DEEPSPEED: "trains by DeepSpeed's engine, whose own configuration says ZeRO and stages; import that",
    flags.TORCH_FSDP: "shards with torch FSDP2, which is not read; pass --use-megatron-fsdp or take it out",
    flags.OFFLOAD: "moves modules of every layer to the host, which no plan says; take it out",
    flags.OLD_FULL: f"is no longer valid in Megatron-LM, which ends with an error; pass {flags.GRANULARITY} full",
    flags.OLD_METHOD: f"is of old releases of Megatron-LM; pass {flags.GRANULARITY} full, {flags.METHOD} and "
    f"{flags.RECOMPUTED}",
    "--cpu-offloading-num-layers": "moves layers' activations to the host by number, which no plan says; take it out",
    "--hybrid-context-parallel": "divides each sequence in its own way, which no plan says; take it out",
    **dict.fromkeys(
        (
            *("--num-layer-list", "--noop-layers", "--pipeline-num-transformer-layers", "--context-parallel-algo"),
            *("--schedules-method", "--enable-recompute-layers-per-pp-rank", "--recompute-activation-function"),
            *("--swap-attention", "--adaptive-recompute-device-swap", "--recompute-in-bubble", "--tp-2d"),
            *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--reuse-fp32-param"),
            *("--use-mc2", "--use-ascend-mc2", "--use-ascend-coc", "--tokenizer-name-or-path"),
            *("--virtual-pipeline-model-parallel-size", "--moe-tp-extend-ep", "--ulysses-degree-in-cp"),
        ),
        "is MindSpeed's, whose scripts are not read as Megatron-LM's; it changes what the plan would be",
    ),
    "--encoder-pipeline-model-parallel-size": "gives an encoder stages of its own, which no plan says",
    "--encoder-tensor-model-parallel-size": "gives an encoder a size of its own, which no plan says",
    "--distribute-saved-activations": "divides what recomputed layers keep, which no plan says; take it out",
}
"""Flag → why a script that passes it is no plan."""


def read_plan(passed: Passed, world_size: int, num_layers: int) -> Plan:
    """The plan that `passed` trains `num_layers` layers under, on `world_size` devices.

    Raises PlanError naming the flag that is missing, malformed or contradicts others, or that no plan can say.
    """
    where = passed.where
    check_strangers(passed)
    sizes: dict[str, Any] = {name: passed.number(flag) or 1 for flag, name in flags.SIZES.items()}
    group = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world_size % group:
        raise PlanError(
            f"{where}: it divides the model among {group} devices (TP {sizes['tp']} x PP {sizes['pp']} x CP "
            f"{sizes['cp']}), and {world_size} devices are no whole number of those; --world-size says another number"
        )
    dp = world_size // group
    mbs = passed.number(flags.MICRO_BATCH)
    if mbs is None:
        raise PlanError(f"{where}: it does not pass {flags.MICRO_BATCH}, without which Megatron-LM does not start")
    batch = passed.number(flags.GLOBAL_BATCH) or mbs * dp
    if batch % (dp * mbs):
        raise PlanError(f"{where}: the global batch {batch} is no multiple of DP {dp} x MBS {mbs}")
    layers = read_layers(passed, num_layers, sizes["pp"])
    vpp = len(layers) // sizes["pp"]
    choices = read_choices(passed)
    strategy = Strategy(
        **sizes,
        dp=dp,
        mbs=mbs,
        vpp=vpp,
        zero=_read_zero(passed),
        etp=passed.number(flags.EXPERT_TENSOR) or 0,
        cp_kind=read_context(passed) if sizes["cp"] > 1 else "",
        optimizer_offload=passed.has(flags.OPTIMIZER_OFFLOAD),
        schedule=passed.text(flags.SCHEDULE) or "",
        rank_order="tp-cp-ep-pp-dp" if passed.has(flags.RANK_ORDER) else DEFAULT_RANK_ORDER,
        sequence_parallel=passed.has(flags.SEQUENCE_PARALLEL) or sizes["tp"] == 1,
        **choices,
    )
    _check(passed, strategy, layers, batch)
    return Plan(strategy, {TEXT: layers}, {TEXT: read_recompute(passed, layers)}, batch)


def check_strangers(passed: Passed) -> None:
    """Raises PlanError for the first flag that makes another training of it than plans and jobs can say."""
    for flag, reason in _STRANGERS.items():
        if passed.has(flag):
            raise PlanError(f"{passed.where}: {passed.line(flag)}{flag} {reason}")


def _check(passed: Passed, strategy: Strategy, layers: tuple[int, ...], batch: int) -> None:
    """What Megatron-LM's parser lets pass and its run does not, and what no plan here can be."""
    where, ranks = passed.where, strategy.tp * strategy.cp * strategy.dp
    if ranks % (strategy.ep * strategy.expert_tp):
        hint = "" if passed.has(flags.EXPERT_TENSOR) else f"; {flags.EXPERT_TENSOR} 1 may be meant, whose default is TP"
        raise PlanError(
            f"{where}: EP {strategy.ep} x ETP {strategy.expert_tp} does not divide the {ranks} ranks of a stage (TP x "
            f"CP x DP), where Megatron-LM ends with an error{hint}"
        )
    if 0 in layers:
        raise PlanError(
            f"{where}: {strategy.name_stage(layers.index(0))} holds no layer; stages with an embedding or a loss alone "
            "are not planned"
        )
    num_microbatches = batch // (strategy.dp * strategy.mbs)
    group = passed.number(flags.GROUP) or strategy.pp
    chunks = strategy.vpp > 1 and not passed.has(flags.SCHEDULE)
    if chunks and group != strategy.pp:
        raise PlanError(f"{where}: {flags.GROUP} {group} is another order than groups of PP {strategy.pp}; take it out")
    if chunks and num_microbatches % strategy.pp:
        raise PlanError(
            f"{where}: {num_microbatches} micro-batches with VPP {strategy.vpp} are no multiple of PP {strategy.pp}, "
            "where Megatron-LM ends with an error"
        )
    if passed.number(flags.OPTIMIZER_COPIES) not in (None, 1):
        raise PlanError(f"{where}: {flags.OPTIMIZER_COPIES} keeps several copies of the optimizer, which no plan says")


def read_choices(passed: Passed) -> dict[str, Any]:
    """Dispatcher, graphs and overlap of the exchange of tokens, as fields of a strategy. Raises PlanError."""
    try:
        found = read_megatron_choices(passed.document())
    except ValueError as failure:
        raise PlanError(f"{passed.where}: {failure}") from None
    assert found.dispatcher in get_args(Dispatcher)
    divides = (passed.number(flags.TENSOR) or 1) > 1 and passed.has(flags.SEQUENCE_PARALLEL)
    beside = "mc2" if passed.has(flags.FUSED) else "user_buffers" if passed.has(flags.USER_BUFFERS) else ""
    return {
        "dispatcher": found.dispatcher,
        "graphs": found.graphs,
        "overlap_all_to_all": found.overlap,
        "tp_overlap": beside if divides else "",
    }


def _read_zero(passed: Passed) -> int:
    if not (passed.has(flags.MEGATRON_FSDP) or passed.has(flags.CUSTOM_FSDP)):
        return int(passed.has(flags.SHARDED_OPTIMIZER))
    kind = passed.text(flags.SHARDING) or "no_shard"
    if kind not in flags.SHARDINGS:
        raise PlanError(f"{passed.where}: {flags.SHARDING} is {kind}; known are {', '.join(flags.SHARDINGS)}")
    return flags.SHARDINGS.index(kind)


def read_context(passed: Passed) -> Any:
    """How attention is shared; p2p where nothing is said, as in Megatron-LM."""
    kinds = {*passed.list(flags.CONTEXT_KIND)} or {"p2p"}
    named = next((name for name, word in flags.CONTEXT_KINDS.items() if kinds == {word}), None)
    if named is None:
        raise PlanError(
            f"{passed.where}: {flags.CONTEXT_KIND} is {' '.join(sorted(kinds))}; one of "
            f"{', '.join(flags.CONTEXT_KINDS.values())} for all layers is expected"
        )
    return named


def read_operators(passed: Passed) -> tuple[str, ...]:
    """What every layer runs once more; core_attn where nothing is named. Raises PlanError for an unknown one."""
    granularity = passed.text(flags.GRANULARITY)
    if granularity != "selective" and not passed.has(flags.OLD_SELECTIVE):
        return ()
    names = passed.list(flags.MODULES) or ("core_attn",)
    unknown = next((name for name in names if name not in flags.MODULE_NAMES), None)
    if unknown:
        raise PlanError(f"{passed.where}: {flags.MODULES} names {unknown}; known are {', '.join(flags.MODULE_NAMES)}")
    return names


def read_recompute(passed: Passed, layers: tuple[int, ...]) -> tuple[int, ...]:
    """How many layers of each virtual stage recompute: the first ones of every chunk, or with `uniform` all."""
    granularity, method = passed.text(flags.GRANULARITY), passed.text(flags.METHOD)
    if granularity not in (None, "full", "selective"):
        raise PlanError(f"{passed.where}: {flags.GRANULARITY} is {granularity}; full or selective is expected")
    if granularity != "full" or passed.has(flags.OLD_SELECTIVE):
        return (0,) * len(layers)
    if method not in ("block", "uniform"):
        raise PlanError(f"{passed.where}: {flags.GRANULARITY} full needs {flags.METHOD} block or uniform")
    number = passed.number(flags.RECOMPUTED, least=0)
    if number is None:
        raise PlanError(f"{passed.where}: {flags.GRANULARITY} full needs {flags.RECOMPUTED}")
    if method == "uniform" and number > 1:
        raise PlanError(
            f"{passed.where}: {flags.METHOD} uniform with {flags.RECOMPUTED} {number} keeps one input for {number} "
            f"layers, and plans here keep each layer's; pass {flags.RECOMPUTED} 1"
        )
    return layers if method == "uniform" else tuple(min(number, held) for held in layers)


# ------------------------------------------------------------------------------------------------------ read-back law


def check_read_back(passed: Passed, plan: Plan, job: Job | None, operators_kept: bool = False) -> None:
    """Whether `passed` is what `plan` says, in all that the flags decide.

    operators_kept: what every layer runs once more is the script's own.

    Raises Lost naming the first choice that is not, PlanError where Megatron-LM could not run the flags.
    """
    again = read_plan(passed, plan.strategy.world_size, sum(plan.layers[TEXT]))
    check_decided(again, replace(plan, modes={}), job)
    workload = job.workload if job else None
    selective = plan.modes.get(TEXT, {}).get("selective")
    always: tuple[str, ...] = workload.recompute_operators if workload else ()
    more = (rerun_operators("selective", workload) if workload else ("core_attn",)) if selective else ()
    check_overlaps(passed, plan.strategy)
    if not operators_kept and read_operators(passed) != (*always, *more):
        raise Lost(f"layers were to run {(*always, *more)} once more, and the flags say otherwise")


def check_overlaps(passed: Passed, strategy: Strategy) -> None:
    """Raises Lost for an overlap that `strategy` chooses and `passed` says otherwise."""
    for flag, is_meant in flags.overlap_switches(strategy.overlaps.chosen).items():
        if passed.has(flag) != is_meant:
            raise Lost(f"{flag} was to be {'passed' if is_meant else 'left out'}, and the flags say otherwise")


def with_workload(plan: Plan, workload: Workload) -> Plan:
    """`plan` without the choices that its job's workload makes already, so that its file says each once."""
    strategy = plan.strategy
    same = {
        "etp": (strategy.tp, 0),
        "cp_kind": (workload.context_parallel, ""),
        "dispatcher": (workload.known_facts.dispatcher, ""),
        "overlap_all_to_all": (workload.overlap_all_to_all, ""),
        "tp_overlap": (workload.known_facts.tp_overlap, ""),
    }
    changed: dict[str, Any] = {
        name: usual for name, (of_job, usual) in same.items() if getattr(strategy, name) == of_job
    }
    return replace(plan, strategy=replace(strategy, **changed))
