"""What a function of a torchtitan registry sets, followed and never run: sections, and what recomputes.

A configuration begins with `Trainer.Config(...)`, or with another function's; values are set over it, in functions of
the same files too. A value is known where it is a literal, a variable that holds one, or a product of such.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.python_text import read_python
from mm_autoparallel.validation import nearest

SECTIONS, AGAIN = ("parallelism", "training"), "activation_checkpoint"
_RETURNED = "Trainer.Config"
_KINDS = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}
_MOST = 2**40
"""Of a number that is a factor: no size is larger."""


@dataclass(frozen=True)
class Unknown:
    """A value that only a run says. where: file and line. called: the function that gives it, if one does."""

    where: str
    called: str = ""


Settings = dict[str, Any]
"""`parallelism.tensor_parallel_degree`, or `activation_checkpoint` (full, selective, none) → its value, or Unknown."""


@dataclass
class _Scope:
    """A function as it is followed. names: variable → its value. variable: the one that is the configuration, whose
    settings `given` are; None: not made yet."""

    path: Path
    above: tuple[str, ...]
    names: dict[str, Any] = field(default_factory=dict)
    variable: str | None = None
    given: Settings = field(default_factory=dict)

    def at(self, node: ast.AST) -> str:
        """File and line."""
        return f"{self.path}: line {getattr(node, 'lineno', 0)}"


def list_entries(path: Path) -> list[str]:
    """Functions of a registry that return a Trainer.Config, whether they can be read or not."""
    found = [node for node in read_python(path).body if isinstance(node, ast.FunctionDef) and node.returns is not None]
    return [node.name for node in found if ast.unparse(node.returns or node) == _RETURNED]


def read_entry(path: Path, beside: Sequence[Path], entry: str | None) -> Settings:
    """What the function `entry` of the file at `path` sets. beside: files of functions that it calls.

    Raises JobError where there is no such function, none is named of several, or it cannot be followed.
    """
    names = list_entries(path)
    if entry is not None and entry not in names:
        raise JobError(f"{path}: --entry {entry}: no function of that name returns a Trainer.Config"
                       f"{nearest(entry, names)}; known are {', '.join(names) or 'none'}")  # fmt: skip
    if entry is None and len(names) != 1:
        raise JobError(
            f"{path}: {len(names)} functions return a Trainer.Config{': ' if names else ''}{', '.join(names)}; say "
            "which with --entry"
        )
    try:
        return _Registry([path, *beside]).call(path, entry or names[0], (), {}).given
    except RecursionError:
        raise JobError(f"{path}: what it sets is nested too deeply to be followed") from None


class _Registry:
    """The functions of the files at `paths`; of several of one name, that of the first file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._functions: dict[str, tuple[Path, ast.FunctionDef]] = {}
        for path in reversed(paths):
            tree = read_python(path)
            self._functions |= {node.name: (path, node) for node in tree.body if isinstance(node, ast.FunctionDef)}

    def call(self, path: Path, name: str, above: tuple[str, ...], handed: Mapping[str, Any]) -> _Scope:
        """What is known behind a call of the function `name`. handed: parameter → its value, a scope for the
        configuration that the function changes."""
        if name not in self._functions or name in above:
            raise JobError(
                f"{path}: {' → '.join((*above, name))}: a function of this file is expected there, or of one beside it"
            )
        of, function = self._functions[name]
        asked = function.args
        defaults = (
            *zip(reversed(asked.args), reversed(asked.defaults), strict=False),
            *zip(asked.kwonlyargs, asked.kw_defaults, strict=True),
        )
        scope = _Scope(of, (*above, name))
        scope.names = {each.arg: _value(node, scope) for each, node in defaults if node is not None}
        for parameter, value in handed.items():
            if isinstance(value, _Scope):
                scope.variable, scope.given = parameter, value.given
            else:
                scope.names[parameter] = value
        self._run(function.body, scope)
        if scope.variable is None:
            raise JobError(f"{of}: {name} calls no Trainer.Config and no function of this file")
        return scope

    def _run(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for node in body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets if node.value is not None else ():
                    self._assign(target, node.value, scope)
            elif isinstance(node, ast.Return) and node.value is not None:
                self._return(node.value, scope)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._act(node.value, scope)
            elif isinstance(node, ast.If) and not isinstance(test := _value(node.test, scope), Unknown):
                self._run(node.body if test else node.orelse, scope)
            elif not isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.Pass, ast.Return, ast.Expr)):
                _refuse_changes(node, scope)

    def _assign(self, target: ast.expr, value: ast.expr | None, scope: _Scope) -> None:
        assert value is not None
        first, _, rest = ast.unparse(target).partition(".")
        if rest and first == scope.variable:
            _set(scope, rest, value)
        elif isinstance(target, ast.Name) and self._makes(value, scope):
            scope.variable = first
        elif isinstance(target, ast.Name):
            said = ast.unparse(value)
            if said in (scope.variable, *(f"{scope.variable}.{section}" for section in SECTIONS)):
                raise JobError(f"{scope.at(value)}: {first} is another name for {said}; set its values by that one")
            scope.names[first] = _value(value, scope)

    def _makes(self, value: ast.expr | None, scope: _Scope) -> bool:
        """Whether `value` is a configuration, whose settings are the scope's then."""
        if not isinstance(value, ast.Call):
            return False
        name = ast.unparse(value.func)
        if name == _RETURNED:
            scope.given = {}
            for each in value.keywords:
                _set(scope, str(each.arg), each.value)
            return True
        if name not in self._functions or _changes_none(self._functions[name][1]):
            return False
        scope.given = self.call(scope.path, name, scope.above, self._bind(name, value, scope)).given
        return True

    def _return(self, value: ast.expr, scope: _Scope) -> None:
        if isinstance(value, ast.Name) and value.id == scope.variable:
            return
        if not self._makes(value, scope):
            called = getattr(_value(value, scope), "called", "")
            is_missing = called.isidentifier() and called.islower() and called not in self._functions
            beside = f"; give the file of {called} beside it" if is_missing else ""
            raise JobError(
                f"{scope.at(value)}: what {scope.above[-1]} returns is known only when the file runs{beside}"
            )
        scope.variable = scope.variable or ""

    def _act(self, call: ast.Call, scope: _Scope) -> None:
        """A call for what it does: nothing to the configuration, unless that is handed to it."""
        handed = {ast.unparse(node) for node in (*call.args, *(each.value for each in call.keywords))}
        if not scope.variable or not handed & {scope.variable, *(f"{scope.variable}.{each}" for each in SECTIONS)}:
            return
        name = ast.unparse(call.func)
        if name not in self._functions or scope.variable not in handed:
            raise JobError(
                f"{scope.at(call)}: what {name} sets is known only when the file runs; give its file beside it"
            )
        self.call(scope.path, name, scope.above, self._bind(name, call, scope))

    def _bind(self, name: str, call: ast.Call, scope: _Scope) -> dict[str, Any]:
        """Parameter of the function `name` → what `call` hands it."""
        parameters = [each.arg for each in self._functions[name][1].args.args]
        pairs = (*zip(parameters, call.args, strict=False), *((str(each.arg), each.value) for each in call.keywords))
        is_variable = {parameter: ast.unparse(node) == scope.variable for parameter, node in pairs}
        return {parameter: scope if is_variable[parameter] else _value(node, scope) for parameter, node in pairs}


