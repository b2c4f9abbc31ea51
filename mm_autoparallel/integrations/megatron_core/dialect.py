"""Dialect: what a code that is built on Megatron-LM spells in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import Decided
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.integrations.shell_text import LaunchScript


@dataclass(frozen=True)
class Dialect:
    """How the flags of a code are Megatron-LM's.

    title, release: of the code, for people. read: what a script passes, in Megatron-LM's flags; raises PlanError naming
    a flag that no plan says. write: flags that Megatron-LM's become; raises PlanError naming a choice that the code
    cannot run. note: sentences for what a script passes beside its plan. stack: of workloads; None: by the flags.
    not_patched: flag → why no plan is written into scripts that pass it. open: a file that is no launch script as one;
    None: the code has launch scripts. old: flags of old releases that its parser lacks; None: Megatron-LM's. adapters:
    that section of a job for what a script passes, None where whole weights train. keeps_less: flags by which a
    training holds less than is simulated. allows: as in `decide`.
    """

    title: str
    release: str
    read: Callable[[Passed], Passed]
    write: Callable[[Decided], Decided]
    note: Callable[[Passed], tuple[str, ...]]
    stack: str | None = None
    not_patched: Mapping[str, str] = field(default_factory=dict)
    open: Callable[[Path, Given], LaunchScript] | None = None
    old: frozenset[str] | None = None
    adapters: Callable[[Passed], Mapping[str, object] | None] = lambda _: None
    keeps_less: frozenset[str] = frozenset()
    allows: frozenset[str] = frozenset()


def without_mindspeed(decided: Decided) -> Decided:
    """Raises PlanError where a plan has what only MindSpeed does: fused products, modes that it has a switch for."""
    if flags.REACTIVATED in decided.values:
        raise PlanError(
            "plan: its layers run in the mode activation, and Megatron-LM runs activations once more by "
            "--recompute-modules moe_act alone; plan with search.modes [selective] and workload.selective_operators "
            "[moe_act]"
        )
    if flags.SWAPPED in decided.values:
        raise PlanError(
            "plan: its layers run in the mode swap_attention, and what attention keeps is moved to the host by "
            "MindSpeed's --swap-attention; plan without it in search.modes"
        )
    if decided.values.get(flags.FUSED) is not None:
        raise PlanError(
            "plan: it fuses products with TP's traffic (tp_overlap mc2), which is MindSpeed's; plan with "
            "search.tp_overlap [none] or without it"
        )
    return replace(decided, values={flag: words for flag, words in decided.values.items() if flag != flags.FUSED})


MEGATRON = Dialect("Megatron-LM", "megatron-core 0.16", lambda passed: passed, without_mindspeed, lambda _: ())
