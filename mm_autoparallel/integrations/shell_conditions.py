"""Conditions of a shell's `if`, told as far as the script says what they ask for; nothing is executed.

Understood: `[ … ]`, `[[ … ]]` and `test` with -n, -z, -v, =, ==, != and comparisons of numbers, `(( … ))` with one
comparison, true and false, and `!`, `&&` and `||` between them. What asks the machine (files, commands) is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from mm_autoparallel.integrations.shell_arithmetic import calculate

Look = Callable[[str], str | None]
"""The text that a variable holds, empty where nobody sets it; None where that is not known."""

_HELD = r"\$\{[^}]*\}|\$(?!\{)|\\(?:.|\n)"
QUOTED = rf"\"(?:{_HELD}|[^\"\\$])*\"|'[^']*'"
"""Text in double or in single quotes."""
_TOKEN = re.compile(
    rf"\s+|(?P<word>(?:{QUOTED}|\$\(\([^()]*\)\)|{_HELD}|[^\s\"'\\$;&|()])+)|(?P<sign>&&|\|\||\(\(|\)\)|[;()])"
)
_PARTS = re.compile(rf"(?P<quoted>{QUOTED})|(?:{_HELD}|[^\"'\\$])+")
_PIECE = re.compile(
    r"\$\(\((?P<sum>[^()]*)\)\)|\$\{(?P<braced>\w+)(?P<default>:?-[^}]*)?\}|\$(?P<plain>[A-Za-z_]\w*|\d)|(?P<other>[$`])"
)
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("-eq", "=="), lambda a, b: a == b),
    **dict.fromkeys(("-ne", "!="), lambda a, b: a != b),
    **dict.fromkeys(("-gt", ">"), lambda a, b: a > b),
    **dict.fromkeys(("-ge", ">="), lambda a, b: a >= b),
    **dict.fromkeys(("-lt", "<"), lambda a, b: a < b),
    **dict.fromkeys(("-le", "<="), lambda a, b: a <= b),
}
_COMPARED = re.compile(r"(?P<left>[^<>=!]+)(?P<sign>==|!=|<=|>=|<|>)(?P<right>[^<>=!]+)")

_MAX_TOKENS = 200
"""Assumed: words of one condition."""


def holds(condition: str, look: Look) -> bool | None:
    """Whether the command list `condition` succeeds; None where that is not known."""
    tokens: list[str] = []
    at = 0
    while at < len(condition):
        match = _TOKEN.match(condition, at)
        if not match or len(tokens) > _MAX_TOKENS:
            return None
        tokens += [match["word"] or match["sign"]] if match["word"] or match["sign"] else []
        at = match.end()
    while tokens and tokens[-1] == ";":
        tokens.pop()
    return _list(tokens, look)


def expand(word: str, look: Look) -> str | None:
    """The text that one shell word stands for, quotes left out; None where it is not known."""
    found: list[str] = []
    if "".join(part[0] for part in _PARTS.finditer(word)) != word:
        return None  # a quote or a brace that does not end
    for part in _PARTS.finditer(word):
        text, at = part[0][1:-1] if part["quoted"] else part[0], 0
        if part[0].startswith("'"):
            found.append(text)
            continue
        for piece in _PIECE.finditer(text):
            value = _value_of(piece, look)
            if value is None:
                return None
            found += [text[at : piece.start()], value]
            at = piece.end()
        found.append(text[at:])
    return "".join(found)


def _value_of(piece: re.Match[str], look: Look) -> str | None:
    if piece["other"]:
        return None
    if piece["sum"] is not None:
        total = calculate(piece["sum"], lambda name: _number(look(name)))
        return None if total is None else str(total)
    value = look(piece["braced"] or piece["plain"])
    if piece["default"] and not value and value is not None:
        return expand(piece["default"].lstrip(":")[1:], look)
    return value


def _list(tokens: list[str], look: Look) -> bool | None:
    """Commands with && and || between them, each told by itself, from left to right."""
    commands, signs, closing = [list[str]()], list[str](), ""
    for token in tokens:
        if not closing and token in ("&&", "||"):
            signs.append(token)
            commands.append([])
            continue
        commands[-1].append(token)
        closing = ("" if token == closing else closing) if closing else {"[[": "]]", "((": "))"}.get(token, "")
    result = _command(commands[0], look)
    for sign, command in zip(signs, commands[1:], strict=True):
        result = _both(sign, result, _command(command, look))
    return result


def _both(sign: str, left: bool | None, right: bool | None) -> bool | None:
    decides = sign == "||"
    if left is decides or right is decides:
        return decides
    return None if left is None or right is None else not decides


def _command(tokens: list[str], look: Look) -> bool | None:
    if tokens[:1] == ["!"]:
        told = _command(tokens[1:], look)
        return None if told is None else not told
    match tokens:
        case ["[[", *inner, "]]"]:
            return _double(inner, look)
        case ["[", *inner, "]"]:
            return _test(inner, look, patterns=False)
        case ["test", *inner]:
            return _test(inner, look, patterns=False)
        case ["((", *inner, "))"]:
            return _compare(" ".join(inner), look)
        case [word]:
            return {"true": True, ":": True, "false": False}.get(expand(word, look) or "")
    return None


def _double(tokens: list[str], look: Look) -> bool | None:
    """What stands in `[[ ]]`, where && binds closer than ||."""
    for sign in ("||", "&&"):
        if sign in tokens:
            cut = tokens.index(sign)
            return _both(sign, _double(tokens[:cut], look), _double(tokens[cut + 1 :], look))
    return _test(tokens, look, patterns=True)


def _test(tokens: list[str], look: Look, patterns: bool) -> bool | None:
    if tokens[:1] == ["!"]:
        told = _test(tokens[1:], look, patterns)
        return None if told is None else not told
    match tokens:
        case [word]:
            text = expand(word, look)
            return None if text is None else bool(text)
        case ["-n" | "-z" as sign, word]:
            text = expand(word, look)
            return None if text is None else bool(text) == (sign == "-n")
        case ["-v", name]:
            text = look(name)
            return None if text is None else bool(text)
        case [left, "=" | "==" | "!=" as sign, right]:
            text, other = expand(left, look), expand(right, look)
            if text is None or other is None:
                return None
            is_pattern = patterns and right[:1] not in "\"'" and re.search(r"[*?\[]", right) is not None
            equal = fnmatchcase(text, other) if is_pattern else text == other
            return equal == (sign != "!=")
        case [left, sign, right] if sign in _NUMBERS and sign.startswith("-"):
            number, bound = _number(expand(left, look)), _number(expand(right, look))
            return None if number is None or bound is None else _NUMBERS[sign](number, bound)
    return None


def _compare(expression: str, look: Look) -> bool | None:
    match = _COMPARED.fullmatch(expression)
    if not match:
        return None
    left, right = (calculate(match[side], lambda name: _number(look(name))) for side in ("left", "right"))
    return None if left is None or right is None else _NUMBERS[match["sign"]](left, right)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d{1,18}", text) else None
