"""Layouts of MIMO: decoder and encoder on ranks of their own, in Megatron-Bridge's fields and back.

Fields and laws: megatron/bridge/models/megatron_mimo of 0.6, megatron_mimo_config.py (MegatronMIMOParallelismConfig),
megatron_mimo_provider.py (what the decoder takes from its standard provider) and megatron_mimo_builder.py (the order of
ranks); data/megatron_mimo/dp_utils.py: a micro-batch counts the samples of all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.megatron_bridge.fields import CHUNKS, LAYOUT, Fields, to_fields
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import TEXT, Decided, decide, has_experts
from mm_autoparallel.integrations.megatron_core.dialect import without_mindspeed
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.validation import nearest

VERSION = "0.6"
"""The first release whose provider takes both modules from one standard provider."""
SECTION = "model.megatron_mimo_parallelism_config"
PROVIDER = "model.standard_provider"
"""The model as it would be without MIMO; what is set there holds for the decoder, recompute for the encoder too."""
LANGUAGE = "language"

MODULES = f"{SECTION}.module_parallelisms"
_FILE = "megatron.bridge.models.megatron_mimo.megatron_mimo_config"
_TARGET = "_target_"
_CLASSES = {SECTION: f"{_FILE}.MegatronMIMOParallelismConfig", MODULES: f"{_FILE}.ModuleParallelismConfig"}
_NAMES = {"vision": "images", "audio": "audios"}
"""What Megatron-Bridge's own providers and examples call an encoder."""
_OF_MODEL = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_DP, _OFFSET = "data_parallel_size", "rank_offset"
_SIZES = (*_OF_MODEL, _DP, _OFFSET)
_MICRO_BATCH = "train.micro_batch_size"


@dataclass(frozen=True)
class Modules:
    """A MIMO configuration taken apart. decoder: its fields as if it were alone; world_size: its ranks; encoder: its
    module, whose name is Megatron-Bridge's."""

    decoder: Fields
    world_size: int
    encoder: ModuleLayout


# ------------------------------------------------------------------------------------------------------------ writing


def decide_mimo(plan: Plan, job: Job | None) -> tuple[Decided, dict[str, Any]]:
    """What the fields of a plan with ranks of the encoder's own decide, and the fields.

    Raises PlanError naming the choice that MIMO cannot run, and what to plan with in its place.
    """
    arrangement = plan.strategy.arrangement
    assert arrangement is not None
    check_mimo(plan, job)
    run, told = _round_recompute(plan, arrangement.encoder)
    decided = without_mindspeed(decide(_decoder_of(run, arrangement.encoder), job))
    if decided.values.get(flags.LAYOUT) is not None:
        raise PlanError(
            f"plan: its decoder's stages hold {list(decided.plan.layers[TEXT])} layers, and MIMO builds them before it "
            "reads a layout: only the first and the last may differ from the others; move layers so, or plan the chain"
        )
    fields = dict(_nest_decoder(to_fields({**decided.values, **decided.usual})))
    fields |= _list_modules(plan.strategy, arrangement.encoder, has_experts(plan.strategy, job))
    return replace(decided, plan=run, approximations=(*told, *decided.approximations)), fields


def check_mimo(plan: Plan, job: Job | None, where: str = "plan") -> None:
    """Raises PlanError for the first choice that MIMO cannot run."""
    reason = next(_refusals(plan, job), None)
    if reason:
        raise PlanError(f"{where}: {reason}")


def _refusals(plan: Plan, job: Job | None) -> Iterator[str]:
    arrangement, decoder = plan.strategy.arrangement, plan.strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    if arrangement.others:
        yield (
            f"its layout is {arrangement.name}, a module for each encoder, and files of MIMO are written for one "
            "encoder; plan with search.layouts [chain]"
        )
    if not arrangement.apart:
        yield (
            f"its layout is {arrangement.name}, and MIMO gives each rank one module (get_active_module_pg); plan with "
            "search.layouts [disaggregated]"
        )
    if len(encoder.parts) > 1:
        yield (
            f"its layout has {' and '.join(encoder.parts)} one after the other on the same ranks, and MIMO gives each "
            "encoder ranks of its own; plan with search.layouts [chain]"
        )
    for name, tp in ((encoder.name, encoder.tp), ("decoder", decoder.tp)):
        if tp & (tp - 1):
            yield f"its {name} has TP {tp}, and MIMO takes powers of two; plan with search.tp [1, 2, 4, 8]"
    if max(encoder.dp, decoder.dp) % min(encoder.dp, decoder.dp):
        yield f"the DPs of its modules are {encoder.dp} and {decoder.dp}, of which MIMO needs one to divide the other"
    if encoder.mbs * encoder.dp != decoder.mbs * decoder.dp:
        yield (
            f"a micro-batch is {encoder.mbs} x {encoder.dp} samples of {encoder.name} and {decoder.mbs} x {decoder.dp} "
            "of the decoder, and MIMO deals the same samples to both"
        )
    if encoder.rank_offset not in (0, decoder.world_size):
        yield (
            f"its {encoder.name} begins at rank {encoder.rank_offset}, and MIMO's ranges of ranks leave no gap: it "
            f"begins at 0 or at {decoder.world_size}"
        )
    if encoder.pp > 1 or encoder.cp > 1:
        yield (
            f"its {encoder.name} has PP {encoder.pp} and CP {encoder.cp}, and MIMO's encoders are whole on a rank "
            "(Qwen3VLVisionModel asserts it); plan with one stage for the encoder"
        )
    alone = plan.strategy.of_encoder()
    if encoder.tp > 1 and (alone.divides_sequences(job.workload) if job else alone.sequence_parallel):
        yield (
            f"its {encoder.name} has TP {encoder.tp} with sequence parallelism, which MIMO gives the decoder alone, so "
            "that the encoder would keep more than planned; plan with workload.sequence_parallel false or TP 1 there"
        )
    yield from _refuse_decoder(plan, job, decoder)


