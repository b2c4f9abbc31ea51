"""What goes to a terminal is made visible and short, and a stream that cannot be written is no crash."""

from __future__ import annotations

import errno
import io
import json
import sys

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
