"""workload.samples read: the table of a job's samples, and what the workload leaves out filled in from their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.model import Encoder, Model, Patches
from mm_autoparallel.model.job.sample_source import QUANTITIES, Distribution, Packing, SampleSource
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.readers.model_file import parse_inline_model, read_model
from mm_autoparallel.records import Noun
from mm_autoparallel.samples.draw import Draw, constant, draw_table, lognormal, mixture
from mm_autoparallel.samples.packing import pack_table
from mm_autoparallel.samples.record import read_record
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import PATCHES_A_TOKEN_SIDE
from mm_autoparallel.samples.sources import list_samples
from mm_autoparallel.samples.table import SampleTable, keep_samples
from mm_autoparallel.validation import parse_record

_NEAR_FRACTION = 0.05
"""What a workload states may lie this far from the samples' mean: lengths are rounded, and files are parts of
others."""
_STEPS, _LARGEST_STEP = 16, 128
"""A sequence length that is filled in is a multiple of a power of two, at most 128, of which it holds 16 or more, so
that tensor and context parallel ranks can divide it."""


class _OfWorkload(Noun):
    samples: SampleSource


class _OfJob(Noun):
    """Where a source stands in a job, so that messages name its keys."""

    workload: _OfWorkload


def fill_samples(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], SampleTable | None]:
    """The job's content with what follows from its samples, and these; None where it names none.

    Raises JobError where source, file or a line of it is wrong, or contradicts the workload or the model.
    """
    workload = document.get("workload")
    if not isinstance(workload, Mapping) or workload.get("samples") is None:
        return document, None
    given = {"workload": {"samples": workload["samples"]}}
    source = parse_record(_OfJob, given, "job file", path).workload.samples
    named = document.get("model")
    if isinstance(named, str):
        model = read_model(path.parent / named)
    elif isinstance(named, dict):
        model = parse_inline_model(named, path)
    else:
        return document, None  # what is wrong with it, its own reader says
    where = f"job file {path}"
    if isinstance(model, TracedModel) or model.text.images:
        kind = "known from traces" if isinstance(model, TracedModel) else "of images alone"
        raise JobError(f"workload.samples is given, and the model is {kind}; leave it out", where=where)
    check_sharing(model, where)
    table = read_source(source, model, path)
    if source.sha256 is not None and source.sha256 != table.sha256:
        raise JobError(
            f"workload.samples.sha256 is {source.sha256[:12]}…, and the samples in {source.file} have "
            f"{table.sha256[:12]}…; the file has changed: give that, or leave it out",
            where=where,
        )
    check_media(table, model, where)
    sha256 = {"sha256": table.sha256} if source.file is not None else {}
    table = _pack(table, source.packing, model, where)
    filled = {**workload, **_fill_means(table, source.packing, model, workload, where)}
    filled["samples"] = source.model_dump(mode="json", exclude_unset=True) | sha256
    return document | {"workload": filled}, table


def read_source(source: SampleSource, model: Model, path: Path) -> SampleTable:
    """The samples of a source, read from its file beside `path` or drawn. Raises JobError."""
    rules = rules_of(model, SampleRules(least_pixels=source.least_pixels, most_pixels=source.most_pixels))
    if source.file is None:
        given = {name: getattr(source, name) for name in QUANTITIES}
        draws = {name: _draw(one) for name, one in given.items() if one is not None}
        try:
            return draw_table(draws, source.seed, frames_per_patch=rules.frames_per_patch)
        except ValueError as failure:
            raise JobError(f"workload.samples: {failure}", where=f"job file {path}") from None
    rules = replace(rules, characters_count_per_token=source.characters_per_token)
    if source.patch_size is not None:
        rules = replace(rules, patch_size=source.patch_size)
    return keep_samples(list_samples(path.parent / source.file, lambda one: read_record(one, rules)), seed=source.seed)


def _draw(one: Distribution) -> Draw:
    if one.values is not None:
        return mixture(one.values, one.weights)
    if one.mean is not None:
        assert one.spread_fraction is not None  # its own law
        return lognormal(one.mean, one.spread_fraction, one.most)
    return constant(one.constant or 0.0)


def check_sharing(model: Model, where: str) -> None:
    """Raises JobError where several encoders read the same images or audio: samples say patches and seconds of one."""
    if reason := model.sharing_reason():
        raise JobError(
            f"samples say what one encoder of images and one of audio take, and {reason}; leave samples out",
            where=where,
        )


def encoder_of(model: Model, media: str) -> Encoder | None:
    """The encoder of "images" or "audios", if there is one."""
    return next((encoder for encoder in model.encoders if encoder.media == media), None)


def rules_of(model: Model, rules: SampleRules) -> SampleRules:
    """`rules` with the tokens of the model's media, and the patches of its encoder of images: in_features are 3
    colours, one frame or two, and a square of pixels."""
    merge_tokens, audio_tokens_per_s = model.merge_tokens, model.audio_tokens_per_s
    rules = replace(rules, count_media=lambda sample: sample.media_tokens(merge_tokens, audio_tokens_per_s))
    encoder = encoder_of(model, "images")
    if encoder is None or not isinstance(encoder.stem, Patches):
        return rules
    sides = {frames: math.isqrt(encoder.stem.in_features // (3 * frames)) for frames in (1, 2)}
    exact = [(side, frames) for frames, side in sides.items() if 3 * frames * side**2 == encoder.stem.in_features]
    merge = max(1, math.isqrt(encoder.projector.merge_tokens))
    side, frames = exact[0] if exact else (None, rules.frames_per_patch)
    fixed_count = _fixed_count(encoder.stem, encoder.projector.merge_tokens) or None
    patch_size = None if fixed_count else side
    return replace(rules, patch_size=patch_size, fixed_count=fixed_count, frames_per_patch=frames, merge_side=merge)


def _fixed_count(stem: Patches, merge_tokens: int) -> int:
    """Patches of the one size of image that an encoder takes; 0 of any size. Learned positions are stretched to images
    of any size by encoders that merge two by two and have no class token (Qwen3-VL, GLM-4.1V, Kimi-VL); others are
    given one size, whole or as tiles (CLIP, SigLIP, InternViT)."""
    is_any = not stem.num_positions or (merge_tokens == PATCHES_A_TOKEN_SIDE**2 and not stem.class_token)
    return 0 if is_any else stem.num_positions - int(stem.class_token)


def check_media(table: SampleTable, model: Model, where: str) -> None:
    """Raises JobError where samples have images or audio, and the model no encoder of such."""
    for media, number in (("images", len(table.patches)), ("audios", len(table.audio_s))):
        if number and encoder_of(model, media) is None:
            raise JobError(
                f"the samples have {number:,} {media}, and the model has no encoder of {media}; leave them out",
                where=where,
            )


def _pack(table: SampleTable, packing: Packing | None, model: Model, where: str) -> SampleTable:
    if packing is None:
        return table
    tokens = table.num_tokens(model.merge_tokens, model.audio_tokens_per_s)
    try:
        return pack_table(table, tokens, packing.tokens, packing.rule == "first_fit_decreasing")
    except ValueError as failure:
        raise JobError(f"workload.samples.packing: {failure}", where=where) from None


def _fill_means(
    table: SampleTable, packing: Packing | None, model: Model, workload: Mapping[str, Any], where: str
) -> dict[str, int]:
    """seq_length, and tokens and numbers of images and audio of the mean sample, where the workload has no own; of the
    mean sequence where samples are packed, and of how many samples it is.

    Raises JobError where it has, and the samples' mean is another.
    """
    of_images, of_audio = table.image_tokens(model.merge_tokens), table.audio_tokens(model.audio_tokens_per_s)
    image_tokens, audio_tokens = table.of_sequences(of_images), table.of_sequences(of_audio)
    of_samples = table.num_tokens(model.merge_tokens, model.audio_tokens_per_s)
    held = table.of_sequences(of_samples)
    tokens = float(np.mean(held))
    means: dict[str, float] = {}
    if packing is not None:
        padding = packing.tokens - held if packing.padded else np.zeros(len(held))
        tokens = float(np.mean(held + padding))
        squares = table.of_sequences(of_samples.astype(np.float64) ** 2) + padding**2
        means["samples_per_sequence"] = tokens**2 / float(np.mean(squares))
    means["seq_length"] = tokens
    for name, counts, of_media in (
        ("image", table.of_sequences(table.num_images), image_tokens),
        ("audio", table.of_sequences(table.num_recordings), audio_tokens),
    ):
        if of_media.any():
            means |= {
                f"{name}_tokens_per_sample": float(np.mean(of_media)),
                f"{name}s_per_sample": float(counts.mean()),
            }
    media = [f"{name}{part}_per_sample" for name in ("image", "audio") for part in ("_tokens", "s")]
    for key, mean in (dict.fromkeys(media, 0.0) | {"samples_per_sequence": 1.0} | means).items():
        given = workload.get(key)
        if isinstance(given, (int, float)) and abs(given - mean) > max(_NEAR_FRACTION * mean, 0.5):
            raise JobError(
                f"workload.{key} is {given}, and workload.samples has {mean:,.1f} on average; leave it out, or give "
                "samples of that mean",
                where=where,
            )
    whole = {key: max(1, round(mean)) for key, mean in means.items()}
    least = sum(whole.get(f"{name}_tokens_per_sample", 0) for name in ("image", "audio"))
    whole["seq_length"] = _round_length(tokens, least)
    for name in ("image", "audio"):
        if (key := f"{name}s_per_sample") in whole:
            whole[key] = min(whole[key], whole[f"{name}_tokens_per_sample"])
    return {key: value for key, value in whole.items() if key not in workload}


def _round_length(mean: float, least: int) -> int:
    step = 1
    while 2 * step <= min(_LARGEST_STEP, mean / _STEPS):
        step *= 2
    nearest = max(1, round(mean / step))
    return step * (nearest if step * nearest >= least else -(-least // step))
