"""Sample files of every kind are read to the same samples, and what is malformed is named with its place."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mm_autoparallel.api.samples import count_samples
from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.image_size import read_size
from mm_autoparallel.samples.record import read_record, write_record
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import Sample
from mm_autoparallel.samples.sources import list_samples
from mm_autoparallel.samples.table import add_up, keep_samples, tabulate

RULES = SampleRules(patch_size=14, characters_count_per_token=4.0)
WIDE = 26 * 46
"""Tokens of 1280 x 720 pixels in squares of 28: 45.7 and 25.7, rounded."""


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIB", 13, b"IHDR", width, height, 8)


def read(path: Path, rules: SampleRules = RULES) -> list[Sample]:
    return list(list_samples(path, lambda record: read_record(record, rules)))


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


EXPECTED = [Sample(patches=(4 * WIDE, 1024), text_tokens=7), Sample(tokens=900, audio_s=(2.5, 3.0))]


def test_lines_lists_and_cells_give_the_same_samples(tmp_path: Path) -> None:
    rows = [
        {"image_sizes": [[1280, 720], [448, 448]], "text_tokens": 7, "id": "whatever"},
        {"tokens": 900, "audio_seconds": [2.5, 3]},
    ]
    lines = write(tmp_path, "a.jsonl", "\n\n".join(json.dumps(row) for row in rows))
    whole = write(tmp_path, "a.json", json.dumps(rows, indent=3))
    cells = "id,image_sizes,text_tokens,tokens,audio_seconds\nx,1280x720 448x448,7,,\ny,,,900,2.5 3\n"
    for path in (lines, whole, write(tmp_path, "a.csv", cells)):
        assert read(path) == EXPECTED
    assert [read_record(write_record(one), SampleRules()) for one in EXPECTED] == EXPECTED


def test_lists_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    rows = [{"text_tokens": number + 1, "note": "x" * 40_000} for number in range(60)]
    path = write(tmp_path, "long.json", json.dumps(rows, indent=1))
    assert [one.text_tokens for one in read(path)] == list(range(1, 61))


def test_archives_give_the_sizes_of_their_images(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (
            (".DS_Store", b"of a desktop"),
            ("00/a.json", b'{"text_tokens": 7}'),
            ("00/._a.json", b"of a file system, and no JSON"),
            ("00/a.png", png(448, 448)),
            ("00/b.txt", b"eight words of text, not a tokenized one"),
            ("00/b.left.png", png(448, 448)),
            ("00/b.right.png", png(28, 28)),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert read(tmp_path / "a.tar") == [Sample((1024,), 7), Sample((1024, 4), 10)]


def test_frames_that_a_patch_joins_count_as_one_image(tmp_path: Path) -> None:
    video = {"frames": 5, "width": 448, "height": 448}
    rows = [
        {"videos": [video, {"frames": 2, "patches": 64}], "patches": 4, "text_tokens": 7},
        {"video": video, "text": "<video>four"},
    ]
    path = write(tmp_path, "videos.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert read(path) == [Sample((4, 1024, 1024, 1024, 64), 7), Sample((1024, 1024, 1024), 1)]
    alone = SampleRules(patch_size=14, characters_count_per_token=4.0, frames_per_patch=1)
    assert [len(sample.patches) for sample in read(path, alone)] == [1 + 5 + 2, 5]


def test_a_video_whose_frames_nobody_says_is_refused(tmp_path: Path) -> None:
    archive_path = tmp_path / "a.tar"
    with tarfile.open(archive_path, "w") as archive:
        for name, content in (("a.mp4", b"film"), ("a.txt", b"words")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    named = write(tmp_path, "a.jsonl", '{"video": "cat.mp4", "text_tokens": 7}')
    cells = write(tmp_path, "a.csv", "videos,text_tokens\ncat.mp4,7\n")
    for path in (archive_path, named, cells):
        with pytest.raises(JobError, match="frames are not counted in files"):
            read(path)


def test_conversations_with_images_in_a_folder(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat on it"}]
    write(tmp_path, "cat.png", png(448, 448))
    path = write(tmp_path, "llava.json", json.dumps([{"image": "cat.png", "conversations": turns}] * 3))
    found = count_samples([path], RULES, images=tmp_path)
    assert found.document()["num_samples"] == 3
    assert found.table.sample(0) == Sample((1024,), 5)  # 6 + 11 characters
    settings = {"basic_parameters": {"dataset": f"{path}"}, "preprocess_parameters": {"image_max_pixels": 28 * 28 * 4}}
    named = write(tmp_path, "data.json", json.dumps({"dataset_param": settings}))
    assert count_samples([named], RULES, images=tmp_path).table.sample(2) == Sample((16,), 5)
    settings["preprocess_parameters"] = {"image_max_pixels": "3136"}
    write(tmp_path, "data.json", json.dumps({"dataset_param": settings}))
    with pytest.raises(JobError, match=r'data.json: .* images of at most "3136" pixels; a whole number'):
        count_samples([named], RULES, images=tmp_path)
    settings["preprocess_parameters"] = {}
    rows = [{"pics": ["cat.png"], "chat": [{"role": "user", "content": "<image>hello"}], "text": "not of messages"}]
    write(tmp_path, "other.json", json.dumps(rows))
    settings["basic_parameters"] = {"dataset": "other.json, other.json"}
    attributes: dict[str, object] = {"images": "pics", "messages": "chat", "videos": None}
    write(tmp_path, "data.json", json.dumps({"dataset_param": {**settings, "attr": attributes}}))
    assert [count_samples([named], RULES, images=tmp_path).table.sample(i) for i in (0, 1)] == [Sample((1024,), 2)] * 2
    for wrong, message in (({"content_tag": "words"}, 'content_tag is "words"'), ({"images": 5}, "images is 5")):
        write(tmp_path, "data.json", json.dumps({"dataset_param": {**settings, "attr": wrong}}))
        with pytest.raises(JobError, match=rf"data.json: dataset_param.attr.{message}"):
            count_samples([named], RULES, images=tmp_path)
    with pytest.raises(JobError, match=r"llava.json: entry 1: the size of its image .cat.png. .* --images DIR"):
        count_samples([path], RULES)
    with pytest.raises(JobError, match=r"entry 1: its conversations is text.*--characters-per-token"):
        count_samples([path], SampleRules(patch_size=14), images=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "it is empty; a record for each sample is expected"),
        ("a.jsonl", "\n \n", "it has no record"),
        ("a.jsonl", '{"tokens": 5}\n{"tokens": -5}', "line 2: its tokens is -5; a whole number from 1 to"),
        ("a.jsonl", '{"tokens": 5}\n{"tokens": ', "line 2: it is no valid JSON"),
        ("a.jsonl", '{"tokens": NaN}', "line 1: it is no valid JSON"),
        ("a.jsonl", "[5]", "line 1: it is no mapping"),
        ("a.jsonl", '{"token": 5}', "line 1: it has token, and none of patches, image_sizes"),
        ("a.jsonl", '{"text_tokens": 0}', "line 1: it has no image, no video, no audio and no text"),
        ("a.jsonl", '{"patches": true}', "line 1: its patches is true"),
        ("a.jsonl", '{"width": 5, "tokens": 3}', "line 1: it has no height"),
        ("a.jsonl", '{"image_sizes": [5], "tokens": 3}', r"line 1: image_sizes has 5; \[width, height\]"),
        ("a.jsonl", '{"audio_seconds": [0], "tokens": 3}', "line 1: its audio_seconds is 0; a number above 0"),
        ("a.jsonl", b"\xff\xfe", "line 1: it is no UTF-8 text"),
        ("a.json", '{"tokens": 5}', "it is no list"),
        ("a.json", '[{"tokens": 5} {"tokens": 6}]', "after entry 1: there is no comma"),
        ("a.json", '[{"tokens": 5},', "entry 2: it is no valid JSON|after entry 1"),
        ("a.json", '[{"tokens": 5}', "after entry 1: the list has no end"),
        ("a.json", "[5]", "entry 1: it is no mapping"),
        ("a.json", '[{"tokens": 5}][{"tokens": 6}]', "behind the list: there is more; one list of records"),
        ("a.json", '[{"tokens": 5}] and more', "behind the list: there is more"),
        ("a.csv", "one,two\n1,2\n", "line 1: no column is called as any of patches"),
        ("a.csv", "tokens,tokens\n1,2\n", "line 1: the column tokens stands twice"),
        ("a.csv", "tokens,x\n1,2\n3\n", "line 3: it has 1 cells, and the header has 2 columns"),
        ("a.csv", "tokens\nmany\n", 'line 2: its tokens is "many"; numbers as in'),
        ("a.csv", "image_sizes\n12 x 5\n", "line 2: its image_sizes is"),
        ("a.tar", "no archive" * 100, "it is no readable tar archive"),
        ("a.txt", "5", "its name ends in .txt, and .jsonl, .json, .csv, .parquet, .tar are read"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        read(write(tmp_path, name, text))
    assert str(caught.value).startswith(f"sample file {tmp_path / name}: ")


def test_cells_hold_conversations(tmp_path: Path) -> None:
    turns = json.dumps([{"from": "human", "value": "x" * 200_000}, {"from": "gpt", "value": "four"}])
    quoted = turns.replace('"', '""')
    assert read(write(tmp_path, "a.csv", f'conversations\n"{quoted}"\n')) == [Sample(text_tokens=50_001)]


def test_lines_that_are_called_a_list(tmp_path: Path) -> None:
    for text in ('{"text_tokens": 5}\n{"text_tokens": 6}\n', '\ufeff\n{"text_tokens": 5}'):
        with pytest.raises(JobError, match=r"a\.json: it begins with a record in a line of its own; name it \.jsonl"):
            count_samples([write(tmp_path, "a.json", text)], RULES)
    with pytest.raises(JobError, match=r"a\.json: it is a mapping without dataset_param"):
        count_samples([write(tmp_path, "a.json", '{"data": []}')], RULES)


def test_pixels_need_a_patch(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"width": 50, "height": 60, "text_tokens": 3}')
    with pytest.raises(JobError, match=r"line 1: it has an image of 50 x 60 pixels, .* --patch-size N"):
        read(path, SampleRules())
    with pytest.raises(JobError, match=r"line 1: .* takes images of one size, 576 patches, .* \[576, 576\] for two"):
        read(path, SampleRules(fixed_count=576))
    assert read(path, SampleRules(fixed_count=576, patch_size=14)) == [Sample((16,), 3)]  # asked for
    with pytest.raises(JobError, match="there is no such file"):
        read(tmp_path / "none.jsonl")


def test_parquet_asks_for_what_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    if find_spec("pyarrow") is None:
        path.write_bytes(b"PAR1")
        with pytest.raises(JobError, match="pip install pyarrow"):
            read(path)
        return
    import pyarrow
    from pyarrow import parquet

    images = [[{"bytes": png(448, 448), "path": None}], []]
    parquet.write_table(pyarrow.table({"images": images, "text_tokens": [7, 9], "url": ["x", "y"]}), path)
    assert read(path) == [Sample((1024,), 7), Sample((), 9)]
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(JobError, match="it is no readable parquet file"):
        read(path)


@pytest.mark.parametrize(
    "content",
    [
        png(640, 480),
        b"GIF89a" + struct.pack("<HH", 640, 480) + b"\0" * 10,
        b"RIFF\0\0\0\0WEBPVP8X" + b"\0" * 8 + (639).to_bytes(3, "little") + (479).to_bytes(3, "little"),
        b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + (639 | 479 << 14).to_bytes(4, "little") + b"\0" * 5,
        b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 640, 480),
        b"\xff\xd8\xff\xe0\0\x10"
        + b"J" * 14
        + b"\xff\xc4\0\x04ab\xff\xc2\0\x0b\x08"
        + struct.pack(">HH", 480, 640)
        + b"\3" * 4,
    ],
)
def test_sizes_of_images_from_their_first_bytes(content: bytes) -> None:
    assert read_size(io.BytesIO(content)) == (640, 480)
    for end in (0, 5):
        assert read_size(io.BytesIO(content[:end])) is None


def test_large_images_are_scaled_down() -> None:
    assert RULES.patches(28, 28) == 4
    assert RULES.patches(3, 5) == 4
    limited = SampleRules(patch_size=14, most_pixels=28 * 28 * 100)
    assert limited.patches(2800, 2800) == 400
    assert limited.patches(5600, 1400) == 4 * 20 * 5


def test_long_streams_keep_a_fair_part() -> None:
    samples = [Sample(text_tokens=number) for number in range(20_000)]
    kept = keep_samples(iter(samples), most=1000)
    assert (len(kept), kept.num_read) == (1000, 20_000)
    assert len({*kept.text_tokens.tolist()}) == 1000
    assert abs(kept.text_tokens.mean() / 10_000 - 1) < 0.06  # three standard errors
    assert keep_samples(iter(samples[:50])).sha256 == tabulate(samples[:50]).sha256


def test_seconds_whose_product_is_just_above_a_whole_number() -> None:
    lengths = [number / 100 for number in range(1, 20_000)]
    exact = [-(-number // 4) for number in range(1, 20_000)]  # 25 tokens a second
    assert [Sample(audio_s=(seconds,)).num_tokens() for seconds in lengths] == exact
    assert tabulate([Sample(audio_s=(seconds,)) for seconds in lengths]).audio_tokens().tolist() == exact
    assert Sample(audio_s=(0.28001,)).num_tokens() == 8


def test_equal_samples_have_equal_sums() -> None:
    values, ends = np.tile([0.1, 0.7, 1e-3], 1000), np.concatenate([[0, 0], np.arange(1, 1001) * 3])
    assert set(add_up(values, ends).tolist()) == {0.0, 0.1 + 0.7 + 1e-3}
    assert add_up(values[:0], np.zeros(3, dtype=np.int64)).tolist() == [0.0, 0.0]


def test_a_table_counts_as_its_samples_do() -> None:
    samples = [Sample((5, 9), 3), Sample((), 0, 77, (1.01,)), Sample(text_tokens=4, audio_s=(2.0, 0.5)), Sample((1,))]
    table = tabulate(samples)
    assert table.num_tokens().tolist() == [one.num_tokens() for one in samples]
    assert table.num_tokens(9, 10.0).tolist() == [one.num_tokens(3, 10.0) for one in samples]
    assert [table.sample(index) for index in range(4)] == samples
