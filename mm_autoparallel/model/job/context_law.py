"""How context parallel ranks may share attention: which kinds a framework has, and what each asks of the sizes.

Ring attention gives each rank an early and a late piece of the causal triangle; Megatron-LM deals these also where
heads are dealt for attention (get_batch_on_this_cp_rank), and where keys are gathered. Heads that are dealt must be
whole ones: query heads and groups of keys and values of a tensor parallel rank (TransformerEngine, attention/
dot_product_attention/context_parallel.py; DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509), on each of the
ranks that deal them; the groups only where the stack does not repeat them for every query head before (MindSpeed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.model import Modality, Model
from mm_autoparallel.model.job.stacks import RepeatedGroups
from mm_autoparallel.model.job.workload import ContextParallel, Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

_RUNS: Mapping[Stack, tuple[ContextParallel, ...]] = MappingProxyType(
    {
        "megatron-te": ("ring", "all_gather", "all_to_all", "hierarchical"),
        "mindspeed": ("ring", "all_gather", "all_to_all", "hierarchical"),
        "transformers": ("all_gather", "ring", "all_to_all"),
    }
)
"""Stack → its kinds, where `all_gather` and `hierarchical` are among them: TransformerEngine's p2p, all_gather, a2a and
a2a+p2p (Megatron-LM, --cp-comm-type); MindSpeed's megatron_cp_algo, kvallgather_cp_algo, ulysses_cp_algo and
hybrid_cp_algo (--context-parallel-algo); PyTorch's two rotations, by an all-gather and by passing on
(torch/distributed/tensor/experimental/_context_parallel), and heads dealt by hand. Of other stacks nobody read that
they have these."""

_EVERYWHERE: tuple[ContextParallel, ...] = ("ring", "all_to_all")


def context_reasons(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """The rules of context parallelism that `strategy` breaks."""
    cp, seq_length = strategy.cp, workload.seq_length
    yield from sharing_reasons(model.modalities, cluster, workload, strategy)
    if cp == 1:
        return
    kind = strategy.context_kind(workload)
    if (kind != "all_to_all" or workload.stack.startswith("megatron")) and seq_length % (2 * cp):
        yield f"seq_length {seq_length} is no multiple of {2 * cp}, two pieces for each of CP {cp}"
    if seq_length % cp:
        yield f"seq_length {seq_length} is no multiple of CP {cp}"


def sharing_reasons(
    modalities: Sequence[Modality], cluster: Cluster, workload: Workload, strategy: Strategy
) -> Iterator[str]:
    """Those of how its ranks share the attention of `modalities`, whatever their tokens."""
    cp, tp, kind = strategy.cp, strategy.tp, strategy.context_kind(workload)
    if kind not in get_args(ContextParallel):
        yield f"CP by {kind} is not understood; known are {', '.join(get_args(ContextParallel))}"
    if cp == 1:
        if strategy.cp_kind:
            yield f"CP by {kind} divides attention among context parallel ranks, and CP is 1"
        return
    known = _RUNS.get(workload.stack, _EVERYWHERE)
    if kind not in known:
        yield f"CP by {kind} is none that workload.stack {workload.stack} runs; it runs {', '.join(known)}"
    if kind not in _EVERYWHERE and any(modality.layers.delta for modality in modalities):
        yield f"CP by {kind} shares softmax attention, and the model has layers with a delta rule"
    dealing = strategy.dealing_ranks(workload, cluster.levels[0].num_devices)
    if kind == "hierarchical" and (cp % dealing or not 1 < dealing < cp):
        yield _dealing_reason(cp, dealing, workload.dealing_ranks > 0)
    for modality in modalities if dealing > 1 else ():
        layers = modality.layers
        sizes = [("attention heads", layers.num_heads)]
        if not repeats_groups(workload.known_facts.repeated_groups, layers.num_kv_groups / tp, dealing):
            sizes.append(("key and value groups", layers.num_kv_groups))
        sizes += [("delta rule's key heads", layers.delta.num_key_heads)] if layers.delta else []
        for name, size in sizes:
            if size % (tp * dealing):
                ranks = f"CP {cp}" if dealing == cp else f"{dealing} of its ranks"
                yield (
                    f"CP {cp} by {kind} deals whole heads, and TP {tp} x {ranks} does not divide the {name} of "
                    f"{modality.name}, {size}"
                )


def repeats_groups(kind: RepeatedGroups, num_groups: float, dealing_ranks: int) -> bool:
    """Whether a tensor parallel rank with `num_groups` of keys and values repeats them before `dealing_ranks` deal."""
    return kind == "always" or (kind == "fewer" and num_groups < dealing_ranks)


def _dealing_reason(cp: int, dealing: int, given: bool) -> str:
    """Why `dealing` neighbours of CP `cp` cannot deal heads beside a ring over the others. given: by the workload."""
    said = "workload.dealing_ranks is" if given else "of a group that share a node there are"
    if dealing >= cp and cp % dealing == 0:
        return (
            f"CP {cp} by hierarchical deals heads among fewer ranks than all, and {said} {dealing}; all_to_all would do"
        )
    if dealing <= 1:
        return f"CP {cp} by hierarchical deals heads among near ranks, and {said} {dealing}; ring would do"
    return f"CP {cp} by hierarchical needs as many dealing ranks as divide it, and {said} {dealing}"
