"""preprocessor_config.json beside a job's config.json: how large an image may be made, and so how many tokens it is.

Of processors that cut images of any size into patches and merge them (Qwen2-VL and all that follow it): `patch_size`,
`merge_size`, and the fewest and most pixels as `min_pixels` and `max_pixels`, or as `size` with `shortest_edge` and
`longest_edge`, which count pixels too. An image of P pixels becomes P / (patch_size x merge_size)^2 tokens. What makes
all images one size is left alone: the model says what those become.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_there, read_document

FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class ImageTokens:
    """Tokens that one image may become, and pixels that it may be made, as the file at `path` says."""

    path: Path
    fewest: int
    most: int
    least_pixels: int
    most_pixels: int


def read_image_tokens(path: Path) -> ImageTokens | None:
    """What the processor's file at `path` says; None where there is none, or it cuts no images into patches.

    Raises JobError naming file, key and value for what is no count, or no room between the fewest and the most.
    """
    if not is_there(path):
        return None
    content = read_document(path, "processor file")
    size = content.get("size")
    bounds = size if isinstance(size, Mapping) else {}
    named = {
        "min_pixels": content.get("min_pixels", bounds.get("shortest_edge")),
        "max_pixels": content.get("max_pixels", bounds.get("longest_edge")),
        "patch_size": content.get("patch_size"),
        "merge_size": content.get("merge_size"),
    }
    if any(value is None for value in named.values()):
        return None
    fewest, most, patch, merge = (_count(path, key, value) for key, value in named.items())
    pixels = (patch * merge) ** 2
    found = ImageTokens(path, max(1, fewest // pixels), most // pixels, fewest, most)
    if found.most < found.fewest:
        raise JobError(
            f"max_pixels is {most}, which is less than min_pixels {fewest} or than one token of "
            f"{pixels} pixels; mend it",
            where=f"processor file {path}",
        )
    return found


def _count(path: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise JobError(
            f"{key} is {describe_value(value)}; a count of 1 or more is expected", where=f"processor file {path}"
        )
    return value


def with_image_tokens(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job of `document`, read from `path`, with the tokens of its images where the processor's file tells them.

    They are filled in where `workload` says how many images a sample has and leaves out their tokens: then each is one
    of the largest. The sentences say what was read, or that tokens which the job states are no image's.
    """
    model, workload = document.get("model"), document.get("workload")
    if not isinstance(model, str) or not isinstance(workload, dict) or Path(model).name != "config.json":
        return document, ()
    count, stated = workload.get("images_per_sample"), workload.get("image_tokens_per_sample")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        count = 1 if stated else None
    if count is None:
        return document, ()
    found = read_image_tokens((path.parent / model).parent / FILE)
    if found is None:
        return document, ()
    allowed = f"{found.path} makes {found.fewest} to {found.most} tokens of an image"
    if stated is None:
        tokens = count * found.most
        filled = document | {"workload": workload | {"image_tokens_per_sample": tokens}}
        return filled, (
            f"workload.image_tokens_per_sample is read: {allowed}, and {count} of the largest make {tokens}",
        )
    if isinstance(stated, int) and stated and not found.fewest <= stated / count <= found.most:
        return document, (
            f"workload.image_tokens_per_sample is {stated} in {count} images, {stated / count:g} each, and {allowed}",
        )
    return document, ()


def with_pixel_bounds(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job of `document`, read from `path`, whose file of samples has images scaled as the processor's file says,
    where the job says no pixels itself; and a sentence then."""
    model, workload = document.get("model"), document.get("workload")
    if not isinstance(model, str) or not isinstance(workload, dict) or Path(model).name != "config.json":
        return document, ()
    samples = workload.get("samples")
    source = {"file": samples} if isinstance(samples, str) else samples
    if not isinstance(source, dict) or "file" not in source or {"least_pixels", "most_pixels"} & source.keys():
        return document, ()
    found = read_image_tokens((path.parent / model).parent / FILE)
    if found is None:
        return document, ()
    bounds = {"least_pixels": found.least_pixels, "most_pixels": found.most_pixels}
    filled = document | {"workload": workload | {"samples": source | bounds}}
    return filled, (
        f"workload.samples: {found.path} makes images of {found.least_pixels:,} to {found.most_pixels:,} pixels, and "
        "so are those of the samples that say pixels",
    )
