"""The shell's completion: what argcomplete asks for, answered by the parser that reads the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("mm-autoparallel si", {"simulate"}), ("mm-autoparallel plan --ma", {"--max-vpp"})],
)
def test_words_are_completed(line: str, expected: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    environment = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_LINE": line}
    environment |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    command = [sys.executable, "-m", "mm_autoparallel.cli.main"]
    subprocess.run(command, env=os.environ | environment, timeout=120, check=False)
    assert {word.strip() for word in answer.read_text().split("\n")} == expected
