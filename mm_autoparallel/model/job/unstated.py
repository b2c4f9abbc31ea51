"""Which decisive facts of a job nobody states: what of its towers trains, and how long and how alike samples are.

A config.json never says what is frozen. A model.json does, under `freeze` of a tower, and an inline model likewise; a
job's own `freeze` says it over both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload

IMAGE_TOKENS, LENGTH_SPREAD = "workload.image_tokens_per_sample", "workload.length_spread_fraction"
FREEZE = "freeze."

_WORDS = {"images": ("vision", "image"), "audios": ("audio",)}


def find_unstated(
    model: Model, document: Mapping[str, Any], freeze: Mapping[str, bool], workload: Workload
) -> tuple[str, ...]:
    """Keys of a job file that would state what is missing, of models with towers: `freeze.vision`.

    document: the model's own. Adapters train in place of whatever is not frozen, so that none is asked of a tower.
    """
    if not model.encoders:
        return ()
    places = [place for place in _places(document) if place[-1] in ("freeze", "is_freeze") or "freeze_" in place[-1]]
    unstated = []
    for encoder in model.encoders:
        words = (encoder.name, *_WORDS.get(encoder.media, ()))
        said = encoder.name in freeze or any(word in key for place in places for key in place for word in words)
        if not said and model.adapters is None:
            unstated.append(FREEZE + encoder.name)
    images = any(encoder.media == "images" for encoder in model.encoders)
    if images and not workload.image_tokens_per_sample and workload.samples is None:
        unstated.append(IMAGE_TOKENS)
    if workload.samples is None and "length_spread_fraction" not in workload.model_fields_set:
        unstated.append(LENGTH_SPREAD)
    return tuple(unstated)


def _places(document: object, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each key of a document; an entry of a list that has a `name` stands under that."""
    if isinstance(document, Mapping):
        name = document.get("name")
        under = (*above, name) if isinstance(name, str) else above
        for key, value in document.items():
            yield (*under, str(key))
            yield from _places(value, (*under, str(key)))
    elif isinstance(document, Sequence) and not isinstance(document, str):
        for entry in document:
            yield from _places(entry, above)
