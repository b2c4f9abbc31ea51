"""Memory of a layer from measured peaks of stages: the linear system of SAPP pipeline balance.

    peak_i = n_i · parameter + (P − i) · Σ_kind n_i,kind · activation_kind + constant (+ head at 0, + tail at P − 1)

Stages between the first and the last give `parameter`, the activations and the constant, by least squares where there
are more of them than unknowns; the first and the last then give head and tail. Without stages enough for the constant
it is taken as 0, with a note. A system that leaves an unknown open, or that gives a negative one, is refused with
the dry run that settles it: among stages with a layer more or less than even and so many of them recomputed, the one
after which that unknown is known best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.recompute_kinds import KINDS, KindCounts
from mm_autoparallel.integrations.mindformers.sapp_init import WHAT, MeasuredStage, SappInit
from mm_autoparallel.units import MIB

Floats = NDArray[np.float64]

NONE = "none"
_PARAMETER, _CONSTANT = "parameter", "constant"

_MISFIT_FRACTION, _TOLD_FRACTION = 0.1, 0.01
"""Assumed: peaks that the system meets worse than the first are not those of one model; than the second, a note.
(The published example of a 175B Llama is met within 4.5 %.)"""

_ROUNDING_BYTES = 1.0 * MIB
"""Peaks are whole MB."""

_RIDGE = 1e-9
"""Keeps open systems solvable while what settles them is looked for."""


@dataclass(frozen=True)
class LayerMemories:
    """Bytes: what a layer holds always, keeps of a micro-batch in flight by kind of recompute (`none` among them), and

    what any stage, the first and the last hold besides. notes: what its reader should know.
    """

    parameter_bytes: float
    activation_bytes: dict[str, float]
    constant_bytes: float
    head_bytes: float
    tail_bytes: float
    notes: tuple[str, ...] = ()


def decompose_memory(init: SappInit) -> LayerMemories:
    """Of the stages that `init` tells of. Raises JobError with the dry run that is missing."""
    middle = [stage for stage in init.stages if 0 < stage.stage < init.num_stages - 1]
    kinds = [NONE, *(kind for kind in KINDS if any(_count(stage, kind) for stage in init.stages))]
    names = [_PARAMETER, *kinds, _CONSTANT]
    rows = np.array([_row(stage, kinds, init.num_stages) for stage in middle]).reshape(len(middle), len(names))
    notes = []
    if np.linalg.matrix_rank(_scaled(rows)) < len(names):
        rows, names = rows[:, :-1], names[:-1]
        if np.linalg.matrix_rank(_scaled(rows)) < len(names):
            raise _open(init, kinds, rows, names)
        notes.append(
            "memory that every stage holds besides its layers cannot be told from these stages; it counts as 0"
        )
    peaks = np.array([stage.peak_bytes for stage in middle])
    solution, *_ = np.linalg.lstsq(rows, peaks, rcond=None)
    misfit = np.abs(rows @ solution - peaks) / peaks
    if np.max(misfit) > _MISFIT_FRACTION:
        worst = middle[int(np.argmax(misfit))]
        raise JobError(
            f"{WHAT} {init.path}: stage {worst.stage} peaks at {worst.peak_bytes / MIB:g} MB, {np.max(misfit):.1%} off "
            "what the other stages tell of it; check its memory, layers and recompute"
        )
    if np.max(misfit) > _TOLD_FRACTION:
        notes.append(f"peaks of the stages are met within {np.max(misfit):.1%} only")
    found = dict(zip(names, (float(value) for value in solution), strict=True))
    negative = next((name for name in (_PARAMETER, *kinds) if found[name] < -_ROUNDING_BYTES), None)
    if negative is not None:
        what = "layer" if negative == _PARAMETER else f"layer with recompute {negative}"
        held = "parameters" if negative == _PARAMETER else "activations"
        advice = _advise(init, kinds, rows, names, negative)
        raise JobError(
            f"{WHAT} {init.path}: its stages give a {what} {found[negative] / MIB:.1f} MB of {held}, which cannot be; "
            f"{advice}"
        )
    constant_bytes = found.get(_CONSTANT, 0.0)
    activation_bytes = {kind: max(0.0, found[kind]) for kind in kinds}

    def beyond_layers_bytes(wanted: int) -> float:
        stage = next(stage for stage in init.stages if stage.stage == wanted)
        known = np.array(_row(stage, kinds, init.num_stages)) @ [
            *(found[n] for n in (_PARAMETER, *kinds)),
            constant_bytes,
        ]
        return stage.peak_bytes - float(known)

    head_bytes, tail_bytes = beyond_layers_bytes(0), beyond_layers_bytes(init.num_stages - 1)
    return LayerMemories(found[_PARAMETER], activation_bytes, constant_bytes, head_bytes, tail_bytes, tuple(notes))


def _count(stage: MeasuredStage, kind: str) -> int:
    names = {"recompute": "full"}
    counts: int = getattr(stage.kinds, names.get(kind, kind))
    return counts


def _row(stage: MeasuredStage, kinds: Sequence[str], num_stages: int) -> list[float]:
    """Coefficients of parameter, each kind and the constant."""
    in_flight = num_stages - stage.stage
    recomputed = sum(_count(stage, kind) for kind in KINDS)
    counts = [stage.num_layers - recomputed if kind == NONE else _count(stage, kind) for kind in kinds]
    return [float(stage.num_layers), *(float(in_flight * count) for count in counts), 1.0]


def _scaled(rows: Floats) -> Floats:
    scale = np.linalg.norm(rows, axis=0)
    scaled: Floats = rows / np.where(scale > 0, scale, 1.0)
    return scaled


def _open(init: SappInit, kinds: Sequence[str], rows: Floats, names: Sequence[str]) -> JobError:
    """Fewer independent stages than unknowns."""
    rank = int(np.linalg.matrix_rank(_scaled(rows))) if len(rows) else 0
    unknowns = ", ".join(names)
    return JobError(
        f"{WHAT} {init.path}: {len(rows)} stages between the first and the last, {rank} of them independent, leave "
        f"{len(names)} unknowns open ({unknowns}); {_advise(init, kinds, rows, names, None)}"
    )


def _advise(init: SappInit, kinds: Sequence[str], rows: Floats, names: Sequence[str], wanted: str | None) -> str:
    """The dry run after which the unknown `wanted` is known best (None: all of them), in words."""
    best: tuple[float, str] | None = None
    for stage in _possible_stages(init, kinds):
        row = np.array([_row(stage, kinds, init.num_stages)[: len(names)]])
        information = np.vstack([rows, row]) if len(rows) else row
        scale = np.where(np.linalg.norm(information, axis=0) > 0, np.linalg.norm(information, axis=0), 1.0)
        normal = (information / scale).T @ (information / scale) + _RIDGE * np.eye(len(names))
        variances = np.diag(np.linalg.inv(normal)) / scale**2
        value = float(variances[names.index(wanted)] if wanted else np.sum(variances * scale**2))
        if best is None or value < best[0]:
            told = [f"{_count(stage, kind)} with recompute {kind}" for kind in kinds if kind != NONE]
            best = (
                value,
                (
                    f"a dry run with {stage.num_layers} layers on stage {stage.stage}"
                    + (f", {' and '.join(told)}," if told else "")
                    + " would settle it best"
                ),
            )
    return best[1] if best else "more stages are needed than this pipeline has"


def _possible_stages(init: SappInit, kinds: Sequence[str]) -> Iterator[MeasuredStage]:
    """Stages between the ends with a layer less or more than even, and none, half or all of a kind recomputed."""
    recomputed = [kind for kind in kinds if kind != NONE]
    for stage in range(1, init.num_stages - 1):
        for num_layers in range(max(1, init.base_layers - 1), init.base_layers + 2):
            for counts in product((0, num_layers // 2, num_layers), repeat=len(recomputed)):
                if sum(counts) <= num_layers:
                    of = dict(zip(recomputed, counts, strict=True))
                    values = (of.get(kind, 0) for kind in KINDS)
                    yield MeasuredStage(-1, stage, num_layers, KindCounts(*values), 0.0)
