"""read_memory: what measured memory says of a run: which parts are frozen, how wide gradients are, what recomputes.

Weights, gradients and optimizer states are counted, not estimated: 2 bytes of a frozen parameter beside 2 + 4 + 12/DP
of a trained one with Megatron-LM's distributed optimizer. So what stays allocated between two steps tells the first
two, and only what was really said of a run makes the same figures on all its stages. Peaks hold activations too, whose
lengths are seldom known, so they are asked where nothing else is told, and for recompute, which nothing else tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.document import percent
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.units import GIB, format_bytes

RESTING_FRACTION, PEAK_FRACTION = 0.02, 0.05
"""How far what is consistent may be off in the mean of a run's stages. Assumed: MindSpeed-MM's published allocated
memory is met within 0.6 % on each stage, and peaks depend on lengths that are seldom stated."""

LEAST_BYTES = 2 * GIB
"""Of the fullest stage, below which memory says too little: buffers that nobody counts are too large a part of it.
Assumed: of 56 runs of Megatron-LM's continuous integration what is allocated is 3.2 % off in the mean, most of them
below 1 GiB, and 0.6 % of the one above 2."""

_CLEAR_FACTOR = 2.0
"""A reading contradicts what is stated where it is so many times as near. Assumed."""

_SAME_FRACTION = 1e-4
"""Readings that differ by less on every stage say the same."""

_GRADIENT_BYTES = (4.0, 2.0)


@dataclass(frozen=True)
class Reading:
    """One way a run may have been. frozen: parts that do not train (`vision`, `vision projector`, `text`). recomputed:

    modalities of which every layer recomputes, of those that may be otherwise. told_bytes: of each measured figure, as
    this reading makes it. distance_fraction: mean of |told / measured - 1| over them.
    """

    frozen: tuple[str, ...]
    gradient_bytes: float
    recomputed: tuple[str, ...]
    told_bytes: tuple[float, ...]
    distance_fraction: float
    stated: bool = False

    @property
    def words(self) -> str:
        """`vision frozen, gradients of 4 bytes`."""
        frozen = f"{' and '.join(self.frozen)} frozen" if self.frozen else "nothing frozen"
        recomputed = f", {' and '.join(self.recomputed)} recomputed" if self.recomputed else ""
        return f"{frozen}, gradients of {self.gradient_bytes:g} bytes{recomputed}"


@dataclass(frozen=True)
class Fingerprint:
    """What memory says. readings: the nearest first, of equal ones that alone which the job states, or the first.

    kind: what was measured: `allocated` between steps, or `peak`. stages, measured_bytes: of each figure. assumed: what
    is frozen was not said, and the job's reading of it was assumed.
    """

    kind: str
    stages: tuple[int, ...]
    measured_bytes: tuple[float, ...]
    readings: tuple[Reading, ...]
    assumed: bool = False

    @property
    def limit_fraction(self) -> float:
        """Within which a reading is consistent."""
        return RESTING_FRACTION if self.kind == "allocated" else PEAK_FRACTION

    @property
    def stated(self) -> Reading:
        """What the job says."""
        return next(reading for reading in self.readings if reading.stated)

    @property
    def consistent(self) -> tuple[Reading, ...]:
        """The readings that the figures allow."""
        return tuple(reading for reading in self.readings if reading.distance_fraction <= self.limit_fraction)

    @property
    def contradicted(self) -> bool:
        """Whether what the job says is not consistent, and another reading is, clearly; or none is."""
        best, stated = self.readings[0], self.stated
        if stated.distance_fraction <= self.limit_fraction:
            return False
        return not self.consistent or _CLEAR_FACTOR * best.distance_fraction <= stated.distance_fraction

    @property
    def words(self) -> str:
        """What is read, how near, and how near the next is; where it contradicts the job, with both figures."""
        best, stated = self.readings[0], self.stated
        beside = f"; next is {self.readings[1].words} ({_percent(self.readings[1])})" if len(self.readings) > 1 else ""
        if not self.contradicted:
            told = best if best.distance_fraction <= self.limit_fraction else stated
            also = "" if told.stated else f", and the job's own {stated.words} ({_percent(stated)}) is as possible"
            return f"its {self.kind} memory is that of {told.words} ({_percent(told)} off{beside}){also}"
        at = max(range(len(self.stages)), key=lambda i: abs(stated.told_bytes[i] / self.measured_bytes[i] - 1))
        whom = "what was assumed" if self.assumed else "the job"
        figures = f"{format_bytes(self.measured_bytes[at])} on stage {self.stages[at]}"
        says = "assumed was" if self.assumed else "the job says"
        against = f"{says} {stated.words}, which makes {format_bytes(stated.told_bytes[at])}"
        if not self.consistent:
            return (
                f"its {self.kind} memory, {figures}, contradicts {whom}: {against}, and no combination of frozen "
                f"parts, gradient bytes and recompute comes nearer than {_percent(best)} ({best.words}); look at "
                "layers per stage, lengths and optimizer states"
            )
        return (
            f"its {self.kind} memory, {figures}, contradicts {whom}: {against} ({_percent(stated)} off on all stages); "
            f"{best.words} makes {format_bytes(best.told_bytes[at])} ({_percent(best)}{beside})"
        )


def read_memory(case: MeasuredCase, calibration: Calibration | None = None) -> Fingerprint | None:
    """What the memory of `case` says of it; None where none was measured by stage, too little was
    (LEAST_BYTES), adapters train, or ZeRO shards gradients.

    What is allocated between steps is asked where it was measured, else peaks. Raises PlanError or ProfileError as
    evaluate does.
    """
    measured = case.resting_bytes or case.measured_bytes
    if measured is None or case.job.model.adapters is not None or case.plan.strategy.zero > 1:
        return None
    by_stage = {0: measured} if isinstance(measured, float) and case.plan.strategy.pp == 1 else measured
    if isinstance(by_stage, float):
        return None
    if max(by_stage.values()) < LEAST_BYTES:
        return None
    kind, stages = "allocated" if case.resting_bytes else "peak", tuple(sorted(by_stage))
    figures = tuple(by_stage[stage] for stage in stages)
    readings: list[Reading] = []
    for frozen, job in _jobs(case.job):
        for plan in _plans(case.plan) if kind == "peak" else [case.plan]:
            stated = job.model == case.job.model and job.workload == case.job.workload and plan == case.plan
            try:
                estimate = evaluate(CostModel(job, calibration), plan)
            except PlannerError:
                if stated:
                    raise
                continue  # no run can have been so
            told = tuple(_told_bytes(case, estimate)[stage] for stage in stages)
            errors = [abs(one / other - 1) for one, other in zip(told, figures, strict=True)]
            recomputed = tuple(name for name, counts in plan.recompute.items() if counts == plan.layers[name])
            distance_fraction = sum(errors) / len(errors)
            of_peaks = recomputed if kind == "peak" else ()
            readings.append(
                Reading(frozen, job.workload.gradient_bytes, of_peaks, told, distance_fraction, stated=stated)
            )
    return Fingerprint(kind, stages, figures, _distinct(readings), _says_no_frozen(case))


def _told_bytes(case: MeasuredCase, estimate: Estimate) -> tuple[float, ...]:
    """Per stage, of the kind that was measured."""
    if case.resting_bytes is not None:
        return estimate.resting_allocated_bytes
    return estimate.first_step_allocated_bytes if case.first_step else estimate.peak_allocated_bytes


def tells_memory(case: MeasuredCase) -> bool:
    """Whether its memory is worth reading: it was told of the first step, or the row does not say what is frozen."""
    told_first = case.first_step or _says_no_frozen(case)
    return case.resting_bytes is not None or (case.measured_bytes is not None and told_first)


def fingerprint_document(found: Fingerprint) -> dict[str, Any]:
    """As a part of `validate --json`."""
    best = found.readings[0]
    return {
        "kind": found.kind,
        "frozen": list(best.frozen),
        "gradient_bytes": best.gradient_bytes,
        "recomputed": list(best.recomputed),
        "off_pct": percent(best.distance_fraction),
        "next_off_pct": percent(found.readings[1].distance_fraction) if len(found.readings) > 1 else None,
        "stated_off_pct": percent(found.stated.distance_fraction),
        "contradicted": found.contradicted,
        "words": found.words,
    }


def _says_no_frozen(case: MeasuredCase) -> bool:
    return any("frozen" in what for what in case.unstated)


def _distinct(readings: Sequence[Reading]) -> tuple[Reading, ...]:
    """The nearest first; of those that make the same figures the stated one, or the first."""
    kept: list[Reading] = []
    for reading in sorted(readings, key=lambda one: not one.stated):
        if not any(_is_same(reading, other) for other in kept):
            kept.append(reading)
    return tuple(sorted(kept, key=lambda one: one.distance_fraction))


def _is_same(one: Reading, other: Reading) -> bool:
    pairs = zip(one.told_bytes, other.told_bytes, strict=True)
    return all(abs(told / its - 1) <= _SAME_FRACTION for told, its in pairs)


def _jobs(job: Job) -> Iterator[tuple[tuple[str, ...], Job]]:
    """Names of what is frozen, and the job with that frozen and gradients of so many bytes; the stated ones among them.

    A tower is trained with its projector, or frozen with or without it. Text alone trains.
    """
    model = job.model
    towers = [_towers(encoder) for encoder in model.encoders]
    texts = [model.text] + ([model.text.model_copy(update={"freeze": not model.text.freeze})] if towers else [])
    widths = dict.fromkeys((job.workload.gradient_bytes, *_GRADIENT_BYTES))
    for *encoders, text in product(*towers, texts):
        changed = model.model_copy(update={"encoders": tuple(encoders), "text": text})
        if not _trains(changed):
            continue
        for width in widths:
            workload = job.workload.model_copy(update={"gradient_bytes": width})
            yield _frozen_names(changed), replace(job, model=changed, workload=workload)


def _towers(encoder: Encoder) -> list[Encoder]:
    """As it is, and as it may be."""
    found = [encoder]
    for frozen, projector_frozen in ((True, True), (True, False), (False, False)):
        projector = encoder.projector.model_copy(update={"freeze": projector_frozen})
        other = encoder.model_copy(update={"freeze": frozen, "projector": projector})
        found += [] if other in found else [other]
    return found


def _trains(model: Model) -> bool:
    return not model.text.freeze or any(not (one.freeze and one.projector.freeze) for one in model.encoders)


def _frozen_names(model: Model) -> tuple[str, ...]:
    names = []
    for encoder in model.encoders:
        names += [encoder.name] * encoder.freeze + [f"{encoder.name} projector"] * encoder.projector.freeze
    return (*names, *["text"] * model.text.freeze)


def _plans(plan: Plan) -> list[Plan]:
    """The plan, and with all or none of the text's layers recomputed."""
    layers = plan.layers["text"]
    others = [layers, tuple(0 for _ in layers)]
    counts = dict.fromkeys([plan.recompute["text"], *others])
    return [replace(plan, recompute={**plan.recompute, "text": count}) for count in counts]


def _percent(reading: Reading) -> str:
    return f"{100 * reading.distance_fraction:.1f} %"
