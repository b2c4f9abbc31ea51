"""Samples drawn from named distributions: a constant, a lognormal, or values with weights; the same seed, the same
draws.

Counts are drawn as real numbers and rounded up or down at random, so that their mean stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.samples.sample import FRAMES_A_PATCH
from mm_autoparallel.samples.table import UNSAID, SampleTable

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
"""So many numbers of one quantity."""

NUM_DRAWN = 20_000
"""Samples of a pool that stands for a distribution. Assumed: its mean is off by 0.7 % where deviation and mean are
equal."""


MOST_SPANS = 50_000_000
"""Images and joined frames of a pool. Assumed: their numbers take 400 MB."""


def constant(value: float) -> Draw:
    """Every number is `value`."""
    return lambda _, count: np.full(count, float(value))


def lognormal(mean: float, spread_fraction: float, most: float | None = None) -> Draw:
    """Numbers whose logarithms are normal: of this mean, and spread_fraction (standard deviation over mean). most: what
    is above is drawn again, so that the mean falls.

    With s² = ln(1 + spread²) logarithms have mean ln(mean) - s²/2 and deviation s (Johnson, Kotz & Balakrishnan 1994,
    Continuous Univariate Distributions 1, chapter 14).
    """
    variance = np.log1p(spread_fraction**2)
    centre, deviation = np.log(mean) - variance / 2, np.sqrt(variance)

    def draw(random: np.random.Generator, count: int) -> Floats:
        found: Floats = random.lognormal(centre, deviation, count)
        while most is not None and (above := np.flatnonzero(found > most)).size:
            found[above] = random.lognormal(centre, deviation, above.size)
        return found

    return draw


def mixture(values: Sequence[float], weights: Sequence[float] | None = None) -> Draw:
    """Each number is one of `values`, the more often the greater its weight; None: all equally often."""
    share = None if weights is None else np.array(weights) / np.sum(weights)
    return lambda random, count: random.choice(np.array(values, dtype=np.float64), count, p=share)


def draw_table(
    quantities: Mapping[str, Draw], seed: int, count: int = NUM_DRAWN, frames_per_patch: int = FRAMES_A_PATCH
) -> SampleTable:
    """`count` samples. quantities: of `images`, `videos` and `audios` how many a sample has, of `patches` each image,
    of `frames` each video, of `frame_patches` all frames of a video, of `audio_seconds` each recording, `text_tokens`;
    those that are missing are 0. frames_per_patch: frames that are one image to an encoder.

    Raises ValueError where they have more than MOST_SPANS images, videos or frames of these."""
    random = np.random.default_rng(seed)

    def whole(name: str, number: int, least: int = 0) -> NDArray[np.int64]:
        draw = quantities.get(name)
        if draw is None:
            return np.zeros(number, dtype=np.int64)
        found = draw(random, number)
        below = np.floor(found)
        rounded = below + (random.random(number) < found - below)
        counts: NDArray[np.int64] = np.maximum(rounded, least).astype(np.int64)
        return counts

    images, audios = _few(whole("images", count)), whole("audios", count)
    patches = whole("patches", int(images.sum()), least=1)
    lengths = quantities.get("audio_seconds", constant(0.0))(random, int(audios.sum()))
    text_tokens = whole("text_tokens", count, least=1)
    videos = _few(whole("videos", count))
    num_videos = int(videos.sum())
    joined = _few(-(-whole("frames", num_videos, least=1) // frames_per_patch))
    frame_patches = np.repeat(whole("frame_patches", num_videos, least=1), joined)
    sample = np.arange(count)
    holders = np.concatenate([np.repeat(sample, images), np.repeat(np.repeat(sample, videos), joined)])
    return SampleTable(
        patches=np.concatenate([patches, frame_patches])[np.argsort(holders, kind="stable")],
        images=np.concatenate([[0], np.cumsum(np.bincount(holders, minlength=count))]),
        audio_s=lengths,
        recordings=np.concatenate([[0], np.cumsum(audios)]),
        text_tokens=text_tokens,
        tokens=np.full(count, UNSAID, dtype=np.int64),
        num_read=count,
    )


def _few(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    if counts.sum(dtype=np.float64) > MOST_SPANS:
        raise ValueError(
            f"{len(counts):,} drawn samples have {counts.sum(dtype=np.float64):,.0f} images, videos or frames, and "
            f"{MOST_SPANS:,} are the most; give fewer of each"
        )
    return counts
