"""Fenced blocks of the documentation: which of them are commands, how each is tested, and what it printed.

The line above a block of commands says what the tests do with it:

    <!-- run -->               make check runs it
    <!-- nightly -->           make nightly runs it, because it takes longer
    <!-- not run: REASON -->   nobody runs it here; its words are checked against the command line

Below it, `<!-- output -->` and a block of text hold what it printed. `<!-- output: FIRST … LAST -->` keeps the lines
from the first that contains FIRST to the next that contains LAST, alone; `; ` begins another such stretch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUN, NIGHTLY, NOT_RUN = "run", "nightly", "not run: "
PROGRAMS = ("mm-autoparallel", "python", "python3", "pip", "make", "torchrun", "cp", "export", "git", "mkdir")
"""What the first line of a block without a language begins with, if it is one of commands."""

_COMMENT = re.compile(r"<!-- (.*?) -->")
_VOLATILE = (
    (re.compile(r"\b\d[\d,]*(?:\.\d+)?(?= (?:CPU )?s\b)"), "N"),  # how long it took
    # which process came first decides what was bounded how well, and what was never placed
    (
        re.compile(r"(?<=strategies in N s): .*|(?<=no plan of this space ).*"),
        "",
    ),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"\S*/(?=examples/)"), ""),
)


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` counts from 1; `mark` is the comment on the line above, empty where there is none."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def is_command(self) -> bool:
        if self.language in ("bash", "sh"):
            return True
        first = self.text.split(maxsplit=1)[:1]
        return not self.language and bool(first) and first[0] in PROGRAMS

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def list_pages() -> list[Path]:
    """Every page: README, those beside it, and docs/."""
    beside = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*beside, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def read_blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """The fenced blocks of `page`, in order."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = re.match(r" *```(.*)", line)
        if not fence:
            continue
        if start is None:
            start = number
            continue
        mark = _COMMENT.fullmatch(lines[start - 1].strip()) if start else None
        language = lines[start].strip().removeprefix("```")
        body = "\n".join(lines[start + 1 : number])
        yield Block(page, start + 1, language, body, mark.group(1) if mark else "")
        start = None


def list_outputs(page: Path) -> list[tuple[Block, Block]]:
    """(command, its output) of `page`, for the commands whose output stands below them."""
    pairs, command = [], None
    for block in read_blocks(page):
        if block.is_command:
            command = block
        elif block.mark.split(":")[0] == "output":
            assert command is not None, f"{block.where}: an output without a command above it"
            pairs.append((command, block))
    return pairs


def run_block(block: Block, folder: Path) -> str:
    """What the commands of `block` print, run in `folder` beside the repository's examples, errors and all.

    Raises AssertionError where one of them fails.
    """
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, module in (("python", ""), ("mm-autoparallel", " -m mm_autoparallel.cli.main")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("examples", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block.where} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_page(page: Path, marks: tuple[str, ...], folder: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of `page` that bear one of these marks, in order and in one folder: (output block, its text now).

    Raises AssertionError where a command fails, or prints nothing of what its output block asks for.
    """
    outputs = list_outputs(page)
    for block in read_blocks(page):
        if block.is_command and block.mark in marks:
            printed = run_block(block, folder)
            for command, output in outputs:
                if command.line == block.line:
                    yield output, excerpt(printed, output.mark)


def excerpt(printed: str, mark: str) -> str:
    """The lines of `printed` that the mark of an output block asks for, without empty lines at either end."""
    lines = [line.rstrip() for line in printed.splitlines() if "compiling its kernels" not in line]
    stretches = mark.partition(":")[2].strip()
    if stretches:
        lines = [line for ends in stretches.split("; ") for line in _stretch(lines, ends)]
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join(lines)


def _stretch(lines: list[str], ends: str) -> list[str]:
    first, last = (words.strip() for words in ends.split("…"))
    begin = next((number for number, line in enumerate(lines) if first in line), len(lines))
    end = next((number for number, line in enumerate(lines) if number >= begin and last in line), None)
    assert end is not None, f"no lines from `{first}` to `{last}` in what was printed:\n" + "\n".join(lines)
    return lines[begin : end + 1]


def without_times(text: str) -> str:
    """`text` without what differs from run to run: seconds that something took, and where a checkout lies."""
    for pattern, stand_in in _VOLATILE:
        text = pattern.sub(stand_in, text)
    return text
