"""The step of a plan over drawn global batches, whose samples differ: mean, p95, p99 and the mean of the worst.

Batches are drawn in planner/drawn_batches.py, and played in planner/batch_steps.py.

For a fixed placement, order and dealing the step is the longest of sums of durations, so convex and growing in them,
and by Jensen's inequality E[T(d)] >= T(E[d]), E[d] taken position by position (Baccelli et al. 1992, Synchronization
and Linearity, for max-plus systems). Drawn and dealt so, every position expects the same durations: those of the pool's
mean. Samples that are packed are so once, before any batch is drawn, and whole sequences are drawn in their place, each
as likely as any other, so that this holds of them too. (Packed anew in each batch, sequences would depend on those
beside them.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.uneven import at_longest
from mm_autoparallel.model.job.job import BatchObjective
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import sum_loads
from mm_autoparallel.planner.batch_steps import BatchSteps
from mm_autoparallel.planner.drawn_batches import POLICY, DrawnBatches
from mm_autoparallel.units import format_bytes

Floats = NDArray[np.float64]

_WORST_FRACTION = 0.05
"""Of all batches, those whose mean cvar95 is."""


@dataclass(frozen=True)
class StepOverBatches:
    """Of one plan, in ms. cvar95_ms: the mean of the worst 5 %. error_ms, cvar95_error_ms: standard errors of mean_ms
    and of cvar95_ms, for a few hundred batches are not all. at_mean_ms: with the durations that every position expects;
    no true mean is below. steps_ms: of each batch, ascending. packing: how samples were packed into sequences."""

    mean_ms: float
    error_ms: float
    p95_ms: float
    p99_ms: float
    cvar95_ms: float
    cvar95_error_ms: float
    at_mean_ms: float
    steps_ms: tuple[float, ...]
    policy: str = POLICY
    packing: str = ""

    @property
    def batches(self) -> int:
        """How many were drawn."""
        return len(self.steps_ms)

    def of(self, objective: BatchObjective) -> float:
        """What plans are ranked by."""
        return {"mean": self.mean_ms, "p95": self.p95_ms, "cvar": self.cvar95_ms}[objective]

    def document(self) -> dict[str, Any]:
        """The result file's `step_over_batches`: all but the single steps."""
        told = dict(vars(self)) | {"batches": self.batches, "policy": self.policy}
        del told["steps_ms"]
        if not self.packing:
            del told["packing"]
        return told

    @property
    def words(self) -> str:
        """`over 256 drawn batches (arrival): mean 412.10 ms, …`."""
        packed = f"; packed {self.packing}" if self.packing else ""
        return (
            f"over {self.batches} drawn batches ({self.policy} order{packed}): mean {self.mean_ms:.2f} ms "
            f"(± {self.error_ms:.2f}), p95 {self.p95_ms:.2f}, p99 {self.p99_ms:.2f}, worst 5 % {self.cvar95_ms:.2f}; "
            f"with expected durations {self.at_mean_ms:.2f}"
        )


def step_over_batches(drawn: DrawnBatches, ready: BatchSteps) -> StepOverBatches:
    """What a plan takes over all drawn batches."""
    steps = np.array([ready.step_ms(drawn, batch) for batch in range(len(drawn.batches))])
    ranked = np.sort(steps)
    worst = ranked[-max(1, round(_WORST_FRACTION * len(ranked))) :]
    return StepOverBatches(
        mean_ms=float(steps.mean()),
        error_ms=float(steps.std(ddof=1) / np.sqrt(len(steps))),
        p95_ms=float(np.quantile(steps, 0.95, method="higher")),
        p99_ms=float(np.quantile(steps, 0.99, method="higher")),
        cvar95_ms=float(worst.mean()),
        cvar95_error_ms=float(worst.std() / np.sqrt(len(worst))),
        at_mean_ms=ready.at_mean_ms(drawn),
        steps_ms=tuple(ranked.tolist()),
        packing=drawn.packing,
    )


def least_mean_fraction(drawn: DrawnBatches) -> float:
    """What the bound of steps of mean samples is multiplied by, to bound the mean over batches of every plan.

    A factor of at least f on every duration makes a step of at least f times as long where f <= 1 (hops and tails stay,
    and a step is the longest of sums), and at least as long where f > 1.
    """
    return min(1.0, *drawn.mean_factor.values())


def describe_longest(
    drawn: DrawnBatches, problem: Problem, placement: Placement, strategy: Strategy, peaks: Floats
) -> str | None:
    """A sentence where a stage is beyond its limit with the longest of the drawn micro-batches in flight among mean
    ones.

    peaks: [P] in bytes, with mean ones alone, which is what plans are searched by.
    """
    longest = drawn.longest(strategy)
    longer = replace(problem, chain=tuple(at_longest(block, longest[block.modality]) for block in problem.chain))
    usual, most = sum_loads(problem, placement), sum_loads(longer, placement)
    more = most.transient_bytes - usual.transient_bytes
    np.add.at(more, np.array(problem.stage_of), most.activation_bytes - usual.activation_bytes)
    over = peaks + more - np.array(problem.memory_limit_bytes)
    if np.all(over <= 0.0):
        return None
    stage = int(np.argmax(over))
    told = ", ".join(f"{name} {factor:.1f}" for name, factor in longest.items())
    return (
        f"memory is that of mean samples; with the longest micro-batch of {len(drawn.batches)} drawn batches among "
        f"them (times the mean's tokens: {told}) stage {stage} would peak at {format_bytes(peaks[stage] + more[stage])}"
        f", above its limit of {format_bytes(problem.memory_limit_bytes[stage])}: cap the tokens of a sample, or "
        "recompute more"
    )
