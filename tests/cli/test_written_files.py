"""What a command writes is never what it reads, and never written twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["calibrate", "{a}", "--device", "a100-80g", "--out", "{a}"], "--out"),
        (["calibrate", "{b}", "--device", "a100-80g", "--holdout", "{b}", "{a}", "--out", "{link}"], "--out"),
        (["simulate", "{a}", "--config", "{b}", "--svg", "{b}"], "--svg"),
        (["simulate", "{a}", "--config", "{b}", "--svg", "{new}", "--trace", "{new}"], "--svg"),
        (["plan", "{a}", "--log-bounds", "{a}"], "--log-bounds"),
        (["place", "{a}", "--certificate", "{link}"], "--certificate"),
    ],
)
def test_files_that_are_read_stay(
    words: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("a", "b", "link", "new")}
    files["a"].write_text("mine")
    files["b"].write_text("mine too")
    files["link"].symlink_to(files["a"])
    assert main([word.format(**files) for word in words]) == 2
    assert f"{flag} names {tmp_path}" in capsys.readouterr().err
    assert files["a"].read_text() == "mine"
    assert files["b"].read_text() == "mine too"
    assert not files["new"].exists()
