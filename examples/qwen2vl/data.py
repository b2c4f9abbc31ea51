"""Data: batches of the photographs that scikit-image ships and of tokens that a null tokenizer would give.

A sample is its images, each between its start and end token, and then text. Sample i is the same in every run and on
every rank, so that runs under different parallel sizes see the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import skimage.data
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import Qwen2VLConfig

from failures import TrainingError

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")
"""Colour images inside the scikit-image package itself; nothing is downloaded."""

# Of the Qwen2-VL image processor (preprocessor_config.json): the statistics that CLIP was trained with.
_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_DEVIATION = (0.26862954, 0.26130258, 0.27577711)

IGNORED = -100
"""Label of a token that is not to be predicted (the default of cross_entropy)."""


@dataclass(frozen=True)
class SampleShape:
    """What one sample consists of. grid: (height, width) of an image in patches, each a multiple of the merge size."""

    seq_length: int
    num_images: int
    grid: tuple[int, int]

    def image_tokens(self, merge: int) -> int:
        """Tokens that the images of one sample occupy in the text decoder."""
        return self.num_images * self.grid[0] * self.grid[1] // merge**2


@dataclass(frozen=True)
class Batch:
    """Samples side by side; every tensor divides into micro-batches along its first dimension.

    pixel_values: (samples, patches of all its images, channels · frames · patch²). image_grid: (samples, images, 3) of
    time, height, width in patches, always on the CPU. input_ids, labels: (samples, sequence). position_ids:
    (samples, 3, sequence) for the multimodal rotary embedding.
    """

    pixel_values: Tensor
    image_grid: Tensor
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Name → tensor, as the model takes them."""
        return dict(vars(self))


def shape_of_tokens(seq_length: int, image_tokens: int, num_images: int, merge: int) -> SampleShape:
    """The most square images that occupy exactly `image_tokens`. Raises TrainingError where they do not divide."""
    if image_tokens % num_images:
        raise TrainingError(f"{image_tokens} image tokens do not divide among {num_images} images of one size")
    tokens = image_tokens // num_images
    height = max(side for side in range(1, int(tokens**0.5) + 1) if tokens % side == 0)
    return SampleShape(seq_length, num_images, (height * merge, tokens // height * merge))


def make_batch(
    indices: Sequence[int], shape: SampleShape, config: Qwen2VLConfig, seed: int, with_pixels: bool = True
) -> Batch:
    """The samples of these numbers, on the CPU, pixels in float32; without pixels for ranks that read none.

    Words are drawn with a Zipf-like frequency, so that there is something to learn: how frequent each is.
    """
    vision = config.vision_config
    merge = vision.spatial_merge_size
    image_tokens = shape.grid[0] * shape.grid[1] // merge**2
    front = []
    for _ in range(shape.num_images):
        front += [config.vision_start_token_id, *[config.image_token_id] * image_tokens, config.vision_end_token_id]
    num_words = shape.seq_length - len(front)
    if num_words < 1:
        raise TrainingError(
            f"--seq-length {shape.seq_length} leaves no token for text after {shape.num_images} images of "
            f"{image_tokens} tokens and their start and end tokens"
        )
    frequencies = _word_frequencies(config)
    rows = [torch.multinomial(frequencies, num_words, replacement=True, generator=_draws(seed, i)) for i in indices]
    head = torch.tensor(front).expand(len(indices), -1)
    words = torch.stack(rows)
    patches = [_sample_patches(index, shape, config) for index in indices] if with_pixels else []
    positions = _positions(shape, merge, num_words)
    return Batch(
        pixel_values=torch.stack(patches) if patches else torch.empty(len(indices), 0),
        image_grid=torch.tensor([1, *shape.grid]).expand(len(indices), shape.num_images, 3),
        input_ids=torch.cat([head, words], dim=1),
        labels=torch.cat([torch.full_like(head, IGNORED), words], dim=1),
        position_ids=positions.expand(len(indices), -1, -1),
    )


def _sample_patches(index: int, shape: SampleShape, config: Qwen2VLConfig) -> Tensor:
    """(patches of all its images, features) of one sample."""
    vision = config.vision_config
    sizes = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    first = index * shape.num_images
    names = [PHOTOGRAPHS[number % len(PHOTOGRAPHS)] for number in range(first, first + shape.num_images)]
    return torch.cat([_patches(name, shape.grid, sizes) for name in names])


def _draws(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


@lru_cache(maxsize=1)
def _frequencies(num_words: int, vocab_size: int) -> Tensor:
    frequencies = torch.zeros(vocab_size)
    frequencies[:num_words] = 1.0 / (torch.arange(num_words) + 10.0)
    return frequencies


def _word_frequencies(config: Qwen2VLConfig) -> Tensor:
    """How often each token is drawn; the special tokens, which end the vocabulary, never are."""
    special = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    return _frequencies(min(special), config.text_config.vocab_size)


@lru_cache(maxsize=16)
def _patches(name: str, grid: tuple[int, int], sizes: tuple[int, int, int]) -> Tensor:
    """A photograph at grid · patch size pixels as (patches, channels · frames · patch²); sizes: patch, frames, merge.

    Patches that merge into one token stand side by side, which is the order of the Qwen2-VL image processor.
    """
    patch, frames, merge = sizes
    pixels = torch.from_numpy(getattr(skimage.data, name)()).permute(2, 0, 1)[None].float() / 255
    pixels = interpolate(pixels, (grid[0] * patch, grid[1] * patch), mode="bicubic", antialias=True)[0]
    pixels = (pixels - torch.tensor(_PIXEL_MEAN)[:, None, None]) / torch.tensor(_PIXEL_DEVIATION)[:, None, None]
    clip = pixels.expand(frames, -1, -1, -1)  # a still image is a clip of equal frames
    down, across = grid[0] // merge, grid[1] // merge
    blocks = clip.reshape(frames, 3, down, merge, patch, across, merge, patch)
    return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(grid[0] * grid[1], -1)


def _positions(shape: SampleShape, merge: int, num_words: int) -> Tensor:
    """(3, sequence): a text token stands at one place in all three, an image token at its time, row and column.

    Counting goes on after an image at its longer side, as Qwen2VLModel.get_rope_index has it.
    """
    down, across = shape.grid[0] // merge, shape.grid[1] // merge
    parts, start = [], 0
    for _ in range(shape.num_images):
        rows = torch.arange(down).repeat_interleave(across)
        columns = torch.arange(across).repeat(down)
        parts.append(torch.full((3, 1), start))
        parts.append(torch.stack([torch.zeros_like(rows), rows, columns]) + start + 1)
        start += 1 + max(down, across)
        parts.append(torch.full((3, 1), start))
        start += 1
    parts.append((torch.arange(num_words) + start).expand(3, -1))
    return torch.cat(parts, dim=1)
