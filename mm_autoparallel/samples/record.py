"""One record of a data set (a line, a row, a member of an archive) as a Sample, or what is wrong with it.

Known keys, each alone or beside others:

    patches             patches of each image: 4096 or [4096, 1024]
    image_sizes         pixels of each: [[1280, 720], ...]; or width and height of a single one
    image, images       names of files, or {"bytes": ..}, or {"width": .., "height": ..}
    video, videos       {"frames": 16, "width": 640, "height": 360}, or with patches of a frame in the place of pixels
    audio_seconds       seconds of each recording: 12.5 or [12.5, 3]
    text_tokens         tokens of text alone
    tokens              of the whole sequence, outright
    text, conversations, messages    text itself, by characters a token
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.image_size import read_size
from mm_autoparallel.samples.sample import FRAMES_A_PATCH, MOST_TOKENS, PATCHES_A_TOKEN_SIDE, Sample

MOST_FRAMES = 100_000
"""Of a video that a model is given. Assumed: an hour, at 25 a second."""

TEXTS = ("text", "conversations", "messages")
KNOWN = (
    *("patches", "image_sizes", "width", "height", "image", "images", "video", "videos", "audio_seconds"),
    *("text_tokens", "tokens", *TEXTS),
)


class Malformed(Exception):
    """What is wrong with a record, and what would be right; whoever reads the file says where."""


@dataclass(frozen=True)
class SampleRules:
    """How pixels become patches and characters tokens. patch_size, merge_side: pixels of a patch's side, and how many
    patches a side become one token; None: nobody says, so that pixels tell nothing. most_pixels: larger images are
    scaled down. frames_per_patch: frames of a video that a patch joins. characters_count_per_token: of text whose
    tokens are not counted; None: nobody says. find_size: width and height of a named image file, None where it cannot
    be found. fixed_count: patches of every image, of an encoder that takes one size; then pixels tell nothing but with
    a patch_size that somebody says. count_media: tokens that a sample's images and audio become, where a model says."""

    patch_size: int | None = None
    merge_side: int = PATCHES_A_TOKEN_SIDE
    most_pixels: int | None = None
    frames_per_patch: int = FRAMES_A_PATCH
    characters_count_per_token: float | None = None
    find_size: Callable[[str], tuple[int, int] | None] | None = None
    fixed_count: int | None = None
    count_media: Callable[[Sample], int] | None = None

    def patches(self, width: int, height: int) -> int:
        """Of an image of so many pixels: each side is rounded to whole tokens, at least one, after the image was scaled
        down to `most_pixels`, rounded down then (Qwen2-VL's smart_resize, arXiv:2409.12191, section 2.1)."""
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
        return across * down * self.merge_side**2


def read_record(record: Mapping[str, Any], rules: SampleRules) -> Sample:
    """The sample that `record` describes. Raises Malformed."""
    if not any(key in record for key in KNOWN):
        names = ", ".join(map(str, list(record)[:6])) or "nothing"
        raise Malformed(f"it has {names}, and none of {', '.join(KNOWN)} is among them")
    patches = (*_list_patches(record, rules), *_list_frames(record, rules))
    audio = tuple(_number(value, "audio_seconds", 1e6) for value in _several(record.get("audio_seconds")))
    said = record.get("tokens")
    tokens = None if said is None else _count(said, "tokens", least=1)
    text_tokens = 0
    if record.get("text_tokens") is not None:
        text_tokens = _count(record["text_tokens"], "text_tokens")
    elif tokens is None:
        text_tokens = _count_text(record, rules)
    if tokens is None and not (patches or audio or text_tokens):
        raise Malformed("it has no image, no video, no audio and no text; take it out, or give its tokens")
    sample = Sample(patches=patches, text_tokens=text_tokens, tokens=tokens, audio_s=audio)
    of_media = rules.count_media(sample) if rules.count_media and tokens is not None else 0
    if tokens is not None and of_media > tokens:
        raise Malformed(
            f"its tokens are {tokens:,}, of the whole sequence, and its images and audio alone become {of_media:,}; "
            "give those of the whole, or text_tokens in their place"
        )
    return sample


def write_record(sample: Sample) -> dict[str, Any]:
    """The sample as a record, without what it has not: `read_record` gives it back."""
    full = {
        "patches": list(sample.patches),
        "text_tokens": sample.text_tokens,
        "tokens": sample.tokens,
        "audio_seconds": list(sample.audio_s),
    }
    return {key: value for key, value in full.items() if value} or {"text_tokens": 0}


