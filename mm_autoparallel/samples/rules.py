"""SampleRules: how pixels become patches and characters tokens, where a record does not say these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mm_autoparallel.samples.sample import FRAMES_A_PATCH, PATCHES_A_TOKEN_SIDE, Sample
from mm_autoparallel.samples.values import Malformed


@dataclass(frozen=True)
class SampleRules:
    """How pixels become patches and characters tokens. patch_size, merge_side: pixels of a patch's side, and how many
    patches a side become one token; None: nobody says, so that pixels tell nothing. least_pixels, most_pixels: smaller
    images are scaled up, and larger ones down. frames_per_patch: frames of a video that a patch joins.
    characters_count_per_token: of text whose tokens are not counted; None: nobody says. find_size: width and height of
    a named image file, None where it cannot be found. fixed_count: patches of every image, of an encoder that takes one
    size; then pixels tell nothing but with a patch_size that somebody says. count_media: tokens that a sample's images
    and audio become, where a model says."""

    patch_size: int | None = None
    merge_side: int = PATCHES_A_TOKEN_SIDE
    least_pixels: int | None = None
    most_pixels: int | None = None
    frames_per_patch: int = FRAMES_A_PATCH
    characters_count_per_token: float | None = None
    find_size: Callable[[str], tuple[int, int] | None] | None = None
    fixed_count: int | None = None
    count_media: Callable[[Sample], int] | None = None

    def patches(self, width: int, height: int) -> int:
        """Of an image of so many pixels: each side is rounded to whole tokens, at least one, after the image was scaled
        down to `most_pixels`, rounded down then, or up to `least_pixels`, rounded up (Qwen2-VL's smart_resize,
        arXiv:2409.12191, section 2.1)."""
        if self.patch_size is None and self.fixed_count is not None:
            raise Malformed(
                f"it has an image of {width} x {height} pixels, and the model's encoder takes images of one size, "
                f"{self.fixed_count} patches, to which its processor scales or cuts them; give `patches` of each, "
                f"[{self.fixed_count}] for a whole image, [{self.fixed_count}, {self.fixed_count}] for two tiles"
            )
        if self.patch_size is None:
            raise Malformed(
                f"it has an image of {width} x {height} pixels, and nobody says how large a patch is; give "
                "--patch-size N or --job JOB, or `patches` in place of pixels"
            )
        side = self.patch_size * self.merge_side
        across, down = (max(1, round(length / side)) for length in (width, height))
        if self.most_pixels is not None and across * down * side**2 > self.most_pixels:
            shrink = math.sqrt(width * height / self.most_pixels)
            across, down = (max(1, math.floor(length / shrink / side)) for length in (width, height))
        elif self.least_pixels is not None and across * down * side**2 < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (width * height))
            across, down = (math.ceil(length * grow / side) for length in (width, height))
        return across * down * self.merge_side**2
