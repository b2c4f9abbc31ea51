"""Galvatron's step of training from what its stages take, and what a layer or the ends cost in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerCost:
    """Of one layer under one strategy, for one micro-batch. Seconds without and with the exchange of gradients; whole
    MiB by stage, as Galvatron rounds them up."""

    compute_s: float
    synced_s: float
    stage_mib: tuple[int, ...]

    @property
    def exchange_s(self) -> float:
        """What the exchange of gradients adds."""
        return self.synced_s - self.compute_s


@dataclass(frozen=True)
class EndsCost:
    """Of embedding and head under one strategy, by stage: seconds without exchange, whole MiB with what the framework
    and its buffers take."""

    compute_s: tuple[float, ...]
    stage_mib: tuple[int, ...]


def step_s(
    compute_s: Sequence[float], synced_s: Sequence[float], chunks: int, counts_every_stage: bool = False
) -> float:
    """Seconds of a step: the larger of two ways to fill the pipeline, and the longest exchange of gradients that no
    computation hides. compute_s: of each stage and micro-batch, ends included; synced_s: of each stage's layers.

    Source: `pipeline_costmodel`, PKU-DAIR/Hetu-Galvatron at cea12ff. It looks at the first and the last stage alone for
    the slowest, which is right where stages are alike; counts_every_stage: the slowest may be any.
    """
    pp, first, last = len(compute_s), compute_s[0], compute_s[-1]
    rest = float(np.sum(compute_s[1:]))
    slowest = max(compute_s) if counts_every_stage else last
    by_last = float(np.sum(compute_s)) + slowest * (chunks - 1)
    waits = min(pp - 1, chunks - 1) * first
    by_first = max(waits / 3, rest / 3) + max(waits * 2 / 3, rest * 2 / 3) + first * max(0, chunks + 1 - pp)
    hidden, exposed = 0.0, 0.0
    for own, synced in zip(compute_s, synced_s, strict=True):
        hidden += own
        exposed = max(exposed, synced - hidden)
    return max(by_last, by_first) + exposed
