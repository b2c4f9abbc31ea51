"""Strategy: the numbers that divide a job over devices. What they must obey: model/job/strategy_law.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.layer_layout import LayerLayout
from mm_autoparallel.model.job.overlaps import AS_SAID, Overlaps
from mm_autoparallel.model.job.precision import Precision
from mm_autoparallel.model.job.stacks import Dispatcher, FusedProducts, Graphs, StackFacts
from mm_autoparallel.model.job.workload import ContextParallel, Overlap, Workload

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
        if self.arrangement is None or self.arrangement.decoder_sized:
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