def _list_patches(record: Mapping[str, Any], rules: SampleRules) -> Iterator[int]:
    """Patches of each image; where a record says them in several ways, the plainest counts."""
    if record.get("patches") is not None:
        yield from (_count(value, "patches", least=1) for value in _several(record["patches"]))
        return
    if record.get("image_sizes") is not None:
        for size in record["image_sizes"] if isinstance(record["image_sizes"], Sequence) else [record["image_sizes"]]:
            if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
                raise Malformed(f"image_sizes has {describe_value(size)}; [width, height] in pixels is expected")
            yield rules.patches(*(_count(side, "image_sizes", least=1) for side in size))
        return
    images = record.get("images") if record.get("images") is not None else record.get("image")
    if record.get("width") is not None or record.get("height") is not None:
        if isinstance(images, Sequence) and not isinstance(images, str) and len(images) > 1:
            raise Malformed(f"it has one width and height, and {len(images)} images; give image_sizes")
        for key in ("width", "height"):
            if record.get(key) is None:
                raise Malformed(f"it has no {key} beside the other side of its image; give both in pixels")
        yield rules.patches(*(_count(record[key], key, least=1) for key in ("width", "height")))
        return
    for image in _several(images):
        yield rules.patches(*_find_size(image, rules))


def _list_frames(record: Mapping[str, Any], rules: SampleRules) -> Iterator[int]:
    """Patches of what each video is to an encoder: so many frames as a patch joins are one image, attended by itself
    (Qwen2-VL, arXiv:2409.12191, section 2.1: a grid of t, h and w has t spans of h x w)."""
    key = "videos" if record.get("videos") is not None else "video"
    for video in _several(record.get(key)):
        if not isinstance(video, Mapping) or video.get("frames") is None:
            raise Malformed(
                f"its {key} has {describe_value(video)}, and frames are not counted in files; "
                '{"frames": 16, "width": 640, "height": 360} is right, or `patches` of a frame in the place of pixels'
            )
        frames = _count(video["frames"], f"{key}.frames", least=1, most=MOST_FRAMES)
        if video.get("patches") is not None:
            each = _count(video["patches"], f"{key}.patches", least=1)
        else:
            each = rules.patches(*(_count(video.get(side), f"{key}.{side}", least=1) for side in ("width", "height")))
        yield from repeat(each, math.ceil(frames / rules.frames_per_patch))


def _find_size(image: object, rules: SampleRules) -> tuple[int, int]:
    """Width and height of what an `image` of a record is."""
    found, name = None, describe_value(image)
    if isinstance(image, Mapping):
        if image.get("width") is not None and image.get("height") is not None:
            return _count(image["width"], "width", least=1), _count(image["height"], "height", least=1)
        name = describe_value(image.get("path"))
        if isinstance(image.get("bytes"), bytes):
            found = read_size(io.BytesIO(image["bytes"]))
        elif isinstance(image.get("path"), str) and rules.find_size:
            found = rules.find_size(image["path"])
    elif isinstance(image, str) and rules.find_size:
        found = rules.find_size(image)
    if found is None:
        where = "there is no such image below --images, or none that is PNG, JPEG, WebP or GIF"
        reason = where if rules.find_size else "give --images DIR, the folder that its images lie in"
        raise Malformed(f"the size of its image {name} is not known: {reason}, or image_sizes in the record")
    return found


def _count_text(record: Mapping[str, Any], rules: SampleRules) -> int:
    """Tokens of what text a record has, by characters a token, without the marks that stand for images and videos."""
    key = next((key for key in TEXTS if record.get(key) is not None), None)
    if key is None:
        return 0
    if rules.characters_count_per_token is None:
        raise Malformed(
            f"its {key} is text, whose tokens nobody has counted; give text_tokens or tokens in the record, or "
            "--characters-per-token X, how long a token of your tokenizer is on such text"
        )
    texts = _list_texts(record[key], key)
    count = sum(len(text.replace("<image>", "").replace("<video>", "")) for text in texts)
    return math.ceil(count / rules.characters_count_per_token)


def _list_texts(value: object, key: str) -> Iterator[str]:
    """All text in a conversation: LLaVA's turns have `value`, others `content`, which may be a list of parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name in ("value", "content", "text"):
            if value.get(name) is not None:
                yield from _list_texts(value[name], key)
                return
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for part in value:
            yield from _list_texts(part, key)
    else:
        raise Malformed(f"its {key} has {describe_value(value)}; text, or a list of turns is expected")


def _several(value: object) -> list[Any]:
    """One value, or a list of them; nothing for None and empty text."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]


def _count(value: object, key: str, least: int = 0, most: int = MOST_TOKENS) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not least <= value <= most:  # type: ignore[operator]
        raise Malformed(f"its {key} is {describe_value(value)}; a whole number from {least} to {most:,} is right")
    return int(value)  # type: ignore[call-overload,no-any-return]


def _number(value: object, key: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise Malformed(f"its {key} is {describe_value(value)}; a number above 0, at most {most:,.0f}, is right")
    return float(value)
