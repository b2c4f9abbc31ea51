"""What of a launch script does not run: branches of an `if` that is not met, and groups of flags that nothing uses.

A condition is told as where the caller sets nothing: a variable that nobody assigns before is empty. What a launcher
or the machine sets is not known; then every branch counts, and that is said with its line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mm_autoparallel.integrations.shell_conditions import QUOTED, expand, holds

_PART = re.compile(
    rf"\\.|{QUOTED}|(?<![^\s;])\#[^\n]*"
    r"|<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n(?:.*\n){0,200}?[ \t]*(?P=end)(?=\n|$)"
    r"|(?P<word>(?<![\w$./=-])(?:if|elif|then|else|fi|for|while|until|select|done|case|esac)(?![\w./=-]))"
)
_OPENS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_BEFORE = re.compile(r"(?:^|[\n;&|({!]|\b(?:then|else|do|if|elif)\s)[ \t]*$")
_OF_LAUNCHERS = re.compile(
    r"SLURM\w*|OMPI\w*|PBS\w*|(?:LOCAL_|NODE_|GLOBAL_)?RANK|WORLD_SIZE|MASTER_\w+|HOME|USER|HOSTNAME|PWD|PATH|OLDPWD"
)
"""Variables that launchers, queues and shells set."""
_GROUP = re.compile(
    rf"^[ \t]*(?P<name>[A-Za-z_]\w*)\+?=(?P<held>{QUOTED}|\((?:{QUOTED}|\\(?:.|\n)|[^()\"'\\])*\))", re.MULTILINE
)
"""What several flags are kept in: a text, or an array."""
_TAKES = re.compile(r"^[ \t]*(?:source|\.)[ \t]+\S|(?<![\w-])eval[ \t]", re.MULTILINE)
"""What takes other files into the script, or runs text: it may use any variable."""
_FLAG = re.compile(r"(?<![\w-])--[A-Za-z]")

_MAX_IFS = 1_000
"""Assumed: branches of one script that are looked at; behind them every one counts."""

_MAX_LOOKS = 50
"""Assumed: variables that stand for variables, one after the other, behind one condition."""


@dataclass(frozen=True)
class Assignment:
    """`name` is assigned the word `value`, which starts at a character."""

    name: str
    value: str
    start: int


@dataclass(frozen=True)
class _If:
    """arms: condition and where its body begins and ends; an empty condition is `else`. loops: whether in a loop."""

    start: int
    arms: tuple[tuple[str, int, int], ...]
    loops: bool


@dataclass
class Branches:
    """dead: where text lies that does not run, in order. doubts: a character and what is not known there."""

    dead: list[tuple[int, int]] = field(default_factory=list)
    doubts: list[tuple[int, str]] = field(default_factory=list)

    def is_dead(self, index: int) -> bool:
        """Whether the character does not run."""
        place = bisect_right(self.dead, index, key=lambda span: span[0]) - 1
        return place >= 0 and index < self.dead[place][1]


def find_branches(text: str, assigned: Sequence[Assignment]) -> Branches:
    """What of `text` does not run. assigned: all assignments outside comments, in order."""
    found = Branches()
    open_spans: list[tuple[int, int]] = []
    by_name: dict[str, list[Assignment]] = {}
    for assignment in assigned:
        by_name.setdefault(assignment.name, []).append(assignment)
    for one in _list_ifs(text)[:_MAX_IFS]:
        if found.is_dead(one.start):
            continue
        look = _Looking(by_name, found, open_spans, one.start)
        certain = doubtful = False
        for condition, start, end in one.arms:
            told = True if not condition else None if one.loops else holds(condition, look)
            if certain or told is False:
                found.dead.append((start, end))
                continue
            certain, doubtful = told is True, doubtful or told is None
            if doubtful:
                open_spans.append((start, end))
        found.dead.sort()
        if any(_FLAG.search(text, start, end) for _, start, end in one.arms):
            if doubtful:
                asked = " ".join(one.arms[0][0].strip(" ;\n").split())
                found.doubts.append((one.start, f"whether `{asked}` holds is known only when it runs; its flags count"))
            elif look.unset:
                names = ", ".join(f"${name}" for name in dict.fromkeys(look.unset))
                found.doubts.append((one.start, f"nobody sets {names} before, and that is read as empty"))
    starts = ".py" in text and not _TAKES.search(text)  # else it may be there for others to take in
    for group in _GROUP.finditer(text) if starts else ():
        start, end = group.span("held")
        if _FLAG.search(text, start, end) and not found.is_dead(start) and not _is_used(text, group["name"]):
            found.dead.append((start, end))
            found.doubts.append((start, f"{group['name']} is used nowhere, so that its flags are not passed"))
            found.dead.sort()
    return found


def _is_used(text: str, name: str) -> bool:
    """Whether anything takes what the variable holds, or hands its name on."""
    used = rf"\$\{{?[#!]?{name}(?!\w)|\bexport[ \t]+(?:\w+[ \t]+)*{name}\b|-n[ \t]+\w+=[\"']?{name}\b"
    return re.search(used, text) is not None


@dataclass
class _Looking:
    """Variables as they are where a condition stands."""

    assigned: Mapping[str, Sequence[Assignment]]
    branches: Branches
    open_spans: Sequence[tuple[int, int]]
    at: int
    depth: int = 0
    unset: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> str | None:
        own = reversed(self.assigned.get(name, ()))
        last = next((one for one in own if one.start < self.at and not self.branches.is_dead(one.start)), None)
        if last is None:
            if _OF_LAUNCHERS.fullmatch(name):
                return None
            self.unset.append(name)
            return ""
        unsure = any(start <= last.start < end and not start <= self.at < end for start, end in self.open_spans)
        if unsure or self.depth > _MAX_LOOKS or last.value.startswith("("):
            return None
        return expand(last.value, replace(self, at=last.start, depth=self.depth + 1))


def _list_ifs(text: str) -> list[_If]:
    """Every `if` of the text that ends, in the order in which they begin."""
    found: list[_If] = []
    frames: list[tuple[str, int]] = []  # the word that closes it, and the place of its first edge
    edges: list[tuple[str, int, int]] = []
    for match in _PART.finditer(text):
        word, start, end = match["word"], match.start(), match.end()
        if not word or not _BEFORE.search(text, max(0, start - 40), start):
            continue
        if word in _OPENS:
            frames.append((_OPENS[word], len(edges)))
            edges.append((word, start, end))
        elif frames and word == frames[-1][0]:
            closes, first = frames.pop()
            if closes == "fi":
                loops = any(frame[0] == "done" for frame in frames)
                found.append(_If(edges[first][1], tuple(_arms(text, edges[first:], start)), loops))
            del edges[first:]
        elif frames and frames[-1][0] == "fi" and word in ("then", "elif", "else"):
            edges.append((word, start, end))
    return sorted(found, key=lambda one: one.start)


def _arms(text: str, edges: Sequence[tuple[str, int, int]], close: int) -> list[tuple[str, int, int]]:
    arms: list[tuple[str, int, int]] = []
    for (word, _, end), (after, start, until) in zip(edges, [*edges[1:], ("fi", close, close)], strict=True):
        if word in ("if", "elif") and after == "then":
            arms.append((text[end:start], until, until))
        elif word == "then" and arms:
            arms[-1] = (arms[-1][0], end, start)
        elif word == "else":
            arms.append(("", end, start))
    return arms
