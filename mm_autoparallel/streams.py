r"""Standard output and standard error: everything that the package prints passes here, made fit for a terminal.

What is said on the way to a result goes to the logger `mm_autoparallel`, silent until somebody listens. The command
line and the hooks attach a handler that prints it on standard error (`telling`).

Names in jobs, tables, messages of other nodes or paths may hold characters that a terminal obeys: escape sequences,
carriage returns, marks that reverse text. They are written as what they are (`\x1b`), and a text of any length as its
beginning and its end. A stream that is closed, full or of another encoding is the person's to mend, not a crash.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TextIO

from mm_autoparallel.errors import JobError

#: Characters of a message that are kept, at its beginning and at its end. Assumed: more than any message needs.
HEAD, TAIL = 6_000, 2_000
#: Control characters (C0, C1), format characters (among them those that reorder text or cannot be seen), halves of
#: surrogate pairs, separators of lines and paragraphs: what a person cannot see, or a terminal obeys.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_PLAIN = re.compile(r"[\n\t -~]*")
_ERASE_LINE = "\r\x1b[K"
_line_stands = [False]
"""Whether `rewrite_line` has left a line on the terminal, which a message takes the place of."""


def visible(text: str) -> str:
    r"""`text` with hidden characters but newlines and tabs written out: `\x1b`, `\u202e`."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(_written_out(character) for character in text)


def _written_out(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


LOGGER = logging.getLogger("mm_autoparallel")
LOGGER.addHandler(logging.NullHandler())


def say(message: str) -> None:
    """Tell something on the way to a result; never part of it. Every handler gets it fit for a terminal."""
    LOGGER.info("%s", visible(message))


def detail(message: str) -> None:
    """Tell what only those want to know who ask for every detail (`tell_from`)."""
    LOGGER.debug("%s", visible(message))


def warn(warnings: Iterable[str]) -> None:
    """Tell what should be known before the result is trusted."""
    for warning in warnings:
        LOGGER.warning("%s", visible(warning))


class _OnTerminal(logging.Handler):
    """Prints what is logged on standard error, as the command line does."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        write_error(f"mm-autoparallel: {mark}{record.getMessage()}\n")


def tell_on_terminal() -> None:
    """From now on print what is logged, unless the program around has given the logger a handler of its own."""
    if all(isinstance(handler, logging.NullHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(_OnTerminal())
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # what it prints is not printed again by handlers of the root


def tell_from(level: Literal["debug", "info", "warning"]) -> None:
    """From now on tell what is at least so urgent: details, what happens on the way, or warnings alone."""
    LOGGER.setLevel(level.upper())


@contextmanager
def telling() -> Iterator[None]:
    """`tell_on_terminal` as long as the body runs."""
    before = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    tell_on_terminal()
    try:
        yield
    finally:
        LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
        LOGGER.setLevel(before[1])


def write_error(text: str) -> None:
    """Write `text` to standard error. Where that cannot be, there is nowhere left to say so, and work goes on."""
    if len(text) > HEAD + TAIL:
        left_out = len(text) - HEAD - TAIL
        text = f"{text[:HEAD]} ... ({left_out} characters left out) ... {text[-TAIL:]}"
    _write_to_stderr((_ERASE_LINE if _line_stands[0] else "") + visible(text))
    _line_stands[0] = False


def rewrite_line(line: str) -> None:
    """Put `line` into the place of the last line of the terminal that is standard error; empty to take that away.

    What the terminal is too narrow for is left out: a line that is broken could not be taken away again.
    """
    _write_to_stderr(_ERASE_LINE + visible(line)[: _columns_of(sys.stderr)])
    _line_stands[0] = bool(line)


def write_output(text: str) -> None:
    """Write `text` to standard output. Raises JobError where that cannot be written, BrokenPipeError where its reader
    has left.
    """
    write_rendered(visible(text))


def write_rendered(text: str) -> None:
    """As `write_output`, for text whose hidden characters are meant: a terminal's colours."""
    stream = open_output()
    try:
        stream.write(_encodable(text, stream))
        stream.flush()
    except (OSError, ValueError) as error:
        _silence(stream)
        if isinstance(error, BrokenPipeError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise JobError(f"standard output cannot be written: {reason}") from None


def open_output() -> TextIO:
    """Standard output. Raises JobError where it was closed before the program began."""
    if sys.stdout is None:
        raise JobError("standard output cannot be written: it is closed; send it to a file, or to /dev/null")
    return sys.stdout


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at `stream`."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def _columns_of(stream: TextIO | None) -> int | None:
    """Columns of the terminal behind `stream` but the last, which some leave for the next line; None: unknown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError):  # no terminal, or no descriptor
        columns = 0
    return columns - 1 if columns > 1 else None


def hold_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, on nothing: no file shall get a standard stream's
    number, and what is meant for that stream.
    """
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        os.set_inheritable(number, number <= 2)
    os.close(number)


def _write_to_stderr(text: str) -> None:
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(_encodable(text, stream))
        stream.flush()
    except (OSError, ValueError):
        _silence(stream)


def _encodable(text: str, stream: TextIO) -> str:
    """`text` with what the stream's encoding lacks written out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _silence(stream: TextIO) -> None:
    """Let what is still in the buffer of `stream` go nowhere: the interpreter would fail over it again at its end."""
    with suppress(OSError, ValueError):  # a stream without a descriptor, as in a notebook, or one that is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
