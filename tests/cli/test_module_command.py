"""The package run as a module is the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["plan", "none.yaml"], 2)])
def test_python_m_prints_and_ends_as_the_command_does(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = subprocess.run([sys.executable, "-m", "mm_autoparallel", *words], capture_output=True, text=True, timeout=60)
    assert main(words) == code
    printed = capsys.readouterr()
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, printed.out, printed.err)
