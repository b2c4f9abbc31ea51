"""A launch script as text: which flags it passes, what their values come to, and edits that touch nothing else.

Understood is what launch scripts of Megatron's kind are made of: `NAME=value` lines, `$NAME`, `$((arithmetic))` and
flags anywhere outside comments. Nothing is executed; what only the machine knows (`$(cat hostfile | wc -l)`, `$1`) has
no value here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mm_autoparallel.errors import JobError

_ARITHMETIC = r"\$\(\((?:[^()\n]|\([^()\n]*\))*\)\)"
_WORD = rf"""{_ARITHMETIC}|\$\([^\n]*\)|`[^`\n]*`|"[^"\n]*"|'[^'\n]*'|(?:\$\{{[^}}\n]*\}}|[^\s;"'\\])+"""
"""One shell word of those that stand behind a flag or an equals sign."""

_BETWEEN = r"(?:=|(?:[ \t]|\\\r?\n)+)"
"""Between a flag and its value: an equals sign, or space that may run over a continued line."""

_REFERENCE = re.compile(r"^\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^}]*))?\})$")
_MAX_REFERENCES = 20
"""Assumed: variables that stand for variables, one after the other; ends loops of them."""


@dataclass(frozen=True)
class Word:
    """A shell word and where it stands, quotes left out."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class LaunchScript:
    """The text of the launch script at `path`. Edits give a new one."""

    path: Path
    text: str

    def has_flag(self, flag: str) -> bool:
        """Whether it passes `flag`, with a value or without."""
        return any(True for _ in self._find(_flag_pattern(flag)))

    def values(self, flag: str) -> list[Word]:
        """What stands behind `flag`, wherever it is passed. Raises JobError where it is passed without a value."""
        values = [
            _unquote(match, "value") for match in self._find(f"{_flag_pattern(flag)}{_BETWEEN}(?P<value>{_WORD})")
        ]
        if len(values) != len(list(self._find(_flag_pattern(flag)))):
            raise JobError(
                f"launch script {self.path}: {flag} is passed without a value; a value is expected behind it"
            )
        return values

    def assignments(self, name: str) -> list[Word]:
        """What is assigned to the variable `name`, in order."""
        return [
            _unquote(match, "value")
            for match in self._find(
                rf"(?:^|;|&&)[ \t]*(?:export[ \t]+|readonly[ \t]+|local[ \t]+)?{name}=(?P<value>{_WORD})(?=[\s;]|$)"
            )
        ]

    def evaluate(self, text: str, known: Mapping[str, int] | None = None, depth: int = 0) -> int | None:
        """The whole number that `text` comes to, variables in `known` being given; None where it cannot be told."""
        known = known or {}
        text = text.strip()
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        if depth > _MAX_REFERENCES:
            return None
        if text.startswith("$((") and text.endswith("))"):
            return _calculate(text[3:-2], lambda name: self.variable(name, known, depth + 1))
        reference = _REFERENCE.match(text)
        if not reference:
            return None
        return self.variable(reference["name"] or reference["braced"], known, depth + 1, reference["default"])

    def variable(
        self, name: str, known: Mapping[str, int] | None = None, depth: int = 0, default: str | None = None
    ) -> int | None:
        """The whole number that the variable `name` holds in the end; None where it cannot be told."""
        if known and name in known:
            return known[name]
        assigned = self.assignments(name)
        if assigned:
            return self.evaluate(_default_of(assigned[-1].text, name), known, depth)
        return self.evaluate(default, known, depth) if default is not None else None

    def set_flag(self, flag: str, value: int, known: Mapping[str, int]) -> LaunchScript:
        """The script in which every `flag` passes `value`: where a variable holds it, its assignment is changed.

        known: variables that hold what the script will have at last. Raises JobError where the variable is assigned
        nowhere, more than once, or from what only the machine or the caller knows.
        """
        script = self
        for index in range(len(self.values(flag))):
            word = script.values(flag)[index]
            script = script._set_word(word, value, known, flag)
        return script

    def set_variable(self, name: str, value: int, known: Mapping[str, int], flag: str) -> LaunchScript:
        """The script in which the variable `name` holds `value`, for `flag`'s sake. Raises JobError as set_flag."""
        assigned = self.assignments(name)
        if len(assigned) != 1:
            lines = ", ".join(str(self.line(word.start)) for word in assigned)
            found = f"is assigned in lines {lines}" if assigned else "is assigned nowhere in it"
            raise JobError(
                f"launch script {self.path}: {flag} takes its value from {name}, which {found}; assign it once, as in "
                f"{name}={value}, or put the number behind {flag}"
            )
        word = assigned[0]
        own_default = _REFERENCE.match(word.text)
        if own_default and own_default["braced"] == name and own_default["default"] is not None:
            start = word.start + own_default.start("default")
            word = Word(own_default["default"], start, start + len(own_default["default"]))
        return self._set_word(word, value, known, flag)

    def _set_word(self, word: Word, value: int, known: Mapping[str, int], flag: str) -> LaunchScript:
        if self.evaluate(word.text, known) == value:
            return self
        if re.fullmatch(r"-?\d+", word.text) or word.text.startswith("$(("):
            return self.replace(word, str(value))
        reference = _REFERENCE.match(word.text)
        if not reference:
            raise JobError(
                f"launch script {self.path}: line {self.line(word.start)} gives {flag} the value {word.text}, which is "
                f"known only when the script runs; a plan needs {value} there: put a number or a variable in its place"
            )
        name = reference["name"] or reference["braced"]
        if not self.assignments(name) and reference["default"] is not None:
            start = word.start + reference.start("default")
            return self.replace(Word(reference["default"], start, start + len(reference["default"])), str(value))
        return self.set_variable(name, value, known, flag)

    def resolve(self, flag: str) -> str:
        """The text that `flag` passes in the end, through variables. Raises JobError where it cannot be told."""
        return self._holder(flag).text

    def set_text(self, flag: str, text: str) -> LaunchScript:
        """The script in which `flag` passes `text`, which needs no quotes. Raises JobError where it cannot be told."""
        return self.replace(self._holder(flag), text)

    def _holder(self, flag: str) -> Word:
        """The word that holds the text of `flag`: behind the flag itself, or behind the variable's equals sign."""
        word = self.values(flag)[-1]
        for _ in range(_MAX_REFERENCES):
            reference = _REFERENCE.match(word.text)
            if not reference:
                break
            assigned = self.assignments(reference["name"] or reference["braced"])
            if len(assigned) != 1:
                break
            word = assigned[0]
        if "$" in word.text or "`" in word.text:
            raise JobError(
                f"launch script {self.path}: line {self.line(word.start)} gives {flag} the value {word.text}, which is "
                "known only when the script runs; write the path itself there"
            )
        return word

    def add_flags(self, flags: Iterable[str], behind: str) -> LaunchScript:
        """The script that also passes `flags`, each put behind the first value of the flag `behind`."""
        text = "".join(f" {flag}" for flag in flags)
        if not text:
            return self
        match = next(self._find(f"{_flag_pattern(behind)}{_BETWEEN}(?P<value>{_WORD})"))
        return self.replace(Word("", match.end("value"), match.end("value")), text)

    def remove_flag(self, flag: str) -> LaunchScript:
        """The script that passes `flag`, which has no value, no more. A line that is left empty goes where it can."""
        script = self
        while matches := list(script._find(_flag_pattern(flag))):
            start, end = matches[0].span()
            line_start = script.text.rfind("\n", 0, start) + 1
            rest = re.compile(r"[ \t]*\\\r?\n").match(script.text, end)
            if rest and not script.text[line_start:start].strip():
                start, end = line_start, rest.end()
            elif script.text[start - 1 : start] == " ":
                start -= 1
            script = script.replace(Word("", start, end), "")
        return script

    def replace(self, word: Word, text: str) -> LaunchScript:
        """The script with `text` where `word` stands."""
        return replace(self, text=self.text[: word.start] + text + self.text[word.end :])

    def line(self, index: int) -> int:
        """The number of the line that character `index` stands in, from 1."""
        return self.text.count("\n", 0, index) + 1

    def names_in(self, text: str) -> set[str]:
        """All variables that `text` depends on, directly or through others."""
        pending, names = [text], set[str]()
        while pending:
            found = set(re.findall(r"[A-Za-z_]\w*", pending.pop())) - names
            names |= found
            pending += [word.text for name in found for word in self.assignments(name) if "$" in word.text]
        return {name for name in names if self.assignments(name)}

    def _find(self, pattern: str) -> Iterator[re.Match[str]]:
        """Matches outside comments."""
        for match in re.compile(pattern, re.MULTILINE).finditer(self.text):
            line_start = self.text.rfind("\n", 0, match.start()) + 1
            before = self.text[line_start : match.start()]
            if not re.match(r"[ \t]*#", self.text[line_start:]) and not re.search(r"[ \t]#[^\"']*$", before):
                yield match


