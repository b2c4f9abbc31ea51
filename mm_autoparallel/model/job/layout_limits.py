"""What a job's search asks of layouts, and none of them can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.arrangement_law import model_reason, own_context_reasons, search_reason, stack_reason
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.division_law import vocabulary_remarks
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.schedule_law import searched_schedules
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import SearchSpace


def warn_of_search(
    model: Model | TracedModel, cluster: Cluster, workload: Workload, search: SearchSpace, path: Path
) -> list[str]:
    """A sentence where layouts are asked for and the chain alone is planned, where the vocabulary alone limits TP, and
    where some of the sizes that encoders are to have are of no layout.

    Raises JobError, about the job file at `path`, where all of these are of none.
    """
    reason = model_reason(model, cluster, workload)
    reason = reason or search_reason(workload, searched_schedules(search.schedule, workload))
    widest = cluster.max_tensor_parallel
    sizes = [tp for tp in search.tp or range(1, widest + 1) if tp <= widest and cluster.num_devices % tp == 0]
    warnings = vocabulary_remarks(model, workload, sizes, not reason and search.kinds != ("chain",))
    if search.kinds == ("chain",):
        return warnings
    if reason:
        asked = "all" if search.layouts == "all" else ", ".join(search.kinds)
        chain_alone = f"search.layouts is {asked}, and the chain alone is planned: {reason}"
        return [*warnings, chain_alone] if "chain" in search.kinds else warnings
    return warnings + _warn_of_encoders(model, cluster, workload, search, path)


def _warn_of_encoders(model: Model, cluster: Cluster, workload: Workload, search: SearchSpace, path: Path) -> list[str]:
    warnings = []
    limits: tuple[tuple[str, tuple[int, ...], Callable[[int], str | None]], ...] = (
        ("encoder_cp", search.encoder_cp, lambda cp: _context_reason(model, cluster, workload, search, cp)),
        ("encoder_pieces", search.encoder_pieces, lambda pieces: _pieces_reason(model, workload, search, pieces)),
    )
    for key, named, ask in limits:
        reasons = {size: reason for size in named if size > 1 and (reason := ask(size))}
        if not reasons:
            continue
        first = next(iter(reasons.values()))
        if len(reasons) == len(set(named)):
            raise JobError(
                f"search.{key} is {list(named)}, and no encoder with sizes of its own can have that: {first}; add "
                "1, or leave it out",
                where=f"job file {path}",
            )
        names = ", ".join(map(str, reasons))
        warnings.append(f"search.{key} names {names}, which no encoder with sizes of its own can have: {first}")
    return warnings


def _context_reason(model: Model, cluster: Cluster, workload: Workload, search: SearchSpace, cp: int) -> str | None:
    """Why no encoder can have context parallel size `cp`, whatever its other sizes; None where one may."""
    counts = search.devices or (cluster.num_devices,)
    if not any(_has_ranks(model, cluster, search, number, cp) for number in counts):
        places = {
            "colocated": "on the decoder's devices it takes all, which CP must divide",
            "disaggregated": "on ranks of its own it leaves some to the decoder, and straddles no node",
        }
        told = "; ".join(said for kind, said in places.items() if kind in search.kinds)
        return f"no ranks of {' or '.join(map(str, counts))} devices make an encoder's CP {cp} ({told})"
    widths = [tp for tp in range(1, cluster.max_tensor_parallel + 1) if cluster.max_tensor_parallel % tp == 0]
    usual = Strategy(1, 1, 1, 1, cp=cp)
    kinds = [usual, *(replace(usual, cp_kind=kind) for kind in search.cp_kind or ())]
    ways = [replace(own, tp=tp) for own, tp in product(kinds, widths)]
    first = None
    for encoder, own in product(model.encoders, ways):
        reason = next(own_context_reasons((encoder,), cluster, workload, own), None)
        if reason is None:
            return None
        first = first or reason
    return first


def _has_ranks(model: Model, cluster: Cluster, search: SearchSpace, number: int, cp: int) -> bool:
    """Whether an encoder of `cp` has ranks on `number` devices: all, or behind those of a decoder."""
    if "colocated" in search.kinds and number % cp == 0:
        return True
    if "disaggregated" not in search.kinds:
        return False
    if len(model.encoders) > 1:  # others may lie between
        return number > cp
    span = cluster.node_span
    begins = [begin for begin in range(1, number) if (number - begin) % cp == 0 and not cluster.uneven_reason(begin)]
    return any(begin % span == 0 or begin % span + number - begin <= span for begin in begins)


def _pieces_reason(model: Model, workload: Workload, search: SearchSpace, pieces: int) -> str | None:
    """Why no passes of an encoder can be cut into `pieces`; None where some may."""
    num_layers = sum(encoder.layers.num_layers for encoder in model.encoders)
    if pieces > num_layers:
        return f"each of {pieces} pieces needs a layer, and the encoders have {num_layers}"
    if search.pp and max(search.pp) == 1:
        return "passes in bubbles and as prefetch lie between those of several stages, and search.pp has 1 alone"
    return stack_reason(workload, "colocated", "bubbles")
