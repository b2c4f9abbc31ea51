"""Scripts of other people call this command line: a verb or an option may be added, none may change or go."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.parser import build_parser


def describe(action: argparse.Action) -> str:
    """One line for one argument: its spellings, what it takes, what it is when left out."""
    words = [", ".join(action.option_strings) or str(action.metavar)]
    if action.option_strings and action.nargs != 0:
        words.append("|".join(map(str, action.choices)) if action.choices else str(action.metavar))
    if action.required and action.option_strings:
        words.append("(required)")
    if action.default not in (None, False, argparse.SUPPRESS):
        words.append(f"(default {action.default})")
    return " ".join(words)


def command_line() -> str:
    parser = build_parser()
    (verbs,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    lines = []
    for name, verb in verbs.choices.items():
        lines.append(f"mm-autoparallel {name}")
        lines += [f"  {describe(action)}" for action in verb._actions if action.dest != "help"]
    return "\n".join(lines) + "\n"


def test_the_command_line_is_the_frozen_one() -> None:
    golden = Path(__file__).with_name("command_line.txt")
    assert command_line() == golden.read_text(encoding="utf-8")
