"""SampleSource: where a job's samples come from, a file or named distributions, and how many batches are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mm_autoparallel.records import Count, Flag, Name, Noun, Number, above_zero, or_zero

_LARGEST = 1e9
"""Of patches, tokens, seconds. Assumed: a thousand times the longest context there is."""

MOST_DRAWN = 50_000_000
"""Samples of all batches that are drawn. Assumed: their numbers take 400 MB."""

Quantity = Annotated[float, or_zero(_LARGEST)]
"""Whole or not: of the unit that its key in SampleSource names."""
Positive = Annotated[float, above_zero(_LARGEST)]
Spread = Annotated[float, above_zero(100.0)]
Characters = Annotated[float, above_zero(100.0)]
Weight = Annotated[float, above_zero(1e9)]


class Distribution(Noun):
    """Of one quantity: constant, lognormal (mean, spread_fraction and most) or a mixture (values, weights).

    constant: every one is that. mean: of a lognormal. spread_fraction: its standard deviation over its mean. most: what
    is above is drawn again. values: each is drawn as often as the others, or by weights: one for each of values.
    """

    constant: Quantity | None = None
    mean: Positive | None = None
    spread_fraction: Spread | None = None
    most: Positive | None = None
    values: Annotated[tuple[Quantity, ...], Field(min_length=1)] | None = None
    weights: Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_number(cls, content: Any) -> Any:
        is_number = isinstance(content, (int, float)) and not isinstance(content, bool)
        return {"constant": content} if is_number else content

    @model_validator(mode="after")
    def _check(self) -> Distribution:
        kinds = [name for name in ("constant", "mean", "values") if getattr(self, name) is not None]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none"
            raise ValueError(f"one of constant, mean and values says what it is, and {said} of them is given")
        if self.mean is not None and self.spread_fraction is None:
            raise ValueError("mean needs spread_fraction, standard deviation over mean; or give constant")
        if self.mean is not None and self.most is not None and self.most <= self.mean:
            raise ValueError(f"most {self.most:g} is not above mean {self.mean:g}; raise it, or leave it out")
        if self.mean is None and (self.spread_fraction is not None or self.most is not None):
            raise ValueError("spread_fraction and most go with mean")
        if self.weights is not None and len(self.weights) != len(self.values or ()):
            raise ValueError(f"weights are {len(self.weights)} and values {len(self.values or ())}; give one for each")
        return self


PackingRule = Literal["in_order", "first_fit_decreasing"]


class Packing(Noun):
    """Samples that are packed into sequences, in which the decoder attends within each sample alone.

    tokens: of a sequence at most. rule: in_order opens a sequence where the next sample does not fit into the last one;
    first_fit_decreasing puts each, the longest first, into the first sequence that has room. padded: sequences are
    padded to `tokens`, and the padding runs through the decoder as one more sample.
    """

    tokens: Count
    rule: PackingRule = "in_order"
    padded: Flag = False


class SampleSource(Noun):
    """Samples as uneven as those that train: a file of them (docs/guide/uneven-data.md), or a distribution of each
    quantity.

    file: JSONL, CSV, JSON, parquet or tar, beside the job's. sha256: of the samples in it, filled in when it is read;
    where it is given, the file must hold these. patch_size: pixels of a patch's side, where the file has pixels; that
    of the model. least_pixels, most_pixels: smaller images are scaled up, and larger ones down, to so many.
    characters_per_token: of text whose tokens nobody counted. images: how many a sample has. patches: of each image,
    before merging. videos: of a sample. frames: of each video, as the model is given them. frame_patches: of every
    frame of a video, before merging. audios: recordings of a sample. audio_seconds: of each recording. text_tokens: of
    a sample, beside what images, videos and audio become.
    packing: samples are packed, all of them once and before batches are drawn, which are then of whole sequences; what
    a job calls a sample, global_batch_size too, is such a sequence.
    seed: of what is drawn. batches: how many global batches are drawn, of samples that are drawn one by one, each as
    likely as any other; all plans are judged by the same.
    """

    file: Name | None = None
    sha256: Name | None = None
    patch_size: Count | None = None
    least_pixels: Count | None = None
    most_pixels: Count | None = None
    characters_per_token: Characters | None = None
    images: Distribution | None = None
    patches: Distribution | None = None
    videos: Distribution | None = None
    frames: Distribution | None = None
    frame_patches: Distribution | None = None
    audios: Distribution | None = None
    audio_seconds: Distribution | None = None
    text_tokens: Distribution | None = None
    packing: Packing | None = None
    seed: Number = 0
    batches: Annotated[int, Field(strict=True, ge=20, le=10_000)] = 256

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, content: Any) -> Any:
        return {"file": content} if isinstance(content, str) else content

    @model_validator(mode="after")
    def _check(self) -> SampleSource:
        drawn = [name for name in QUANTITIES if getattr(self, name) is not None]
        if (self.file is None) == (not drawn):
            raise ValueError(
                f"either file names the samples, or {', '.join(QUANTITIES)} say how they are distributed, and "
                f"{'both are' if drawn else 'neither is'} given"
            )
        of_file = ("sha256", "patch_size", "least_pixels", "most_pixels", "characters_per_token")
        stray = next((name for name in of_file if drawn and getattr(self, name) is not None), None)
        if stray:
            raise ValueError(f"{stray} is of a file, and distributions are given; leave it out")
        for number, *sizes in (
            ("images", "patches"),
            ("videos", "frames", "frame_patches"),
            ("audios", "audio_seconds"),
        ):
            if len({getattr(self, name) is None for name in (number, *sizes)}) > 1:
                together = f"{', '.join((number, *sizes[:-1]))} and {sizes[-1]}"
                raise ValueError(f"{together} go together: how many a sample has, and how large each is")
        return self


QUANTITIES = ("images", "patches", "videos", "frames", "frame_patches", "audios", "audio_seconds", "text_tokens")
"""Of which there may be a distribution."""