def _flag_pattern(flag: str) -> str:
    return rf"(?<![\w-]){re.escape(flag)}(?![\w-])"


def _unquote(match: re.Match[str], group: str) -> Word:
    text, start, end = match[group], match.start(group), match.end(group)
    if len(text) > 1 and text[0] in "\"'" and text[0] == text[-1]:
        return Word(text[1:-1], start + 1, end - 1)
    return Word(text, start, end)


def _default_of(text: str, name: str) -> str:
    """`TP=${TP:-4}`: what holds where the caller sets nothing."""
    reference = _REFERENCE.match(text)
    if reference and reference["braced"] == name and reference["default"] is not None:
        return reference["default"]
    return text


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}


def _calculate(expression: str, variable: Callable[[str], int | None]) -> int | None:
    """Shell arithmetic of + - * / % and brackets. The shell divides towards zero."""
    try:
        tree = ast.parse(re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression).strip(), mode="eval")
    except SyntaxError:
        return None
    return _fold(tree.body, variable)


def _fold(node: ast.expr, variable: Callable[[str], int | None]) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return variable(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _fold(node.left, variable), _fold(node.right, variable)
        if left is None or right is None:
            return None
        if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](left, right)
        if isinstance(node.op, (ast.Div, ast.Mod)) and right:
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if isinstance(node.op, ast.Div) else left - quotient * right
    return None
