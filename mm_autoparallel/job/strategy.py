"""Strategy: the numbers that divide a job over devices, and the law they must obey.

The rules are those of Megatron-LM and MindSpeed-MM, where one tensor parallel size holds for every modality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mm_autoparallel.job.cluster import Cluster
from mm_autoparallel.job.model import Model
from mm_autoparallel.job.sharding import offload_reason, zero_reason
from mm_autoparallel.job.workload import ContextParallel, Workload
from mm_autoparallel.schedules.catalog import SCHEDULES


@dataclass(frozen=True)
class Strategy:
    """Parallel sizes and micro-batch size. An empty `schedule` becomes the default for `vpp`.

    pp: pipeline stages. vpp: chunks per stage. tp: tensor parallel. cp: context parallel. dp: data parallel. ep: expert
    parallel, over ranks of tp · cp · dp. etp: tensor parallel of experts (0: as tp). mbs: samples per micro-batch.
    zero: ZeRO stage (job/sharding.py). reshard: with ZeRO 3, gathered weights are given up after the forward and
    gathered once more for the backward (FSDP2's reshard_after_forward), else kept. cp_kind: how context parallel ranks
    share attention (empty: as the workload says). optimizer_offload: the host keeps the optimizer's states and steps.
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
    cp_kind: ContextParallel | Literal[""] = ""
    optimizer_offload: bool = False

    def __post_init__(self) -> None:
        if not self.schedule:
            object.__setattr__(self, "schedule", "1f1b" if self.vpp == 1 else "interleaved_1f1b")

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same part of the same experts; whole only where the strategy is lawful."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def choices(self) -> tuple[str, ...]:
        """A few words for each choice beside the sizes that is not the usual one."""
        words = [f"CP by {self.cp_kind}"] if self.cp_kind else []
        words += [] if self.reshard else ["weights kept"]
        return (*words, *(["optimizer offload"] if self.optimizer_offload else []))

    def context_kind(self, workload: Workload) -> ContextParallel:
        """How context parallel ranks share attention."""
        return self.cp_kind or workload.context_parallel

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of one step of each replica; whole only where the strategy is lawful."""
        return global_batch_size // (self.dp * self.mbs)


def unlawful_reason(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> str | None:
    """The first rule that `strategy` breaks, in a sentence with the numbers; None where it is lawful."""
    for name in ("pp", "tp", "dp", "mbs", "cp", "ep", "vpp"):
        value = getattr(strategy, name)
        if value < 1:
            return f"{name.upper()} is {value}; it must be at least 1"
    rules = (
        _break_cluster(cluster, strategy),
        _break_model(model, strategy),
        _break_experts(model, workload, strategy),
        _break_context(model, workload, strategy),
        _break_sharding(model, cluster, workload, strategy),
        _break_workload(workload, strategy),
    )
    return next((reason for rule in rules for reason in rule), None)


def _break_cluster(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    world, node = strategy.world_size, cluster.devices_per_node
    if world > cluster.num_devices:
        yield (
            f"PP {strategy.pp} x TP {strategy.tp} x CP {strategy.cp} x DP {strategy.dp} needs {world} devices, and the "
            f"cluster has {cluster.num_devices}"
        )
    if world > node and world % node:
        yield f"{world} devices are no whole nodes of {node}"
    widest = cluster.max_tensor_parallel
    if strategy.tp > widest:
        yield f"TP {strategy.tp} is wider than the {widest} devices that tensor parallel groups may span"
    if min(world, widest) % strategy.tp:
        yield f"TP {strategy.tp} does not divide the {widest} devices of a node, so groups would straddle two nodes"


def _break_model(model: Model, strategy: Strategy) -> Iterator[str]:
    tp = strategy.tp
    for modality in model.modalities:
        layers = modality.layers
        sizes = [("attention heads", layers.num_heads), ("key and value groups", layers.num_kv_groups)]
        experts = layers.experts
        if experts is None or experts.dense_layers:
            sizes.append(("feed-forward width", layers.ffn_size))
        if experts:
            sizes.append(("shared expert width", experts.shared_ffn_size))
        for name, size in sizes:
            if size % tp:
                yield f"TP {tp} does not divide the {name} of {modality.name}, {size}"
        if experts and experts.ffn_size % strategy.expert_tp:
            part = f"TP {tp}" if strategy.expert_tp == tp else f"ETP {strategy.expert_tp}"
            yield f"{part} does not divide the expert width of {modality.name}, {experts.ffn_size}"
    if model.text.vocab_size % tp:
        yield (
            f"TP {tp} does not divide the vocabulary, {model.text.vocab_size}; a model whose vocab_size is padded to "
            f"{-(-model.text.vocab_size // tp) * tp} would do"
        )
    num_chunks = strategy.pp * strategy.vpp
    if num_chunks > model.num_layers:
        chunks = f"PP {strategy.pp} x VPP {strategy.vpp} = {num_chunks} chunks"
        yield f"{chunks} need a layer each, and the model has {model.num_layers}"


def _break_experts(model: Model, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Megatron-LM's rules (core/parallel_state.py, training/arguments.py): EP x ETP divides TP x CP x DP, EP the

    experts; experts under tensor parallelism need sequence parallelism, for they route the tokens of their own part.
    """
    tp, ep, etp = strategy.tp, strategy.ep, strategy.expert_tp
    found = [(modality.name, modality.layers.experts) for modality in model.modalities if modality.layers.experts]
    if not found:
        if ep > 1:
            yield f"EP {ep} needs experts, and the model has none"
        if strategy.etp not in (0, tp):
            yield f"ETP {strategy.etp} needs experts, and the model has none"
        return
    for name, experts in found:
        if experts.num_experts % ep:
            yield f"EP {ep} does not divide the experts of {name}, {experts.num_experts}"
    if etp not in (1, tp):
        yield f"ETP {etp} is not understood: experts are whole (1) or divided like all else (TP {tp})"
    ranks = tp * strategy.cp * strategy.dp
    if ranks % (ep * etp):
        yield (
            f"EP {ep} x ETP {etp} = {ep * etp} does not divide the {ranks} ranks of TP {tp} x CP {strategy.cp} x DP "
            f"{strategy.dp} that share the experts"
        )
    if workload.overlap_all_to_all == "micro_batches" and ep > 1 and strategy.pp > 1 and strategy.vpp == 1:
        yield (  # core/transformer/transformer_config.py, overlap_moe_expert_parallel_comm
            f"EP {ep} with PP {strategy.pp} and VPP 1: workload.overlap_all_to_all is micro_batches, which in a "
            "pipeline asks for several chunks a stage"
        )
    if tp > 1 and not workload.sequence_parallel:
        yield f"experts with TP {tp} need sequence parallelism, and workload.sequence_parallel is false"


def _break_context(model: Model, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Ring attention gives each rank an early and a late piece of the causal triangle; Megatron-LM deals these also

    where heads are dealt for attention (get_batch_on_this_cp_rank), which then must be whole ones: query heads and
    groups of keys and values of a tensor parallel rank (TransformerEngine, attention/dot_product_attention/
    context_parallel.py; DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).
    """
    cp, tp, seq_length = strategy.cp, strategy.tp, workload.seq_length
    kind = strategy.context_kind(workload)
    if kind not in get_args(ContextParallel):
        yield f"CP by {kind} is not understood; known are {', '.join(get_args(ContextParallel))}"
    if cp == 1:
        if strategy.cp_kind:
            yield f"CP by {kind} divides attention among context parallel ranks, and CP is 1"
        return
    if (kind == "ring" or workload.stack.startswith("megatron")) and seq_length % (2 * cp):
        yield f"seq_length {seq_length} is no multiple of {2 * cp}, two pieces for each of CP {cp}"
    if seq_length % cp:
        yield f"seq_length {seq_length} is no multiple of CP {cp}"
    if kind == "all_to_all":
        for modality in model.modalities:
            layers = modality.layers
            for name, size in (("attention heads", layers.num_heads), ("key and value groups", layers.num_kv_groups)):
                if size % (tp * cp):
                    yield (
                        f"CP {cp} by all_to_all deals whole heads, and TP {tp} x CP {cp} does not divide the {name} of "
                        f"{modality.name}, {size}"
                    )


def _break_sharding(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    has_experts = any(modality.layers.experts for modality in model.modalities)
    reason = zero_reason(workload.stack, strategy.zero, strategy.pp, strategy.ep, strategy.reshard, has_experts)
    if reason:
        yield reason
    if strategy.optimizer_offload:
        reason = offload_reason(workload.stack, strategy.zero, cluster.device)
        if reason:
            yield reason


def _break_workload(workload: Workload, strategy: Strategy) -> Iterator[str]:
    batch, seq_length = workload.global_batch_size, workload.seq_length
    if batch % (strategy.dp * strategy.mbs):
        yield (
            f"global_batch_size {batch} is no multiple of DP {strategy.dp} x MBS {strategy.mbs} = "
            f"{strategy.dp * strategy.mbs}"
        )
    if workload.sequence_parallel and seq_length % (strategy.cp * strategy.tp):
        yield (
            f"seq_length {seq_length} is no multiple of CP {strategy.cp} x TP {strategy.tp} = "
            f"{strategy.cp * strategy.tp}, which share each sequence"
        )
    schedule = SCHEDULES.get(strategy.schedule)
    if schedule is None:
        yield f"schedule {strategy.schedule!r} is not known; known are {', '.join(SCHEDULES)}"
    elif strategy.vpp > 1 and not schedule.interleaved:
        yield f"schedule {strategy.schedule} runs one chunk a stage, and VPP is {strategy.vpp}"
    if strategy.vpp > 1 and strategy.pp == 1:
        yield f"VPP {strategy.vpp} needs more than one pipeline stage, and PP is 1"
    if strategy.vpp > 1 and strategy.num_microbatches(batch) < strategy.pp:
        yield (
            f"VPP {strategy.vpp} needs at least PP = {strategy.pp} micro-batches, and there are "
            f"{strategy.num_microbatches(batch)}"
        )
