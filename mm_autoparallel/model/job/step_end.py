"""How a step ends: for all stages at once, or for each by itself (Qi et al. 2024, arXiv:2401.10241, section 4).

With a barrier every stage waits for the norm of all gradients before its optimizer's step, so that stages begin the
next step together. With post-validation each updates its weights at once and undoes that where the norm, known later,
says so: it begins its next step as soon as its own work is done. Zero bubble's own code has it
(--enable-optimizer-post-validation), which no stack is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.schedules.catalog import parts_backwards

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import SearchSpace
    from mm_autoparallel.model.job.strategy import Strategy

StepEnd = Literal["barrier", "post_validation"]


def step_end_reason(step_end: StepEnd, strategy: Strategy) -> str | None:
    """Why a pipeline of `strategy` does not end its steps so; None where it does."""
    if step_end == "barrier" or strategy.pp == 1:
        return None
    if parts_backwards(strategy.schedule, strategy.vpp, strategy.orders):
        return None
    return (
        f"schedule {strategy.schedule} parts no backward, and search.step_end is post_validation, which goes with "
        "schedules that do"
    )


def step_end_limit_reasons(limits: SearchSpace, workload: Workload) -> Iterator[str]:
    """Why no plan within the limits could be ranked as `search.step_end` asks."""
    if limits.step_end == "barrier":
        return
    if "stack" in workload.model_fields_set:
        yield f"zero bubble's own code runs it, and workload.stack is {workload.stack}; leave the stack out"
    if limits.objective is not None:
        yield f"search.objective {limits.objective} ranks plans too; leave one of the two out"
    if limits.kinds != ("chain",):
        yield f"it is of encoders in the chain, and search.layouts is {list(limits.kinds)}"
    if limits.schedule is None:
        yield "its schedules part backwards, and search.schedule names none; zb_h1, zbv or free would do"
