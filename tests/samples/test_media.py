"""Images, videos and audio of a record count however it says them, and are refused where ways to say them disagree."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.record import read_record
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import Sample
from mm_autoparallel.samples.sources import list_samples
from mm_autoparallel.samples.values import Malformed

RULES = SampleRules(patch_size=14, characters_count_per_token=1.0, find_size={"a.jpg": (448, 448)}.get)
VIDEO = {"frames": 4, "patches": 64}


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIB", 13, b"IHDR", width, height, 8)


def say(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content), **more}, {"role": "assistant", "content": "cat"}]}


def image(**own: Any) -> dict[str, Any]:
    return {"type": "image", **own}


INLINE = f"data:image/png;base64,{base64.b64encode(png(28, 28)).decode()}"

WORDS = {"type": "text", "text": "seven!!", "image": None}
"""Parquet gives every part all keys."""


@pytest.mark.parametrize(
    ("record", "sample"),
    [
        (say(image(image="a.jpg"), WORDS), Sample((1024,), 10)),
        (say(image(image="a.jpg"), WORDS, image(image={"bytes": png(28, 28), "path": None})), Sample((1024, 4), 10)),
        (say({"type": "image_url", "image_url": {"url": "a.jpg"}}), Sample((1024,), 3)),
        (say({"type": "image_url", "image_url": {"url": INLINE}}), Sample((4,), 3)),
        ({"images": [INLINE, "file://a.jpg"]}, Sample((4, 1024))),
        (say(image(bytes=png(28, 28))), Sample((4,), 3)),
        (say(image(width=28, height=28)), Sample((4,), 3)),
        (say("hi", images=["a.jpg", "a.jpg"]), Sample((1024, 1024), 5)),
        (say(image(), WORDS) | {"images": ["a.jpg"]}, Sample((1024,), 10)),
        (say(image(text=None), WORDS) | {"image_sizes": [[28, 28]]}, Sample((4,), 10)),
        (say(image(image="a.jpg")) | {"tokens": 300}, Sample((1024,), tokens=300)),
        (say({"type": "video", "video": VIDEO}), Sample((64, 64), 3)),
        (say({"type": "audio", "audio_url": "a.wav"}) | {"audio_seconds": 2}, Sample((), 3, audio_s=(2.0,))),
        ({"messages": json.dumps(say(image(image="a.jpg"), WORDS)["messages"])}, Sample((1024,), 10)),
        ({"conversations": "[so it begins"}, Sample((), 13)),
        ({"text": "", **say("hello")}, Sample((), 8)),
        ({"text": "<image><image>", "patches": [16, 16, 4, 16, 16, 4]}, Sample((16, 16, 4, 16, 16, 4))),
        ({"text": "<image>of a video", "video": VIDEO}, Sample((64, 64), 10)),
        ({"text": "<image><video>both", "video": VIDEO, "image": "a.jpg"}, Sample((1024, 64, 64), 4)),
        ({"text": "<audio>words", "audio": "a.wav", "audio_seconds": 1.5}, Sample((), 5, audio_s=(1.5,))),
        ({"text": "images without marks", "images": ["a.jpg"]}, Sample((1024,), 20)),
        ({"text": "<image>", "tokens": 9}, Sample(tokens=9)),
        (say(image(), WORDS) | {"tokens": 9}, Sample(tokens=9)),
        ({"patches": [], "image_sizes": [[28, 28]]}, Sample((4,))),
        ({"videos": [], "video": VIDEO}, Sample((64, 64))),
        ({"image": {"bytes": None, "path": None}, "text_tokens": 3}, Sample((), 3)),
        ({"image": png(28, 28)}, Sample((4,))),
        ({"images": [png(28, 28), png(448, 448)]}, Sample((4, 1024))),
        ({"image_sizes": {"width": 28, "height": 28}}, Sample((4,))),
        ({"image_sizes": [{"width": 28, "height": 28}, [448, 448]]}, Sample((4, 1024))),
        ({"image_sizes": "28x28 448x448"}, Sample((4, 1024))),
        ({"image_sizes": ["28x28"]}, Sample((4,))),
    ],
)
def test_what_a_record_holds_is_counted(record: dict[str, Any], sample: Sample) -> None:
    assert read_record(record, RULES) == sample


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (say(image(image="b.jpg")), 'the size of its image "b.jpg" is not known'),
        ({"image": "data:image/png;base64,!"}, "the size of its image .data:image/png;base64,!. is not known"),
        ({"image": b"GIF"}, "the size of its image of 3 bytes is not known"),
        (say(image(), WORDS), "messages has 1 parts of messages that are images, and nothing says which; give images"),
        (say(image(), image()) | {"images": ["a.jpg"]}, "it has 1 in images, and 2 parts of messages"),
        ({"text": "<image>hi"}, "it has 1 <image> mark in text, and no key says an image; give .* or `tokens` of"),
        ({"text": "<image>hi", "text_tokens": 2}, "it has 1 <image> mark in text, and no key says an image"),
        ({"text": "<image><image>", "width": 28, "height": 28}, "it has 2 <image> marks in text, and 1 in width and"),
        ({"text": "<image><image>", "patches": [4]}, "it has patches of 1 images, and 2 <image> marks in text"),
        ({"images": ["a.jpg", "a.jpg"], "image_sizes": [[28, 28]]}, "it has 1 in image_sizes, and 2 in images"),
        ({"images": ["a.jpg", "a.jpg"], "patches": [4]}, "it has patches of 1 images, and 2 in images"),
        ({"images": ["a.jpg", "a.jpg"], "image": "a.jpg"}, "it has 2 in images, and 1 in image"),
        ({"text": "<video>hi"}, "it has 1 <video> mark in text, and no key says a video"),
        ({"text": "<video><video>", "video": VIDEO}, "it has 2 <video> marks in text, and 1 in video"),
        (say({"type": "video", "video": "a.mp4"}), 'its parts of messages has "a.mp4", and frames are not counted'),
        ({"video": VIDEO, "videos": [VIDEO, VIDEO]}, "it has 2 in videos, and 1 in video"),
        ({"audio": "a.wav", "text": "hi"}, 'its audio has "a.wav", and recordings are not opened; give audio_seconds'),
        ({"audio": {"bytes": b"RIFF", "path": None}, "text": "hi"}, "its audio has a mapping, and recordings are not"),
        ({"audios": ["a.wav", "b.wav"], "audio_seconds": 3}, "it has 1 in audio_seconds, and 2 in audios"),
        (say({"type": "input_audio", "input_audio": {"data": "UklG"}}), "recordings are not opened"),
        ({"text": "<audio>hi"}, "it has 1 <audio> mark in text, and no audio_seconds"),
        ({"text": "<audio><audio>", "audio_seconds": 3}, "it has 2 <audio> marks in text, and 1 in audio_seconds"),
        ({"tokens": 10, "text_tokens": 20}, "its tokens are 10, of the whole sequence, and its text_tokens alone 20"),
        ({"tokens": 10, "patches": [4096]}, "its images, with 2 x 2 patches a token, alone become 1,024; .* --merge N"),
        ({"image_sizes": "28 x 28"}, 'its image_sizes is "28 x 28"; pixels as in "1280x720 640x480" are right'),
    ],
)
def test_what_disagrees_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(Malformed, match=message):
        read_record(record, RULES)


def test_names_in_messages_need_a_folder_of_images() -> None:
    with pytest.raises(Malformed, match="give --images DIR"):
        read_record(say(image(image="a.jpg")), SampleRules(patch_size=14, characters_count_per_token=1.0))


def test_parquet_as_hugging_face_writes_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = [{"type": "image", "text": None, "image": "a.jpg"}, {"type": "text", "text": "hello", "image": None}]
    tables = {
        "messages": ({"messages": [[{"role": "user", "content": content}]]}, Sample((1024,), 5)),
        "bytes": ({"image": [png(28, 28)], "text_tokens": [3]}, Sample((4,), 3)),
        "sizes": ({"image_sizes": [[{"width": 28, "height": 28}]], "text_tokens": [3]}, Sample((4,), 3)),
        "turns": ({"conversations": ['[{"from": "human", "value": "hi"}]']}, Sample((), 2)),
        "rows": ({"text_tokens": list(range(1, 100))}, Sample((), 1)),
    }
    for name, (columns, sample) in tables.items():
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
        found = list(list_samples(tmp_path / f"{name}.parquet", lambda record: read_record(record, RULES)))
        assert (found[0], len(found)) == (sample, len(next(iter(columns.values()))))
    parquet.write_table(
        pyarrow.table({"audio": [{"bytes": b"RIFF", "path": "a.wav"}], "text": ["hi"]}), tmp_path / "a.parquet"
    )
    with pytest.raises(JobError, match="row 1: its audio has a mapping, and recordings are not opened"):
        list(list_samples(tmp_path / "a.parquet", lambda record: read_record(record, RULES)))


def test_parquet_is_read_by_a_few_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"image": [png(28, 28) + bytes(1 << 20)] * 100})
    parquet.write_table(table, tmp_path / "a.parquet", write_batch_size=1, use_dictionary=False)
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        assert len(list(list_samples(tmp_path / "a.parquet", lambda record: read_record(record, RULES)))) == 100
    finally:
        pyarrow.set_memory_pool(usual)
    assert pool.max_memory() < 50 << 20
