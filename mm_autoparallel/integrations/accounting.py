"""Whether files say all that a plan decides: what was written is read again, and held against what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mm_autoparallel.integrations.features import products_beside
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.plan import Plan


class Lost(Exception):
    """A choice that files do not say as they should, in a sentence."""


def check_decided(again: Plan, meant: Plan, job: Job | None) -> None:
    """Raises Lost naming the first choice that `again`, read from files, says otherwise than `meant`.

    job: what the plan was made for; None: choices that a plan leaves to its workload stay as the files have them.
    """
    workload = job.workload if job else None
    for (name, written), (_, wanted) in zip(list_decided(again, workload), list_decided(meant, workload), strict=True):
        is_left = wanted in ("", None) and (job is None or name in ("dispatcher", "graphs"))  # as the files have it
        if written != wanted and not is_left:
            told, found = (getattr(value, "name", repr(value)) for value in (wanted, written))
            raise Lost(f"{name} was to be {told}, and the files written say {found}")


def list_decided(plan: Plan, workload: Workload | None) -> Iterator[tuple[str, Any]]:
    """All that a plan decides, in one spelling."""
    strategy = plan.strategy
    has_experts = strategy.ep > 1 or strategy.expert_tp != strategy.tp
    for name in ("pp", "tp", "dp", "mbs", "cp", "ep", "vpp", "zero", "schedule", "reshard"):
        yield name, getattr(strategy, name)
    yield "shard", 0 if strategy.zero != 3 or strategy.shard == strategy.dp * strategy.cp else strategy.shard
    yield "rank_order", strategy.rank_order if strategy.pp > 1 else None  # else both orders are the same
    yield "etp", strategy.expert_tp if has_experts else 0
    yield "optimizer_offload", strategy.optimizer_offload
    yield "layouts", strategy.layouts
    yield "layout", strategy.arrangement
    yield (
        "sequence_parallel",
        strategy.tp == 1 or (strategy.divides_sequences(workload) if workload else strategy.sequence_parallel),
    )
    yield "cp_kind", (strategy.context_kind(workload) if workload else strategy.cp_kind) if strategy.cp > 1 else None
    yield "overlap_all_to_all", (strategy.overlap_of(workload) if workload else strategy.overlap_all_to_all)
    stated = strategy.dispatcher or (workload.known_facts.dispatcher if workload else "")
    yield "dispatcher", stated if has_experts else None
    yield "tp_overlap", products_beside(strategy, workload)
    yield "graphs", strategy.graphs if strategy.graphs != "none" else ""
    yield "precision", (strategy.precision_of(workload) if workload else strategy.precision or "bf16")
    yield "global_batch_size", plan.global_batch_size
    for modality, counts in plan.layers.items():
        yield f"layers of {modality}", tuple(counts)
        yield f"recompute of {modality}", tuple(plan.recompute[modality])
        yield f"modes of {modality}", {mode: tuple(each) for mode, each in plan.modes.get(modality, {}).items()}
