"""Passed: what a launch script passes to its training, looked up by flag as Megatron-LM's parser would find it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.launch_script import SUFFIXES, WORLD
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.shell_text import LaunchScript

_EXPANSION = re.compile(r"\$\{?\w+(?:\[[@*]\])?\}?")


@dataclass(frozen=True)
class Passed:
    """Flag → the words behind it, of a flag that stands there several times the last. script: where they stand."""

    words: Mapping[str, tuple[str, ...]]
    script: LaunchScript

    @property
    def where(self) -> str:
        """What messages call it."""
        is_script = self.script.path.suffix in SUFFIXES
        return f"{'launch script' if is_script else 'configuration'} {self.script.path}"

    def line(self, flag: str) -> str:
        """In which line of the script `flag` stands, for a message; empty of a configuration, or where none has it."""
        if self.script.path.suffix not in SUFFIXES or not self.script.has_flag(flag):
            return ""
        return f"line {self.script.line(next(self.script.find(flag)).start())}: "

    def unset(self) -> str:
        """Which words behind the script's name decide its flags, for a message that one is missing."""
        asked = [doubt for doubt in self.script.doubts() if "nobody sets" in doubt and re.search(r"\$\d", doubt)]
        words = sorted({int(number) for doubt in asked for number in re.findall(r"\$(\d+)", doubt)})
        if not words:
            return ""
        names = ", ".join(f"${number}" for number in words)
        return (
            f"; which flags it passes is decided by what its caller gives, {names} (first in "
            f"{asked[0].partition(':')[0]}), read as empty here: write their values into the script"
        )

    def has(self, flag: str) -> bool:
        """Whether it is passed."""
        return flag in self.words

    def text(self, flag: str) -> str | None:
        """The value of `flag`; None where it is not passed. Raises PlanError where it has none, or one that only the
        machine or the caller knows."""
        words = self.words.get(flag)
        if words is None:
            return None
        if not words or "$" in words[0] or "`" in words[0]:
            line = self.script.line(self.script.values(flag)[-1].start) if words else 0
            raise PlanError(
                f"{self.where}: line {line} gives {flag} the value {describe_value(words[0])}, which is known only "
                "when the script runs; write the value itself there"
                if words
                else f"{self.where}: {flag} is passed without a value; one is expected behind it"
            )
        return words[0]

    def number(self, flag: str, least: int = 1) -> int | None:
        """The value of `flag` as a whole number of at least `least`; None where it is not passed."""
        text = self.text(flag)
        if text is None:
            return None
        if not re.fullmatch(r"\d{1,15}", text) or int(text) < least:
            raise PlanError(
                f"{self.where}: {flag} is {describe_value(text)}; a whole number of at least {least} is expected"
            )
        return int(text)

    def list(self, flag: str) -> tuple[str, ...]:
        """All values of `flag`."""
        return () if self.text(flag) is None else self.words[flag]

    def document(self) -> dict[str, Any]:
        """Flag → its value, of switches True, as files of arguments have it; without values that are not known."""
        found: dict[str, Any] = {}
        for flag, words in self.words.items():
            if flag in flags.SWITCHES or not words:
                found[flag] = True
            elif "$" not in words[0] and "`" not in words[0]:
                found[flag] = [*words] if flag in flags.LISTS and len(words) > 1 else words[0]
        return found


def read_passed(script: LaunchScript, world_size: int | None) -> Passed:
    """What `script` passes, variables followed and arithmetic worked out. world_size: devices that are meant."""
    known = {} if world_size is None else {WORLD: world_size}
    found: dict[str, tuple[str, ...]] = {}
    for flag, words in script.flags():
        followed: list[str] = []
        for word in words:
            number = script.evaluate(word, known) if "$" in word else None
            text = script.follow(word) if number is None else str(number)
            if text.lstrip().startswith("--") or (_EXPANSION.fullmatch(text) and followed):
                break  # another group of arguments, behind a switch or a value
            followed.append(text)
        keep = 0 if flag in flags.SWITCHES else len(followed) if flag in flags.LISTS else 1
        found[flag] = tuple(followed[:keep])
    return Passed(found, script)
