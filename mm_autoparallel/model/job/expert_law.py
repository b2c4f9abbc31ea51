"""What a strategy must obey where a model has experts: how they are dealt out, what exchanges their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.layers import Experts
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.stacks import Dispatcher, Graphs
from mm_autoparallel.model.job.workload import Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy


def expert_reasons(model: Model, workload: Workload, strategy: Strategy) -> Iterator[str]:
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
        for what in (strategy.facts_of(workload).dispatcher, strategy.overlap_all_to_all):
            if what:
                yield f"{what} is of the exchange of tokens with their experts, and the model has none"
        yield from _break_graphs(workload, strategy)
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
    if strategy.overlap_of(workload) == "micro_batches" and ep > 1 and strategy.pp > 1 and strategy.vpp == 1:
        by = "the strategy's" if strategy.overlap_all_to_all else "workload."
        yield (  # core/transformer/transformer_config.py, overlap_moe_expert_parallel_comm
            f"EP {ep} with PP {strategy.pp} and VPP 1: {by}overlap_all_to_all is micro_batches, which in a "
            "pipeline asks for several chunks a stage"
        )
    if tp > 1 and not workload.sequence_parallel and workload.stack != "mindformers":  # which deals all their tokens
        yield f"experts with TP {tp} need sequence parallelism, and workload.sequence_parallel is false"
    elif tp > 1 and not strategy.sequence_parallel:
        yield f"experts with TP {tp} need sequence parallelism, and the strategy is without"
    yield from _break_kind(workload, strategy)
    yield from _break_choices(found, workload, strategy)
    yield from _break_graphs(workload, strategy)


_DISPATCHERS: Mapping[Stack, tuple[Dispatcher, ...]] = {
    "megatron-te": ("alltoall", "deepep", "hybridep"),
    "megatron-local": ("alltoall", "deepep", "hybridep"),
    "mindspeed": ("alltoall",),
    "mindspeed-mm": ("alltoall",),
}
"""Stack → what its experts' tokens can be exchanged by (Megatron-LM, --moe-token-dispatcher-type alltoall or flex, and
--moe-flex-dispatcher-backend; MindSpeed, core/transformer/moe). Of others nobody says which they have."""
_GRAPHS: Mapping[Stack, tuple[Graphs, ...]] = {
    "megatron-te": ("none", "partial", "full"),
    "megatron-local": ("none", "partial", "full"),
}
"""Stack → which CUDA graphs it records (Megatron-LM, --cuda-graph-impl and --cuda-graph-scope); others none."""


def dispatcher_reason(stack: Stack, dispatcher: str) -> str | None:
    """Why experts' tokens are not exchanged so under `stack`; None where they are, or nothing is said."""
    known = _DISPATCHERS.get(stack, ())
    if not dispatcher or dispatcher in known:
        return None
    listed = f"it has {', '.join(known)}" if known else "of which no dispatcher is known"
    return f"dispatcher {dispatcher} is none of workload.stack {stack}; {listed}"


def graphs_reason(stack: Stack, graphs: str) -> str | None:
    """Why `stack` records no such CUDA graphs; None where it does, or nothing is said."""
    known = _GRAPHS.get(stack, ("none",))
    if not graphs or graphs in known:
        return None
    return f"graphs {graphs} is no mode of workload.stack {stack}; it has {', '.join(known)}"


def _break_kind(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """MindSpeed, mindspeed/moe: DeepSpeed's experts are divided as all else is, with an exchange of their own."""
    if workload.ep_kind == "megatron":
        return
    if strategy.expert_tp != strategy.tp:
        yield (
            f"ETP {strategy.expert_tp} beside TP {strategy.tp}: DeepSpeed's layer (workload.ep_kind) divides experts "
            "as all else"
        )
    for value in (strategy.facts_of(workload).dispatcher, strategy.overlap_all_to_all):
        if value not in ("", "none"):
            yield f"{value} is of Megatron-LM's layer with experts, and workload.ep_kind is deepspeed"


def _break_choices(found: Sequence[tuple[str, Experts]], workload: Workload, strategy: Strategy) -> Iterator[str]:
    reason = dispatcher_reason(workload.stack, strategy.facts_of(workload).dispatcher)
    if reason:
        yield reason
    if strategy.overlap_all_to_all == "shared_experts" and not any(experts.shared_ffn_size for _, experts in found):
        yield "overlap_all_to_all is shared_experts, and the model has no shared expert"
    if strategy.overlap_all_to_all not in ("", "none") and strategy.ep == 1:
        yield f"overlap_all_to_all is {strategy.overlap_all_to_all}, and with EP 1 no token is exchanged"


def _break_graphs(workload: Workload, strategy: Strategy) -> Iterator[str]:
    reason = graphs_reason(workload.stack, strategy.facts_of(workload).graphs)
    if reason:
        yield reason
