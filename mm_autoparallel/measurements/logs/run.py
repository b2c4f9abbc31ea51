"""Run: what a reader found in a log, in this project's words, before a device is put under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.model.job.strategy import Strategy


@dataclass(frozen=True)
class Step:
    """One entry: the mean time of a step since the entry before. number: of the step, which begins anew where the job

    is started again. samples: of a step; None: not said.
    """

    step_ms: float
    number: int
    samples: int | None = None


@dataclass(frozen=True)
class Run:
    """One job of one log.

    software: the stack, as calibrations call it. model: as a job's `model`; workload: as a job's, its batch and length
    included. placed: layers and recomputed layers of each modality on each stage and chunk, of models with encoders;
    layers: of the text decoder, None where evenly but for first_layers and last_layers; num_recomputed: layers of each
    chunk that recompute, all of them where recompute_all. devices_per_node: None where the log does not tell; device:
    what it calls its device. rank_peak_bytes: rank → peak allocated bytes, rank_resting_bytes: between steps;
    peak_bytes: of all ranks alike. first_step: peaks were told after one step. parameters: pipeline stage → parameters
    of its first tensor parallel rank, as the framework counted them, or of the whole model. flops_per_s: of a device,
    as it counted them. out_of_memory: it ended so.
    """

    software: str
    model: Mapping[str, Any]
    strategy: Strategy
    workload: Mapping[str, Any]
    steps: tuple[Step, ...]
    placed: tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]] | None = None
    layers: tuple[int, ...] | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    recompute_all: bool = False
    num_recomputed: int = 0
    devices_per_node: int | None = None
    device: str | None = None
    rank_peak_bytes: Mapping[int, float] = field(default_factory=dict)
    rank_resting_bytes: Mapping[int, float] = field(default_factory=dict)
    peak_bytes: float | None = None
    first_step: bool = False
    stage_parameters: Mapping[int, int] = field(default_factory=dict)
    parameters: int | None = None
    flops_per_s: tuple[float, ...] = ()
    out_of_memory: bool = False
    remarks: tuple[str, ...] = ()
