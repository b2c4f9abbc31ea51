"""One record of a data set (a line, a row, a member of an archive) as a Sample, or what is wrong with it.

Known keys, each alone or beside others:

    patches             patches of each image: 4096 or [4096, 1024]
    image_sizes         pixels of each: [[1280, 720], ...] or "1280x720 ..."; or width and height of a single one
    image, images       names of files, bytes, {"bytes": ..}, or {"width": .., "height": ..}
    video, videos       {"frames": 16, "width": 640, "height": 360}, or with patches of a frame in the place of pixels
    audio_seconds       seconds of each recording: 12.5 or [12.5, 3]
    audio, audios       recordings, which are not opened: audio_seconds goes with them
    text_tokens         tokens of text alone
    tokens              of the whole sequence, outright
    text, conversations, messages    text itself, by characters a token; images may be parts of messages

Ways to say the same media, marks in text too, must agree in how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mm_autoparallel.samples.content import TEXTS, Content, read_contents
from mm_autoparallel.samples.media import list_audio, list_frames, list_patches
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import Sample
from mm_autoparallel.samples.values import Malformed, whole

KNOWN = (
    *("patches", "image_sizes", "width", "height", "image", "images", "video", "videos"),
    *("audio_seconds", "audio", "audios", "text_tokens", "tokens", *TEXTS),
)


def read_record(record: Mapping[str, Any], rules: SampleRules) -> Sample:
    """The sample that `record` describes. Raises Malformed."""
    if not any(key in record for key in KNOWN):
        names = ", ".join(map(str, list(record)[:6])) or "nothing"
        raise Malformed(f"it has {names}, and none of {', '.join(KNOWN)} is among them")
    contents = read_contents(record)
    told = max(contents, key=lambda content: content.num_media, default=Content())
    tokens = None if record.get("tokens") is None else whole(record["tokens"], "tokens", least=1)
    if tokens is not None:  # then text is not read: parts that have an image of their own are left of it
        told = told.without_marks()
    frames, num_videos = list_frames(record, told, rules)
    patches = (*list_patches(record, told, num_videos, rules), *frames)
    audio = list_audio(record, told)
    text_tokens = 0
    if record.get("text_tokens") is not None:
        text_tokens = whole(record["text_tokens"], "text_tokens")
    elif tokens is None and contents:
        text_tokens = _count_text(contents[0], rules)
    if tokens is None and not (patches or audio or text_tokens):
        raise Malformed("it has no image, no video, no audio and no text; take it out, or give its tokens")
    sample = Sample(patches=patches, text_tokens=text_tokens, tokens=tokens, audio_s=audio)
    _check_tokens(sample, rules)
    return sample


def _check_tokens(sample: Sample, rules: SampleRules) -> None:
    """Raises Malformed where a part of the sequence has more tokens than the whole."""
    tokens = sample.tokens
    if tokens is None:
        return
    if sample.text_tokens > tokens:
        raise Malformed(
            f"its tokens are {tokens:,}, of the whole sequence, and its text_tokens alone {sample.text_tokens:,}; give "
            "those of the whole, or one of the two"
        )
    images_alone = replace(sample, audio_s=())
    of_media = rules.count_media(sample) if rules.count_media else images_alone.media_tokens(rules.merge_side**2, 0.0)
    if of_media > tokens:
        side = rules.merge_side
        whose = "images and audio" if rules.count_media else f"images, with {side} x {side} patches a token,"
        other = "" if rules.count_media else ", or --job JOB or --merge N, if other patches become a token"
        raise Malformed(
            f"its tokens are {tokens:,}, of the whole sequence, and its {whose} alone become {of_media:,}; "
            f"give those of the whole, or text_tokens in their place{other}"
        )


def write_record(sample: Sample) -> dict[str, Any]:
    """The sample as a record, without what it has not: `read_record` gives it back."""
    full = {
        "patches": list(sample.patches),
        "text_tokens": sample.text_tokens,
        "tokens": sample.tokens,
        "audio_seconds": list(sample.audio_s),
    }
    return {key: value for key, value in full.items() if value} or {"text_tokens": 0}


def _count_text(content: Content, rules: SampleRules) -> int:
    """Tokens of a text, by characters a token."""
    if rules.characters_count_per_token is None:
        raise Malformed(
            f"its {content.key} is text, whose tokens nobody has counted; give text_tokens or tokens in the record, or "
            "--characters-per-token X, how long a token of your tokenizer is on such text"
        )
    return math.ceil(content.num_characters / rules.characters_count_per_token)
