"""How a MindFormers model may be divided over its devices: every division, lawful or not, with the rule it breaks.

All devices of the YAML are used and every division processes the same global batch, so dp, tp, pp and cp multiply to
the number of devices, and (dp, tp, pp, ep) names one of them. A division that cannot be whatever its ep, op, vp and mbs
are is listed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mm_autoparallel.integrations.mindformers.model_job import strategy_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.profile_table import Candidate
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.planner.search.space import divisors

MAX_CHUNKS = 4
"""Assumed: the most chunks a stage that are tried; published pipelines of MindFormers have up to four."""

MAX_MICRO_BATCH = 4
"""Assumed: the largest micro-batch that is tried beside the YAML's own; published YAMLs have 1 to 48, most have 1."""

MIN_CP_TOKENS = 4096
"""Assumed: a context parallel rank has at least so many tokens of a sequence, below which its attention is too short to
hide what it exchanges (the auto-tuning of MindSpeed asks for sequences of 8,192 with two ranks)."""


@dataclass(frozen=True)
class Scope:
    """Which divisions are looked at. sizes: `dp`, `tp`, `pp`, `cp`, `ep` → the only ones allowed (left out: any).

    reserve_bytes: of every stage, for what memory from sizes does not tell (sized_memory.py, reserve_of).
    """

    max_expert_parallel: int
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reserve_bytes: float | None = None

    def reason(self, division: Division) -> str | None:
        """Why the sizes of `division` that are set are not looked at."""
        for name, allowed in self.sizes.items():
            size = getattr(division, name)
            if size is not None and size not in allowed:
                return f"{name.upper()} {size} is not among --{name} {' '.join(map(str, allowed))}"
        if division.ep is not None and division.ep > self.max_expert_parallel:
            return f"EP {division.ep} is above max_expert_parallel {self.max_expert_parallel}"
        return None


@dataclass(frozen=True)
class Division:
    """Parallel sizes; op: ranks that share the optimizer state of a parameter (1: enable_parallel_optimizer is off).

    ep, op, vp, mbs are None where the others alone break a rule.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int | None = None
    op: int | None = None
    vp: int | None = None
    mbs: int | None = None

    @property
    def candidate(self) -> Candidate:
        """What the tables of the search call it. Only for a division that has an ep."""
        assert self.ep is not None
        return self.dp, self.tp, self.pp, self.ep


def list_divisions(pretrain: Pretrain, job: Job, scope: Scope) -> Iterator[tuple[Division, str | None]]:
    """Every division with the rule it breaks, None where it is lawful. job: of the YAML at the wanted global batch."""
    num_devices = job.cluster.num_devices
    experts = job.model.text.layers.experts
    every_ep = divisors(experts.num_experts) if experts else (1,)
    for tp in divisors(num_devices):
        for cp in divisors(num_devices // tp):
            for pp in divisors(num_devices // tp // cp):
                outer = Division(num_devices // (tp * cp * pp), tp, pp, cp)
                reason = scope.reason(outer) or _outer_reason(pretrain, job, outer)
                if reason:
                    yield outer, reason
                    continue
                for ep in every_ep:
                    division = replace(outer, ep=ep)
                    reason = scope.reason(division)
                    reason = reason or _reason(pretrain, job, replace(division, op=1, vp=1, mbs=1))
                    if reason:
                        yield division, reason
                    else:
                        yield from _inner_divisions(pretrain, job, division)


def divide(pretrain: Pretrain, division: Division, global_batch_size: int) -> Pretrain:
    """`pretrain` with the sizes of a whole division, its text and document as they were."""
    dp, mbs, vp = division.dp, division.mbs or 1, division.vp or 1
    samples = dp * mbs * pretrain.interleave_num * pretrain.gradient_accumulation_steps
    return replace(
        pretrain,
        dp=dp,
        tp=division.tp,
        pp=division.pp,
        cp=division.cp,
        ep=division.ep or 1,
        vp=vp,
        mbs=mbs,
        optimizer_parallel=(division.op or 1) > 1,
        num_microbatches=max(1, global_batch_size // samples),
    )


def _inner_divisions(pretrain: Pretrain, job: Job, outer: Division) -> Iterator[tuple[Division, str | None]]:
    batch = job.workload.global_batch_size // outer.dp
    for mbs in (size for size in divisors(batch) if size <= MAX_MICRO_BATCH or size == pretrain.mbs):
        for vp in range(1, MAX_CHUNKS + 1):
            for op in sorted({1, outer.dp * outer.cp}):
                division = replace(outer, op=op, vp=vp, mbs=mbs)
                yield division, _reason(pretrain, job, division)


def _outer_reason(pretrain: Pretrain, job: Job, outer: Division) -> str | None:
    if outer.cp > 1 and job.workload.seq_length // outer.cp < MIN_CP_TOKENS:
        return (
            f"CP {outer.cp} leaves {job.workload.seq_length // outer.cp} tokens of a sequence to a rank, below "
            f"{MIN_CP_TOKENS}"
        )
    # experts are looked at with their number
    return _reason(pretrain, job, replace(outer, ep=1, op=1, vp=1, mbs=1))


def _reason(pretrain: Pretrain, job: Job, division: Division) -> str | None:
    batch = job.workload.global_batch_size
    divided = divide(pretrain, division, batch)
    samples = divided.dp * divided.mbs * divided.interleave_num * divided.gradient_accumulation_steps
    if batch % samples:
        return (
            f"DP {divided.dp} x MBS {divided.mbs} take {samples} samples, which do not divide the global batch {batch}"
        )
    if divided.num_microbatches < divided.pp:
        return f"{divided.num_microbatches} micro-batches are fewer than PP {divided.pp}"
    if divided.vp > 1 and divided.num_microbatches % divided.pp:
        return f"VPP {divided.vp} needs multiples of PP {divided.pp} micro-batches, and has {divided.num_microbatches}"
    return unlawful_reason(job.model, job.cluster, job.workload, strategy_of(divided))
