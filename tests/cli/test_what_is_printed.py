"""What reaches the terminal: nothing that it obeys, and one sentence where it cannot be reached at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.streams import visible

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBLEM = EXAMPLES / "place" / "problem.json"
FULL = "mm-autoparallel: standard output cannot be written: No space left on device"
CLOSED = "mm-autoparallel: standard output cannot be written: it is closed; send it to a file, or to /dev/null"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--version > /dev/full", 2, FULL),
        ("plan --help >&-", 2, CLOSED),
        (f"place {PROBLEM} > /dev/full", 2, FULL),
        (f"place {PROBLEM} --json >&-", 2, CLOSED),
        ("plan there_is_none.yaml 2>&-", 2, ""),
        ("plan there_is_none.yaml 2> /dev/full", 2, ""),
        ("mistyped 2> /dev/full", 2, ""),
        ("mistyped >&- 2>&-", 2, ""),
        ("--version 2>&- > /dev/null", 0, ""),
    ],
)
def test_streams_that_cannot_be_written(tmp_path: Path, arguments: str, code: int, told: str) -> None:
    command = f"{sys.executable} -m mm_autoparallel.cli.main {arguments}"
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr.rstrip("\n")) == (code, "", told)


@pytest.mark.slow
def test_an_encoding_without_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mm_autoparallel.cli.main", "place", str(PROBLEM)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "where the step goes" in result.stdout


@pytest.mark.parametrize("name", ["[/x]", "[red]dense[/red]", "\x1b]0;owned\x07", "\u202eesned"])
def test_a_block_may_be_called_anything(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(PROBLEM.read_text(encoding="utf-8"))
    document["chain"][0]["name"] = name
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["place", str(path)]) == 0
    told = capsys.readouterr().out
    assert visible(told) == told
    assert visible(name)[:4] in told
    assert main(["place", str(path), "--json"]) == 0
    told = capsys.readouterr().out
    assert visible(told) == told
    assert name in json.loads(told)["layers"]


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        (r'{"\u001b]0;owned\u0007": 1}', ["plan", "job.yaml"]),
        (r'{"model": "\u009b31m.json", "cluster": {}, "workload": {}}', ["plan", "job.yaml"]),
        ("{}", ["plan", "\x1b[31m.yaml"]),
        ("{}", ["place", "job.yaml", "--time-limit", "\x1b[31m"]),
        ("{}", ["\u202eecalp"]),
        ("{}", ["plan", "job.yaml", "--\x1b[31m"]),
        ("a\x9b,b\n1,2\n", ["validate", "job.yaml"]),
        ('{"%s": 1}' % ("x" * 1_000_000), ["plan", "job.yaml"]),
    ],
)
def test_words_of_others_are_written_out(
    content: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(content, encoding="utf-8")
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert visible(told.err) == told.err
    assert len(told.err) < 10_000
