"""Words of a shell script as text: what one looks like, its quotes, and the variable that it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ARITHMETIC = r"\$\(\((?:[^()\n]|\([^()\n]*\))*\)\)"
_BRACED = r"\$\{[^}\n]{0,200}\}"
WORD = rf"""{_ARITHMETIC}|\$\([^\n]*\)|`[^`\n]*`|"[^"\n]*"|'[^'\n]*'|(?:{_BRACED}|(?!\$\{{)[^\s;"'\\])+"""
"""One shell word of those that stand behind a flag or an equals sign."""

REFERENCE = re.compile(r"^\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^}]*))?\})$")
"""A word that is one variable, with what holds where nobody sets it."""


@dataclass(frozen=True)
class Word:
    """A shell word and where it stands, quotes left out."""

    text: str
    start: int
    end: int


def word_of(match: re.Match[str], group: str) -> Word:
    """The word that `group` of a match is."""
    text, start, end = bare(match[group]), match.start(group), match.end(group)
    return Word(text, start, end) if text == match[group] else Word(text, start + 1, end - 1)


def bare(text: str) -> str:
    """`text` without quotes around all of it."""
    return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[0] == text[-1] else text


def default_of(text: str, name: str) -> str:
    """`TP=${TP:-4}`: what holds where the caller sets nothing."""
    reference = REFERENCE.match(text)
    if reference and reference["braced"] == name and reference["default"] is not None:
        return bare(reference["default"])
    return text
