"""Rooms of kernels are compiled once on a machine, side by side, and one call of several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mm_autoparallel.pipeline.simulate import compiled, rooms

pytestmark = pytest.mark.usefixtures("told_on_terminal")

#: Rooms of a module that processes of their own import: each notes who came.
MODULE = """
import os, time
from pathlib import Path

def note(room):
    with (Path({folder!r}) / room).open("a") as came:
        came.write(f"{{os.getpid()}}\\n")

def first(): note("first")
def second(): note("second")
def lost():
    note("lost")
    if os.getpid() != {here}: raise OSError("no room")
def slow():
    note("slow")
    if os.getpid() != {here}: time.sleep(600.0)
def breaks():
    (Path({folder!r}) / "breaks").touch()
    slow = Path({folder!r}) / "slow"
    while not slow.exists() or not slow.read_text(): time.sleep(0.01)
    raise KeyboardInterrupt
"""


@pytest.fixture
def came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of notes. Machine code has a folder of its own, and `noted_rooms` is a module."""
    (tmp_path / "code").mkdir()
    text = MODULE.format(folder=str(tmp_path), here=os.getpid())
    (tmp_path / "noted_rooms.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(compiled, "_folder", tmp_path / "code")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "noted_rooms", raising=False)
    return tmp_path


def processes(note: Path) -> list[int]:
    return [int(line) for line in note.read_text(encoding="utf-8").split()]


def test_each_room_has_a_process_and_is_loaded_here_once(came: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import noted_rooms  # type: ignore[import-not-found]

    asked = (noted_rooms.first, noted_rooms.second)
    callers = [threading.Thread(target=rooms.compile_rooms, args=(asked,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    rooms.compile_rooms(asked)
    assert processes(came / "first") == [os.getpid()]
    other, here = processes(came / "second")
    assert here == os.getpid() != other
    assert capsys.readouterr().err.count("compiling its kernels") == 1


def test_a_room_that_another_process_could_not_run_is_run_here(came: Path) -> None:
    import noted_rooms

    rooms.compile_rooms((noted_rooms.first, noted_rooms.lost))
    assert processes(came / "lost")[-1] == os.getpid()
    rooms.compile_rooms((noted_rooms.first, noted_rooms.lost))
    assert len(processes(came / "lost")) == 2


def test_an_interrupt_ends_the_processes_and_nothing_counts_as_compiled(came: Path) -> None:
    import noted_rooms

    with pytest.raises(KeyboardInterrupt):
        rooms.compile_rooms((noted_rooms.breaks, noted_rooms.slow))
    (other,) = processes(came / "slow")
    assert subprocess.run(["kill", "-0", str(other)], check=False, stderr=subprocess.DEVNULL).returncode
    assert not list((came / "code").glob("*.compiled"))
