"""Records of data sets, one after the other, with the place of each for messages: the readers of file formats.

JSONL, a JSON list (LLaVA's conversations, MindSpeed-MM's data), CSV, parquet (Hugging Face's data sets) and tar
(WebDataset). Memory is bounded by the largest record, in parquet by 16 of them and a page,
and not by the file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.archives import list_tar
from mm_autoparallel.samples.content import TEXTS
from mm_autoparallel.samples.opened import MOST_RECORD, broken, name_file, open_samples, parse_record, refuse_constant
from mm_autoparallel.samples.record import KNOWN
from mm_autoparallel.samples.values import Malformed

Records = Iterator[tuple[str, Mapping[str, Any]]]
"""Place (`line 3`) and content of each."""

_CHUNK = 1 << 20
"""Characters of JSON, and bytes of a parquet column, that are read at once."""
_NAMED = ("image", "images", "video", "videos", "audio", "audios")
"""Columns whose cells name a file."""
_ROWS = 16
"""Of parquet that are in memory at once: images in them may be large."""


def list_records(path: Path) -> Records:
    """The records of the file at `path`, by the ending of its name. Raises JobError, naming the place, where one is
    malformed."""
    ending = path.suffix.lower()
    known = {
        ".jsonl": _list_lines,
        ".json": _list_json,
        ".csv": _list_csv,
        ".parquet": _list_parquet,
        ".tar": list_tar,
    }
    if ending not in known:
        raise JobError(
            f"its name ends in {ending or 'nothing'}, and {', '.join(known)} are read; give the files of a folder one "
            "by one",
            where=name_file(path),
        )
    return known[ending](path)


def _text(stream: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


def _list_lines(path: Path) -> Records:
    number = 0
    with _text(open_samples(path)) as lines:
        while True:
            number += 1
            try:
                line = lines.readline(MOST_RECORD)
            except UnicodeDecodeError as failure:
                raise broken(path, f"line {number}", f"it is no UTF-8 text (byte {failure.start} of it)") from None
            if not line:
                return
            if len(line) == MOST_RECORD:
                raise broken(path, f"line {number}", f"it has more than {MOST_RECORD:,} characters; divide it")
            if line.strip():
                yield f"line {number}", parse_record(line, path, f"line {number}")


_SPACE = re.compile(r"\s*")


class _Ahead:
    """The text of a file from where its reader stands, `at`: as much as the next value needs."""

    def __init__(self, stream: io.TextIOWrapper, path: Path) -> None:
        self._stream, self._path, self._text, self.at = stream, path, "", 0
        self._decoder = json.JSONDecoder(parse_constant=refuse_constant)

    def _more(self, place: str) -> bool:
        """Read on, and forget what was passed; whether there was anything."""
        try:
            found = self._stream.read(_CHUNK)
        except UnicodeDecodeError:
            raise broken(self._path, place, "it is no UTF-8 text") from None
        self._text, self.at = self._text[self.at :] + found, 0
        return bool(found)

    def next_character(self, place: str) -> str:
        """That after white space, which is passed; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self._text) or not self._more(place):
                return self._text[self.at : self.at + 1]

    def take_value(self, place: str) -> object:
        """The JSON value that begins here."""
        while True:
            try:
                value, self.at = self._decoder.raw_decode(self._text, self.at)
            except (ValueError, RecursionError) as failure:
                if len(self._text) - self.at > MOST_RECORD or not self._more(place):
                    reason = getattr(failure, "msg", str(failure))
                    raise broken(self._path, place, f"it is no valid JSON ({reason})") from None
                continue
            return value


def _list_json(path: Path) -> Records:
    """Entries of a list, read one by one."""
    with _text(open_samples(path)) as stream:
        ahead, number = _Ahead(stream, path), 0
        if ahead.next_character("its beginning") != "[":
            raise JobError("it is no list; a list of records is expected, or name it .jsonl", where=name_file(path))
        ahead.at += 1
        while (following := ahead.next_character(f"entry {number + 1}")) != "]":
            if not following:
                raise broken(path, f"after entry {number}", "the list has no end; the file is cut off")
            if number:
                if following != ",":
                    raise broken(path, f"after entry {number}", "there is no comma; a list of records is expected")
                ahead.at += 1
                ahead.next_character(f"entry {number + 1}")
            number += 1
            entry = ahead.take_value(f"entry {number}")
            if not isinstance(entry, dict):
                reason = f"it is no mapping; one with some of {', '.join(KNOWN)} is right"
                raise broken(path, f"entry {number}", reason)
            yield f"entry {number}", entry
        ahead.at += 1
        if ahead.next_character("behind the list"):
            raise broken(path, "behind the list", "there is more; one list of records is expected in a file")


def _list_csv(path: Path) -> Records:
    """Cells are numbers, or several divided by spaces; image_sizes are `1280x720 640x480`."""
    csv.field_size_limit(MOST_RECORD)  # of this process: a cell may hold a whole conversation
    with _text(open_samples(path)) as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            if not {*header} & {*KNOWN}:
                raise broken(path, "line 1", f"no column is called as any of {', '.join(KNOWN)}")
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise broken(path, "line 1", f"the column {twice} stands twice; keep one of the two")
            for cells in reader:
                place = f"line {reader.line_num}"
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise broken(path, place, f"it has {len(cells)} cells, and the header has {len(header)} columns")
                named = {name: cell.strip() for name, cell in zip(header, cells, strict=True) if cell.strip()}
                yield place, {name: _cell(name, cell, path, place) for name, cell in named.items() if name in KNOWN}
        except csv.Error as failure:
            raise broken(path, f"line {reader.line_num}", f"it is no valid CSV ({failure})") from None
        except UnicodeDecodeError:
            raise broken(path, f"after line {reader.line_num}", "it is no UTF-8 text") from None


def _cell(name: str, cell: str, path: Path, place: str) -> object:
    if name in ("image_sizes", *_NAMED, *TEXTS):
        return cell
    try:
        numbers = [float(word) if "." in word or "e" in word.lower() else int(word) for word in cell.split()]
    except ValueError:
        raise broken(path, place, f'its {name} is "{cell[:60]}"; numbers as in "4096 1024" are right') from None
    return numbers[0] if len(numbers) == 1 else numbers


def _list_parquet(path: Path) -> Records:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise JobError(
            "parquet is read by pyarrow, which is not installed: pip install pyarrow; or write the samples as JSONL",
            where=name_file(path),
        ) from None
    with open_samples(path) as stream:
        try:
            file = parquet.ParquetFile(stream, buffer_size=_CHUNK, pre_buffer=False)
            wanted = [name for name in file.schema_arrow.names if name in KNOWN]
            if not wanted:
                raise JobError(f"no column is called as any of {', '.join(KNOWN)}", where=name_file(path))
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except (OSError, ValueError) as failure:  # pyarrow's errors are such
            raise JobError(
                f"it is no readable parquet file ({str(failure).splitlines()[0]})", where=name_file(path)
            ) from None


def list_samples(path: Path, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """What `read` makes of each record; a Malformed becomes a JobError with file and place. Raises JobError where there
    is no record."""
    is_empty = True
    for place, record in list_records(path):
        is_empty = False
        try:
            yield read(record)
        except Malformed as reason:
            raise broken(path, place, str(reason)) from None
    if is_empty:
        raise JobError("it has no record; one for each sample is expected", where=name_file(path))
