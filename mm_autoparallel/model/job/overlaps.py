"""Overlaps as a strategy's choice: what traffic between replicas and stages runs beside, where a stack has switches.

Megatron-LM has --overlap-grad-reduce, --overlap-param-gather and --no-overlap-p2p-communication; Megatron-Bridge,
MindSpeed-LLM and MindSpeed-MM have them from it. Its parser asks for the first and the distributed optimizer beside the
second (training/arguments.py), and for three stages or more where transfers of several chunks are waited for.
MindSpeed's DualPipeV, and its exchange of tokens beside other micro-batches, refuse the first
(mindspeed/features_manager).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.workload import MINDSPEED, Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import SearchSpace
    from mm_autoparallel.model.job.strategy import Strategy

_SWITCHED: tuple[Stack, ...] = ("megatron-te", "megatron-local", "mindspeed", "mindspeed-mm")
"""Stacks whose launch scripts say each of them."""
_WORDS = {"overlap_grad_reduce": "reductions", "overlap_param_gather": "gathers", "overlap_p2p": "transfers"}


@dataclass(frozen=True)
class Overlaps:
    """overlap_grad_reduce, overlap_param_gather, overlap_p2p: each as in Workload. None: as the workload has it."""

    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_p2p: bool | None = None

    @property
    def chosen(self) -> dict[str, bool]:
        """Those that are not left to the workload, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def words(self) -> tuple[str, ...]:
        """`reductions overlapped`, `transfers open`."""
        return tuple(f"{_WORDS[name]} {'overlapped' if value else 'open'}" for name, value in self.chosen.items())

    @property
    def key(self) -> tuple[int, ...]:
        """Their order: what the workload has before what is overlapped, and that before what is open."""
        return tuple(0 if value is None else 2 - value for value in vars(self).values())

    def of(self, workload: Workload) -> Workload:
        """The workload with what is chosen in place of its own."""
        return workload.model_copy(update=self.chosen) if self.chosen else workload

    def meant_for(self, strategy: Strategy) -> Overlaps:
        """Without what changes nothing there, so that no strategy has two forms. Weights are gathered behind nothing
        where gradients are not reduced behind something, as Megatron-LM has it, unless it is asked for."""
        if not self.chosen:
            return self
        shared = strategy.dp * strategy.cp > 1 or strategy.expert_dp > 1
        reduces = self.overlap_grad_reduce if shared else None
        gathers = self.overlap_param_gather
        if gathers is None and reduces is False:
            gathers = False
        beside = self.overlap_p2p if strategy.vpp > 1 else None
        return Overlaps(reduces, gathers if shared and strategy.zero else None, beside)


OVERLAPS = tuple(field.name for field in fields(Overlaps))
"""Their names, in a workload, and of the lists of a search."""
AS_SAID = Overlaps()
"""All as the workload has them."""


def list_overlaps(limits: SearchSpace) -> tuple[Overlaps, ...]:
    """Every choice within the limits."""
    return tuple(Overlaps(*each) for each in product(*(getattr(limits, name) or (None,) for name in OVERLAPS)))


def switch_reason(name: str, stack: Stack) -> str | None:
    """Why a plan for `stack` cannot choose the overlap `name`; None where it can."""
    if stack in _SWITCHED:
        return None
    return (
        f"{name} is a choice where a launch script has Megatron-LM's switch for it (stack {', '.join(_SWITCHED)}), and "
        f"stack is {stack}; say it in workload.{name}"
    )


def overlap_limit_reasons(limits: SearchSpace, workload: Workload) -> Iterator[tuple[str, str | None]]:
    """Lists of a search, with why no strategy within its limits could meet them."""
    for name in OVERLAPS:
        if getattr(limits, name):
            yield name, switch_reason(name, workload.stack)
    if limits.overlap_param_gather and not any(limits.zero):
        yield "overlap_param_gather", f"weights are gathered from ZeRO 1 on, and search.zero is {list(limits.zero)}"
    if limits.overlap_p2p and limits.max_vpp == 1:
        yield "overlap_p2p", "stages of several chunks alone wait for transfers, and search.max_vpp is 1"


def choice_reasons(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Each rule that a strategy's choices of overlaps break."""
    chosen = strategy.overlaps.chosen
    yield from filter(None, (switch_reason(name, workload.stack) for name in chosen))
    said = strategy.overlaps.of(workload)
    reduced = "overlap_grad_reduce" in chosen
    gathers = said.overlap_param_gather and strategy.zero > 0
    if (reduced or "overlap_param_gather" in chosen) and gathers and not said.overlap_grad_reduce:
        yield "overlap_param_gather goes with overlap_grad_reduce alone, and gradients are reduced in the open"
    if chosen.get("overlap_param_gather") and not strategy.zero:
        yield "overlap_param_gather is on, and with ZeRO 0 no weights are gathered"
    if chosen.get("overlap_p2p") is False and strategy.vpp == 1:
        yield "overlap_p2p is off, which is of several chunks a stage, and VPP is 1"
    elif chosen.get("overlap_p2p") is False and strategy.pp == 2:
        yield f"overlap_p2p is off, and VPP {strategy.vpp} with PP 2 needs transfers beside compute"
    if chosen and workload.stack in MINDSPEED and strategy.zero == 3:
        yield f"{next(iter(chosen))} is chosen, and torch FSDP2 (ZeRO 3) has its own way there"
    if chosen.get("overlap_grad_reduce") and workload.stack == "mindspeed":
        beside = f"schedule {strategy.schedule}" if strategy.schedule.startswith("dualpipev") else ""
        if strategy.ep > 1 and strategy.overlap_of(workload) == "micro_batches":
            beside = "experts' exchange beside other micro-batches"
        if beside:
            yield f"overlap_grad_reduce is on, which MindSpeed refuses beside its {beside}"
