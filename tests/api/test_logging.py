"""Below the command line nothing prints: what is told goes to a logger, and only a handler shows it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mm_autoparallel.streams import LOGGER, say, tell_on_terminal, telling, warn


@pytest.fixture(autouse=True)
def as_imported() -> Iterator[None]:
    """The logger as a fresh process has it: hooks that other tests called tell on the terminal for good."""
    before = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:], LOGGER.propagate = [logging.NullHandler()], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


def test_a_fresh_process_has_a_logger_that_tells_nobody() -> None:
    code = "import mm_autoparallel.streams, logging; print(logging.getLogger('mm_autoparallel').handlers)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[<NullHandler (NOTSET)>]"


def test_nothing_is_printed_until_somebody_listens(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mm_autoparallel"):
        say("100 % done")
        warn(["mind the gap"])
    assert capsys.readouterr() == ("", "")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100 % done"),
        ("WARNING", "mind the gap"),
    ]


def test_the_command_line_prints_it_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with telling():
        say("100 % \x1b done")
        warn(["mind the gap"])
    say("nobody listens any more")
    expected = "mm-autoparallel: 100 % \\x1b done\nmm-autoparallel: warning: mind the gap\n"
    assert capsys.readouterr() == ("", expected)
    assert LOGGER.propagate
    assert LOGGER.level == logging.NOTSET


def test_a_host_s_own_handler_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    own = logging.Handler()
    own.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(own)
    try:
        tell_on_terminal()
        warn(["mind the gap"])
    finally:
        LOGGER.removeHandler(own)
    assert told == ["mind the gap"]
    assert capsys.readouterr() == ("", "")


def test_what_a_host_s_handler_gets_is_fit_for_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mm_autoparallel"):
        say("a name of \x1b]0;owned\x07")
        warn(["half \ud83d"])
    assert [record.getMessage() for record in caplog.records] == [r"a name of \x1b]0;owned\x07", r"half \ud83d"]