def _refuse_decoder(plan: Plan, job: Job | None, decoder: Strategy) -> Iterator[str]:
    if decoder.vpp > 1:
        yield f"VPP {decoder.vpp}: MIMO builds one chunk a stage; plan with search.max_vpp 1"
    if decoder.zero > 1:
        yield f"ZeRO {decoder.zero}: MIMO has no FSDP (NotImplementedError); plan with search.zero [0, 1]"
    if decoder.rank_order != DEFAULT_RANK_ORDER:
        yield f"ranks {decoder.rank_order}: MIMO's grids are {DEFAULT_RANK_ORDER}; plan with search.rank_order of those"
    operators = job.workload.recompute_operators if job else ()
    if any(plan.modes.values()) or operators:
        yield (
            "some of its layers run operators once more, and MIMO's encoder takes the decoder's recompute_granularity "
            "without its modules; plan with search.modes [recompute] and no workload.recompute_operators"
        )


def _decoder_of(plan: Plan, encoder: ModuleLayout) -> Plan:
    """The decoder by itself."""
    layers, recompute = (of[TEXT][encoder.pp :] for of in (plan.layers, plan.recompute))
    return replace(
        plan, strategy=plan.strategy.of_decoder(), layers={TEXT: layers}, recompute={TEXT: recompute}, modes={}
    )


def join(decoder: Plan, encoder: ModuleLayout, num_layers: int, num_recomputed: int) -> Plan:
    """Decoder and encoder in one plan, as result files have it: the encoder before the decoder's stages."""
    strategy = decoder.strategy
    pp = encoder.pp + strategy.pp
    behind, before = (0,) * (pp - 1), (0,) * encoder.pp
    arrangement = Arrangement("disaggregated", "inline", encoder)
    return replace(
        decoder,
        strategy=replace(strategy, pp=pp, arrangement=arrangement),
        layers={encoder.name: (num_layers, *behind), TEXT: (*before, *decoder.layers[TEXT])},
        recompute={encoder.name: (num_recomputed, *behind), TEXT: (*before, *decoder.recompute[TEXT])},
    )


def _round_recompute(plan: Plan, encoder: ModuleLayout) -> tuple[Plan, tuple[str, ...]]:
    """The plan whose stages all recompute one number of layers, and a sentence where that is more than planned."""
    counts = [count for modality in (encoder.name, TEXT) for count in plan.recompute[modality]]
    most = max(counts)
    rounded = {name: tuple(min(most, held) for held in plan.layers[name]) for name in plan.layers}
    if rounded == {name: tuple(of) for name, of in plan.recompute.items()}:
        return plan, ()
    told = (
        f"recompute differs between stages and modules, and MIMO has one number for all, the encoder too: "
        f"recompute_num_layers {most} recomputes {sum(map(sum, rounded.values()))} layers in place of {sum(counts)}, "
        "which takes longer and keeps less than planned"
    )
    return replace(plan, recompute=rounded), (told,)


