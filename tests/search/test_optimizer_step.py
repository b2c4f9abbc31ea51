"""What passes during the optimizer's step counts: no plan is proven that exceeds its memory then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mm_autoparallel.errors import NoFeasiblePlan
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.search.planner import search

#: So few tokens keep little, and the optimizer's step needs most.
SHORT = {"seq_length": 64, "image_tokens_per_sample": 16}
LIMITS: dict[str, Any] = {"pp": (4,), "tp": (1,), "cp": (1,), "mbs": (1,), "zero": (0,)}


@pytest.fixture
def short_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Text layers on short samples, all of it trained."""

    def make(stack: str, num_layers: int, memory_bytes: float) -> Job:
        workload = {"stack": stack, **SHORT}
        job = make_job(memory_bytes, num_layers=num_layers, freeze_vision=False, workload=workload, **LIMITS)
        return replace(job, calibration="a100-80g")

    return make


@pytest.mark.parametrize(
    ("stack", "num_layers", "memory_bytes", "layers"),
    [
        ("transformers", 12, 6.0e9, (2, 4, 4, 2)),
        ("transformers", 12, 5.9e9, (1, 4, 4, 3)),  # the first split is faster, and its first stage too full then
        ("mindspeed", 8, 4.5e9, (1, 3, 3, 1)),  # one tensor that passes then, when no activations are kept
    ],
)
def test_the_best_plan_fits_its_memory_in_every_moment(
    short_job: Callable[..., Job], stack: str, num_layers: int, memory_bytes: float, layers: tuple[int, ...]
) -> None:
    job = short_job(stack, num_layers, memory_bytes)
    plan = search(job, num_workers=1).plan
    estimate = evaluate(job, plan)
    assert estimate.fits
    assert plan.layers["text"] == layers
    for stage, peak_bytes in zip(estimate.memory, estimate.peak_memory_bytes, strict=True):
        assert stage.total_bytes == pytest.approx(peak_bytes, rel=1e-12)


def test_nothing_fits_where_the_optimizer_s_step_does_not(short_job: Callable[..., Job]) -> None:
    with pytest.raises(NoFeasiblePlan, match=r"exceeds its limit by at least 0\.38 GB \(stage 0: 4\.65 GB"):
        search(short_job("transformers", 8, 4.5e9), num_workers=1)
