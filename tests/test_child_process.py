"""Processes that this package starts run nothing of the folder they are started in."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from mm_autoparallel.child_process import followed, hand_on, python_command


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with files of the names of modules that would be imported; each leaves a trace."""
    for name in ("json", "numpy", "ctypes", "signal", "pathlib", "importlib", "mm_autoparallel"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError({name!r})\n")
    return tmp_path


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_file_beside_the_job_is_not_imported(trapped: Path, safe_path: str) -> None:
    ended = subprocess.run(
        python_command("mm_autoparallel.pipeline.solve.engines.worker"),
        cwd=trapped,
        env=os.environ | {"PYTHONSAFEPATH": safe_path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (trapped / "ran").exists()


def test_what_is_handed_on_is_in_the_childs_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_autoparallel.child_process._handed_on", {})
    before = dict(os.environ)
    hand_on("A_FOLDER", "/a=b c")
    ended = subprocess.run(followed(["printenv", "A_FOLDER"]), capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("/a=b c\n", "")
    assert os.environ == before


def test_a_program_is_followed_from_there_too(trapped: Path) -> None:
    ended = subprocess.run(followed(["echo", "a b", "c"]), cwd=trapped, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("a b c\n", "")


def test_python_is_started_at_one_place(sources: dict[str, ast.Module]) -> None:
    """Beside it, only the command that the person typed is started again, for the ranks of a profile run; `doctor` says
    which Python it is."""
    named = {
        path
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert named == {"child_process.py", "hooks/planning.py", "cli/profile.py", "api/doctor.py"}
