"""Width and height of an image from the first bytes of its file, without a decoder: PNG, JPEG, WebP and GIF.

PNG: its IHDR (ISO/IEC 15948, 11.2.2). JPEG: the first frame header, SOF0 to SOF15 but for DHT, JPG and DAC (ITU-T T.81,
B.2.2). WebP: VP8X, VP8L or VP8 (RFC 9649, section 2). GIF: its screen (GIF89a, section 18).
"""

from __future__ import annotations

import struct
from typing import BinaryIO

_NO_FRAME = (0xC4, 0xC8, 0xCC)
_MOST_MARKERS = 10_000
"""Segments of a JPEG before its frame. Assumed: far more than cameras write."""


def read_size(stream: BinaryIO) -> tuple[int, int] | None:
    """Width and height in pixels; None where the bytes are no image of a known kind, or end too early."""
    try:
        return _read(stream)
    except (struct.error, IndexError):
        return None


def _read(stream: BinaryIO) -> tuple[int, int] | None:
    head = stream.read(12)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        rest = stream.read(12)
        width, height = struct.unpack(">II", rest[4:12])
        return (width, height) if width and height else None
    if head[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack("<HH", head[6:10])
        return width, height
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _read_webp(stream.read(18))
    return _read_jpeg(head, stream) if head.startswith(b"\xff\xd8") else None


def _read_webp(chunk: bytes) -> tuple[int, int] | None:
    kind, body = chunk[:4], chunk[8:]
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", body[6:10])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _read_jpeg(head: bytes, stream: BinaryIO) -> tuple[int, int] | None:
    rest = head[2:]

    def take(count: int) -> bytes:
        nonlocal rest
        if len(rest) < count:
            rest += stream.read(count - len(rest))
        found, rest = rest[:count], rest[count:]
        return found

    for _ in range(_MOST_MARKERS):
        mark = take(1)
        if mark != b"\xff":
            return None
        while (code := take(1)) == b"\xff":
            pass
        (length,) = struct.unpack(">H", take(2))
        body = take(max(0, length - 2))
        if 0xC0 <= code[0] <= 0xCF and code[0] not in _NO_FRAME:
            height, width = struct.unpack(">HH", body[1:5])
            return width, height
    return None
