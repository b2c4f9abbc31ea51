"""WebDataset's archives give the same samples in any order of their members, and are refused where they are cut off."""

from __future__ import annotations

import io
import itertools
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.record import read_record
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import Sample
from mm_autoparallel.samples.sources import list_samples

RULES = SampleRules(patch_size=14, characters_count_per_token=1.0)
IMAGE = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIB", 13, b"IHDR", 28, 28, 8)
VIDEO = {"frames": 4, "patches": 64}


def write(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def read(path: Path) -> list[Sample]:
    return list(list_samples(path, lambda record: read_record(record, RULES)))


@pytest.mark.parametrize(
    ("content", "names", "sample"),
    [
        ({"images": "0.png"}, ["png"], Sample((4,), 5)),
        ({"images": None}, ["png"], Sample((4,), 5)),
        ({"images": ["0.png"]}, ["png"], Sample((4,), 5)),
        ({"image": "0.png"}, ["png"], Sample((4,), 5)),
        ({"images": ["0.png", "1.png"]}, ["left.png", "right.png"], Sample((4, 4), 5)),
        ({"image": {"width": 56, "height": 56}}, ["png"], Sample((16,), 5)),
        ({"width": 56, "height": 56}, ["png"], Sample((16,), 5)),
        ({"text": "of its own"}, ["png"], Sample((4,), 10)),
        ({"video": VIDEO}, ["mp4"], Sample((64, 64), 5)),
        ({"videos": [VIDEO]}, ["mp4"], Sample((64, 64), 5)),
        ({"audio_seconds": 2}, ["flac"], Sample((), 5, audio_s=(2.0,))),
        ({"audio": "0.wav", "audio_seconds": 2}, ["wav"], Sample((), 5, audio_s=(2.0,))),
    ],
)
def test_the_order_of_members_does_not_matter(
    tmp_path: Path, content: dict[str, Any], names: list[str], sample: Sample
) -> None:
    members = [("0.json", json.dumps(content).encode()), ("0.txt", b"words"), *((f"0.{name}", IMAGE) for name in names)]
    for order in itertools.permutations(members):
        assert read(write(tmp_path / "a.tar", *order)) == [sample]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ({"images": ["0.png", "1.png"]}, "png", "sample 0: its JSON names 2 images, and 1 are beside it"),
        ({"text": "hi"}, "flac", 'sample 0: its audios has "flac", and recordings are not opened; give audio_seconds'),
        ({"video": "0.mp4"}, "mp4", "sample 0: its videos has .* frames are not counted"),
    ],
)
def test_what_an_archive_does_not_say_is_refused(
    tmp_path: Path, content: dict[str, Any], name: str, message: str
) -> None:
    path = write(tmp_path / "a.tar", ("0.json", json.dumps(content).encode()), (f"0.{name}", IMAGE))
    with pytest.raises(JobError, match=message):
        read(path)


def test_archives_that_are_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", ("0.png", IMAGE), ("1.png", IMAGE), ("2.png", IMAGE))
    whole = path.read_bytes()
    assert read(path) == [Sample((4,))] * 3
    for kept in (700, 1024, 1030, 1300, 1536, 1600, 2048, 2100, 3072):
        path.write_bytes(whole[:kept])
        with pytest.raises(JobError, match=r"a\.tar: it is no readable tar archive \("):
            read(path)
    path.write_bytes(whole[:3584])  # one of the two blocks of zeros
    assert len(read(path)) == 3