def _nest_decoder(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Fields of the model are the standard provider's; sizes come from the module's own section."""
    for field, value in fields.items():
        section, _, key = field.partition(".")
        if section != "model":
            yield field, value
        elif key not in _OF_MODEL:
            yield f"{PROVIDER}.{key}", value


def _list_modules(strategy: Strategy, encoder: ModuleLayout, deals: bool) -> dict[str, Any]:
    """Both modules' sizes, ranks and samples. deals: the decoder has experts."""
    decoder = strategy.of_decoder()
    behind = encoder.num_ranks if encoder.rank_offset == 0 else 0
    own = {name: getattr(decoder, key) for name, key in _OF_MODEL.items() if key != "etp"}
    own |= {"expert_tensor_parallel_size": decoder.expert_tp if deals else 1, _DP: decoder.dp, _OFFSET: behind}
    beside = dict.fromkeys(_SIZES, 1) | {"tensor_model_parallel_size": encoder.tp}
    beside |= {_DP: encoder.dp, _OFFSET: encoder.rank_offset}
    modules = {LANGUAGE: own, _NAMES.get(encoder.name, encoder.name): beside}
    found: dict[str, Any] = {f"{SECTION}.{_TARGET}": _CLASSES[SECTION]}
    for module, sizes in modules.items():
        where = f"{MODULES}.{module}"
        found |= {f"{where}.{_TARGET}": _CLASSES[MODULES]} | {f"{where}.{name}": sizes[name] for name in _SIZES}
    return found | {_MICRO_BATCH: decoder.mbs * decoder.dp}


# ------------------------------------------------------------------------------------------------------------ reading


def is_mimo(fields: Fields) -> bool:
    """Whether a configuration gives its modules ranks of their own."""
    return any(field.startswith(SECTION) and value is not None for field, value in fields.items())


def take_apart(fields: Fields, where: str, has_experts: bool) -> Modules:
    """Decoder and encoder of a MIMO configuration. has_experts: of the decoder's model.

    Raises JobError naming the field that is missing, malformed or not planned.
    """
    modules = _read_modules(fields, where)
    own = modules.pop(LANGUAGE, None)
    if own is None or len(modules) != 1:
        raise JobError(
            f"{where}: {MODULES} has {', '.join([LANGUAGE] * (own is not None) + [*modules]) or 'nothing'}; "
            f"{LANGUAGE} and one encoder are planned"
        )
    ((name, beside),) = modules.items()
    for size in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if beside[size] != 1:
            raise JobError(f"{where}: {MODULES}.{name}.{size} is {beside[size]}, and encoders have no experts there")
    spans = own["expert_tensor_parallel_size"] * own["expert_model_parallel_size"]
    ranks = own["tensor_model_parallel_size"] * own["context_parallel_size"] * own[_DP]
    if ranks % spans:
        raise JobError(f"{where}: EP x ETP of {LANGUAGE} is {spans}, and that does not divide its TP x CP x DP {ranks}")
    batch = fields.get(_MICRO_BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 or batch % own[_DP] or batch % beside[_DP]:
        raise JobError(
            f"{where}: {_MICRO_BATCH} is {describe_value(batch)}; it counts the samples of all replicas, and a "
            f"multiple of the {_DP} of {LANGUAGE}, {own[_DP]}, and of {name}, {beside[_DP]}, is expected"
        )
    world_size = ranks * own["pipeline_model_parallel_size"]
    sizes = {_OF_MODEL[key]: beside[key] for key in _OF_MODEL if _OF_MODEL[key] in ("pp", "tp", "cp")}
    encoder = ModuleLayout(name, **sizes, dp=beside[_DP], mbs=batch // beside[_DP], rank_offset=beside[_OFFSET])
    if own[_OFFSET] != (0 if encoder.rank_offset else encoder.num_ranks):
        raise JobError(
            f"{where}: {LANGUAGE} begins at rank {own[_OFFSET]} and {name} at {encoder.rank_offset}; their "
            f"{world_size} and {encoder.num_ranks} ranks must lie side by side from 0 on"
        )
    alone = {"model.seq_length": fields.get("model.seq_length")}
    alone |= {f"model.{field[len(PROVIDER) + 1 :]}": fields[field] for field in fields if field.startswith(PROVIDER)}
    alone |= {field: value for field, value in fields.items() if not field.startswith("model.")}
    alone |= {f"model.{key}": own[key] for key in _OF_MODEL if key != "expert_tensor_parallel_size" or has_experts}
    alone |= {_MICRO_BATCH: batch // own[_DP]}
    for unread in (CHUNKS, LAYOUT):
        if alone.get(unread) not in (None, 1):
            raise JobError(f"{where}: {PROVIDER} has {unread.partition('.')[2]}, which MIMO cannot run; take it out")
    return Modules(alone, world_size, encoder)


def name_encoder(module: str, known: tuple[str, ...]) -> str:
    """What a model with the encoders `known` calls Megatron-Bridge's `module`. Raises PlanError where none is it."""
    name = next((ours for ours, theirs in _NAMES.items() if theirs == module), module)
    if known != (name,):
        raise PlanError(
            f"the module {module} is to be its encoder {name}, and the model's are {', '.join(known) or 'none'}"
        )
    return name


def _read_modules(fields: Fields, where: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for field, value in fields.items():
        if not field.startswith(f"{MODULES}."):
            continue
        module, _, key = field[len(MODULES) + 1 :].partition(".")
        if not key or isinstance(value, Mapping):
            raise JobError(f"{where}: {field} is {describe_value(value)}; sizes of a module are expected below it")
        sizes = found.setdefault(module, {})
        if key == _TARGET:
            continue
        if key not in _SIZES:
            raise JobError(f"{where}: {field} is not known{nearest(key, _SIZES)}; known are {', '.join(_SIZES)}")
        least = 0 if key == _OFFSET else 1
        if value is None and key == _DP:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise JobError(
                f"{where}: {field} is {describe_value(value)}; a whole number of at least {least} is expected"
            )
        sizes[key] = value
    for module, sizes in found.items():
        if _DP not in sizes:
            raise JobError(f"{where}: {MODULES}.{module} has no {_DP}, which MIMO does not work out by itself")
    return {module: dict.fromkeys(_SIZES, 1) | {_OFFSET: 0} | sizes for module, sizes in found.items()}
