"""What a host takes to launch one layer of the decoder and one of a tower, forward and backward apart.

A host gives a device its operators one by one; where these are small the device waits for it, and a layer takes what
its launching takes. That is timed by the clock of the process, without waiting for the device, on samples so short that
the device is never behind. One layer is the difference of two whole models, one of which has more layers of that kind
and is otherwise the same: everything that is not a layer falls out. All models take turns, so that whatever disturbs
the machine disturbs them alike.

On a CPU computing is launching: there the widths must be small, so that operators are nearly nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.store import Timing
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples, summarize
from mm_autoparallel.profilers.subject import Build, Subject

MORE_LAYERS = 4
"""Layers by which two models differ. Assumed: enough to stand out, and to fit on one device."""

SAMPLE_TOKENS = 64
"""Of a sample, where images ask for no more. Assumed: a layer's products then take less than launching it."""

EFFORT = Effort(budget_s=60.0, min_rounds=10, max_rounds=100, max_warm_up=10)


@dataclass(frozen=True)
class HostTimes:
    """Of one layer of a modality, all in ms: launching its forward, and the backward of inputs and weights together."""

    forward_ms: Timing
    backward_ms: Timing

    @property
    def backward_factor(self) -> float:
        """Backward over forward."""
        return self.backward_ms.median_ms / self.forward_ms.median_ms if self.forward_ms.median_ms else 0.0


def measure_host(
    subject: Subject,
    workload: Workload,
    num_layers: Mapping[str, int],
    device: torch.device,
    effort: Effort = EFFORT,
) -> dict[str, HostTimes]:
    """Modality → what launching one of its layers takes, in the process that asks.

    num_layers: of the whole model. A modality of one layer cannot be measured so. Everything should train in
    `subject`: of a frozen tower there is no backward to time.
    """
    told = {name: min(MORE_LAYERS, count - 1) for name, count in num_layers.items() if count > 1}
    depths = {"": dict.fromkeys(num_layers, 1)}
    depths |= {name: {**depths[""], name: 1 + more} for name, more in told.items()}
    models = {
        name: subject.build_model(Build(depth=depth, device=device, tp_mesh=None)) for name, depth in depths.items()
    }
    stopwatch = Stopwatch(device)

    def run_round() -> dict[str, float]:
        found = {
            name: _launch_ms(partial(subject.forward_step, model, 1, workload), stopwatch.settle)
            for name, model in models.items()
        }
        plain = found[""]
        return {
            f"{name} {direction}": (found[name][at] - plain[at]) / more
            for name, more in told.items()
            for at, direction in enumerate(("forward", "backward"))
        }

    samples = collect_samples(run_round, effort)
    return {name: HostTimes(*(summarize(samples[f"{name} {way}"]) for way in ("forward", "backward"))) for name in told}


def _launch_ms(forward: Callable[[], torch.Tensor], settle: Callable[[], None]) -> tuple[float, float]:
    """What the process takes to launch a forward, and its backward; the device is idle as either begins."""
    settle()
    start_s = time.perf_counter()
    loss = forward()
    launched_s = time.perf_counter()
    settle()
    again_s = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    end_s = time.perf_counter()
    settle()
    return (launched_s - start_s) * 1e3, (end_s - again_s) * 1e3
