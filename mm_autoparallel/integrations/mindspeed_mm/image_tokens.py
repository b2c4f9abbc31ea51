"""How many tokens the images of a sample come to: from MindSpeed-MM's data file, at most, where nobody says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.model.job.model import Encoder, Patches
from mm_autoparallel.model.readers.foreign import Section


@dataclass(frozen=True)
class ImageTokens:
    """Tokens after merging of all images of a sample, into how many attention spans they divide, and why so many."""

    tokens: int
    spans: int
    reason: str


def tokens_of_images(
    data: Mapping[str, Any], path: Path, encoder: Encoder, patch_size: int | None, images: int, seq_length: int
) -> ImageTokens | None:
    """The most that the data file at `path`, whose content is `data`, allows `images` images of a sample.

    patch_size: pixels of a patch's side in the model file, None where it does not say. Tokens beyond `seq_length` are
    cut off. None where the file limits nothing. Raises JobError where its figures are malformed.
    """
    file = Section(data, path, what="data file")
    parameters = file.section("dataset_param", {})
    tiles = _tiles(parameters, images)
    if tiles is None:
        tiles = _pixels(parameters.section("preprocess_parameters", {}), encoder, patch_size, images)
    if tiles is None:
        tiles = _fixed(encoder, images, tiled=parameters.text("dataset_type", "") == "deepseekvl2")
    if tiles is None or tiles.tokens <= seq_length:
        return tiles
    of_span = min(tiles.tokens // tiles.spans, seq_length)
    spans = max(1, min(tiles.spans, seq_length // of_span))
    return ImageTokens(min(tiles.tokens, spans * of_span), spans, f"{tiles.reason}, cut to seq-length {seq_length}")


def _tiles(parameters: Section, images: int) -> ImageTokens | None:
    """InternVL cuts an image into tiles of image_size, at most max_dynamic_patch, and adds the whole as a thumbnail.

    Each tile is (image_size / patch_size · down_sample_ratio)² tokens (dynamic_preprocess of OpenGVLab/InternVL).
    """
    if not all(parameters.has(key) for key in ("patch_size", "image_size", "down_sample_ratio")):
        return None
    side = parameters.side("image_size") // parameters.side("patch_size")
    merged = side // parameters.ratio("down_sample_ratio", 0.5)
    of_tile = max(1, merged) ** 2
    most = parameters.count("max_dynamic_patch", 1) if parameters.flag("dynamic_image_size", True) else 1
    tiles = most + int(most > 1 and parameters.flag("use_thumbnail", True))
    return ImageTokens(
        images * tiles * of_tile,
        images * tiles,
        f"{tiles} tiles of {of_tile} each, the most that max_dynamic_patch {most} allows",
    )


def _pixels(parameters: Section, encoder: Encoder, patch_size: int | None, images: int) -> ImageTokens | None:
    """Qwen's and GLM's towers take an image as it is, scaled down to image_max_pixels (image_resolution in 2.0)."""
    key = next((key for key in ("image_max_pixels", "image_resolution") if parameters.has(key)), None)
    if key is None or patch_size is None:
        return None
    limit = parameters.count(key)
    of_image = max(1, limit // (patch_size**2 * encoder.projector.merge_tokens))
    return ImageTokens(images * of_image, images, f"the most that {key} {limit} allows")


_DEEPSEEK_TILES = 10
"""DeepSeek-VL2 cuts an image into at most 9 tiles and adds the whole (arXiv:2412.10302, section 2.1)."""


def _fixed(encoder: Encoder, images: int, tiled: bool) -> ImageTokens | None:
    """Towers whose learned positions are for images of one size give as many tokens of each image, or of each tile."""
    stem = encoder.stem
    if not isinstance(stem, Patches) or not stem.num_positions or encoder.layers.rotary:
        return None
    patches = stem.num_positions - int(stem.class_token)
    of_image = max(1, -(-patches // encoder.projector.merge_tokens))
    if tiled:
        reason = f"{_DEEPSEEK_TILES} tiles of {of_image} each, the most that DeepSeek-VL2 makes"
        return ImageTokens(images * _DEEPSEEK_TILES * of_image, images * _DEEPSEEK_TILES, reason)
    return ImageTokens(images * of_image, images, "as many as the model has positions for")
