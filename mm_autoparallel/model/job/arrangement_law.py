"""What an arrangement must obey, whatever trains, and which arrangements each framework runs.

Megatron-LM: core/models/mimo (bridge_communicator.py, module_to_grid_map) and examples/mimo: an encoder on ranks of its
own, PP = CP = 1; or on the decoder's, PP = CP = 1 for both. Megatron-Bridge's MegatronMIMOParallelismConfig is that
form with more sizes, on ranks of its own alone. MindSpeed-MM's --hetero-parallel, on the decoder's ranks: in every
micro-batch beside one stage, in phases before several; no gradients go back to the encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.arrangement import JOINED, MODULE_KINDS, Arrangement, ModuleLayout
from mm_autoparallel.model.job.cached_law import break_cached
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.context_law import sharing_reasons
from mm_autoparallel.model.job.division_law import division_reasons
from mm_autoparallel.model.job.model import Encoder, Model, Patches
from mm_autoparallel.model.job.sharding import zero_reason
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

PLANNED_SCHEDULES = ("1f1b", "interleaved_1f1b")
"""Those that go with an arrangement; the second only with encoders that are away."""
PREFETCH_LAW = "prefetch makes features in another step, with other weights, and this encoder or its projector trains"
_MEGATRON: tuple[Stack, ...] = ("megatron-te", "megatron-local")


def model_reason(model: Model, cluster: Cluster, workload: Workload) -> str | None:
    """Why no arrangement of this job is planned beside the chain; None where some may be."""
    if isinstance(model, TracedModel):
        return f"{model.name} is known from traces of its whole chain alone, and an arrangement parts it"
    if not model.encoders:
        return "an arrangement gives an encoder sizes of its own, and the model has none"
    names = [encoder.name for encoder in model.encoders]
    if any(JOINED in name for name in names):
        return f"an arrangement tells encoders apart by {JOINED} between their names, which are {', '.join(names)}"
    if len(names) > 1 and "stack" in workload.model_fields_set:
        return (
            f"an arrangement of {workload.stack} is planned for one encoder, and the model's are {', '.join(names)}; "
            "leave workload.stack out, or plan the chain"
        )
    if len(cluster.kinds) > 1 or cluster.slow_devices or cluster.device_time_spread_fraction:
        return "an arrangement is planned on devices that are all alike, and the cluster has several kinds"
    if workload.micro_batch_scale:
        return "an arrangement is planned for equal micro-batches, and workload.micro_batch_scale is given"
    if workload.replicate_towers:
        return "an arrangement gives the encoder sizes of its own, and workload.replicate_towers replicates it"
    return None


def has_planned(schedules: Collection[str]) -> bool:
    """Whether one of them goes with an arrangement; an empty name stands for a strategy's default."""
    return not {"", *PLANNED_SCHEDULES}.isdisjoint(schedules)


def search_reason(workload: Workload, schedules: Collection[str]) -> str | None:
    """Why a search that looks at these schedules plans the chain alone, whatever the model; None where it may not."""
    if not has_planned(schedules):
        return f"arrangements are planned for {' and '.join(PLANNED_SCHEDULES)}, and search.schedule asks for others"
    if "stack" in workload.model_fields_set and all(stack_reason(workload, kind) for kind in MODULE_KINDS[1:]):
        return f"workload.stack {workload.stack} has one parallel size for encoder and decoder"
    return None


def stack_reason(workload: Workload, kind: str, encoder_run: str = "") -> str | None:
    """Why the framework that a job names cannot run such arrangements; None where it can, or none is named."""
    stack = workload.stack
    if kind == "chain" or "stack" not in workload.model_fields_set:
        return None
    run = f" {encoder_run.replace('_', ' ')}" if encoder_run not in ("", "inline") else ""
    runs: dict[str, tuple[str, ...]] = dict.fromkeys(_MEGATRON, ("disaggregated", "colocated inline"))
    runs["mindspeed-mm"] = ("colocated phases", "colocated inline")
    asked = f"{kind} {encoder_run}" if kind == "colocated" and encoder_run else kind
    known = runs.get(stack, ())
    if any(asked == one or (not encoder_run and one.startswith(asked)) for one in known):
        return None
    told = f"it runs {' and '.join(known)}" if known else "it has one parallel size for encoder and decoder"
    return f"{kind}{run}: no layout that workload.stack {stack} runs; {told}"


