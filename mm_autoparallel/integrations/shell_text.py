"""A launch script as text: which flags it passes, what their values come to, and edits that touch nothing else.

Understood is what launch scripts of Megatron's kind are made of: `NAME=value` lines, `$NAME`, `$((arithmetic))` and
flags anywhere outside comments and what does not run (shell_branches.py). Nothing is executed; what only the machine
knows (`$(cat hostfile | wc -l)`, `$1`) has no value here. Every look takes time in proportion to the text, and what a
person writes is far below the limits here.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.shell_arithmetic import calculate
from mm_autoparallel.integrations.shell_branches import Assignment, Branches, find_branches
from mm_autoparallel.integrations.shell_words import REFERENCE, WORD, Word, bare, default_of, word_of

_BETWEEN = r"(?:=|(?:[ \t]|\\\r?\n)+)"
"""Between a flag and its value: an equals sign, or space that may run over a continued line."""

_ANY_FLAG = r"(?<![\w-])(?P<flag>--[A-Za-z][\w-]{0,100})(?![\w-])"

_STARTED = (
    r"(?<![\w./-])(?:torchrun|msrun|python3?|accelerate|deepspeed)\b(?:[^\n;|&\\]|\\\r?\n){0,2000}?"
    r"(?P<entry>[\w./-]{1,200}\.py)(?![\w.])"
    r"(?:(?:[ \t]|\\\r?\n)+[\"']?(?P<config>\$\{?\w{1,100}\}?(?=[\"'\s\\]|$)|[\w./-]{1,200}\.ya?ml))?"
)
"""A launcher, its own flags, the file it starts, and a configuration behind that."""
_HANDED = (
    r"(?:\$\{?\w{1,100}\}?[ \t]{1,20}|=[\"'](?:\s|\\\r?\n){0,20})(?P<entry>[\w./-]{1,200}\.py)(?![\w.])(?P<config>)"
)
"""The file behind a variable that holds the launcher, or first in a variable that is handed to it."""

_TOOL = (
    r"(?:^|[;|&(`]|\b(?:then|else|do)[ \t])[ \t]*(?:git|scancel|squeue|scontrol|sinfo|sacct|docker|podman|kubectl|pip3?"
    r"|conda|apt|apt-get|wget|curl|tar|rsync|grep|sed|awk|find|sort|ls|date|nvidia-smi|npu-smi|wandb|huggingface-cli)"
    r"[ \t](?:(?!\b(?:torchrun|msrun|python3?|accelerate|deepspeed)\b)(?:[^\n;|&`\\]|\\\r?\n|\\.)){0,2000}"
)
"""A tool and its own flags, up to a launcher that it may start."""
_COMMENT = re.compile(r"^[ \t]*#[^\n]*|[ \t]#[^\"'\n]*", re.MULTILINE)
"""A line of its own, or what follows a blank on a line: until a quote, which may have begun before."""

_ASSIGNMENT = re.compile(
    r"(?:^|;|&&|\bthen\b|\belse\b)[ \t]*(?:export[ \t]+|readonly[ \t]+|local[ \t]+)?"
    rf"(?P<name>[A-Za-z_]\w*)=(?P<value>{WORD})(?=[\s;]|$)",
    re.MULTILINE,
)
_GROUP = re.compile(r"[\"']?\$\{\w+\[[@*]\]\}[\"']?")
"""All words of an array, which are arguments of their own."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""What fits the shell's 64 bits whatever its digits."""

_MAX_REFERENCES, _MAX_VARIABLES = 20, 100
"""Assumed: variables that stand for variables, one after the other, and variables behind one value."""

_MAX_WORDS = 100
"""Assumed: words behind one flag; the longest known are lists of modules."""

_MAX_PASSED = 100
"""Assumed: places where a script passes one flag; each that changes is a pass over the text."""


