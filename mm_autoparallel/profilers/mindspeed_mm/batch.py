"""Samples for a MindSpeed-MM model, of exactly the tokens that the workload says: ids, images and their places.

The keys are those of the batches that MindSpeed-MM's collators make for Qwen2-VL's and InternVL's kinds of image.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.workload import Workload

PLAIN_IDS = 1000
"""Assumed: ids below this are ordinary tokens in every vocabulary; those of images and audio come last."""


def make_batch(config: Any, num_samples: int, workload: Workload, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch for the model of `config` (model.json as attributes), on the CPU; pixels are of `dtype`.

    input_ids, labels, attention_mask: int64 (samples, seq_length). pixel_values and, by the kind of image,
    image_grid_thw or image_flags. Raises ProfileError for images or audio of which no samples can be made here.
    """
    if workload.audio_tokens_per_sample:
        raise ProfileError(
            "audio_tokens_per_sample is given, and samples with audio cannot be made for MindSpeed-MM here; plan with "
            "0 (audio costs are then analytic) or profile with a script that makes its own batches"
        )
    shares = _share(workload.image_tokens_per_sample, workload.images_per_sample)
    ids = _plain_ids(config, num_samples, workload.seq_length)
    images = _make_images(config, shares * num_samples, dtype) if shares else {}
    _place_images(config, ids, shares)
    labels = ids.clone()
    labels[ids == config.img_context_token_id] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **images}


def _share(tokens: int, num_images: int) -> list[int]:
    """Tokens of each image of a sample."""
    if not tokens:
        return []
    return [tokens // num_images + (index < tokens % num_images) for index in range(num_images)]


def _plain_ids(config: Any, num_samples: int, length: int) -> torch.Tensor:
    special = {value for key, value in vars(config).items() if key.endswith("_token_id") and isinstance(value, int)}
    plain = [index for index in range(min(PLAIN_IDS, config.text_decoder.vocab_size)) if index not in special]
    return torch.tensor(plain)[torch.randint(len(plain), (num_samples, length))]


def _place_images(config: Any, ids: torch.Tensor, shares: list[int]) -> None:
    """One image after the other from the sample's start, each behind its mark where the model has one."""
    mark: int | None = getattr(config, "vision_start_token_id", None)
    marks = sum(shares) + len(shares) <= ids.shape[1]
    at = 0
    for tokens in shares:
        if marks and mark is not None:
            ids[:, at] = mark
            at += 1
        ids[:, at : at + tokens] = config.img_context_token_id
        at += tokens


def _make_images(config: Any, tokens: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    encoder = config.image_encoder.vision_encoder
    patch, channels = _side(encoder.patch_size), getattr(encoder, "in_channels", getattr(encoder, "num_channels", 3))
    if not hasattr(encoder, "image_size"):  # any size, in patches
        merge = getattr(encoder, "spatial_merge_size", 2)
        grids = [[1, *(merge * side for side in _sides(count))] for count in tokens]
        num_patches = sum(math.prod(grid) for grid in grids)
        in_features = channels * getattr(encoder, "temporal_patch_size", 2) * patch**2
        return {
            "pixel_values": torch.randn(num_patches, in_features, dtype=dtype),
            "image_grid_thw": torch.tensor(grids),
        }
    side = _side(encoder.image_size)
    of_a_tile = round((side // patch * getattr(encoder, "downsample_ratio", 0.5)) ** 2)
    wrong = [count for count in tokens if count != of_a_tile]
    if wrong:
        raise ProfileError(
            f"an image is {wrong[0]} tokens of the workload, and a tile of this model is {of_a_tile}; give "
            f"image_tokens_per_sample as {of_a_tile} times images_per_sample, the number of tiles"
        )
    pixels = torch.randn(len(tokens), channels, side, side, dtype=dtype)
    return {"pixel_values": pixels, "image_flags": torch.ones(len(tokens), 1, dtype=torch.int64)}


def _sides(area: int) -> tuple[int, int]:
    """The two whole numbers nearest to each other whose product is `area`."""
    shorter = next(side for side in range(math.isqrt(area), 0, -1) if area % side == 0)
    return shorter, area // shorter


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)
