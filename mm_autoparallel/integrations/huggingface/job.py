"""What a config.json has to say in a job beside its model: tokens of images, and parts that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.huggingface.processor import with_image_tokens, with_pixel_bounds

_THINKERS = ("qwen2_5_omni", "qwen3_omni_moe")
_BESIDE = {"talker_config": "talker", "token2wav_config": "vocoder", "code2wav_config": "vocoder"}
"""Models of their own beside a thinker: key → what it is."""


def fill_job(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job of `document`, read from `path`, as with_image_tokens has it, and a sentence for what is not planned.

    Raises JobError where a file that is read is malformed.
    """
    named = document["model"]
    model = read_document(path.parent / named, "model file") if isinstance(named, str) else named
    bounded, scaled = with_pixel_bounds(document, path)
    filled, read = with_image_tokens(bounded, path)
    where = f"model file {path.parent / named}" if isinstance(named, str) else f"job file {path}: model"
    return filled, (*read, *scaled, *(f"{where}: {said}" for said in _left_out(model)))


def _left_out(model: Mapping[str, Any]) -> list[str]:
    """A sentence where a model has a part that is not read; a class told to make no sounds builds none of these."""
    if model.get("model_type") not in _THINKERS or model.get("enable_audio_output") is False:
        return []
    found = [f"its {name} ({key})" for key, name in _BESIDE.items() if isinstance(model.get(key), Mapping)]
    if not found:
        return []
    are = "are" if len(found) > 1 else "is"
    return [f"{' and '.join(found)} {are} left out; the thinker alone is planned, which is what is trained on text"]