@dataclass(frozen=True)
class LaunchScript:
    """The text of the launch script at `path`. Edits give a new one."""

    path: Path
    text: str

    def has_flag(self, flag: str) -> bool:
        """Whether it passes `flag`, with a value or without."""
        return bool(self._passed(flag))

    def values(self, flag: str) -> list[Word]:
        """What stands behind `flag`, wherever it is passed. Raises JobError where it is passed without a value."""
        values = [word_of(match, "value") for match in self.find(f"{_flag_pattern(flag)}{_BETWEEN}(?P<value>{WORD})")]
        if len(values) != len(self._passed(flag)):
            raise JobError(
                f"launch script {self.path}: {flag} is passed without a value; a value is expected behind it"
            )
        return values

    def flags(self) -> Iterator[tuple[str, list[str]]]:
        """Every `--flag` outside comments and but tools' own, in order, with the words behind it until the next one,
        quotes left out."""
        word = rf"{_BETWEEN}(?P<word>(?!--|[|&>])(?:{WORD}))"
        tools = [span for match in self.find(_TOOL) for span in (match.start(), match.end())]
        for match in self.find(_ANY_FLAG):
            if bisect_left(tools, match.start()) % 2:
                continue
            words: list[str] = []
            end = match.end()
            while len(words) < _MAX_WORDS and (behind := re.compile(word).match(self.text, end)):
                if self._is_comment(behind.start("word") + 1):
                    break
                words.append(word_of(behind, "word").text)
                end = behind.end()
            yield match["flag"], words

    def started(self) -> tuple[Word, str | None] | None:
        """The last Python file that it starts, and the YAML file named right behind; None where it starts none. Where
        no launcher stands before one, those behind variables."""
        started = None
        for match in [*self.find(_STARTED)] or [*self.find(_HANDED)]:
            config = self.follow(match["config"] or "")
            started = word_of(match, "entry"), config if config.endswith((".yaml", ".yml")) else None
        return started

    def follow(self, text: str) -> str:
        """What `text` stands for: where it is one variable that is assigned once, what that holds, and so on."""
        for _ in range(_MAX_REFERENCES):
            reference = REFERENCE.match(text)
            if not reference:
                break
            name = reference["name"] or reference["braced"]
            assigned = self.assignments(name)
            if len(assigned) != 1:
                return text if assigned or reference["default"] is None else bare(reference["default"])
            text = default_of(assigned[0].text, name)
        return text

    def assignments(self, name: str) -> list[Word]:
        """What is assigned to the variable `name`, in order."""
        return self._assigned.get(name, [])

    def evaluate(self, text: str, known: Mapping[str, int] | None = None) -> int | None:
        """The whole number that `text` comes to, variables in `known` being given; None where it is not known."""
        return _Evaluation(self, dict(known or {})).evaluate(text)

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

    def set_variable(
        self, name: str, value: int, known: Mapping[str, int], flag: str, through: tuple[str, ...] = ()
    ) -> LaunchScript:
        """The script in which the variable `name` holds `value`, for `flag`'s sake. Raises JobError as set_flag.

        through: variables that stand for `name`.
        """
        assigned = self.assignments(name)
        if len(assigned) != 1 or name in through:
            lines = ", ".join(str(self.line(word.start)) for word in assigned[:_MAX_REFERENCES])
            found = f"is assigned in lines {lines}" if assigned else "is assigned nowhere in it"
            if name in through:
                found = "stands for itself"
            raise JobError(
                f"launch script {self.path}: {flag} takes its value from {name}, which {found}; assign it once, as in "
                f"{name}={value}, or put the number behind {flag}"
            )
        word = assigned[0]
        own_default = REFERENCE.match(word.text)
        if own_default and own_default["braced"] == name and own_default["default"] is not None:
            start = word.start + own_default.start("default")
            word = Word(own_default["default"], start, start + len(own_default["default"]))
        return self._set_word(word, value, known, flag, (*through, name))

    def _set_word(
        self, word: Word, value: int, known: Mapping[str, int], flag: str, through: tuple[str, ...] = ()
    ) -> LaunchScript:
        if self.evaluate(word.text, known) == value:
            return self
        if re.fullmatch(r"-?\d+", word.text) or word.text.startswith("$(("):
            return self.replace(word, str(value))
        reference = REFERENCE.match(word.text)
        if not reference or re.search(r"\s", reference["default"] or ""):  # an open brace takes in what follows it
            raise JobError(
                f"launch script {self.path}: line {self.line(word.start)} gives {flag} the value {word.text}, which is "
                f"known only when the script runs; a plan needs {value} there: put a number or a variable in its place"
            )
        name = reference["name"] or reference["braced"]
        if not self.assignments(name) and reference["default"] is not None:
            start = word.start + reference.start("default")
            return self.replace(Word(reference["default"], start, start + len(reference["default"])), str(value))
        if len(through) > _MAX_REFERENCES:
            raise JobError(
                f"launch script {self.path}: {flag} takes its value from {through[0]}, behind which more than "
                f"{_MAX_REFERENCES} variables stand one for the other; put the number behind {flag}"
            )
        return self.set_variable(name, value, known, flag, through)

    def resolve(self, flag: str) -> str:
        """The text that `flag` passes in the end, through variables. Raises JobError where it is not known."""
        return self._holder(flag).text

    def set_text(self, flag: str, text: str) -> LaunchScript:
        """The script in which `flag` passes `text`, which needs no quotes. Raises JobError where it is not known."""
        return self.replace(self._holder(flag), text)

    def _holder(self, flag: str) -> Word:
        """The word that holds the text of `flag`: behind the flag itself, or behind the variable's equals sign."""
        word = self.values(flag)[-1]
        for _ in range(_MAX_REFERENCES):
            reference = REFERENCE.match(word.text)
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
        """The script that also passes `flags`, each put behind the first value of the flag `behind`.

        A flag whose value holds what a shell would take for its own (`|`) is quoted, unless it then stands in quotes.
        """
        added = list(flags)
        if not added:
            return self
        match = next(self.find(f"{_flag_pattern(behind)}{_BETWEEN}(?P<value>{WORD})"))
        end = match.end("value")
        if any("|" in flag for flag in added) and not self.is_in_quotes(end):
            added = [re.sub(r" (\S*\|\S*)$", r" '\1'", flag) for flag in added]
        return self.replace(Word("", end, end), "".join(f" {flag}" for flag in added))

    def remove_flag(self, flag: str, most_words: int = 0) -> LaunchScript:
        """The script that passes `flag` no more, nor up to `most_words` words behind it. A line that is left empty goes
        where it can.
        """
        word = re.compile(rf"{_BETWEEN}(?P<word>(?!--|[|&>)])(?:{WORD}))")
        script = self
        while matches := script._passed(flag):
            start, end = matches[0].span()
            for _ in range(most_words):
                behind = word.match(script.text, end)
                if not behind or script._is_comment(behind.start("word") + 1) or _GROUP.fullmatch(behind["word"]):
                    break
                end = behind.end()
            line_start = script.text.rfind("\n", 0, start) + 1
            is_first = not script.text[line_start:start].strip()
            rest = re.compile(r"[ \t]*\\\r?\n").match(script.text, end)
            whole = re.compile(r"[ \t]*\r?\n").match(script.text, end)
            is_continued = re.search(r"\\\r?\n$", script.text[:line_start])
            if rest and is_first:
                start, end = line_start, rest.end()
            elif whole and is_first and not is_continued:
                start, end = line_start, whole.end()
            elif script.text[start - 1 : start] == " ":
                start -= 1
            script = script.replace(Word("", start, end), "")
        return script

    def is_in_quotes(self, index: int) -> bool:
        """Whether a shell that reads from the top is inside quotes at character `index`."""
        quote, at = "", 0
        while at < index:
            letter = self.text[at]
            if letter == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if letter == quote else quote
            elif letter in "\"'":
                quote = letter
            elif letter == "#" and (at == 0 or self.text[at - 1] in " \t\n;"):
                end = self.text.find("\n", at)
                at = index if end < 0 else end
            at += 1
        return bool(quote)

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

    def doubts(self) -> list[str]:
        """What decides which flags it passes, and is told as where its caller sets nothing, or not at all."""
        return [f"line {self.line(at)}: {doubt}" for at, doubt in sorted(self._branches.doubts)]

    @cached_property
    def _assigned(self) -> dict[str, list[Word]]:
        found: dict[str, list[Word]] = {}
        for match in _ASSIGNMENT.finditer(self.text):
            if not self._is_left_out(match.start("value")):
                found.setdefault(match["name"], []).append(word_of(match, "value"))
        return found

    @cached_property
    def _branches(self) -> Branches:
        found = (match for match in _ASSIGNMENT.finditer(self.text) if not self._is_comment(match.start()))
        return find_branches(self.text, [Assignment(one["name"], one["value"], one.start("value")) for one in found])

    @cached_property
    def _comments(self) -> tuple[list[int], list[int]]:
        """Where each begins, its sign, and ends."""
        spans = [match.span() for match in _COMMENT.finditer(self.text)]
        return [self.text.index("#", start) for start, _ in spans], [end for _, end in spans]

    def _is_comment(self, index: int) -> bool:
        starts, ends = self._comments
        before = bisect_left(starts, index)
        return before > 0 and index <= ends[before - 1]

    def _is_left_out(self, index: int) -> bool:
        """Whether it stands in a comment, or in what does not run."""
        return self._is_comment(index) or self._branches.is_dead(index)

    def _passed(self, flag: str) -> list[re.Match[str]]:
        """Every place of `flag`, with a value or without. Raises JobError where they are too many to be meant."""
        found = list(self.find(_flag_pattern(flag)))
        if len(found) > _MAX_PASSED:
            raise JobError(
                f"launch script {self.path}: {flag} is passed {len(found):,} times; at most {_MAX_PASSED} places are "
                "changed"
            )
        return found

    def find(self, pattern: str) -> Iterator[re.Match[str]]:
        """Matches outside comments and outside what does not run."""
        for match in re.compile(pattern, re.MULTILINE).finditer(self.text):
            if not self._is_left_out(match.start()):
                yield match


