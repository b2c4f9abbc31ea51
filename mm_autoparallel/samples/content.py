"""What the text of a record holds: characters, marks such as <image>, and parts that are images, videos or audio."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.values import Malformed, is_said, several

TEXTS = ("text", "conversations", "messages")
MEDIA = ("image", "video", "audio")
_TURNS = ("conversations", "messages")
_MARK = re.compile(f"<({'|'.join(MEDIA)})>")


def _none_of_each() -> dict[str, int]:
    return dict.fromkeys(MEDIA, 0)


def _lists_of_each() -> dict[str, list[Any]]:
    return {medium: [] for medium in MEDIA}


@dataclass
class Content:
    """Of one text or conversation. num_characters: without marks. marks: how many stand in its text, by medium. parts:
    what each part of a message is, by medium; None: it only says that there is one."""

    key: str = "text"
    num_characters: int = 0
    marks: dict[str, int] = field(default_factory=_none_of_each)
    parts: dict[str, list[Any]] = field(default_factory=_lists_of_each)

    @property
    def num_media(self) -> int:
        """Marks and parts."""
        return sum(self.marks.values()) + sum(map(len, self.parts.values()))

    def without_marks(self) -> Content:
        """What is left of it where its text is not read: parts that are something themselves."""
        parts = {medium: [part for part in found if part is not None] for medium, found in self.parts.items()}
        return Content(self.key, 0, parts=parts)

    def add(self, value: object) -> None:
        """Take in text, a turn, a part, or a list of such. LLaVA's turns have `value`, others `content`."""
        if isinstance(value, str):
            for mark in _MARK.finditer(value):
                self.marks[mark[1]] += 1
            self.num_characters += len(_MARK.sub("", value))
        elif isinstance(value, Mapping):
            self._add_media(value)
            self.add(next((value[name] for name in ("value", "content", "text") if value.get(name) is not None), ""))
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            for part in value:
                self.add(part)
        else:
            raise Malformed(f"its {self.key} has {describe_value(value)}; text, or a list of turns is expected")

    def _add_media(self, part: Mapping[str, Any]) -> None:
        """`{"type": "image", "image": "a.jpg"}`, `{"type": "image_url", "image_url": {"url": "a.jpg"}}`, or the same
        without one of the two; a turn may have `images` too."""
        for medium in MEDIA:
            names = (medium, f"{medium}s", f"{medium}_url", f"input_{medium}")
            is_one = part.get("type") in names
            own = next((part[name] for name in names if is_said(part.get(name))), None)
            if is_one and any(is_said(part.get(name)) for name in ("width", "frames", "bytes", "path", "url")):
                self.parts[medium].append({**(own if isinstance(own, Mapping) else {}), **part})
            elif is_one or own is not None:
                self.parts[medium] += several(own) or [None]


def read_contents(record: Mapping[str, Any]) -> list[Content]:
    """Of each text that a record has, the first being the one whose characters count. Turns may be JSON text, as CSV
    has them. Raises Malformed."""
    found = []
    for key in TEXTS:
        if not is_said(record.get(key)):
            continue
        content = Content(key)
        content.add(_parse_turns(record[key]) if key in _TURNS else record[key])
        found.append(content)
    return found


def _parse_turns(value: object) -> object:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # text that begins so
            return value
    return value