def arrangement_reasons(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """The rules that the arrangement of `strategy` breaks, beside those of its decoder alone."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    if reason := model_reason(model, cluster, workload):
        yield reason
        return
    if arrangement.others and workload.samples:
        yield (
            f"a module for each of {', '.join(encoder.name for encoder in model.encoders)} is planned for equal "
            "micro-batches, and workload.samples is given; one module of them all may be uneven"
        )
    if arrangement.others:
        yield from _break_modules(model, arrangement)
    elif arrangement.encoder.name != module_name(model):
        yield f"layout names the encoder {arrangement.encoder.name}, and the model's is {module_name(model)}"
    for one in arrangement.each:
        yield from module_reasons(model, cluster, workload, strategy.with_only(one), bool(arrangement.others))
    apart = [one.encoder for one in arrangement.each if one.apart]
    if arrangement.others and apart and not arrangement.decoder_offset:
        yield from _break_several_ranges(cluster, apart, strategy.of_decoder())


def _break_modules(model: Model, arrangement: Arrangement) -> Iterator[str]:
    """Several modules are all encoders of the model, each once and in its order, and go together."""
    each, names = arrangement.each, [encoder.name for encoder in model.encoders]
    told = [part for one in each for part in one.encoder.parts]
    firsts = [names.index(one.encoder.parts[0]) for one in each if one.encoder.parts[0] in names]
    if sorted(told) != sorted(names) or firsts != sorted(firsts):
        yield f"layout names the encoders {', '.join(told)}, and the model's are {', '.join(names)}"
    for one in each:
        if list(one.encoder.parts) != [name for name in names if name in one.encoder.parts]:
            yield f"layout names the encoders {one.encoder.name} in another order than the model, {', '.join(names)}"
    if all(one.in_chain for one in each):
        yield "all encoders lie on the decoder's stages under its sizes, which is the chain; plan that"


def module_reasons(
    model: Model, cluster: Cluster, workload: Workload, strategy: Strategy, has_others: bool
) -> Iterator[str]:
    """The rules that one module breaks by itself. strategy: with that one alone. has_others: whether it stands beside
    others."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    if reason := stack_reason(workload, arrangement.kind, arrangement.encoder_run):
        yield reason
    for name in ("pp", "tp", "dp", "mbs", "cp"):
        if getattr(encoder, name) < 1:
            yield f"the encoder's {name.upper()} is {getattr(encoder, name)}; it must be at least 1"
            return
    if has_others and arrangement.kind == "colocated" and not arrangement.away and encoder.pp > 1:
        yield from _break_in_chain(arrangement, strategy)
        return
    if arrangement.is_cached and not arrangement.apart:
        yield from beside_reasons(strategy, away=True)
        yield from break_cached(model, workload, encoder, decoder)
        return
    yield from _break_sizes(arrangement, strategy)
    yield from _break_context(model, cluster, workload, strategy)
    yield from _break_batch(workload, arrangement, decoder)
    yield from _break_sharding(workload, arrangement, decoder)
    if arrangement.apart:
        yield from _break_ranges(cluster, encoder, decoder, has_others)
    else:
        yield from _break_shared(arrangement, decoder, has_others)
    if workload.stack in _MEGATRON and "stack" in workload.model_fields_set:
        yield from _break_megatron(arrangement, decoder)
    trains = encoders_train(model, encoder.parts)
    if workload.stack == "mindspeed-mm":
        yield from _break_mindspeed_mm(arrangement, decoder, trains)
    num_layers = sum(part.layers.num_layers for part in model.encoders if part.name in encoder.parts)
    if encoder.pieces < 1 or (encoder.pieces > 1 and not arrangement.in_bubbles):
        yield f"{encoder.name} is in {encoder.pieces} pieces; passes in bubbles or as prefetch alone are cut, from 1 on"
    if encoder.pieces > num_layers:
        yield f"{encoder.pieces} pieces of a pass need a layer each, and {encoder.name} has {num_layers}"
    if encoder.pp > num_layers:
        yield f"encoder PP {encoder.pp} needs a layer a stage, and {encoder.name} has {num_layers}"
    if arrangement.encoder_run == "prefetch" and trains:
        yield f"{PREFETCH_LAW}; freeze both, or run it in bubbles"
    for reason in division_reasons(model, workload, strategy.of_encoder(), encoder.parts):
        yield f"of the encoder: {reason}"


def module_name(model: Model) -> str:
    """What layouts call the encoders of `model`, which are one module."""
    return JOINED.join(encoder.name for encoder in model.encoders)


def encoders_train(model: Model, parts: Collection[str] = ()) -> bool:
    """Whether something of these encoders or of their projectors does. parts: their names (empty: all)."""
    meant = [encoder for encoder in model.encoders if not parts or encoder.name in parts]
    return any(model.layers_train(encoder) or model.projectors_train(encoder) for encoder in meant)


def _break_in_chain(arrangement: Arrangement, strategy: Strategy) -> Iterator[str]:
    """Of an encoder on the decoder's stages, several, beside others that are elsewhere."""
    encoder, decoder = arrangement.encoder, strategy.of_decoder()
    if decoder.cp > 1:
        yield f"{encoder.name} is on the stages of a decoder of CP {decoder.cp}, where layouts have CP 1"
    for name in ("pp", "tp", "cp", "dp", "mbs"):
        mine, theirs = getattr(encoder, name), getattr(decoder, name)
        if mine != theirs:
            yield (
                f"{encoder.name} has {name.upper()} {mine} inline on the stages of a decoder of {name.upper()} "
                f"{theirs}; there it has the decoder's sizes, and elsewhere PP 1"
            )
    if encoder.rank_offset:
        yield f"{encoder.name} begins at rank {encoder.rank_offset}; on the decoder's stages it begins at 0"


def _break_several_ranges(cluster: Cluster, apart: list[ModuleLayout], decoder: Strategy) -> Iterator[str]:
    """Several encoders on ranks of their own lie side by side behind the decoder, which begins at rank 0."""
    end = decoder.world_size
    for encoder in sorted(apart, key=lambda one: one.rank_offset):
        if encoder.rank_offset != end:
            fault = "overlap" if encoder.rank_offset < end else "leave ranks idle"
            yield f"{encoder.name} begins at rank {encoder.rank_offset}, so that ranges {fault}; {end} would do"
        end += encoder.num_ranks
    if end > cluster.num_devices:
        yield f"encoders and decoder have {end} ranks, more than the {cluster.num_devices} devices"


def _break_sizes(arrangement: Arrangement, strategy: Strategy) -> Iterator[str]:
    encoder, decoder = arrangement.encoder, strategy.of_decoder()
    if arrangement.apart and arrangement.away:
        yield "an encoder on ranks of its own runs with each micro-batch (inline); other runs are of shared devices"
    if not arrangement.apart and encoder.pp > 1:
        yield f"encoder PP {encoder.pp}: on the decoder's devices every device holds the whole encoder, so its PP is 1"
    if max(encoder.dp, decoder.dp) % min(encoder.dp, decoder.dp):
        yield (
            f"the encoder's DP {encoder.dp} and the decoder's DP {decoder.dp}: one must divide the other, for a "
            "replica of one serves whole replicas of the other"
        )
    yield from beside_reasons(strategy, arrangement.away)


def beside_reasons(decoder: Strategy, away: bool) -> Iterator[str]:
    """The rules that a decoder breaks beside every encoder of one kind of run, whatever its sizes. away: whether that
    is on none of the pipeline's stages."""
    if decoder.layouts:
        yield "layers of one stage shared in several ways (LAYOUTS) go with the chain alone"
    if decoder.schedule not in (PLANNED_SCHEDULES if away else PLANNED_SCHEDULES[:1]):
        yield (
            f"schedule {decoder.schedule}: arrangements are planned for 1f1b, and for interleaved_1f1b where the "
            "encoder runs in phases, in bubbles or as prefetch, or its features are cached"
        )
    if decoder.vpp > 1 and not away:
        yield f"VPP {decoder.vpp}: chunks go with the chain or an encoder in phases, in bubbles or as prefetch"
    if decoder.optimizer_offload:
        yield "arrangements are planned with the optimizer on the device"
    if decoder.shard or not decoder.reshard:
        yield (
            "arrangements are planned with weights that ZeRO 3 shards over all replicas of a module and gives up after "
            "each pass (no shard, reshard true)"
        )
    if decoder.rank_order != "tp-cp-ep-dp-pp":
        yield f"ranks {decoder.rank_order}: arrangements are planned for tp-cp-ep-dp-pp"


def _break_context(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    arrangement = strategy.arrangement
    assert arrangement is not None
    if arrangement.encoder.cp > 1:
        encoders = [encoder for encoder in model.encoders if encoder.name in arrangement.encoder.parts]
        yield from own_context_reasons(encoders, cluster, workload, strategy.of_encoder())


def own_context_reasons(
    encoders: Sequence[Encoder], cluster: Cluster, workload: Workload, own: Strategy
) -> Iterator[str]:
    """The rules that one module of `encoders` breaks, of sizes `own`, whose ranks share the tokens of each sample: its
    own attention in its own CP."""
    if "stack" in workload.model_fields_set:
        yield f"the encoder's CP is {own.cp}, and layouts of workload.stack {workload.stack} have encoders of CP 1"
    for reason in sharing_reasons(encoders, cluster, workload, own):
        yield f"of the encoder: {reason}"
    for encoder in encoders:
        tokens = workload.handed_tokens(encoder.name, encoder.media)
        if tokens % own.cp:
            yield f"the encoder's CP {own.cp} does not divide the {tokens} tokens that {encoder.name} makes of a sample"
        if isinstance(encoder.stem, Patches) and encoder.stem.class_token:
            yield f"the encoder's CP is {own.cp}, and {encoder.name} has a class token, which would lie with one rank"


def _break_batch(workload: Workload, arrangement: Arrangement, decoder: Strategy) -> Iterator[str]:
    encoder = arrangement.encoder
    if arrangement.in_bubbles:
        yield from _break_passes(workload, arrangement, decoder)
    elif arrangement.in_phases:
        if workload.global_batch_size % (encoder.dp * encoder.mbs):
            yield (
                f"global_batch_size {workload.global_batch_size} is no multiple of the encoder's DP {encoder.dp} x "
                f"MBS {encoder.mbs} = {encoder.dp * encoder.mbs}"
            )
    elif encoder.mbs * encoder.dp != decoder.mbs * decoder.dp:
        yield (
            f"a micro-batch of all replicas has MBS {decoder.mbs} x DP {decoder.dp} samples, which the encoder's DP "
            f"{encoder.dp} must divide into its MBS, and that is {encoder.mbs}"
        )


def _break_passes(workload: Workload, arrangement: Arrangement, decoder: Strategy) -> Iterator[str]:
    """Of one pass, which the encoder's replicas on the ranks of one stage make together."""
    encoder, width = arrangement.encoder, decoder.tp * decoder.cp
    if decoder.pp == 1:
        yield "a decoder of one stage leaves no bubbles; inline would do"
    if width % (encoder.tp * encoder.cp):
        sizes = f"TP {encoder.tp} x CP {encoder.cp}" if encoder.cp > 1 else f"TP {encoder.tp}"
        yield f"the encoder's {sizes} does not divide the {width} ranks of a decoder stage, where it runs"
        return
    samples = arrangement.num_beside(decoder.tp, decoder.cp) * encoder.mbs
    count = decoder.num_microbatches(workload.global_batch_size)
    if samples % decoder.mbs or count % (samples // decoder.mbs):
        yield (
            f"a pass of the encoder takes {samples} samples, which must be whole micro-batches of {decoder.mbs}, and "
            f"a divisor of the {count} of a step"
        )
    elif count * decoder.mbs < decoder.pp * samples:
        yield (
            f"a step has {count * decoder.mbs // samples} passes of {samples} samples, and each of the {decoder.pp} "
            "stages runs one at least"
        )


def _break_sharding(workload: Workload, arrangement: Arrangement, decoder: Strategy) -> Iterator[str]:
    """Of an encoder whose gradients or weights lie in shards, as the decoder's do (ZeRO 2 and 3)."""
    zero = decoder.zero
    if zero < 2:
        return
    if "stack" in workload.model_fields_set:
        yield f"ZeRO {zero}: no layout of workload.stack {workload.stack} is planned with it; ZeRO 0 and 1 are"
    if arrangement.in_bubbles:
        run = "as prefetch" if arrangement.encoder_run == "prefetch" else "in bubbles"
        yield (
            f"ZeRO {zero}: passes {run} lie between those of the decoder, and which of them hides the other's traffic "
            "is not known; ZeRO 0 and 1 go with them, and ZeRO 2 and 3 with inline and phases"
        )
    if reason := zero_reason(workload.stack, zero, arrangement.encoder.pp, 1, True, False):
        yield f"of the encoder: {reason}"


def _break_ranges(
    cluster: Cluster, encoder: ModuleLayout, decoder: Strategy, has_others: bool = False
) -> Iterator[str]:
    """The two ranges of ranks lie side by side from rank 0 on, each where its groups do not straddle nodes."""
    number, world = decoder.world_size, encoder.num_ranks + decoder.world_size
    if world > cluster.num_devices:
        yield f"encoder {encoder.num_ranks} + decoder {number} ranks are more than the {cluster.num_devices} devices"
    is_behind_others = has_others and encoder.rank_offset > number
    if encoder.rank_offset not in (0, number) and not is_behind_others:
        fault = "overlap" if encoder.rank_offset < number else "leave ranks idle"
        yield (
            f"the encoder begins at rank {encoder.rank_offset}, so that the two ranges {fault}; it begins at 0, the "
            f"decoder behind it, or at {number}, behind the decoder"
        )
        return
    span, behind = cluster.node_span, encoder.num_ranks if encoder.rank_offset == 0 else 0
    for name, begin, size in (("encoder", encoder.rank_offset, encoder.num_ranks), ("decoder", behind, number)):
        if begin % span and begin % span + size > span:
            yield (
                f"the {name} begins at rank {begin}, inside a node of {span} devices, and does not end in it: its "
                f"groups would straddle nodes"
            )
    if cluster.max_tensor_parallel % encoder.tp or encoder.rank_offset % encoder.tp:
        yield f"the encoder's TP {encoder.tp} does not divide its node's {cluster.max_tensor_parallel} devices"


def _break_shared(arrangement: Arrangement, decoder: Strategy, has_others: bool = False) -> Iterator[str]:
    encoder, number = arrangement.encoder, decoder.world_size
    if encoder.num_ranks != number or encoder.rank_offset:
        yield (
            f"colocated modules share all ranks: the encoder has TP {encoder.tp} x CP {encoder.cp} x DP {encoder.dp} = "
            f"{encoder.num_ranks} from rank {encoder.rank_offset} on, and the decoder {number} from 0"
        )
    if arrangement.encoder_run == "inline" and decoder.pp > 1:
        yield f"colocated inline needs a decoder of one stage, and its PP is {decoder.pp}; phases would do"
    sizes, theirs = ((one.tp, one.cp, one.dp) for one in (encoder, decoder))
    if arrangement.encoder_run == "inline" and sizes == theirs and not has_others:
        yield f"colocated inline with the decoder's own TP {decoder.tp} and DP {decoder.dp} is the chain; plan that"
    if encoder.tp > 1 and decoder.tp % encoder.tp and encoder.tp % decoder.tp:
        yield f"colocated TP {encoder.tp} and TP {decoder.tp}: one must divide the other, so that samples stay on nodes"


def _break_mindspeed_mm(arrangement: Arrangement, decoder: Strategy, trains: bool) -> Iterator[str]:
    if trains:
        why = (
            "encoder phase runs forward only (hetero_pipeline)"
            if arrangement.in_phases
            else "encoder hands on no gradients (all_gather_dp_group)"
        )
        yield (f"MindSpeed-MM's {why}, and this encoder or its projector trains; freeze both, or plan the chain")
    if arrangement.in_phases and decoder.pp == 1:
        yield "MindSpeed-MM runs the encoder in every micro-batch (inline) where the decoder has one stage"
    if decoder.vpp > 1:
        yield f"VPP {decoder.vpp}: beside --hetero-parallel MindSpeed-MM runs 1f1b without chunks alone"


def _break_megatron(arrangement: Arrangement, decoder: Strategy) -> Iterator[str]:
    encoder = arrangement.encoder
    if encoder.tp & (encoder.tp - 1) or decoder.tp & (decoder.tp - 1):
        yield f"Megatron's MIMO takes powers of two as TP, and they are {encoder.tp} and {decoder.tp}"
    if not arrangement.apart and decoder.cp > 1:
        yield f"Megatron's colocated MIMO takes CP 1, and the decoder's is {decoder.cp}"
