"""What context parallel ranks send each other of attention, by the kind that they share it in.

Keys and values may go round (ring), heads may be dealt (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509), keys
and values may be gathered before attention and their gradients summed after it, or near ranks deal heads and far ones
pass on (TransformerEngine's a2a+p2p): then each rank has the tokens of all near ones and a part of the heads, so
that as many bytes of keys and values go round as are its own, among fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.operators import AttentionProduct, Share
from mm_autoparallel.model.profiles.collectives import Group, exposed_ms, form_group
from mm_autoparallel.model.profiles.network import NetworkProfile, Operation

if TYPE_CHECKING:
    from mm_autoparallel.model.operators.analytic import Rates


def context_groups(
    levels: Sequence[Level], strategy: Strategy, network: NetworkProfile | None, workload: Workload | None
) -> tuple[Group | None, Group | None]:
    """The ranks that deal heads among themselves and those that pass on, where neither are all context parallel ranks.

    levels: as in form_group. workload: nothing where all or none deal, whatever the strategy's own kind is.
    """
    if workload is None or strategy.cp == 1 or strategy.context_kind(workload) != "hierarchical":
        return None, None
    num_dealing, stride = strategy.dealing_ranks(workload, levels[0].num_devices), strategy.stride_of("cp")
    dealing = form_group(levels, num_dealing, stride, network)
    return dealing, form_group(levels, strategy.cp // num_dealing, stride * num_dealing, network)


def context_exchange_ms(attention: AttentionProduct, rates: Rates) -> float:
    """What nothing hides of one pass: heads dealt before and after, or all keys and values gathered."""
    dealt_ms = (rates.dealing_group or rates.cp_group).all_to_all_ms(attention.dealt_bytes)
    return dealt_ms + rates.cp_group.all_gather_ms(attention.gathered_bytes)


def exposed_ring_ms(compute_ms: float, ring_bytes: float, share: Share, rates: Rates) -> float:
    """Ring attention (Liu et al. 2023, arXiv:2310.01889), the sequence dealt in zig-zag so that every rank has the same

    part of the causal triangle: in each of n − 1 steps, n ranks that pass, keys and values travel behind one n-th of
    the attention. Where a part stays open whatever it takes (open_ring_fraction), so does the latency of each step.
    """
    group, open_fraction = rates.passing_group or rates.cp_group, share.facts.open_ring_fraction
    num_steps, step_ms = group.num_ranks - 1, group.pass_on_ms(ring_bytes)
    hidden_fraction = rates.lanes.context.hidden_fraction
    if open_fraction and step_ms:
        latency_ms = min(step_ms, group.pass_latency_ms)
        traffic_ms = num_steps * (step_ms - latency_ms)
        open_ms = max(open_fraction * traffic_ms, exposed_ms(traffic_ms, compute_ms, hidden_fraction))
        return open_ms + num_steps * latency_ms
    return num_steps * exposed_ms(step_ms, compute_ms / group.num_ranks, hidden_fraction)


def context_traffic(rates: Rates, strategy: Strategy, workload: Workload) -> tuple[Group, tuple[Operation, ...]]:
    """The group whose traffic decides what sharing attention costs, and what is asked of it."""
    kind = strategy.context_kind(workload)
    if kind == "all_to_all":
        return rates.cp_group, ("all_to_all",)
    if kind == "all_gather":
        return rates.cp_group, ("all_gather", "reduce_scatter")
    return rates.passing_group or rates.cp_group, ("send_recv",)
