"""What is set on MindSpeed-MM's configuration objects of a run: the model cut to few layers, and recompute per stage.

The objects are those of `get_args().mm.model`: model.json with attributes for keys. A model provider copies them each
time it builds a chunk, so what is set before it runs holds for that chunk alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindspeed_mm import model_json
from mm_autoparallel.planner.plan import Plan


def cut_model(model: Any, depth: Mapping[str, int]) -> None:
    """Cut `model` (attributes as in model.json) to `depth` layers of each modality on one stage, nothing recomputed.

    Parts that `depth` does not name keep their layers.
    """
    for modality, part in _parts(model):
        num_layers = depth.get(modality, part.num_layers)
        part.num_layers = num_layers
        setattr(part, model_json.LAYERS_KEY, [num_layers])
        setattr(part, model_json.RECOMPUTE_KEY, [0])
        _set(part, model_json.recompute_settings(0))


@contextmanager
def recompute_of_stage(model: Any, stage: int, chunk: int = 0, plan: Plan | None = None) -> Iterator[dict[str, int]]:
    """While it lasts, each part of `model` is built to recompute what this rank's chunk recomputes, and no more.

    The numbers are `plan`'s; without one those that a plan left in model.json. Parts without either are not touched.
    Gives the numbers that were set, by modality. Raises PlanError where `stage` or `chunk` is none of the plan's.
    """
    numbers: dict[str, int] = {}
    before: list[tuple[Any, dict[str, Any]]] = []
    for modality, part in _parts(model):
        counts = _recompute_counts(modality, part, plan)
        if counts is not None:
            numbers[modality] = _pick(counts, stage, chunk, modality)
            before.append((part, {key: getattr(part, key, None) for key in model_json.RECOMPUTE_SETTINGS}))
    try:
        for (part, _), number in zip(before, numbers.values(), strict=True):
            _set(part, model_json.recompute_settings(number))
        yield numbers
    finally:
        for part, settings in before:
            _set(part, settings)


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """The parts that are there, each with its modality."""
    for modality, section in model_json.SECTIONS.items():
        part = model
        for key in section:
            part = getattr(part, key, None)
        if part is not None:
            yield modality, part


def _recompute_counts(modality: str, part: Any, plan: Plan | None) -> Sequence[Sequence[int]] | None:
    """[chunk][stage]"""
    if plan is not None:
        counts, num_stages = plan.recompute.get(modality), plan.strategy.pp
        if counts is None:
            return None
        return [counts[start : start + num_stages] for start in range(0, len(counts), num_stages)]
    listed = getattr(part, model_json.RECOMPUTE_KEY, None)
    if listed is None:
        return None
    return listed if listed and isinstance(listed[0], (list, tuple)) else [listed]


def _pick(counts: Sequence[Sequence[int]], stage: int, chunk: int, modality: str) -> int:
    if not 0 <= chunk < len(counts) or not 0 <= stage < len(counts[chunk]):
        raise PlanError(
            f"plan: this process builds stage {stage}, chunk {chunk}, and the plan has {len(counts[0])} stages of "
            f"{len(counts)} chunks for {modality}; start the training with the plan's own PP and VPP"
        )
    return counts[chunk][stage]


def _set(part: Any, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        setattr(part, key, value)
