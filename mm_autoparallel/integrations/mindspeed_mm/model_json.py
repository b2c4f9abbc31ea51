"""The part of a plan that model.json holds: layers of every virtual stage, and how many of them recompute.

MindSpeed-MM takes `pipeline_num_layers` per part, [stage] or [chunk][stage] (mindspeed_mm/models/vlm_model.py), and one
number of recomputed layers per part, the same on every stage. The numbers per stage stand beside it under a key of our
own, which MindSpeed-MM carries along unread and the hook sets while each rank builds its part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import BYTE_ORDER_MARK, describe_value, read_document
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.integrations.mindspeed_mm.model_reader import is_mindspeed_mm
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import parse_foreign_model, read_model

SECTIONS: dict[str, tuple[str, ...]] = {
    "vision": ("image_encoder", "vision_encoder"),
    "audio": ("audio_encoder", "audio_encoder"),
    "text": ("text_decoder",),
}
"""Modality → where model.json keeps its layers."""

LAYERS_KEY = "pipeline_num_layers"
RECOMPUTE_KEY = "pipeline_recompute_num_layers"
RECOMPUTE_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Megatron's names (megatron/core/transformer/transformer_config.py); all null: nothing is recomputed."""

Counts = Mapping[str, tuple[int, ...]]


def read_model_json(path: Path, decoder: Mapping[str, Any] | None = None) -> Model:
    """The model in the MindSpeed-MM model.json at `path`, `decoder` being what the command line adds to its decoder.

    Raises JobError where it is something else.
    """
    document = read_document(path, "model file")
    if not is_mindspeed_mm(document):
        raise JobError(
            f"model file {path}: it has no text_decoder, so it is no model.json of a MindSpeed-MM vision-language "
            "model (those of examples/qwen2vl are), and a plan cannot be written into it"
        )
    if not decoder:
        return read_model(path)
    text = document["text_decoder"]
    if not isinstance(text, Mapping):
        raise JobError(f"model file {path}: text_decoder is {describe_value(text)}; a mapping is expected")
    return parse_foreign_model(document | {"text_decoder": {**text, **decoder}}, path)


def recompute_settings(count: int) -> dict[str, Any]:
    """The three settings that recompute the first `count` layers of a part that a rank builds."""
    return dict(zip(RECOMPUTE_SETTINGS, ("full", "block", count) if count else (None, None, None), strict=True))


def place_layers(text: str, layers: Counts, recompute: Counts, num_stages: int) -> str:
    """The text of model.json with the counts per virtual stage in it; all else stays byte for byte.

    MindSpeed-MM without our hook recomputes the largest of a part's counts on every stage: never more memory than
    planned, though more time.
    """
    for modality, counts in layers.items():
        path, recomputed = SECTIONS[modality], recompute[modality]
        part = _part(json.loads(text.lstrip(BYTE_ORDER_MARK)), path)
        values: dict[str, Any] = {LAYERS_KEY: _nest(counts, num_stages)}
        if any(recomputed) or RECOMPUTE_KEY in part:
            values[RECOMPUTE_KEY] = _nest(recomputed, num_stages)
        settings = recompute_settings(max(recomputed))
        values |= {key: value for key, value in settings.items() if value is not None or key in part}
        after = "num_layers"
        for key, value in values.items():
            text = set_json_value(text, (*path, key), value, after)
            after = key
    return text


def read_placement(
    path: Path, model: Model, num_stages: int, num_chunks: int, whole: tuple[str, ...] = ()
) -> tuple[Counts, Counts]:
    """Layers and recomputed layers of each modality per virtual stage, as the model.json at `path` has them.

    whole: modalities that every device holds, of which no stage then has layers.
    Raises PlanError where the lists do not fit the stages or the model, or the recompute is not of whole layers.
    """
    document = read_document(path, "model file")
    layers: dict[str, tuple[int, ...]] = {}
    recompute: dict[str, tuple[int, ...]] = {}
    for modality in model.modalities:
        where = ".".join(SECTIONS[modality.name])
        section = _part(document, SECTIONS[modality.name])
        number = modality.layers.num_layers
        if modality.name in whole:
            if section.get(LAYERS_KEY, [number]) != [number]:
                raise PlanError(
                    f"model file {path}: {where}.{LAYERS_KEY} is {describe_value(section[LAYERS_KEY])}; every device "
                    f"holds all of it, so [{number}] is expected"
                )
            layers[modality.name] = recompute[modality.name] = (0,) * num_stages
            continue
        if LAYERS_KEY in section or num_stages > 1:
            counts = _read_counts(path, f"{where}.{LAYERS_KEY}", section.get(LAYERS_KEY), num_stages, num_chunks)
        else:
            counts = (number,)
        if sum(counts) != number:
            raise PlanError(
                f"model file {path}: {where}.{LAYERS_KEY} sums to {sum(counts)}, and num_layers beside it is {number}"
            )
        layers[modality.name] = counts
        if RECOMPUTE_KEY in section:
            of_stages = _read_counts(path, f"{where}.{RECOMPUTE_KEY}", section[RECOMPUTE_KEY], num_stages, num_chunks)
        else:
            of_stages = _read_recompute(path, where, section, counts)
        for k, (recomputed, held) in enumerate(zip(of_stages, counts, strict=True)):
            if recomputed > held:
                raise PlanError(
                    f"model file {path}: {where}.{RECOMPUTE_KEY} recomputes {recomputed} layers on virtual stage {k}, "
                    f"which holds {held}"
                )
        recompute[modality.name] = of_stages
    return layers, recompute


def _part(document: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    for key in path:
        document = document[key]
    found: Mapping[str, Any] = document
    return found


def _nest(counts: tuple[int, ...], num_stages: int) -> list[int] | list[list[int]]:
    rows = [list(counts[start : start + num_stages]) for start in range(0, len(counts), num_stages)]
    return rows if len(rows) > 1 else rows[0]


def _read_counts(path: Path, where: str, value: Any, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    rows = value if num_chunks > 1 else [value]
    shape = f"{num_chunks} lists of {num_stages}" if num_chunks > 1 else f"a list of {num_stages}"
    if (
        not isinstance(rows, list)
        or len(rows) != num_chunks
        or any(not isinstance(row, list) or len(row) != num_stages for row in rows)
        or any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for row in rows for count in row)
    ):
        raise PlanError(
            f"model file {path}: {where} is {describe_value(value)}; {shape} whole numbers is expected, because the "
            f"launch script has {num_stages} pipeline stages and {num_chunks} chunks on each"
        )
    return tuple(count for row in rows for count in row)


def _read_recompute(path: Path, where: str, section: Mapping[str, Any], held: tuple[int, ...]) -> tuple[int, ...]:
    """What the one number that MindSpeed-MM knows means for each virtual stage."""
    granularity, method, number = (section.get(key) for key in RECOMPUTE_SETTINGS)
    if granularity is None:
        return (0,) * len(held)
    if granularity == "full" and isinstance(number, int):
        if method == "block":
            return tuple(min(number, count) for count in held)
        if method == "uniform" and number == 1:
            return held
    raise PlanError(
        f"model file {path}: {where} recomputes with granularity {describe_value(granularity)}, method "
        f"{describe_value(method)} and {describe_value(number)} layers; a plan can only say which whole layers are "
        'recomputed, so "full" with "block", or with "uniform" and 1, is expected'
    )
