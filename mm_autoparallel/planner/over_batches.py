"""The step of a plan over drawn global batches, whose samples differ: mean, p95, p99 and the mean of the worst.

Samples are drawn one by one, each as likely as any other, and dealt in the order in which they come (`arrival`), as
Megatron-LM's samplers deal them: micro-batch by micro-batch, of each to one replica after another. All plans are judged
by the same draws (common random numbers). Each replica's pipeline is played with its own micro-batches, and the step is
the longest of them: they meet once a step, in the tails of their stages.

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
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.sample_loads import relative_loads, relative_sizes
from mm_autoparallel.model.costs.uneven import at_longest
from mm_autoparallel.model.job.job import BatchObjective, Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.sample_source import Packing
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import sum_loads
from mm_autoparallel.pipeline.simulate.unequal import UnequalSteps, list_modalities, prepare
from mm_autoparallel.samples.table import SampleTable
from mm_autoparallel.units import format_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

POLICY = "arrival"
"""How samples are dealt to replicas and micro-batches."""
_WORST_FRACTION = 0.05
"""Of all batches, those whose mean cvar95 is."""


@dataclass(frozen=True, eq=False)
class DrawnBatches:
    """Of one job. load_factor: modality → [n] loads of its samples over that of the mean sample; size_factor: the same
    of tokens, which memory goes by. batches: [S, B] numbers of the samples in each global batch, in the order in which
    they come. Where samples are packed, all that is of sequences, and `packing` says how; else it is empty.
    """

    load_factor: dict[str, Floats]
    size_factor: dict[str, Floats]
    batches: Ints
    packing: str = ""

    @property
    def mean_factor(self) -> dict[str, float]:
        """Modality → what every position expects."""
        return {name: float(np.mean(loads)) for name, loads in self.load_factor.items()}

    def longest(self, strategy: Strategy) -> dict[str, float]:
        """Modality → how many times the mean's tokens the micro-batch with most of them has, of all drawn batches."""
        dealt = self.batches.reshape(-1, strategy.mbs)
        return {name: float(sizes[dealt].mean(axis=1).max()) for name, sizes in self.size_factor.items()}

    def deal(self, batch: int, modalities: tuple[str, ...], strategy: Strategy) -> Floats:
        """[DP, modalities, M] factors on the times of each micro-batch of each replica in one batch."""
        dealt = self.batches[batch].reshape(-1, strategy.dp, strategy.mbs)
        return np.stack([self.load_factor[name][dealt].mean(axis=2).T for name in modalities], axis=1)


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


_DRAWN: WeakKeyDictionary[SampleTable, list[tuple[Model, Workload, str, DrawnBatches]]] = WeakKeyDictionary()
"""By a job's samples: for which model, workload and calibration."""


def draw_batches(job: Job | CostModel) -> DrawnBatches:
    """The batches of a job with samples; worked out once for each model, workload and calibration."""
    known = CostModel.of(job)
    job, samples = known.job, known.job.samples
    source = job.workload.samples
    assert samples is not None
    assert source is not None
    of_table, calibration = _DRAWN.setdefault(samples, []), known.calibration.description
    for model, workload, name, drawn in of_table:
        if model is job.model and workload is job.workload and name == calibration:
            return drawn
    sizes = (source.batches, job.workload.global_batch_size)
    batches = np.random.default_rng(source.seed).integers(samples.num_sequences, size=sizes)
    loads, lengths = relative_loads(known, samples), relative_sizes(known, samples)
    drawn = DrawnBatches(loads, lengths, batches, _describe_packing(job.model, source.packing, samples))
    of_table.append((job.model, job.workload, calibration, drawn))
    return drawn


def _describe_packing(model: Model, packing: Packing | None, samples: SampleTable) -> str:
    """`in_order up to 8192 tokens, 3.4 samples a sequence, 93 % full, padded`."""
    if packing is None:
        return ""
    full = samples.num_tokens(model.merge_tokens, model.audio_tokens_per_s).sum() / packing.tokens
    return (
        f"{packing.rule} up to {packing.tokens} tokens, {len(samples) / samples.num_sequences:.1f} samples a sequence, "
        f"{100 * full / samples.num_sequences:.0f} % full{', padded' if packing.padded else ''}"
    )


def step_over_batches(
    drawn: DrawnBatches, problem: Problem, placement: Placement, strategy: Strategy
) -> StepOverBatches:
    """What `placement` takes over all drawn batches. problem: the pipeline of `strategy`, as the job has it."""
    ready, modalities = prepare(problem, placement), list_modalities(problem)
    steps = np.array([ready.play(drawn.deal(batch, modalities, strategy)).max() for batch in range(len(drawn.batches))])
    ranked = np.sort(steps)
    worst = ranked[-max(1, round(_WORST_FRACTION * len(ranked))) :]
    return StepOverBatches(
        mean_ms=float(steps.mean()),
        error_ms=float(steps.std(ddof=1) / np.sqrt(len(steps))),
        p95_ms=float(np.quantile(steps, 0.95, method="higher")),
        p99_ms=float(np.quantile(steps, 0.99, method="higher")),
        cvar95_ms=float(worst.mean()),
        cvar95_error_ms=float(worst.std() / np.sqrt(len(worst))),
        at_mean_ms=play_at_mean(drawn, ready),
        steps_ms=tuple(ranked.tolist()),
        packing=drawn.packing,
    )


def play_at_mean(drawn: DrawnBatches, ready: UnequalSteps) -> float:
    """The step with the durations that every position expects: never above the true mean of steps."""
    means = drawn.mean_factor
    factors = np.array([means[name] for name in list_modalities(ready.problem)])
    even = np.broadcast_to(factors[None, :, None], (1, len(factors), ready.problem.num_microbatches))
    return float(ready.play(even)[0])


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
