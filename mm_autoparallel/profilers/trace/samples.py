"""Samples for a model that nobody described: tokens, images and sounds whose forms follow from its config.

What a forward asks for is read from its signature; how wide a patch or a frame is, from the config, and where that does
not fit, from the first matrix that refused it. Integers are real, fractions hold no numbers (fakes.py).
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]

_SAMPLES_PER_FRAME = 160
"""Of waveforms of 16 kHz, ten milliseconds: what nearly all feature extractors of transformers step by."""


_PLACES = "image_embeds_position_mask"

_MEL_BINS = (
    *("num_mel_bins", "n_mel_bins", "input_dim", "n_mels", "mel_bins", "feature_size"),
    *("input_feat_per_channel", "feature_projection_input_dim"),
)


@dataclass(frozen=True)
class Entry:
    """What the first matrix that a sample meets takes. features: numbers of a patch or a frame, of a linear layer.

    channels, kernel: of a convolution.
    """

    features: int = 0
    channels: int = 0
    kernel: tuple[int, ...] = ()


def entry_of(failure: BaseException) -> Entry | None:
    """Of the innermost module that was running when `failure` was raised: the first matrix in it. None: it has none."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(failure.__traceback__)]
    inside = [module for module in running if isinstance(module, nn.Module)]
    for module in inside[-1].modules() if inside else ():
        if isinstance(module, nn.Linear):
            return Entry(features=module.in_features)
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return Entry(channels=module.in_channels, kernel=tuple(int(size) for size in module.kernel_size))
    return None


