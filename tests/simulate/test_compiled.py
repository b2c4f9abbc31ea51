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


def test_whoever_comes_meanwhile_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_folder", tmp_path)
    came: list[str] = []

    def come() -> None:
        with compiled.one_at_a_time("save"):
            came.append("second")

    second = threading.Thread(target=come)
    with compiled.one_at_a_time("save"):
        second.start()
        second.join(0.2)
        assert second.is_alive()
        came.append("first")
    second.join()
    assert came == ["first", "second"]


def test_another_kernel_of_its_module_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_folder", tmp_path)
    (tmp_path / "room.kernel_of_another-7.py311.nbi").touch()
    assert compiled.announce_compilation("room.kernel")


@pytest.mark.slow
def test_a_kernel_in_a_changed_file_is_not_called_by_an_old_one(package: Path, tmp_path: Path) -> None:
    """numba would go on with the caller's machine code, which has the old callee in it: only its own file is looked
    at."""
    shutil.copytree(package, tmp_path / "mm_autoparallel")
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


SETTINGS = """
import os, stat, sys
import numba

def settings():
    config = {name: getattr(numba.config, name) for name in dir(numba.config) if name.isupper()}
    return dict(os.environ), config

before = settings()
from mm_autoparallel.pipeline.simulate.compiled import kernel_folder
from mm_autoparallel.pipeline.placement.patterns.state_graph import least_of
import numpy as np

least_of(np.ones((2, 2)), 0, 2, 0)
assert settings() == before

@numba.njit
def of_the_host(x):
    return x

of_the_host.enable_caching()
assert str(kernel_folder()) not in of_the_host.stats.cache_path, of_the_host.stats
places = [kernel_folder(), *kernel_folder().rglob("*")]
assert all(place.stat().st_uid == os.getuid() for place in places)
assert all(not place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) for place in places)
assert kernel_folder().stat().st_mode & 0o777 == 0o700
print(sum(least_of.stats.cache_hits.values()), len(list(kernel_folder().rglob("state_graph.least_of-*.nbc"))))
"""


@pytest.mark.slow
def test_the_settings_of_the_process_stay_and_kernels_are_kept(tmp_path: Path, repository: Path) -> None:
    """In a folder of this user; and a second process takes them from there. Other people's functions lie elsewhere."""
    (tmp_path / "host.py").write_text(SETTINGS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(repository)}
    command = [sys.executable, str(tmp_path / "host.py")]
    printed = [
        subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout for _ in range(2)
    ]
    assert printed == ["0 1\n", "1 1\n"]


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
    handed_on: dict[str, str] = {}
    monkeypatch.setattr("mm_autoparallel.child_process._handed_on", handed_on)
    monkeypatch.setattr(compiled.atexit, "register", lambda *call: at_the_end.append(call))
    folder = compiled.open_cache()
    assert folder != only_a_planted_folder
    assert only_a_planted_folder not in folder.parents
    assert folder.stat().st_mode & 0o777 == 0o700
    told = capsys.readouterr().err
    assert str(only_a_planted_folder) in told
    assert told.count("\n") == 1
    assert handed_on == {"NUMBA_CACHE_DIR": str(folder)}
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
