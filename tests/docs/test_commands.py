"""Every command in the documentation is one: its words are accepted, the cheap ones run, the others by night."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import (
    NIGHTLY,
    NOT_RUN,
    RUN,
    Block,
    list_pages,
    read_blocks,
    run_page,
    without_times,
)

from mm_autoparallel.cli.parser import build_parser
from mm_autoparallel.cli.spellings import translate_options
from mm_autoparallel.hooks import flags

COMMANDS = [block for page in list_pages() for block in read_blocks(page) if block.is_command]


def words_of(text: str) -> Iterator[list[str]]:
    """The commands of a block, each as its words; `$NAMES` are left out, `!`, `&&` and `> FILE` as a shell has them."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s&&\s", line):
            words = [word for word in shlex.split(part, comments=True) if not word.startswith("$") and word != "!"]
            if words[-2:-1] == [">"]:
                words = words[:-2]
            if words:
                yield words


def mistakes_in(words: list[str], repository: Path) -> str | None:
    """What is wrong with a command: a verb, an option, a script, a target or an extra that is not there."""
    program, *rest = words
    if program == "mm-autoparallel":
        try:
            build_parser().parse_args(translate_options(["1" if word in ("N", "S", "K") else word for word in rest]))
        except SystemExit as end:
            return f"`{' '.join(words)}` is not accepted ({end.code})" if end.code else None
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        wrong = [word for word in rest if "=" not in word and word not in targets]
        return f"make has no {wrong}" if wrong else None
    if program == "pip":
        known = (repository / "pyproject.toml").read_text(encoding="utf-8")
        extras = [extra for word in rest if word.startswith(".[") for extra in word[2:-1].split(",")]
        wrong = [extra for extra in extras if not re.search(rf"^{extra} = \[", known, re.MULTILINE)]
        return f"there is no extra {wrong}" if wrong else None
    script = next((word for word in rest if word.endswith(".py")), None)
    if program in ("python", "torchrun"):
        return _mistakes_in_script(script, rest, repository)
    return None


def _mistakes_in_script(script: str | None, words: list[str], repository: Path) -> str | None:
    """A script that is not there, or an option that neither it, a file beside it, nor the hooks know."""
    hooks = argparse.ArgumentParser(add_help=False)
    flags.add_arguments(hooks)
    known = {option for action in hooks._actions for option in action.option_strings}
    if script and not script.startswith("pretrain"):
        path = repository / script
        if not path.is_file():
            return f"there is no {script}"
        known |= _options_in(path.parent)
    own = words[words.index(script) :] if script in words else []
    wrong = [word for word in own if _is_option(word) and word not in known]
    return f"{script} knows no {wrong}" if wrong else None


@cache
def _options_in(folder: Path) -> set[object]:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {*filter(_is_option, constants)}


def _is_option(word: object) -> bool:
    return isinstance(word, str) and re.fullmatch(r"--[\w-]+", word) is not None


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.where)
def test_its_words_are_accepted(block: Block, repository: Path) -> None:
    mistakes = [mistakes_in(words, repository) for words in words_of(block.text)]
    assert not any(mistakes), mistakes


@pytest.mark.slow
@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.name))
def test_commands_within_sentences_are_accepted(page: Path, repository: Path) -> None:
    """Of tables and sentences, as far as they are whole: `…` and `VERB` stand for anything."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`((?:mm-autoparallel|python) [^`]+)`", text)]
    whole = [span for span in spans if "…" not in span and "VERB" not in span]
    mistakes = [mistakes_in(words, repository) for span in whole for words in words_of(span)]
    assert not any(mistakes), mistakes


def test_wrong_words_are_not(repository: Path) -> None:
    for line in (
        "mm-autoparallel plan job.yaml --nodes-of-mine 8",
        "mm-autoparallel plant job.yaml",
        "make everything",
        'pip install -e ".[everything]"',
        "python tests/oracle/none.py",
        "python tests/oracle/compare.py --everything 1",
        "python examples/qwen2vl/pretrain_vlm.py --auto-parallel-everything",
    ):
        (words,) = words_of(line)
        assert mistakes_in(words, repository), line


def test_every_block_says_what_is_done_with_it() -> None:
    unmarked = [
        block.where
        for block in COMMANDS
        if block.mark not in (RUN, NIGHTLY) and not (block.mark.startswith(NOT_RUN) and len(block.mark) > len(NOT_RUN))
    ]
    assert not unmarked, f"say `run`, `nightly` or `not run: REASON` in a comment on the line above: {unmarked}"


def _run(page: Path, marks: tuple[str, ...], folder: Path) -> None:
    for output, now in run_page(page, marks, folder):
        assert without_times(now) == without_times(output.text), f"{output.where}: renew.py --outputs"


def _pages_with(mark: str) -> list[Path]:
    return list(dict.fromkeys(block.page for block in COMMANDS if block.mark == mark))


@pytest.mark.slow
@pytest.mark.parametrize("page", _pages_with(RUN), ids=lambda page: page.stem)
def test_cheap_commands_run(page: Path, tmp_path: Path) -> None:
    _run(page, (RUN,), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("page", _pages_with(NIGHTLY), ids=lambda page: page.stem)
def test_all_commands_run(page: Path, tmp_path: Path) -> None:
    _run(page, (RUN, NIGHTLY), tmp_path)


def test_messages_of_troubleshooting_are_the_programs(repository: Path, sources: dict[str, ast.Module]) -> None:
    """The first column quotes messages; what it quotes stands in the source, whatever is filled in between."""
    page = (repository / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        words for row in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE) for words in re.findall("`([^`]*)`", row)
    ]
    assert len(quoted) > 40
    package = " ".join(
        node.value
        for tree in sources.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert [words for words in quoted if words not in package] == []
