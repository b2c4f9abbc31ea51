"""Strategy: the numbers that divide a job over devices, and the law they must obey.

The rules are those of Megatron-LM and MindSpeed-MM, where one tensor parallel size holds for every modality.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mm_autoparallel.model.job import mindspeed_mm_law
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.arrangement_law import arrangement_reasons
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.context_law import context_reasons
from mm_autoparallel.model.job.division_law import division_reasons
from mm_autoparallel.model.job.expert_law import expert_reasons
from mm_autoparallel.model.job.fact_law import overlap_reasons
from mm_autoparallel.model.job.layer_layout import LayerLayout, layer_wise_reasons
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.overlaps import AS_SAID, Overlaps, choice_reasons
from mm_autoparallel.model.job.precision import Precision, precision_reasons
from mm_autoparallel.model.job.schedule_law import schedule_reasons
from mm_autoparallel.model.job.sharding import sharding_reasons
from mm_autoparallel.model.job.stacks import Dispatcher, FusedProducts, Graphs, StackFacts
from mm_autoparallel.model.job.workload import ContextParallel, Overlap, Workload
from mm_autoparallel.pipeline.schedules.catalog import MAX_ACTIONS

RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
DEFAULT_RANK_ORDER: RankOrder = "tp-cp-ep-dp-pp"
RANK_ORDERS: dict[str, tuple[str, ...]] = {
    "tp-cp-ep-dp-pp": ("tp", "cp", "dp", "pp"),
    "tp-cp-ep-pp-dp": ("tp", "cp", "pp", "dp"),
}
"""Which sizes count fastest in a rank's number, by Megatron's names: its default, and with --use-tp-pp-dp-mapping
(megatron/training/initialize.py). Expert parallel ranks are some of those of a stage, their tensor parallel fastest."""


@dataclass(frozen=True)
class Strategy:
    """Parallel sizes and micro-batch size. An empty `schedule` becomes the default for `vpp`.

    pp: pipeline stages. vpp: chunks per stage. tp: tensor parallel. cp: context parallel. dp: data parallel. ep: expert
    parallel, over ranks of tp · cp · dp. etp: tensor parallel of experts (0: as tp). mbs: samples per micro-batch.
    zero: ZeRO stage (model/job/sharding.py). reshard: with ZeRO 3, gathered weights are given up after the forward and
    gathered once more for the backward (FSDP2's reshard_after_forward), else kept. shard: with ZeRO 3, how many of the
    dp · cp ranks share one copy of the weights, which are then held in dp · cp / shard copies (FSDP2's hybrid sharding;
    0: all ranks share one). cp_kind: how context parallel ranks share attention (empty: as the workload says).
    optimizer_offload: the host keeps the optimizer's states and steps. rank_order: which rank has which part.
    sequence_parallel: norms, residuals and layer boundaries are divided by TP where the workload says so
    (Workload.sequence_parallel), else they never are. precision: what linear layers multiply in (empty: as the workload
    says). dispatcher, graphs: of the stack's (StackFacts); overlap_all_to_all: as in Workload. Empty: as the workload
    has them. tp_overlap: of StackFacts. overlaps: of replicas' traffic and of transfers between stages. layouts: others
    in which layers of a stage may be shared, by ascending names. arrangement: of an encoder with sizes of its own; all
    of these are then the decoder's, but for pp, which counts the stages of an encoder on ranks of its own too. None:
    the chain. orders: of each stage where the schedule is `given`.
    """

    pp: int
    tp: int
    dp: int
    mbs: int
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    zero: int = 1
    schedule: str = ""
    etp: int = 0
    reshard: bool = True
    shard: int = 0
    cp_kind: ContextParallel | Literal[""] = ""
    optimizer_offload: bool = False
    rank_order: str = DEFAULT_RANK_ORDER
    sequence_parallel: bool = True
    dispatcher: Dispatcher = ""
    graphs: Graphs = ""
    overlap_all_to_all: Overlap | Literal[""] = ""
    precision: Precision | Literal[""] = ""
    tp_overlap: FusedProducts = ""
    overlaps: Overlaps = AS_SAID
    layouts: tuple[LayerLayout, ...] = ()
    arrangement: Arrangement | None = None
    orders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.schedule:
            object.__setattr__(self, "schedule", "1f1b" if self.vpp == 1 else "interleaved_1f1b")

    @property
    def world_size(self) -> int:
        if self.arrangement:
            return self._decoder.world_size + sum(one.encoder.num_ranks for one in self.arrangement.each if one.apart)
        return self.pp * self.tp * self.cp * self.dp

    @property
    def away(self) -> tuple[str, ...]:
        """Encoders that run before, after or beside the pipeline, of which no stage holds layers."""
        each = self.arrangement.each if self.arrangement else ()
        return tuple(part for one in each if one.away for part in one.encoder.parts)

    def of_decoder(self) -> Strategy:
        """Where an encoder has sizes of its own, the decoder's by themselves; else this very one."""
        return self if self.arrangement is None else self._decoder

    @cached_property
    def _decoder(self) -> Strategy:
        apart = self.arrangement.num_stages_apart if self.arrangement else 0
        return replace(self, pp=self.pp - apart, arrangement=None)

    def of_encoder(self) -> Strategy:
        """The same of the first module: its choices are the decoder's, but for those of experts."""
        if self.arrangement is None or self.arrangement.in_chain:
            return self.of_decoder()
        own = self.arrangement.encoder
        return self.beside(own.pp, own.tp, own.dp, own.mbs, own.cp)

    def with_only(self, one: Arrangement) -> Strategy:
        """The strategy with one of its arrangement's modules and none of the others."""
        if one is self.arrangement:
            return self
        before = self.arrangement.num_stages_apart if self.arrangement else 0
        return replace(self, pp=self.pp - before + one.num_stages_apart, arrangement=one)

    def of_modality(self, modality: str) -> Strategy:
        """What a modality's blocks are shared by: of its module, else of the decoder."""
        for one in self.arrangement.each if self.arrangement else ():
            if modality in one.encoder.parts and not one.in_chain:
                own = one.encoder
                return self.beside(own.pp, own.tp, own.dp, own.mbs, own.cp)
        return self.of_decoder()

    def beside(self, pp: int, tp: int, dp: int, mbs: int, cp: int = 1) -> Strategy:
        """An encoder of these sizes by itself beside this decoder, whose choices it has."""
        return Strategy(
            pp,
            tp,
            dp,
            mbs,
            cp=cp,
            zero=self.zero,
            cp_kind=self.cp_kind if cp > 1 else "",
            sequence_parallel=self.sequence_parallel,
            graphs=self.graphs,
            precision=self.precision,
            tp_overlap=self.tp_overlap if tp > 1 else "",
            overlaps=self.overlaps,
        )

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same part of the same experts; whole only where the strategy is lawful."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of what is no dealt expert, where ZeRO shards it."""
        return self.shard or self.dp * self.cp

    @property
    def choices(self) -> tuple[str, ...]:
        """A few words for each choice beside the sizes that is not the usual one."""
        words = [f"CP by {self.cp_kind}"] if self.cp_kind else []
        words += [] if self.reshard else ["weights kept"]
        words += [f"shards of {self.shard}"] if self.shard else []
        words += ["optimizer offload"] if self.optimizer_offload else []
        words += [] if self.sequence_parallel else ["no sequence parallel"]
        words += [self.dispatcher] if self.dispatcher else []
        words += [f"graphs {self.graphs}"] if self.graphs else []
        words += [f"all-to-all beside {self.overlap_all_to_all}"] if self.overlap_all_to_all else []
        words += [self.precision] if self.precision else []
        words += [f"products beside TP's traffic: {self.tp_overlap}"] if self.tp_overlap else []
        words += self.overlaps.words
        words += [f"layers also {' '.join(layout.name for layout in self.layouts)}"] if self.layouts else []
        words += [self.arrangement.name] if self.arrangement else []
        return (*words, *([f"ranks {self.rank_order}"] if self.rank_order != DEFAULT_RANK_ORDER else []))

    @property
    def layout(self) -> LayerLayout:
        """Its own: in which everything is shared that is in none of `layouts`."""
        return LayerLayout(self.tp, self.dp, self.cp, self.zero, self.reshard)

    def in_layout(self, layout: LayerLayout) -> Strategy:
        """The strategy that shares everything as `layout` does, with the same samples in a stage's micro-batch."""
        return replace(
            self,
            tp=layout.tp,
            cp=layout.cp,
            dp=layout.dp,
            mbs=self.mbs * self.dp // layout.dp,
            zero=layout.zero,
            reshard=layout.reshard,
            cp_kind=self.cp_kind if layout.cp > 1 else "",
            tp_overlap=self.tp_overlap if layout.tp > 1 else "",
            layouts=(),
        )

    def in_each_layout(self) -> tuple[Strategy, ...]:
        """The strategy in its own layout alone, and in each of its others."""
        return tuple(map(self.in_layout, (self.layout, *self.layouts))) if self.layouts else (self,)

    def context_kind(self, workload: Workload) -> ContextParallel:
        """How context parallel ranks share attention."""
        return self.cp_kind or workload.context_parallel

    def dealing_ranks(self, workload: Workload, node_devices: int) -> int:
        """Neighbours of a context parallel group that deal heads among themselves while attention runs (1: none do).

        node_devices: those of the innermost level, among which they lie where the workload does not say how many.
        """
        kind = self.context_kind(workload)
        if kind == "all_to_all":
            return self.cp
        if kind != "hierarchical":
            return 1
        stride = self.stride_of("cp")
        return workload.dealing_ranks or max(1, math.gcd(node_devices, self.cp * stride) // stride)

    def facts_of(self, workload: Workload) -> StackFacts:
        """What the workload's stack does under this strategy."""
        facts = workload.known_facts
        chosen: dict[str, str] = {"dispatcher": self.dispatcher, "graphs": self.graphs}
        chosen = {name: value for name, value in chosen.items() if value and value != getattr(facts, name)}
        chosen |= {"tp_overlap": self.tp_overlap.removeprefix("none")} if self.tp_overlap else {}
        return facts.model_copy(update=chosen) if chosen else facts

    def overlap_of(self, workload: Workload) -> Overlap:
        """What hides the exchange of tokens with their experts' ranks."""
        return self.overlap_all_to_all or workload.overlap_all_to_all

    def precision_of(self, workload: Workload, modality: str = "text") -> Precision:
        """What linear layers of `modality` multiply in; a tower's are low beside a low decoder alone."""
        decoder = self.precision or workload.precision
        return decoder if modality == "text" or decoder == "bf16" else workload.tower_precision

    def divides_sequences(self, workload: Workload) -> bool:
        """Whether tensor parallel ranks divide norms, residuals and layer boundaries."""
        return workload.sequence_parallel and self.sequence_parallel and self.tp > 1

    def stride_of(self, name: Literal["tp", "cp", "dp", "pp"]) -> int:
        """How far apart the ranks of a group stand that differ in `name` alone."""
        order = RANK_ORDERS[self.rank_order]
        return math.prod(getattr(self, inner) for inner in order[: order.index(name)])

    def name_stage(self, virtual_stage: int) -> str:
        """`stage 3`, or with chunks `stage 3, chunk 1`."""
        chunk, stage = divmod(virtual_stage, self.pp)
        return f"stage {stage}" if self.vpp == 1 else f"stage {stage}, chunk {chunk}"

    def stage_runs(self, stage: int) -> tuple[range, ...]:
        """The ranks of a pipeline stage, as runs of consecutive ones in rising order."""
        length = self.stride_of("pp")
        return tuple(
            range(first + stage * length, first + (stage + 1) * length)
            for first in range(0, self.world_size, length * self.pp)
        )

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of one step of each replica; whole only where the strategy is lawful."""
        return global_batch_size // (self.dp * self.mbs)


def unlawful_reason(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> str | None:
    """The first rule that `strategy` breaks, in a sentence with the numbers; None where it is lawful."""
    for name in ("pp", "tp", "dp", "mbs", "cp", "ep", "vpp"):
        value = getattr(strategy, name)
        if value < 1:
            return f"{name.upper()} is {value}; it must be at least 1"
    if strategy.arrangement:
        return _break_arrangement(model, cluster, workload, strategy)
    rules = (
        _break_cluster(cluster, strategy),
        division_reasons(model, workload, strategy),
        expert_reasons(model, workload, strategy),
        context_reasons(model, cluster, workload, strategy),
        sharding_reasons(model, cluster, workload, strategy),
        _break_workload(workload, strategy),
        precision_reasons(model, cluster, workload, strategy),
        overlap_reasons(workload, strategy),
        choice_reasons(workload, strategy),
        mindspeed_mm_law.strategy_reasons(model, workload, strategy),
        _break_layouts(model, cluster, workload, strategy),
    )
    return next((reason for rule in rules for reason in rule), None)


def _break_arrangement(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> str | None:
    """Its own rules, and those of the decoder with nothing before it but encoders on its stages."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    if strategy.pp <= arrangement.num_stages_apart:
        return (
            f"PP {strategy.pp} counts the encoder's {arrangement.num_stages_apart} stages and leaves the decoder none"
        )
    if reason := next(arrangement_reasons(model, cluster, workload, strategy), None):
        return reason
    chained = {part for one in arrangement.each if one.in_chain for part in one.encoder.parts}
    alone = model.model_copy(update={"encoders": tuple(e for e in model.encoders if e.name in chained)})
    return unlawful_reason(alone, cluster, workload, strategy.of_decoder())


def _break_layouts(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Each layout must be lawful by itself, of the same devices and samples, and the stack must run several."""
    if not strategy.layouts:
        return
    yield from layer_wise_reasons(workload)
    if strategy.vpp > 1:
        yield f"layers of one stage are shared in several ways with one chunk a stage alone, and VPP is {strategy.vpp}"
    if strategy.shard or strategy.etp:
        yield "layers of one stage are shared in several ways without shards (SHARD) and ETP of their own"
    own, samples = strategy.layout, strategy.mbs * strategy.dp
    for layout in strategy.layouts:
        if layout == own:
            yield f"layout {layout.name} is the strategy's own, in which layers are that name no other"
        elif layout.num_devices != own.num_devices:
            yield f"layout {layout.name} shares {layout.num_devices} devices, and a stage has {own.num_devices}"
        elif samples % layout.dp:
            yield f"layout {layout.name}: its {layout.dp} data parallel ranks do not divide {samples} samples"
        elif reason := unlawful_reason(model, cluster, workload, strategy.in_layout(layout)):
            yield f"layout {layout.name}: {reason}"


def _break_cluster(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    world = strategy.world_size
    if world > cluster.num_devices:
        yield (
            f"PP {strategy.pp} x TP {strategy.tp} x CP {strategy.cp} x DP {strategy.dp} needs {world} devices, and the "
            f"cluster has {cluster.num_devices}"
        )
    if world <= cluster.num_devices and (uneven_reason := cluster.uneven_reason(world)):
        yield uneven_reason
    widest = cluster.max_tensor_parallel
    if strategy.tp > widest:
        yield f"TP {strategy.tp} is wider than the {widest} devices that tensor parallel groups may span"
    if min(world, widest) % strategy.tp:
        yield f"TP {strategy.tp} does not divide the {widest} devices of a node, so groups would straddle two nodes"
    yield from _break_rank_order(strategy)
    if cluster.node_groups and world <= cluster.num_devices:
        yield from _break_kinds(cluster, strategy)


def _break_rank_order(strategy: Strategy) -> Iterator[str]:
    """Megatron-LM, core/parallel_state.py: pipelines of experts and of all else must be the same ranks."""
    if strategy.rank_order not in RANK_ORDERS:
        yield f"rank order {strategy.rank_order!r} is not known; known are {', '.join(RANK_ORDERS)}"
    elif strategy.rank_order != DEFAULT_RANK_ORDER and strategy.pp > 1 and strategy.expert_dp != strategy.dp:
        yield (
            f"rank order {strategy.rank_order} needs as many replicas of experts as of all else, and CP {strategy.cp}, "
            f"EP {strategy.ep} and ETP {strategy.expert_tp} make {strategy.expert_dp} of them beside DP {strategy.dp}"
        )


def _break_kinds(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """One pipeline problem stands for all replicas, so the ranks of a stage must be of one kind."""
    if strategy.rank_order not in RANK_ORDERS:
        return
    kinds = cluster.kinds
    spans = [(kind.ranks.start, kind.ranks.stop) for kind in kinds]
    for stage in range(strategy.pp):
        runs = strategy.stage_runs(stage)
        held = [i for i, (first, end) in enumerate(spans) if any(run.start < end and first < run.stop for run in runs)]
        for index in held[1:]:
            if (kinds[index].device, kinds[index].time_factor) != (kinds[held[0]].device, kinds[held[0]].time_factor):
                yield (
                    f"stage {stage} has its ranks {runs[0][0]} to {runs[-1][-1]} on nodes of different kinds, those of "
                    f"node_groups[{held[0]}] and of node_groups[{index}]; a stage must lie in one kind"
                )


def _break_workload(workload: Workload, strategy: Strategy) -> Iterator[str]:
    batch, seq_length = workload.global_batch_size, workload.seq_length
    if batch % (strategy.dp * strategy.mbs):
        yield (
            f"global_batch_size {batch} is no multiple of DP {strategy.dp} x MBS {strategy.mbs} = "
            f"{strategy.dp * strategy.mbs}"
        )
    if workload.sequence_parallel and strategy.sequence_parallel and seq_length % (strategy.cp * strategy.tp):
        yield (
            f"seq_length {seq_length} is no multiple of CP {strategy.cp} x TP {strategy.tp} = "
            f"{strategy.cp * strategy.tp}, which share each sequence"
        )
    num_microbatches = strategy.num_microbatches(batch)
    num_actions = 2 * strategy.pp * strategy.vpp * num_microbatches
    if num_actions > MAX_ACTIONS:
        yield (
            f"PP {strategy.pp} x VPP {strategy.vpp} with {num_microbatches:,} micro-batches makes {num_actions:,} "
            f"forwards and backwards a step; at most {MAX_ACTIONS:,} are simulated"
        )
    yield from schedule_reasons(workload, strategy)
    if strategy.vpp > 1 and strategy.pp == 1:
        yield f"VPP {strategy.vpp} needs more than one pipeline stage, and PP is 1"
    if strategy.vpp > 1 and num_microbatches < strategy.pp:
        yield f"VPP {strategy.vpp} needs at least PP = {strategy.pp} micro-batches, and there are {num_microbatches}"
