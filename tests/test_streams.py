"""What goes to a terminal is made visible and short, and a stream that cannot be written is no crash."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import struct
import sys
import termios
import time

import pytest
from rich.table import Table

from mm_autoparallel.cli.output import print_document
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.console import print_rich
from mm_autoparallel.reports.terminal import Progress, say
from mm_autoparallel.streams import visible, write_output

pytestmark = pytest.mark.usefixtures("told_on_terminal")

HIDDEN = {
    "\x1b]0;owned\x07": r"\x1b]0;owned\x07",
    "\x9b31m": r"\x9b31m",
    "gnp.\u202eexe": r"gnp.\u202eexe",
    "a\u2066b\u200bc\ufeff": r"a\u2066b\u200bc\ufeff",
    "half \ud83d": r"half \ud83d",
    "over\rwritten\x7f": r"over\rwritten\x7f",
    "one\u2028two": r"one\u2028two",
}


@pytest.mark.parametrize(("text", "shown"), HIDDEN.items())
def test_hidden_characters_are_written_out(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(text)
    write_output(text)
    assert capsys.readouterr() == (shown, f"mm-autoparallel: {shown}\n")
    table = Table(text, title=text)
    table.add_row(text)
    print_rich(table)
    told = capsys.readouterr().out
    assert visible(told) == told
    assert told.count(shown[:3]) >= 3  # some of them rich drops itself


def test_what_can_be_seen_stays() -> None:
    text = "Qwen2-VL 72B, 千问, é\u0301, 🙂\tof\n8"
    assert visible(text) == text


@pytest.mark.parametrize("cell", ["GPT [/x] 1.7B", "[red]a[/red]", "[link=file:///etc]b[/link]", ":smile:"])
def test_names_are_no_markup(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", title=cell)
    table.add_row(cell)
    print_rich(table)
    assert capsys.readouterr().out.count(cell) == 2


def test_a_document_is_json_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    document = {text: [text] for text in HIDDEN}
    print_document(document)
    told = capsys.readouterr().out
    assert json.loads(told) == document
    assert visible(told) == told
    assert told.isascii()


def test_a_message_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"the key {'x' * 1_000_000} is unknown; `model` would do")
    told = capsys.readouterr().err
    assert len(told) < 10_000
    assert told.startswith("mm-autoparallel: the key xxx")
    assert told.endswith("is unknown; `model` would do\n")


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def closed() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, closed, Full], ids=["none", "closed", "full"])
def test_streams_that_cannot_be_written(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error goes without; a result that cannot be told is the person's to mend."""
    assert callable(make)
    monkeypatch.setattr(sys, "stderr", make())
    say("nobody hears it")
    Progress().show("nor this")
    table = Table("name")
    for write in (lambda: write_output("a result"), lambda: print_rich(table)):
        monkeypatch.setattr(sys, "stdout", make())
        with pytest.raises(JobError, match="standard output cannot be written: "):
            write()


def test_an_encoding_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("層", title="Größe")
    table.add_row("é")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_rich(table)
    write_output("層\n")
    for word in (rb"\u5c64", rb"Gr\xf6\xdfe", rb"\xe9"):
        assert word in written.getvalue()


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_a_line_of_progress_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a time limit falls while a solver works; nothing is written once the line is taken away."""
    monkeypatch.setattr("mm_autoparallel.reports.terminal.TICK_S", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress() as progress:
        progress.show("one")
        progress.show(lambda since_s: f"told {'at once' if since_s == 0.0 else 'later'}")
        until_s = time.monotonic() + 10.0
        while "later" not in sys.stderr.getvalue() and time.monotonic() < until_s:
            time.sleep(0.01)
    told = sys.stderr.getvalue()
    erase = re.escape("\r\x1b[K")
    assert re.fullmatch(f"({erase}one)+{erase}told at once({erase}told later)+{erase}", told)
    time.sleep(0.05)
    assert sys.stderr.getvalue() == told


def test_a_message_takes_the_place_of_a_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_autoparallel.reports.terminal.TICK_S", 1000.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress() as progress:
        progress.show("one")
        say("a message")
        say("another")
        progress.show("two")
    erase, told = "\r\x1b[K", "mm-autoparallel: a message\nmm-autoparallel: another\n"
    assert sys.stderr.getvalue() == f"{erase}one{erase}{told}{erase}two{erase}"


def test_a_line_of_progress_fits_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal would break a longer one, and erase only the last part of it."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("mm_autoparallel.reports.terminal.TICK_S", 1000.0)
        with Progress() as progress:
            progress.show("x" * 100)
        told = b""
        while told.count(b"\x1b[K") < 2:
            told += os.read(controller, 1000)
    os.close(controller)
    assert told == b"\r\x1b[K" + b"x" * 19 + b"\r\x1b[K"
