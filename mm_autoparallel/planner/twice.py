"""answer_twice: what a plan takes if what its job does not state is otherwise than was taken.

One number would be a guess of the facts that move a step most: whether a tower trains, whether samples have images at
all, and how much they differ in length. Each is changed by itself; the plan stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mm_autoparallel.errors import PlannerError, ProfileError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.unstated import FREEZE, IMAGE_TOKENS, LENGTH_SPREAD
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.units import format_bytes, format_ms

UNEVEN_FRACTION = 0.15
"""Of images and questions where nothing makes micro-batches equal. Assumed: no data set's lengths are published
(published steps of MindSpeed-MM ask for 0.15 to 0.25)."""

_IMAGE_SHARE = 2
"""Half of a sample's tokens are taken for those of images where nobody says how many are. Assumed."""


@dataclass(frozen=True)
class Answer:
    """The same plan under the other reading of what is not stated.

    key: what states it in a job file. taken, other: the two readings in words. step_ms, peak_memory_bytes (of the
    fullest stage), fits: under the other; None, with a reason, where the plan cannot run so or is not known.
    """

    key: str
    taken: str
    other: str
    step_ms: float | None = None
    peak_memory_bytes: float | None = None
    fits: bool | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """`freeze.vision is not stated: taken is frozen; if trained: step 9.30 s, fullest stage 48.00 GiB`."""
        said = f"{self.key} is not stated: taken is {self.taken}; if {self.other}: "
        if self.step_ms is None or self.peak_memory_bytes is None:
            return f"{said}{self.reason}"
        over = "" if self.fits else ", beyond its limit"
        return f"{said}step {format_ms(self.step_ms)}, fullest stage {format_bytes(self.peak_memory_bytes)}{over}"

    def document(self) -> dict[str, Any]:
        """As a part of `--json`."""
        return dict(vars(self))


def answer_twice(job: Job, estimate: Estimate) -> tuple[Answer, ...]:
    """An answer for each fact that `job` does not state, of the plan of `estimate`; none where it states all."""
    return tuple(_answer(estimate, key, taken, other, changed) for key, taken, other, changed in _readings(job))


def _answer(estimate: Estimate, key: str, taken: str, other: str, job: Job) -> Answer:
    try:
        found = evaluate(job, estimate.plan)
    except ProfileError:
        return Answer(key, taken, other, reason=f"not known, for the costs that the job has are of {taken} alone")
    except PlannerError as failure:
        return Answer(key, taken, other, reason=f"this plan cannot run ({failure})")
    return Answer(key, taken, other, found.step_ms, max(found.peak_memory_bytes), found.fits)


def _readings(job: Job) -> Iterator[tuple[str, str, str, Job]]:
    frozen = {encoder.name: encoder.freeze for encoder in job.model.encoders}
    workload = job.workload
    for key in job.unstated:
        if key == IMAGE_TOKENS:
            merged = max(encoder.projector.merge_tokens for encoder in job.model.encoders)
            tokens = workload.seq_length // (_IMAGE_SHARE * merged) * merged
            with_images = workload.model_copy(update={"image_tokens_per_sample": tokens})
            yield key, "0", f"{tokens} (assumed)", replace(job, workload=with_images)
        elif key == LENGTH_SPREAD:
            uneven = workload.model_copy(update={"length_spread_fraction": UNEVEN_FRACTION})
            yield key, "0, samples of one length", f"{UNEVEN_FRACTION:g} (assumed)", replace(job, workload=uneven)
        else:
            name = key.removeprefix(FREEZE)
            words = ("frozen", "trained") if frozen[name] else ("trained", "frozen")
            yield key, *words, replace(job, model=job.model.with_freeze({name: not frozen[name]}))
