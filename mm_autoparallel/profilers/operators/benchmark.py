"""Micro-benchmarks: each form by itself on the device at hand, once its times have settled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mm_autoparallel.model.profiles.operators.base import MAX_SAMPLES, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples
from mm_autoparallel.profilers.operators.replay import Run, Unrepeatable, prepare
from mm_autoparallel.units import MIB

FORM_EFFORT = Effort(budget_s=0.5, min_rounds=5, max_rounds=MAX_SAMPLES, max_warm_up=4)

ROTATED_BYTES, MAX_ROTATED = 16 * MIB, 16
"""Assumed: calls go round so many operands, so that they lie no nearer than in a model, where others were at work
between; and at most so many sets of them."""

BATCH_MS = 1.0
"""Assumed: so long a row of launches takes on an accelerator, of which one alone would tell what the host takes."""
MAX_BATCH = 256


@dataclass(frozen=True)
class Failed:
    """A form that could not be measured, and why."""

    form: OperatorForm
    reason: str


def measure_forms(
    forms: Iterable[OperatorForm],
    device: torch.device,
    effort: Effort = FORM_EFFORT,
    on_form: Callable[[Sampled | Failed], None] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[list[Sampled], list[Failed]]:
    """The times of `forms`, each one's by itself; those that could not be run. on_form: told each as it is done.

    now: as of Stopwatch."""
    measured: list[Sampled] = []
    failed: list[Failed] = []
    for form in forms:
        try:
            found = Sampled(
                form, _time_us(_rotated(form, device), Stopwatch(device, now), effort, device.type == "cpu")
            )
        except Unrepeatable as failure:
            failed.append(Failed(form, str(failure)))
            on_form(failed[-1])
            continue
        measured.append(found)
        on_form(found)
    return measured, failed


def _rotated(form: OperatorForm, device: torch.device) -> Run:
    """What runs `form` once, each time on the next of several sets of tensors."""
    num_sets = min(MAX_ROTATED, max(1, ROTATED_BYTES // max(1, form.moved_bytes)))
    sets = itertools.cycle([prepare(form, device) for _ in range(num_sets)])
    return lambda: next(sets)()


def _time_us(run: Run, stopwatch: Stopwatch, effort: Effort, one_by_one: bool) -> list[float]:
    num_calls = 1
    if not one_by_one:
        alone_ms = stopwatch.time_ms(run)
        num_calls = min(MAX_BATCH, max(1, round(BATCH_MS / max(alone_ms, 1e-3))))

    def run_all() -> None:
        for _ in range(num_calls):
            run()

    samples = collect_samples(lambda: {"run": stopwatch.time_ms(run_all)}, effort)["run"]
    return [sample_ms * 1e3 / num_calls for sample_ms in samples]
