"""Images, videos and audio that a record says, by its keys or in its text: how large each is, and that all agree."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.content import Content
from mm_autoparallel.samples.image_size import read_size
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.values import Malformed, is_said, number, several, whole

MOST_FRAMES = 100_000
"""Of a video that a model is given. Assumed: an hour, at 25 a second."""

_HEAD = 1 << 20
"""Characters in base64 that are read of an image. Assumed: its size stands in them."""
_SIZE = re.compile(r"(\d{1,9})x(\d{1,9})")
_OUTRIGHT = "or `tokens` of the whole sequence, with which text is not read"


def list_patches(record: Mapping[str, Any], told: Content, num_videos: int, rules: SampleRules) -> list[int]:
    """Patches of each image; where a record says them in several ways, the plainest counts. told: what its text holds.
    num_videos: that it has; LLaVA's <image> stands for a video as well.

    Raises Malformed where one way has another number of images than another. `patches` may have more, of tiles."""
    ways = _list_ways(record, told)
    patches = [whole(value, "patches", least=1) for value in several(record.get("patches"))]
    if patches:
        for name, images in ways.items():
            if len(images) > len(patches):
                raise Malformed(f"it has patches of {len(patches)} images, and {_number(len(images), name)}; {_AGREE}")
        if told.marks["image"] > len(patches) + num_videos:
            raise Malformed(f"it has patches of {len(patches)} images, and {_marks(told, 'image')}; {_AGREE}")
        return patches
    if len({len(images) for images in ways.values()}) > 1:
        (one, first), (other, second) = next(
            (a, b) for a in ways.items() for b in ways.items() if len(a[1]) != len(b[1])
        )
        raise Malformed(f"it has {_number(len(first), one)}, and {_number(len(second), other)}; {_AGREE}")
    name, images = next(iter(ways.items()), ("", []))
    if name.startswith("parts") and all(image is None for image in images):
        raise Malformed(
            f"{told.key} has {_number(len(images), name)} that are images, and nothing says which; give images, "
            f"image_sizes or patches in the record, {_OUTRIGHT}"
        )
    marks = told.marks["image"]
    if marks and not images and marks != num_videos:
        raise Malformed(
            f"it has {_marks(told, 'image')}, and no key says an image; give images, image_sizes or patches in the "
            f"record, {_OUTRIGHT}"
        )
    if marks not in (0, len(images), len(images) + num_videos):
        raise Malformed(f"it has {_marks(told, 'image')}, and {_number(len(images), name)}; {_AGREE}")
    return [rules.patches(*_find_size(image, rules)) for image in images]


_AGREE = "give as many of each, or leave one of them out"


def _number(count: int, name: str) -> str:
    return f"{count} in {name}" if not name.startswith("parts") else f"{count} {name}"


def _marks(told: Content, medium: str) -> str:
    """In words, for messages."""
    count = told.marks[medium]
    return f"{count} <{medium}> mark{'s' * (count > 1)} in {told.key}"


def _list_ways(record: Mapping[str, Any], told: Content) -> dict[str, list[Any]]:
    """How a record says its images, but for `patches`, the plainest first: each image as `_find_size` takes it."""
    sides: dict[str, Any] = {key: record[key] for key in ("width", "height") if record.get(key) is not None}
    if len(sides) == 1:
        missing = "height" if "width" in sides else "width"
        raise Malformed(f"it has no {missing} beside the other side of its image; give both in pixels")
    ways = {
        "image_sizes": _list_sizes(record.get("image_sizes")),
        "width and height": [sides] if sides else [],
        "images": several(record.get("images")),
        "image": several(record.get("image")),
        "parts of messages": told.parts["image"],
    }
    return {name: images for name, images in ways.items() if images}


def _list_sizes(value: object) -> list[dict[str, Any]]:
    """Width and height of each: `[[1280, 720]]`, `[{"width": 1280, "height": 720}]`, or `1280x720 640x480`."""
    found: list[dict[str, Any]] = []
    for size in value.split() if isinstance(value, str) else several(value):
        written = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if written:
            found.append({"width": int(written[1]), "height": int(written[2])})
        elif isinstance(value, str):
            raise Malformed(f'its image_sizes is {describe_value(value)}; pixels as in "1280x720 640x480" are right')
        elif isinstance(size, Mapping) and {"width", "height"} <= size.keys():
            found.append({"width": size["width"], "height": size["height"]})
        elif isinstance(size, Sequence) and not isinstance(size, (str, bytes)) and len(size) == 2:
            found.append({"width": size[0], "height": size[1]})
        else:
            raise Malformed(f"image_sizes has {describe_value(size)}; [width, height] in pixels is expected")
    return found


def _find_size(image: object, rules: SampleRules) -> tuple[int, int]:
    """Width and height of what an image of a record is."""
    content, file_name = image, image
    if isinstance(image, Mapping):
        if image.get("width") is not None and image.get("height") is not None:
            return whole(image["width"], "width", least=1), whole(image["height"], "height", least=1)
        content = image.get("bytes")
        file_name = image.get("path") if image.get("path") is not None else image.get("url")
    if isinstance(file_name, str) and file_name.startswith("data:") and not isinstance(content, bytes):
        content = _decode(file_name)
    found, name = None, describe_value(file_name)
    if isinstance(content, bytes):
        found = read_size(io.BytesIO(content))
        name = name if isinstance(file_name, str) else f"of {len(content):,} bytes"
    elif isinstance(file_name, str) and rules.find_size:
        found = rules.find_size(file_name.removeprefix("file://"))
    if found is None:
        where = "there is no such image below --images, or none that is PNG, JPEG, WebP or GIF"
        reason = where if rules.find_size else "give --images DIR, the folder that its images lie in"
        raise Malformed(f"the size of its image {name} is not known: {reason}, or image_sizes in the record")
    return found


def _decode(name: str) -> bytes:
    """The first bytes of an image that stands in its own name, `data:image/png;base64,iVBO...` (RFC 2397)."""
    text = name.partition(",")[2][:_HEAD]
    try:
        return base64.b64decode(text[: len(text) // 4 * 4])
    except ValueError:
        return b""


def list_frames(record: Mapping[str, Any], told: Content, rules: SampleRules) -> tuple[list[int], int]:
    """Patches of what each video is to an encoder, and how many videos there are: so many frames as a patch joins are
    one image, attended by itself (Qwen2-VL, arXiv:2409.12191, section 2.1: a grid of t, h and w has t spans of h x w).
    told: what the record's text holds. Raises Malformed.
    """
    key, videos = _agreeing(record, told, "video")
    patches: list[int] = []
    for video in videos:
        if not isinstance(video, Mapping) or video.get("frames") is None:
            raise Malformed(
                f"its {key} has {describe_value(video)}, and frames are not counted in files; "
                '{"frames": 16, "width": 640, "height": 360} is right, or `patches` of a frame in the place of pixels'
            )
        frames = whole(video["frames"], f"{key}.frames", least=1, most=MOST_FRAMES)
        if video.get("patches") is not None:
            each = whole(video["patches"], f"{key}.patches", least=1)
        else:
            each = rules.patches(*(whole(video.get(side), f"{key}.{side}", least=1) for side in ("width", "height")))
        patches += repeat(each, math.ceil(frames / rules.frames_per_patch))
    if told.marks["video"] and not videos:
        raise Malformed(f"it has {_marks(told, 'video')}, and no key says a video; give videos, {_OUTRIGHT}")
    if told.marks["video"] not in (0, len(videos)):
        raise Malformed(f"it has {_marks(told, 'video')}, and {_number(len(videos), key)}; {_AGREE}")
    return patches, len(videos)


def list_audio(record: Mapping[str, Any], told: Content) -> tuple[float, ...]:
    """Seconds of each recording. told: what the record's text holds. Raises Malformed."""
    seconds = tuple(number(value, "audio_seconds", 1e6) for value in several(record.get("audio_seconds")))
    key, recordings = _agreeing(record, told, "audio")
    if recordings and not seconds:
        raise Malformed(
            f"its {key} has {describe_value(recordings[0])}, and recordings are not opened; give audio_seconds in the "
            "record, seconds of each: [12.5, 3]"
        )
    if recordings and len(recordings) != len(seconds):
        raise Malformed(f"it has {len(seconds)} in audio_seconds, and {_number(len(recordings), key)}; {_AGREE}")
    if told.marks["audio"] and not seconds:
        raise Malformed(f"it has {_marks(told, 'audio')}, and no audio_seconds; give seconds of each, {_OUTRIGHT}")
    if told.marks["audio"] not in (0, len(seconds)):
        raise Malformed(f"it has {_marks(told, 'audio')}, and {len(seconds)} in audio_seconds; {_AGREE}")
    return seconds


def _agreeing(record: Mapping[str, Any], told: Content, medium: str) -> tuple[str, list[Any]]:
    """The videos or the recordings of a record, and what says them: a key, or parts of messages."""
    ways = {key: several(record.get(key)) for key in (f"{medium}s", medium)} | {"parts of messages": told.parts[medium]}
    ways = {name: found for name, found in ways.items() if is_said(found)}
    name, found = next(iter(ways.items()), (medium, []))
    for other, there in ways.items():
        if len(there) != len(found):
            raise Malformed(f"it has {_number(len(found), name)}, and {_number(len(there), other)}; {_AGREE}")
    return name, found
