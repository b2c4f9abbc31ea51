"""What may be run or believed where it lies: folders that nobody else can have written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mm_autoparallel.private import is_private, make_private


def test_a_folder_is_made_for_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert make_private(tmp_path / "cache" / "mine")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "cache", tmp_path / "cache" / "mine")] == [0o700, 0o700]
    assert make_private(tmp_path / "cache" / "mine")  # once more, now that it is there


def of_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def of_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def a_link(path: Path) -> None:
    path.with_name("target").mkdir(mode=0o700)
    path.symlink_to(path.with_name("target"))


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_file(path: Path) -> None:
    path.touch(mode=0o600)


def where_everybody_renames(path: Path) -> None:
    path.mkdir(mode=0o700)
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    "plant",
    [of_others, of_the_group, a_link, a_dangling_link, a_file, where_everybody_renames],
    ids=lambda f: f.__name__,
)
def test_what_others_can_have_put_there_is_not_private(tmp_path: Path, plant) -> None:
    plant(tmp_path / "cache")
    assert not make_private(tmp_path / "cache")


def test_another_user_s_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_private(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not is_private(tmp_path)
