"""Kernels are compiled once on a machine, and by one process at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from mm_autoparallel.pipeline.simulate import compiled

pytestmark = pytest.mark.usefixtures("told_on_terminal")


def test_whoever_comes_meanwhile_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "_folder", tmp_path)
    was_first: list[bool] = []

    def come() -> None:
        with compiled.first_compilation("room.kernel") as is_first:
            was_first.append(is_first)

    second = threading.Thread(target=come)
    with compiled.first_compilation("room.kernel") as is_first:
        assert is_first
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert not was_first
        (tmp_path / "room.kernel-7.py311.nbi").touch()
    second.join()
    assert was_first == [False]
    assert capsys.readouterr().err.count("compiling its kernels") == 1


def test_another_kernel_of_its_module_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_folder", tmp_path)
    (tmp_path / "room.kernel_of_another-7.py311.nbi").touch()
    assert compiled.announce_compilation("room.kernel")


def test_a_kernel_in_a_changed_file_is_not_called_by_an_old_one(repository: Path, tmp_path: Path) -> None:
    """numba would go on with the caller's machine code, which has the old callee in it: only its own file is looked
    at."""
    shutil.copytree(repository / "mm_autoparallel", tmp_path / "mm_autoparallel")
    changed = tmp_path / "mm_autoparallel" / "pipeline" / "placement" / "incumbents" / "repair.py"
    program = "from mm_autoparallel.pipeline.simulate import compiled; print(compiled._folder)"

    def folder() -> str:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, check=True, stdout=subprocess.PIPE
        ).stdout

    before = folder()
    assert folder() == before
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert folder() != before


@pytest.fixture
def only_a_planted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that kernels could be cached in, which others can write to."""
    planted = tmp_path / f"mm-autoparallel-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(planted))
    return planted


def test_machine_code_that_others_could_have_written_is_not_loaded(
    only_a_planted_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_the_end: list[tuple] = []
    monkeypatch.setattr(compiled.atexit, "register", lambda *call: at_the_end.append(call))
    folder = compiled.open_cache()
    assert folder != only_a_planted_folder
    assert only_a_planted_folder not in folder.parents
    assert folder.stat().st_mode & 0o777 == 0o700
    told = capsys.readouterr().err
    assert str(only_a_planted_folder) in told
    assert told.count("\n") == 1
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    assert compiled.open_cache() == folder  # in a process that this one starts
    ((remove, *arguments),) = at_the_end
    remove(*arguments)
    assert not folder.parent.exists()


def test_a_folder_that_was_asked_for_is_not_passed_over_in_silence(
    only_a_planted_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled.open_cache().parent == tmp_path / "cache" / "mm-autoparallel"
    assert str(only_a_planted_folder) in capsys.readouterr().err


def test_the_folder_that_is_named_serves_and_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = compiled.open_cache()
    assert folder.parent == tmp_path
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    assert compiled.open_cache() == folder
    assert capsys.readouterr().err == ""
