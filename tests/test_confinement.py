"""Files are opened below one folder alone once that is asked for: names that lead out, and links, are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mm_autoparallel.confinement import confine, release
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_folder, is_there, read_document, read_text, write_text_atomically
from mm_autoparallel.model.profiles.calibration import SHIPPED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that is served, with a file in it; beside it a secret."""
    served = tmp_path / "served"
    (served / "inner").mkdir(parents=True)
    (served / "inner" / "a.json").write_text('{"a": 1}')
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.json").write_text('{"secret": 1}')
    monkeypatch.chdir(served)
    confine(served)
    yield served
    release()


def read(path: str | Path) -> str:
    return read_text(Path(path), "file", "JSON file")


def test_what_lies_below_is_read_and_written(folder: Path) -> None:
    assert read("inner/a.json") == read(folder / "inner" / "a.json") == read("inner/../inner/./a.json") == '{"a": 1}'
    assert is_there(Path("inner/a.json"))
    assert is_folder(Path("inner"))
    assert not is_folder(Path("inner/a.json"))
    write_text_atomically(Path("new/folders/b.json"), "{}")
    write_text_atomically(Path("inner/a.json"), '{"b": 2}')
    assert read("new/folders/b.json") == "{}"
    assert read("inner/a.json") == '{"b": 2}'
    assert sorted(path.name for path in folder.rglob("*")) == ["a.json", "b.json", "folders", "inner", "new"]


@pytest.mark.parametrize(
    "name", ["../outside/secret.json", "inner/../../outside/secret.json", "/etc/passwd", "/", ".."]
)
def test_what_lies_outside_is_not(folder: Path, name: str) -> None:
    with pytest.raises(JobError, match=r"it lies outside .*served"):
        read(name)
    assert not is_there(Path(name))
    assert not is_folder(Path(name))
    with pytest.raises(PermissionError, match="it lies outside"):
        write_text_atomically(Path(name) / "new.json", "{}")
    assert [path.name for path in (folder.parent / "outside").iterdir()] == ["secret.json"]


@pytest.mark.parametrize("within", [False, True])
def test_links_are_not_followed(folder: Path, within: bool) -> None:
    """Neither as the file nor on the way to it, wherever they lead."""
    target = folder / "inner" if within else folder.parent / "outside"
    (folder / "way").symlink_to(target)
    (folder / "file.json").symlink_to(next(target.iterdir()))
    for name in ("file.json", f"way/{next(target.iterdir()).name}"):
        with pytest.raises(JobError, match="is a link, and links are not followed here"):
            read(name)
        assert not is_there(Path(name))
    assert not is_folder(Path("way"))
    for name in ("file.json", "way/new.json"):
        with pytest.raises(PermissionError, match="is a link"):
            write_text_atomically(Path(name), "{}")
    assert sum(1 for _ in target.iterdir()) == 1


@pytest.mark.parametrize("name", [".env", ".studio/token", "inner/.hidden.json"])
def test_what_is_hidden_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("secret")
    with pytest.raises(JobError, match="begins with a dot, and what is hidden is not opened here"):
        read(name)
    assert not is_there(Path(name))
    with pytest.raises(PermissionError, match="begins with a dot"):
        write_text_atomically(Path(name), "{}")
    assert (folder / name).read_text() == "secret"


def test_a_link_that_is_swapped_in_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a folder and the opening of a file in it, a stranger is as quick as can be."""
    opened = os.open
    (folder / "inner" / "deep").mkdir()
    (folder / "inner" / "deep" / "secret.json").write_text("{}")

    def open_and_swap(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "deep" and not (folder / "inner" / "deep").is_symlink():
            (folder / "inner" / "deep").rename(folder / "moved")
            (folder / "inner" / "deep").symlink_to(folder.parent / "outside")
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_and_swap)
    with pytest.raises(JobError, match="deep is a link"):
        read("inner/deep/secret.json")


def test_a_folder_that_is_swapped_while_it_is_written_to_keeps_the_file(folder: Path) -> None:
    from mm_autoparallel.confinement import pinned

    with pinned(Path("inner/new.json")) as path:
        (folder / "inner").rename(folder / "moved")
        (folder / "inner").symlink_to(folder.parent / "outside")
        path.write_text("{}")
    assert (folder / "moved" / "new.json").exists()
    assert [path.name for path in (folder.parent / "outside").iterdir()] == ["secret.json"]


def test_devices_and_pipes_are_no_files(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(JobError, match="it is a named pipe"):
        read("pipe")
    with pytest.raises(PermissionError, match="no regular file"):
        write_text_atomically(Path("pipe"), "{}")


def test_what_the_package_ships_is_read(folder: Path) -> None:
    assert read_document(next(SHIPPED.glob("*.json")), "calibration")["schema"]


def test_folders_of_the_package_are_read_and_written(folder: Path, tmp_path: Path) -> None:
    confine(folder, own=[tmp_path / "own"])
    write_text_atomically(tmp_path / "own" / "a.json", "{}")
    assert read(tmp_path / "own" / "a.json") == "{}"


def test_afterwards_files_are_opened_anywhere(folder: Path) -> None:
    release()
    assert "secret" in read("../outside/secret.json")
