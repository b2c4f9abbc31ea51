"""SampleTable: the samples of a data set as columns, so that a million of them are a few arrays.

Of a source that holds more than are kept, each of its samples is kept with the same chance (Vitter 1985, Random
Sampling with a Reservoir, algorithm R), so that memory is bounded however long the source is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.samples.sample import (
    AUDIO_TOKENS_PER_S,
    MOST_TOKENS,
    PATCHES_A_TOKEN_SIDE,
    Sample,
    count_audio_tokens,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_KEPT = 200_000
"""Samples that are kept of one source. Assumed: p99 of so many is known to 0.02 % of all samples."""
UNSAID = -1
"""Stands for the tokens of samples that do not say them outright."""


@dataclass(frozen=True, eq=False)
class SampleTable:
    """n samples. patches: of all images; sample i has those from images[i] to images[i + 1]. audio_s, recordings: the
    same of audio. text_tokens, tokens: [n], tokens UNSAID where they follow from the rest. num_read: samples of the
    source, of which these are all, or drawn. sequences: where they are packed, sequence s holds the samples from
    sequences[s] to sequences[s + 1]; None: each is one by itself."""

    patches: Ints
    images: Ints
    audio_s: Floats
    recordings: Ints
    text_tokens: Ints
    tokens: Ints
    num_read: int
    sequences: Ints | None = None

    def __len__(self) -> int:
        """Samples that are kept."""
        return len(self.text_tokens)

    @property
    def num_sequences(self) -> int:
        """What batches are drawn of."""
        return len(self) if self.sequences is None else len(self.sequences) - 1

    def of_sequences(self, values: NDArray[Any]) -> NDArray[Any]:
        """[sequences] sums of the samples' values [n]."""
        return values if self.sequences is None else add_up(values, self.sequences)

    def take(self, order: Ints) -> SampleTable:
        """The samples of these numbers, in this order, none of them packed."""
        patches, images = _take_parts(self.patches, self.images, order)
        audio_s, recordings = _take_parts(self.audio_s, self.recordings, order)
        return SampleTable(
            patches, images, audio_s, recordings, self.text_tokens[order], self.tokens[order], self.num_read
        )

    @cached_property
    def num_images(self) -> Ints:
        """[n] images of each sample."""
        return np.diff(self.images)

    @cached_property
    def num_recordings(self) -> Ints:
        """[n] recordings of each sample."""
        return np.diff(self.recordings)

    @cached_property
    def seconds(self) -> Floats:
        """[n] seconds of audio of each sample."""
        return add_up(self.audio_s, self.recordings)

    def image_tokens(self, merge_tokens: int = PATCHES_A_TOKEN_SIDE**2) -> Ints:
        """[n] what images become of each sample's sequence: Sample.num_tokens has the rule."""
        return add_up(-(-self.patches // merge_tokens), self.images).astype(np.int64)

    def audio_tokens(self, tokens_per_s: float = AUDIO_TOKENS_PER_S) -> Ints:
        """[n] what recordings become."""
        return add_up(count_audio_tokens(self.audio_s, tokens_per_s), self.recordings).astype(np.int64)

    def num_tokens(
        self, merge_tokens: int = PATCHES_A_TOKEN_SIDE**2, audio_tokens_per_s: float = AUDIO_TOKENS_PER_S
    ) -> Ints:
        """[n] of each sample's sequence in the decoder."""
        counted = self.text_tokens + self.image_tokens(merge_tokens) + self.audio_tokens(audio_tokens_per_s)
        return np.where(self.tokens == UNSAID, counted, self.tokens)

    @cached_property
    def sha256(self) -> str:
        """Of all that it holds, in hexadecimal."""
        digest = hashlib.sha256(str(self.num_read).encode())
        for column in (self.patches, self.images, self.audio_s, self.recordings, self.text_tokens, self.tokens):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def sample(self, index: int) -> Sample:
        """One sample as a record."""
        images, recordings = (slice(*ends[index : index + 2]) for ends in (self.images, self.recordings))
        tokens = int(self.tokens[index])
        return Sample(
            patches=tuple(self.patches[images].tolist()),
            text_tokens=int(self.text_tokens[index]),
            tokens=None if tokens == UNSAID else tokens,
            audio_s=tuple(self.audio_s[recordings].tolist()),
        )


def add_up(values: NDArray[Any], ends: Ints) -> Floats:
    """[n] the sum of those from ends[i] to ends[i + 1]; 0 where there are none. Equal values have equal sums, to the
    last digit, wherever they stand."""
    holders = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    weights = values[ends[0] : ends[-1]].astype(np.float64)
    return np.bincount(holders, weights, len(ends) - 1).astype(np.float64)


def _take_parts(values: NDArray[Any], ends: Ints, order: Ints) -> tuple[NDArray[Any], Ints]:
    counts = np.diff(ends)[order]
    taken = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    at = np.repeat(ends[order] - taken[:-1], counts) + np.arange(taken[-1])
    return values[at], taken


def tabulate(samples: Sequence[Sample], num_read: int | None = None) -> SampleTable:
    """The table of `samples`, in their order. num_read: of how many they were drawn; None: these are all.

    Raises ValueError, naming the sample, where patches or tokens are no whole numbers from 0 to MOST_TOKENS.
    """
    columns = {name: list(map(attrgetter(name), samples)) for name in ("patches", "text_tokens", "tokens", "audio_s")}
    images = _ends(columns["patches"])
    heard = columns["audio_s"] if any(columns["audio_s"]) else []  # most have none, and a step waits for this
    told = [i for i, count in enumerate(columns["tokens"]) if count is not None]
    tokens = np.full(len(samples), UNSAID, dtype=np.int64)
    tokens[told] = _whole([columns["tokens"][i] for i in told], samples, told)
    holders = np.repeat(np.arange(len(samples)), np.diff(images))
    return SampleTable(
        patches=_whole(list(chain.from_iterable(columns["patches"])), samples, holders),
        images=images,
        audio_s=np.array(list(chain.from_iterable(heard)), dtype=np.float64),
        recordings=_ends(heard) if heard else np.zeros_like(images),
        text_tokens=_whole(columns["text_tokens"], samples, range(len(samples))),
        tokens=tokens,
        num_read=len(samples) if num_read is None else num_read,
    )


def _whole(values: Sequence[Any], samples: Sequence[Sample], holders: Sequence[int] | Ints) -> Ints:
    """The values as whole numbers. holders: the sample that each is of. Raises ValueError, naming it."""
    found = np.array([np.nan if isinstance(value, (str, bytes)) else value for value in values], dtype=np.float64)
    wrong = np.flatnonzero(~((found >= 0) & (found == np.floor(found)) & (found <= MOST_TOKENS)))
    if len(wrong):
        i = int(holders[int(wrong[0])])
        raise ValueError(f"sample {i} is {samples[i]}; patches and tokens are whole numbers from 0 to {MOST_TOKENS:,}")
    return found.astype(np.int64)


def _ends(parts: Sequence[Sequence[Any]]) -> Ints:
    """[n + 1] where the parts of each sample end, behind a zero."""
    ends = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=ends[1:])
    return ends


def keep_samples(samples: Iterable[Sample], most: int = MOST_KEPT, seed: int = 0) -> SampleTable:
    """The table of a stream: of all, in their order, or of `most` of them."""
    random, kept, number = np.random.default_rng(seed), list[Sample](), 0
    for number, one in enumerate(samples, start=1):
        if number <= most:
            kept.append(one)
        elif (place := int(random.integers(number))) < most:
            kept[place] = one
    return tabulate(kept, number)