def signature_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a forward; of wrapped ones those of what they wrap."""
    return dict(inspect.signature(function).parameters)


def text_batch(model: nn.Module, vocab_size: int, num_samples: int, seq_length: int) -> Batch:
    """Tokens and labels, for the encoder too where there is one."""
    asked = signature_of(model.forward)
    tokens = torch.ones((num_samples, seq_length), dtype=torch.int64) * min(5, vocab_size - 1)
    batch: Batch = {"image_attention_mask": torch.ones((num_samples, seq_length, 1), dtype=torch.int64)}
    batch = fitting(batch, model.forward)
    for name in ("input_ids", "decoder_input_ids", "labels"):
        if name in asked:
            batch[name] = tokens
    if "attention_mask" in asked and ("input_ids" in asked or "decoder_input_ids" not in asked):  # else of sounds
        batch["attention_mask"] = torch.ones_like(tokens)
    if "use_cache" in asked or "kwargs" in asked:
        batch["use_cache"] = False
    if "bbox" in asked:
        batch["bbox"] = torch.zeros((num_samples, seq_length, 4))  # fractions of a page
    return batch


def coded(batch: Batch, model: nn.Module) -> list[Batch]:
    """`batch`; with types of tokens, where the model takes some, all of text; and ways to give several codes a token,
    where its config says how many: as rows, as columns."""
    types = [name for name in ("token_type_ids", "mm_token_type_ids") if name in signature_of(model.forward)]
    if types and "input_ids" in batch:
        return [batch, batch | {name: torch.zeros_like(batch["input_ids"]) for name in types}]
    count = int(getattr(getattr(model, "config", None), "num_codebooks", 1) or 1)
    tokens = batch.get("input_ids")
    if count < 2 or tokens is None:
        return [batch]
    labels = {"labels": tokens[..., None].repeat(1, 1, count)} if "labels" in batch else {}
    rows = batch | labels | {"input_ids": tokens.repeat_interleave(count, dim=0)}
    beside_text = batch | {"input_ids": tokens[..., None].repeat(1, 1, count + 1)}
    return [batch, rows, beside_text]


@dataclass(frozen=True)
class _Images:
    """The images of one batch, in the sizes that a config and the first matrix name.

    num_samples: of text, which share the images. rows, columns: tokens of an image; high, wide: its patches. patch,
    side: in pixels, of a patch and of a square image; temporal: frames of a patch. dtype: of pixels.
    """

    num_images: int
    num_samples: int
    rows: int
    columns: int
    merge: int
    patch: int
    side: int
    fine_side: int
    channels: int
    temporal: int
    most_tiles: int
    features: int
    dtype: torch.dtype

    @property
    def high(self) -> int:
        return self.rows * self.merge

    @property
    def wide(self) -> int:
        return self.columns * self.merge

    @property
    def patches(self) -> int:
        return self.high * self.wide

    @property
    def per_sample(self) -> int:
        return max(1, self.num_images // self.num_samples)

    def pixels(self, *shape: int) -> Callable[[], Tensor]:
        """Made when they are needed; of zeros some classes take an image for padding."""
        return partial(torch.ones, shape, dtype=self.dtype)

    def each(self, *numbers: int) -> Tensor:
        """A row of these for every image."""
        return torch.tensor([numbers]).repeat(self.num_images, 1)


def _read_images(
    config: Any, num_images: int, num_samples: int, tokens: int, dtype: torch.dtype, entry: Entry
) -> _Images:
    """The sizes that `config` names, those of `entry` before them."""
    vision = _vision_of(config)
    channels = _first(vision, "num_channels", "in_channels", "in_chans", "channels", default=3)
    patch = _side(_first(vision, "patch_size", "spatial_patch_size", default=14))
    if len(entry.kernel) > 1:
        channels, patch = entry.channels, entry.kernel[-1]
    temporal = _first(vision, "temporal_patch_size", default=1)
    if len(entry.kernel) == 3:  # time, height, width
        temporal = entry.kernel[0]
    rows = next(rows for rows in range(math.isqrt(max(1, tokens)), 0, -1) if max(1, tokens) % rows == 0)
    side = _side(
        _first(vision, "image_size", "img_size", "resolution", default=None)
        or _first(config, "image_size", default=224)
    )
    fine = _part(config, "high_res_vision_config")
    return _Images(
        num_images=num_images,
        num_samples=num_samples,
        rows=rows,
        columns=max(1, tokens) // rows,
        merge=_merge(vision, config),
        patch=patch,
        side=side,
        fine_side=_side(_first(fine, "image_size", default=side)) if fine is not config else side,
        channels=channels,
        temporal=temporal,
        most_tiles=_first(vision, "max_num_tiles", default=1),
        features=entry.features or channels * temporal * patch * patch,
        dtype=dtype,
    )


def _beside_any(images: _Images) -> Batch:
    """What classes ask for in whatever form they take pixels."""
    words = torch.ones((images.num_images, 32), dtype=torch.int64)
    return {
        "high_res_pixel_values": images.pixels(images.num_images, images.channels, images.fine_side, images.fine_side),
        "qformer_input_ids": words,
        "qformer_attention_mask": words,
        _PLACES: None,
        "num_local_patches": torch.zeros(images.num_images, dtype=torch.int64),
    }


def _beside_squares(images: _Images) -> Batch:
    """What stands beside square images."""
    num_images, side, of_samples = images.num_images, images.side, (images.num_samples, images.per_sample)
    return _beside_any(images) | {
        "pixel_mask": torch.ones((num_images, side, side), dtype=torch.bool),
        "image_sizes": images.each(side, side),
        "pixel_attention_mask": torch.ones((num_images, 1, side, side), dtype=torch.bool),
        "aspect_ratio_ids": torch.ones(of_samples, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones((*of_samples, images.most_tiles), dtype=torch.int64),
    }


def _beside_grids(images: _Images) -> Batch:
    """What stands beside images whose patches make a grid."""
    grid = images.each(1, images.high, images.wide)
    return _beside_any(images) | {
        "image_grid_thw": grid,
        "spatial_shapes": grid[:, 1:],
        "image_grid_hw": grid[:, 1:],
        "target_sizes": grid[:, 1:],
        "image_merge_sizes": torch.full((images.num_images,), images.merge),
    }


def _list_squares(images: _Images) -> Iterator[Batch]:
    """Square images: each by itself, in tiles, in samples."""
    beside, pixels = _beside_squares(images), images.pixels
    num_images, channels, side = images.num_images, images.channels, images.side
    yield beside | {"pixel_values": pixels(num_images, channels, side, side)}
    yield beside | {"pixel_values": pixels(num_images, 1, channels, side, side)}
    tiles = images.most_tiles
    yield beside | {"pixel_values": pixels(images.num_samples, images.per_sample, tiles, channels, side, side)}
    tiled = beside | {"pixel_attention_mask": torch.ones((num_images, 1), dtype=torch.bool)}
    yield tiled | {"pixel_values": pixels(num_images, 1, channels, side, side)}
    for tiles in (2, 3, 5):
        yield beside | {"pixel_values": pixels(num_images, tiles, channels, side, side)}


def _list_patches(images: _Images) -> Iterator[Batch]:
    """Patches in a row, the likeliest form first."""
    num_images, patches, patch, pixels = images.num_images, images.patches, images.patch, images.pixels
    channels, temporal = images.channels, images.temporal
    beside = {
        **_beside_grids(images),
        "pixel_attention_mask": torch.ones((num_images, patches), dtype=torch.int64),
        "image_position_ids": _positions(images.high, images.wide, num_images),
    }
    yield beside | {"pixel_values": pixels(num_images * patches, images.features)}
    yield beside | {"pixel_values": pixels(num_images, patches, images.features)}
    yield beside | {"pixel_values": pixels(num_images * patches, channels, patch, patch)}
    yield beside | {"pixel_values": pixels(num_images * patches, channels, temporal, patch, patch)}
    yield beside | {"pixel_values": pixels(num_images * patches, temporal, patch, patch, channels)}


def image_batches(
    config: Any, num_images: int, num_samples: int, tokens: int, dtype: torch.dtype, entry: Entry | None = None
) -> Iterator[Batch]:
    """Ways to give `num_images` images of about `tokens` tokens each, the likeliest first; all names of each way.

    entry: what the first matrix takes, where that is known to be other than the config says.
    """
    entry = entry or Entry()
    images = _read_images(config, num_images, num_samples, tokens, dtype, entry)
    channels, patch, side, pixels = images.channels, images.patch, images.side, images.pixels
    likeliest, *others = _list_patches(images)
    yield likeliest
    yield from _list_squares(images)
    yield from others
    square = patch * images.merge
    of_tokens = {"image_grid_thw": images.each(1, images.rows, images.columns)}
    yield of_tokens | {"pixel_values": pixels(num_images * max(1, tokens), square, square, channels)}
    crops = side // patch
    yield _pooled_crops(num_images, crops) | {"pixel_values": pixels(num_images, crops**2, images.features)}
    tall, broad = images.high * patch, images.wide * patch
    sized = _beside_grids(images) | {"image_sizes": images.each(tall, broad)}
    yield sized | {"pixel_values": pixels(num_images, channels, tall, broad)}
    usual = _first(_vision_of(config), "patch_embed_hidden_size", default=channels * patch * patch)
    flattened = pixels(num_images, images.patches, (entry.features or usual) + 2)  # each with its row and column
    attended = torch.ones((num_images, images.patches), dtype=torch.int64)
    yield {"flattened_patches": flattened, "attention_mask": attended}


def _vision_of(config: Any) -> Any:
    return _part(config, "vision_config", "vision", "visual_config", "image_config", "vit_config", "vq_config")


def count_places(config: Any, function: Callable[..., Any]) -> int:
    """Tokens of text whose places an image takes, of a class that asks which ones these are; else 0."""
    return _first(config, "latent_query_num", default=0) if _PLACES in signature_of(function) else 0


def with_places(batch: Batch, count: int) -> Batch:
    """`batch` with the first `count` tokens of each sample as the places of its image."""
    places = torch.zeros_like(batch["input_ids"])
    places[:, :count] = 1
    return batch | {_PLACES: places}


def _pooled_crops(num_images: int, rows: int) -> Batch:
    """Of images of one crop of `rows` rows of patches: the patches that each token pools, two by two, and its grid."""
    pooled = -(-rows // 2)
    ys, xs = torch.meshgrid(torch.arange(pooled), torch.arange(pooled), indexing="ij")
    patches = [
        torch.where((2 * ys + y < rows) & (2 * xs + x < rows), (2 * ys + y) * rows + 2 * xs + x, -1).flatten()
        for y in (0, 1)
        for x in (0, 1)
    ]
    of_one = torch.stack(patches, dim=-1)
    each = [torch.where(of_one < 0, of_one, of_one + image * rows * rows) for image in range(num_images)]
    return {
        "image_token_pooling": torch.cat(each),
        "image_grids": torch.tensor([[pooled, pooled, 0, 0]]).repeat(num_images, 1),
    }


def audio_batches(
    config: Any, num_sounds: int, tokens: int, dtype: torch.dtype, entry: Entry | None = None
) -> Iterator[Batch]:
    """Ways to give sounds of about `tokens` tokens each: as a spectrogram, codes or a waveform. entry: as above."""
    audio = _part(config, "audio_config", "audio_encoder_config", "encoder_config", "sound_config")
    bins = _first(audio, *_MEL_BINS, default=128)
    if entry is not None:
        bins = entry.features or (entry.channels if len(entry.kernel) == 1 else bins)
    fixed = 2 * _first(audio, "max_source_positions", default=1500)
    for frames in (fixed, 8 * max(1, tokens), 4 * max(1, tokens), 2 * max(1, tokens)):
        lengths = torch.full((num_sounds,), frames, dtype=torch.int64)
        masks = {
            "feature_attention_mask": torch.ones((num_sounds, frames), dtype=torch.int64),
            "input_features_mask": torch.ones((num_sounds, frames), dtype=torch.bool),
            "audio_feature_lengths": lengths,
            "chunk_sample_lengths": lengths * _SAMPLES_PER_FRAME,
            "padding_mask": partial(torch.ones, (num_sounds, frames * _SAMPLES_PER_FRAME), dtype=torch.int64),
        }
        for shape in ((num_sounds, bins, frames), (num_sounds, frames, bins)):
            yield masks | {"input_features": partial(torch.zeros, shape, dtype=dtype)}
    codes = torch.zeros((num_sounds, max(1, tokens), bins), dtype=torch.int64)
    yield {"audio_input_ids": codes, "audio_input_ids_mask": torch.ones(codes.shape[:2], dtype=torch.int64)}
    per_token = _first(audio, "samples_per_token", "audio_samples_per_token", default=8 * _SAMPLES_PER_FRAME)
    length = max(1, tokens) * per_token
    heard = partial(torch.ones, (num_sounds, length), dtype=torch.bool)
    for wave in ((num_sounds, length), (num_sounds, 1, length)):
        waves = partial(torch.zeros, wave, dtype=dtype)
        yield {"input_values": waves, "input_values_mask": heard, "padding_mask": heard}


def fitting(batch: Mapping[str, Any], function: Callable[..., Any], needed: bool = False) -> Batch:
    """What of `batch` the function asks for; what it cannot do without, if `needed`."""
    asked = signature_of(function)
    wanted = [name for name, one in asked.items() if not needed or one.default is inspect.Parameter.empty]
    return {name: batch[name] for name in wanted if name in batch}


def made(batch: Mapping[str, Any]) -> Batch:
    """The batch with the tensors that its ways only say how to make: there are many ways, and images are large."""
    return {name: value() if callable(value) else value for name, value in batch.items()}


def asked_for(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that the function cannot do without."""
    empty = inspect.Parameter.empty
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in signature_of(function).items() if one.default is empty and one.kind not in variable]


def _positions(high: int, wide: int, num_images: int) -> Tensor:
    ys, xs = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    return torch.stack([xs.flatten(), ys.flatten()], dim=-1).repeat(num_images, 1, 1)


def _merge(vision: Any, config: Any) -> int:
    found = _first(vision, "spatial_merge_size", "merge_size", default=None)
    if found is None:
        found = _first(config, "spatial_merge_size", "merge_size", "downsample_factor", default=None)
    if found is None:
        found = _first(vision, "pooling_kernel_size", default=1)
    while isinstance(found, (list, tuple)):
        found = found[0]
    return int(found)


def _part(config: Any, *names: str) -> Any:
    for holder in (config, getattr(config, "thinker_config", None), getattr(config, "encoder", None)):
        for name in names:
            found = getattr(holder, name, None)
            if found is not None:
                return found
    return config


def _first(holder: Any, *names: str, default: Any) -> Any:
    for name in names:
        found = getattr(holder, name, None)
        if found is not None:
            return found
    return default


def _side(value: Any) -> int:
    if isinstance(value, Mapping):
        value = next(iter(value.values()))
    while isinstance(value, (list, tuple)):
        value = value[-1]
    return int(value)