@dataclass(frozen=True)
class _Evaluation:
    """What variables of `script` hold where those in `values` are given; each is worked out once."""

    script: LaunchScript
    values: dict[str, int | None]
    pending: list[str] = field(default_factory=list)

    def evaluate(self, text: str) -> int | None:
        text = text.strip()
        if _NUMBER.fullmatch(text):
            return int(text)
        if text.startswith("$((") and text.endswith("))"):
            return calculate(text[3:-2], self.variable)
        reference = REFERENCE.match(text)
        return self.variable(reference["name"] or reference["braced"], reference["default"]) if reference else None

    def variable(self, name: str, default: str | None = None) -> int | None:
        """The whole number that the variable `name` holds in the end; None where it is not known."""
        if name in self.values:
            return self.values[name]
        assigned = self.script.assignments(name)
        if not assigned:
            return self.evaluate(bare(default)) if default is not None else None
        if name in self.pending or len(self.pending) > _MAX_REFERENCES or len(self.values) > _MAX_VARIABLES:
            return None
        self.pending.append(name)
        self.values[name] = self.evaluate(default_of(assigned[-1].text, name))
        self.pending.pop()
        return self.values[name]


def _flag_pattern(flag: str) -> str:
    return rf"(?<![\w-]){re.escape(flag)}(?![\w-])"