def _changes_none(function: ast.FunctionDef) -> bool:
    """Whether what a function returns is said to be no configuration."""
    return function.returns is not None and not ast.unparse(function.returns).strip("\"'").endswith(_RETURNED)


def _refuse_changes(node: ast.AST, scope: _Scope) -> None:
    """Raises JobError where a branch or a loop that is not followed changes what decides."""
    for inner in ast.walk(node):
        name = ast.unparse(inner) if isinstance(inner, (ast.Name, ast.Attribute)) else ""
        first, _, rest = name.partition(".")
        if scope.variable and first == scope.variable and rest.partition(".")[0] in (*SECTIONS, AGAIN):
            raise JobError(f"{scope.at(inner)}: {rest} stands in a branch or a loop that only a run decides; write the "
                           "value itself there")  # fmt: skip


def _set(scope: _Scope, key: str, value: ast.expr) -> None:
    """Notes a value that decides, those of a section that is made anew, or what recomputes."""
    section, _, rest = key.partition(".")
    if section == AGAIN and not rest:
        scope.given[AGAIN] = _read_again(value, scope)
    elif section in SECTIONS and rest:
        scope.given[key] = _value(value, scope)
    elif section in SECTIONS:
        if not isinstance(value, ast.Call) or value.args or any(each.arg is None for each in value.keywords):
            raise JobError(f"{scope.at(value)}: {key} is no call with keywords")
        for old in [each for each in scope.given if each.startswith(f"{section}.")]:
            del scope.given[old]
        scope.given |= {f"{section}.{each.arg}": _value(each.value, scope) for each in value.keywords}


def _read_again(node: ast.expr, scope: _Scope) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return "none"
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if name not in _KINDS:
        raise JobError(f"{scope.at(node)}: activation_checkpoint is {name or 'no call'}; FullAC is planned")
    return _KINDS[name]


def _value(node: ast.expr, scope: _Scope) -> Any:
    """A literal, a variable that holds one, or a product of such; Unknown otherwise."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _computed(node, scope)


def _computed(node: ast.expr, scope: _Scope) -> Any:
    """`_value` of what is no literal."""
    if isinstance(node, ast.Name):
        return scope.names.get(node.id, Unknown(scope.at(node)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [_value(each, scope) for each in (node.left, node.right)]
        if all(type(each) is int and abs(each) < _MOST for each in factors):
            return factors[0] * factors[1]
    return Unknown(scope.at(node), ast.unparse(node.func) if isinstance(node, ast.Call) else "")
