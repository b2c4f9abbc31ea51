"""Records of WebDataset's tar archives: members of one name before the first dot are a sample, and hidden ones none."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.content import TEXTS
from mm_autoparallel.samples.opened import MOST_RECORD, broken, name_file, open_samples, parse_record
from mm_autoparallel.samples.values import is_said, several

_HEAD = 1 << 20
"""Bytes of an image that are read. Assumed: its size stands in them."""
_ENDINGS = {
    "images": ("png", "jpg", "jpeg", "webp", "gif"),
    "videos": ("mp4", "mkv", "webm", "avi", "mov"),
    "audios": ("flac", "wav", "mp3", "ogg", "opus", "m4a"),
}


class _Header(tarfile.TarInfo):
    """One that ends with an error where an archive ends without the two blocks of zeros behind its last member."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:  # type: ignore[override,unused-ignore]
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as failure:
            if tarfile_.offset and type(failure).__name__ != "EOFHeaderError":
                raise tarfile.ReadError(f"it is cut off or damaged behind byte {tarfile_.offset:,}") from None
            raise


@dataclass
class _Group:
    """Members of one sample. content: of its JSON. files: of each medium, in their order."""

    key: str
    content: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    files: dict[str, list[Any]] = field(default_factory=lambda: {medium: [] for medium in _ENDINGS})

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"sample {self.key}"

    def take(self, ending: str, content: IO[bytes], path: Path) -> None:
        """Take in a member, by what stands behind the first dot of its name."""
        if ending == "json":
            text = content.read(MOST_RECORD).decode("utf-8", "replace")
            self.content |= parse_record(text, path, self.place)
        elif ending == "txt":
            self.text = content.read(MOST_RECORD).decode("utf-8", "replace")
        kind = ending.rpartition(".")[2]
        for medium, endings in _ENDINGS.items():
            if kind in endings:
                is_image = medium == "images"
                self.files[medium].append({"path": ending, "bytes": content.read(_HEAD)} if is_image else ending)

    def record(self, path: Path) -> dict[str, Any]:
        """The whole, in whatever order the members came: JSON counts where it says more than names of files."""
        record = dict(self.content)
        if self.text is not None and not any(is_said(record.get(name)) for name in TEXTS):
            record["text"] = self.text
        for medium, files in self.files.items():
            keys = [key for key in (medium, medium.removesuffix("s")) if is_said(record.get(key))]
            for key in keys if files else ():
                named = several(record[key])
                if len(named) != len(files):
                    reason = f"its JSON names {len(named)} {medium}, and {len(files)} are beside it; give as many"
                    raise broken(path, self.place, reason)
            if files and not any(isinstance(one, Mapping) for key in keys for one in several(record[key])):
                record = {key: value for key, value in record.items() if key not in keys} | {medium: files}
        return record


def list_tar(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A record for each sample: its JSON member, its text, and the sizes of its images."""
    group = _Group("")
    with open_samples(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as archive:
                for member in archive:
                    if not member.isfile():
                        continue
                    place = PurePosixPath(member.name)
                    stem, _, ending = place.name.partition(".")
                    if not stem:  # .DS_Store, ._000.json: WebDataset passes over them too
                        continue
                    if (key := str(place.with_name(stem))) != group.key:
                        if found := group.record(path):
                            yield group.place, found
                        group = _Group(key)
                    content = archive.extractfile(member)
                    assert content is not None  # of a regular file
                    group.take(ending.lower(), content, path)
            if found := group.record(path):
                yield group.place, found
        except (tarfile.TarError, EOFError, OSError) as failure:
            raise JobError(f"it is no readable tar archive ({failure})", where=name_file(path)) from None
