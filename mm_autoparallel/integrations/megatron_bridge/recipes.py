"""Recipes of Megatron-Bridge: functions that return a ConfigContainer, read as the values that they set.

Assignments are followed in their order, through functions of the files that are given; a branch is taken where what it
asks is known, and what else only a run would say is said to be unread. Nothing is run.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.python_text import read_python
from mm_autoparallel.validation import nearest

RETURNED = "ConfigContainer"
FLEX = ("apply_flex_dispatcher_backend", "model.moe_token_dispatcher_type")
"""The function of training/flex_dispatcher_backend.py that turns a backend on, and the field that says so."""

_BASES = ("_pretrain_common", "_sft_common", "_peft_common")
"""Of recipes/common.py, whose usual values decide only where a recipe says nothing."""

_DEFAULTS = {f"model.{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")}
"""Fields that recipes ask for before anybody set them."""

_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda value, several: value in several,
    ast.NotIn: lambda value, several: value not in several,
}


@dataclass(frozen=True)
class Unread:
    """A value that only a run says. expression: what stands there; where: file and line."""

    expression: str
    where: str


@dataclass
class _Scope:
    """What is known within a function: variables, which of them is the configuration, its fields, and variables that
    are a section of it; missing: the first function that it calls and no file has."""

    path: Path
    names: dict[str, Any]
    variable: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    sections: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: str = ""


def list_entries(path: Path) -> list[str]:
    """Public functions of the file at `path` that return a ConfigContainer."""
    return [
        node.name
        for node in read_python(path).body
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) == RETURNED
        and not node.name.startswith("_")
    ]


def find_recipe(name: str, paths: Sequence[Path]) -> tuple[Path, str] | None:
    """The file of `paths` that has the recipe `name`, and what the recipe is called there, where others import it under
    another name (`import … as name`); None where none has it."""
    files = [(path, read_python(path)) for path in paths]
    names = [name]
    for _, tree in files:
        imported = [each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names]
        names += [each.name for each in imported if each.asname == name]
    return next(((path, each) for each in names for path in paths if each in list_entries(path)), None)


def read_recipe(path: Path, beside: Sequence[Path], entry: str | None) -> dict[str, Any]:
    """Field → value or Unread of the recipe `entry` of the file at `path`. beside: files of functions that it calls.

    Raises JobError where there is no such recipe, none is named of several, or it cannot be followed.
    """
    try:
        return _Recipes([path, *beside]).read(path, entry)
    except RecursionError:
        raise JobError(f"{path}: what it sets is nested too deeply to be followed") from None


class _Recipes:
    """The functions and constants of the files at `paths`; of several of one name, that of the first file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._functions: dict[str, tuple[ast.FunctionDef, Path]] = {}
        self._constants: dict[str, Any] = {}
        for path in reversed(paths):
            scope = _Scope(path, self._constants)
            for node in read_python(path).body:
                if isinstance(node, ast.FunctionDef):
                    self._functions[node.name] = node, path
                elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    self._constants |= dict.fromkeys(_targets_of(node), _value(node.value, scope))

    def read(self, path: Path, entry: str | None) -> dict[str, Any]:
        """As `read_recipe`."""
        names = list_entries(path)
        if entry is None and len(names) != 1:
            raise JobError(f"{path}: {len(names)} functions return a {RETURNED}{': ' if names else ''}"
                           f"{', '.join(names)}; say which with --entry")  # fmt: skip
        name = entry or names[0]
        if name not in names:
            raise JobError(f"{path}: --entry {name}: no function of that name returns a {RETURNED}"
                           f"{nearest(name, names)}; known are {', '.join(names) or 'none'}")  # fmt: skip
        scope = self._call(name, (), {})
        if not scope.variable:
            raise JobError(
                f"{path}: {name} begins with {scope.missing or 'no configuration'}, which is in none of the files that "
                "are given; give its file beside"
            )
        return scope.fields

    def _call(self, name: str, above: tuple[str, ...], given: Mapping[str, Any]) -> _Scope:
        """What is known behind a call of `name`. given: parameter → value. Raises JobError where others are asked."""
        function, path = self._functions[name]
        if name in above:
            raise JobError(f"{path}: {name} calls itself")
        asked = function.args
        of_last = zip(reversed(asked.args), reversed(asked.defaults), strict=False)
        of_named = zip(asked.kwonlyargs, asked.kw_defaults, strict=True)
        scope = _Scope(path, dict(self._constants))
        known: dict[str, Any] = {each.arg: _value(node, scope) for each, node in (*of_last, *of_named) if node}
        known |= given
        missing = [each.arg for each in (*asked.args, *asked.kwonlyargs) if each.arg not in known]
        if asked.kwarg or asked.vararg or missing:
            raise JobError(
                f"{path}: {name} takes {', '.join(missing) or 'any keywords'}, so what it sets is known only when it "
                "runs"
            )
        for parameter, value in known.items():
            if isinstance(value, _Scope):  # the configuration itself, which the function changes
                scope.variable, scope.fields = parameter, value.fields
            scope.names[parameter] = value
        self._run(function.body, scope, (*above, name))
        return scope

    def _bind(self, name: str, call: ast.Call, scope: _Scope) -> dict[str, Any]:
        """Parameter of the function `name` → what `call` hands it, a scope for the configuration."""
        parameters = [each.arg for each in self._functions[name][0].args.args]
        handed = [*zip(parameters, call.args, strict=False), *((str(each.arg), each.value) for each in call.keywords)]
        return {
            parameter: scope if scope.variable and ast.unparse(node) == scope.variable else _value(node, scope)
            for parameter, node in handed
        }

    def _run(self, body: Iterable[ast.stmt], scope: _Scope, above: tuple[str, ...]) -> None:
        for node in body:
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and value is not None and len(_targets_of(node)) == 1:
                self._assign(_targets_of(node)[0], value, scope, above)
            elif isinstance(node, ast.If):
                test = _value(node.test, scope)
                if isinstance(test, Unread):
                    self._leave(node, scope)
                else:
                    self._run(node.body if test else node.orelse, scope, above)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._act(node.value, scope, above)
            elif not isinstance(node, (ast.Expr, ast.Return, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)):
                self._leave(node, scope)

    def _assign(self, target: str, value: ast.expr, scope: _Scope, above: tuple[str, ...]) -> None:
        first, _, rest = target.partition(".")
        if rest and first == scope.variable:
            scope.fields[rest] = _value(value, scope)
            if isinstance(value, ast.Name):
                scope.sections[value.id] = rest
        elif rest and first in scope.sections:
            scope.fields[f"{scope.sections[first]}.{rest}"] = _value(value, scope)
        elif isinstance(value, ast.Call) and not rest:
            called = ast.unparse(value.func).rpartition(".")[2]
            if called == RETURNED:
                scope.variable, scope.fields = target, _keywords(value, scope)
            elif called in self._functions and not scope.variable:
                inner = self._call(called, above, self._bind(called, value, scope))
                scope.variable, scope.fields = (target if inner.variable else ""), inner.fields
                scope.missing = inner.missing
            elif not scope.variable and called in _BASES:
                scope.variable = target
            elif not scope.variable:
                scope.missing = scope.missing or called
            scope.names[target] = _unread(value, scope)
        elif not rest:
            scope.names[target] = _value(value, scope)

    def _act(self, call: ast.Call, scope: _Scope, above: tuple[str, ...]) -> None:
        """A function that changes the configuration. What one sets that is handed a section is unread, but for the one
        that is known."""
        name = ast.unparse(call.func)
        if name == FLEX[0]:
            backend = _value([*call.args, *(each.value for each in call.keywords)][-1], scope)
            scope.fields |= {FLEX[1]: "flex"} if isinstance(backend, str) else {}
        elif name == "setattr" and len(call.args) == 3:
            section, key = ast.unparse(call.args[0]).partition(".")[2], _value(call.args[1], scope)
            scope.fields[f"{section}.{key}"] = _value(call.args[2], scope)
        elif name in self._functions:
            given = self._bind(name, call, scope)
            if any(value is scope for value in given.values()):
                self._call(name, above, given)
            else:
                self._leave(self._functions[name][0], scope, name)

    def _leave(self, node: ast.AST, scope: _Scope, called: str = "") -> None:
        """Every field that is set below `node` is unread. called: the function that it is, whose variables differ."""
        assigned = [each for each in ast.walk(node) if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
        for target, value in ((target, each.value) for each in assigned if each.value for target in _targets_of(each)):
            first, _, rest = target.partition(".")
            if called and rest:
                known = [key for key in (rest, f"model.{rest}") if "." in key]
                scope.fields |= {key: _unread(value, scope, called) for key in known}
            elif rest and (first == scope.variable or first in scope.sections):
                field = f"{scope.sections[first]}.{rest}" if first in scope.sections else rest
                scope.fields[field] = _unread(value, scope, _HERE)
            elif not rest:
                scope.names[first] = _unread(value, scope)


_HERE = "a branch, a loop or a change of several"
"""Where a value stands that is not followed."""


def _targets_of(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    """What is assigned to, of a tuple each."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    each = [inner for target in targets for inner in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in each]


def _keywords(call: ast.Call, scope: _Scope) -> dict[str, Any]:
    """Fields of `ConfigContainer(train=TrainingConfig(…), …)`."""
    found: dict[str, Any] = {}
    for each in call.keywords:
        if isinstance(each.value, ast.Call):
            found |= {f"{each.arg}.{inner.arg}": _value(inner.value, scope) for inner in each.value.keywords}
        else:
            found[str(each.arg)] = _value(each.value, scope)
    return found


def _unread(node: ast.expr, scope: _Scope, called: str = "") -> Unread:
    text = ast.unparse(node)
    return Unread(f"{text[:80]} in {called}" if called else text[:80], f"{scope.path}: line {node.lineno}")


def _value(node: ast.expr, scope: _Scope) -> Any:
    """What `node` is: a literal, a variable, a field that was set, or a comparison or product of those."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _follow(node, scope)


def _follow(node: ast.expr, scope: _Scope) -> Any:
    """What `node`, no literal, is of what is known."""
    if isinstance(node, ast.Name):
        return scope.names.get(node.id, _unread(node, scope))
    if isinstance(node, ast.Attribute):
        return _attribute(node, scope)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, scope)
        return value if isinstance(value, Unread) else not value
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        values = [_value(each, scope) for each in node.values]
        return next((value for value in values if isinstance(value, Unread) or not value), True)
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(node, scope)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left, scope), _value(node.right, scope)
        small = all(isinstance(each, int) and abs(each) < 2**40 for each in (left, right))
        return left * right if small else _unread(node, scope)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        left, right = _value(node.left, scope), _value(node.comparators[0], scope)
        try:
            known = not isinstance(left, Unread) and not isinstance(right, Unread)
            return _COMPARED[type(node.ops[0])](left, right) if known else _unread(node, scope)
        except TypeError:
            return _unread(node, scope)
    return _unread(node, scope)


