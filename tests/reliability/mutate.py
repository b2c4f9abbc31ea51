"""Mutations of inputs: of their bytes, their words, and of what they hold where they are JSON or YAML.

A mutation takes a text and a random.Random, and gives bytes. The same seed gives the same mutation.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import yaml

NUMBERS = (
    0, -1, 1, 2, 3, 7, 64, 1000, 4097, 10**9, 10**15, 10**18, 10**30, 2**63, -(2**63), 0.5, 1e-9, 1e-12, 1e-100, 1e-300,
    1e-320, 5e-324, 1e18, 1e30, 1e100, 1e300, 1.7976931348623157e308, -1e-9, -0.0, 1e-6, 0.999999,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "a" * 300, "../../a", "/", "/dev/zero", "/dev/null", "a\0b", "\x1b]0;owned\x07", "\x1b[31mred",
    "\x9b31m",
    "\u202eright to left", "\u2066isolate", "[red]a[/red]", "[/x]", "[link=a]b[/link]", "{0}", "%s%n", "²", "٣", "४२",
    "\ufeff", "\u2028", "e\u0301", "\U0001f600", "~", "null", "true", "no", "1e5", "0x10", "1_000", "010", "--5", "+3",
    "9" * 5000, "1:30", "2024-01-01", "<<", "*a", "&a", "!!timestamp x", "$(id)", "`id`", ";id", "$TP", "${TP:-4}",
    "$((TP+TP+TP))", "=1+1", "'", '"', "\\",
)  # fmt: skip
JUNK: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1], {"a": 1}, [None], [1] * 5000, {"": ""})


def mutate(name: str, text: str, rng: random.Random, others: list[str]) -> bytes:
    """The content of a file called `name` that holds `text`, mutated. others: texts that may be mixed in."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.random()
        if kind < 0.6:
            changed = _mutate_structure(name, text, rng)
            if changed is not None:
                text = changed
                continue
        if kind < 0.93:
            text = rng.choice(WORDS)(text, rng)
        elif kind < 0.95 and others:
            other = rng.choice(others)
            text = text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other) + 1) :]
        else:
            return rng.choice(BYTES)(text.encode("utf-8", "surrogatepass"), rng)
    return text.encode("utf-8", "surrogatepass")


# Of bytes ------------------------------------------------------------------------------------------------------------


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"a")
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    lambda content, rng: content[: rng.randrange(len(content) + 1)],
    lambda content, rng: b"\xef\xbb\xbf" * rng.randint(1, 3) + content,
    lambda content, rng: content.replace(b"\n", b"\r\n"),
    lambda content, rng: content.replace(b"\n", b"\r"),
    lambda content, rng: content + bytes(rng.randrange(256) for _ in range(50)),
    lambda content, rng: content.decode("utf-8", "replace").encode("utf-16"),
    lambda content, rng: b"",
    lambda content, rng: b"\0" * 10,
    lambda content, rng: content * rng.choice((2, 50)),
    lambda content, rng: rng.choice((b"[", b"{", b"- ", b"(", b"\t")) * 100_000,
    lambda content, rng: b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
        f"a{n}: &a{n} [{','.join(['*a' + (str(n - 1) if n else '')] * 10)}]\n".encode() for n in range(9)
    ),
    lambda content, rng: b"a: &a {x: 1}\n" + b"".join(
        f"a{n}: &a{n} {{<<: [{','.join(['*a' + (str(n - 1) if n else '')] * 10)}]}}\n".encode() for n in range(9)
    ),
    lambda content, rng: b"a: [" + b"1, " * 1_000_000 + b"]",
    lambda content, rng: b"a," * 100_000 + b"\n" + content,
    lambda content, rng: content + (content.splitlines(True) or [b""])[-1] * 20_000,
)  # fmt: skip


# Of words ------------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[\w.+-]+|[^\w\s]")


def _replace_word(text: str, rng: random.Random, new: Callable[[str], str]) -> str:
    words = list(_WORD.finditer(text))
    if not words:
        return text
    word = rng.choice(words)
    return text[: word.start()] + new(word[0]) + text[word.end() :]


def _number_for(rng: random.Random) -> str:
    number = rng.choice(NUMBERS)
    return rng.choice((str(number), repr(number), f"{number:.3g}", rng.choice(("nan", "inf", "-inf", ".nan", "NaN"))))


def _edit_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    here, there = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[here]
    elif kind == 1:
        lines.insert(there, lines[here])
    elif kind == 2:
        lines[here], lines[there] = lines[there], lines[here]
    else:
        lines[here] = rng.choice((" ", "\t", "  ", "#", "- ")) + lines[here]
    return "".join(lines)


WORDS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda text, rng: _replace_word(text, rng, lambda _: rng.choice(TEXTS)),
    lambda text, rng: _replace_word(text, rng, lambda _: _number_for(rng)),
    lambda text, rng: _replace_word(text, rng, lambda word: word * 2),
    lambda text, rng: _replace_word(text, rng, lambda word: ""),
    lambda text, rng: _replace_word(text, rng, lambda word: f"{word} {rng.choice(TEXTS)}"),
    _edit_lines,
)


# Of structure --------------------------------------------------------------------------------------------------------


def _mutate_structure(name: str, text: str, rng: random.Random) -> str | None:
    """The document with one value changed; None where it is none. Comments and spelling of YAML are lost."""
    is_json = name.endswith(".json")
    if not is_json and not name.endswith((".yaml", ".yml")):
        return None
    try:
        document = json.loads(text) if is_json else yaml.safe_load(text)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError, RecursionError):  # PyYAML trips over tags
        return None
    places: list[tuple[Any, Any]] = []
    _walk(document, places)
    if not places:
        return None
    holder, key = rng.choice(places)
    _change(holder, key, rng, places)
    try:
        return json.dumps(document, indent=rng.choice((None, 1))) if is_json else _dump(document, rng)
    except (ValueError, RecursionError):
        return None


def _dump(document: Any, rng: random.Random) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=rng.choice((None, False)), allow_unicode=True)


def _walk(value: Any, places: list[tuple[Any, Any]], depth: int = 0) -> None:
    if depth > 50:
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        places.append((value, key))
        _walk(item, places, depth + 1)


def _change(holder: Any, key: Any, rng: random.Random, places: list[tuple[Any, Any]]) -> None:
    value, kind = holder[key], rng.randrange(12)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = rng.choice((value, rng.choice(NUMBERS)))
    elif kind == 3:
        other, there = rng.choice(places)
        if (isinstance(other, dict) and there in other) or (isinstance(other, list) and there < len(other)):
            holder[key] = json.loads(json.dumps(other[there]))
    elif kind == 4:
        holder[key] = rng.choice(JUNK)
    elif kind == 5:
        holder[key] = rng.choice(TEXTS)
    elif kind == 6 and isinstance(value, list) and value:
        holder[key] = rng.choice((value * 2, value[:-1], value[::-1], value[:1] * 300, [*value, value[0]], [value]))
    elif kind == 7 and isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = rng.choice((value * 2, value + 1, -value, value * 1e6, value / 7, str(value), float(value)))
    elif kind == 8:
        deep: Any = value
        for _ in range(rng.choice((1, 30, 250))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        holder[key] = deep
    else:
        holder[key] = rng.choice(NUMBERS)