def _called(node: ast.Call, scope: _Scope) -> Any:
    """`isinstance(variable, str)` and `variable.lower()`, of what is known."""
    text = ast.unparse(node.func)
    if text == "isinstance" and len(node.args) == 2 and ast.unparse(node.args[1]) == "str":
        value = _value(node.args[0], scope)
        return value if isinstance(value, Unread) else isinstance(value, str)
    if isinstance(node.func, ast.Attribute) and node.func.attr == "lower" and not node.args:
        value = _value(node.func.value, scope)
        return value.lower() if isinstance(value, str) else _unread(node, scope)
    return _unread(node, scope)


def _attribute(node: ast.Attribute, scope: _Scope) -> Any:
    """A field that was set before, or a member such as `AttnBackend.flash`, by its name."""
    first, _, rest = ast.unparse(node).partition(".")
    if first == scope.variable and (rest in scope.fields or rest in _DEFAULTS):
        return scope.fields.get(rest, _DEFAULTS.get(rest))
    return f"{first}.{rest}" if first == "AttnBackend" else _unread(node, scope)


def read_adapters(fields: Mapping[str, Any]) -> dict[str, object] | None:
    """The section `adapters` of a job, where a recipe trains them (peft/lora.py); None where it trains weights."""
    if fields.get("peft") is None and not any(name.startswith("peft.") for name in fields):
        return None
    rank, dropout = fields.get("peft.dim", 32), fields.get("peft.dropout", 0.0)
    targets = fields.get("peft.target_modules") or ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    if not isinstance(rank, int) or not isinstance(targets, list):
        raise JobError("peft.dim and peft.target_modules are known only when the recipe runs; write the values there")
    return {
        "rank": rank,
        "targets": [str(name).removeprefix("linear_") for name in targets],
        "dropout": dropout not in (0, 0.0),
    }
