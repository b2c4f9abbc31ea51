"""The generated parts on the house: rooms by floor, who imports heavy packages, frameworks, and assistants' tools."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from doc_tables import escaped, table

from mm_autoparallel.api.linted import list_rules
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.features import FEATURES
from mm_autoparallel.integrations.findings import Rule
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.mcp.catalog import AT_ONCE, TOOLS
from mm_autoparallel.model.readers.model_form import ModelForm
from mm_autoparallel.model.readers.registry import OWN, list_frameworks, list_offers

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "mm_autoparallel"


def _law(name: str) -> dict[str, Any]:
    """The table `name` of tests/law/test_floors.py, which holds the rules of imports."""
    tree = ast.parse((REPOSITORY / "tests" / "law" / "test_floors.py").read_text(encoding="utf-8"))
    named = (node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name)
    value = next(named).value
    assert value is not None
    found: dict[str, Any] = ast.literal_eval(value)
    return found


def _room_words(room: str) -> str:
    """The first sentence of a room's docstring; a folder without one has that of its first file."""
    path = PACKAGE / room
    files = [path] if path.is_file() else [path / "__init__.py", *sorted(path.glob("*.py"))]
    docs = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    first = " ".join(next(doc for doc in docs if doc).split("\n\n")[0].split())
    first = re.sub(rf"^{room.removesuffix('.py')}: ", "", first, flags=re.IGNORECASE)
    return re.split(r"(?<=[.:]) (?=[A-Z`])", first)[0].rstrip(":.")


def floors() -> str:
    """The table of floors, highest first."""
    found = _law("FLOORS")
    rows = []
    for floor in sorted({*found.values()}, reverse=True):
        rooms = [room for room, on in found.items() if on == floor]
        names = [room if room.endswith(".py") else f"{room}/" for room in rooms]
        pairs = zip(names, map(_room_words, rooms), strict=True)
        rows.append((str(floor), "<br>".join(f"`{name}`: {escaped(said)}" for name, said in pairs)))
    return table(("floor", "rooms"), rows)


def heavy_packages() -> str:
    """Which rooms may import a heavy package."""
    rows = [(f"`{name}`", ", ".join(f"`{place}`" for place in places)) for name, places in _law("ALLOWED").items()]
    return table(("package", "imported by"), rows)


def registered_frameworks() -> str:
    """This package's frameworks, and what each can do."""
    forms, launches = list_offers("models", ModelForm), list_offers("launches", LaunchKind)
    rows = []
    for one in list_frameworks():
        if one.distribution == OWN:
            framework = frameworks()[one.name]
            abilities = [
                *(f"reads model files ({offer.given.mark})" for offer in forms if offer.of is one),
                *(f"plans {offer.given.title}" for offer in launches if offer.of is one),
                *(["writes a plan as its flags and into a script (`export`)"] if framework.exporter else []),
                *(["has rules of its own for `lint`"] if framework.linter else []),
                *(["writes a plan into its two files and reads it back"] if framework.plan_files else []),
                *(["builds live models for `profile` and `trace`"] if framework.live_models else []),
                *(f"has the verb `{verb}`" for verb in framework.verbs),
                *(f"takes over a training script at `{switch}`" for switch in framework.switches),
            ]
            rows.append((f"`{one.name}`", framework.title, escaped("; ".join(abilities))))
    return table(("entry point", "framework", "what it does here"), rows)


def export_features() -> str:
    """What becomes of each feature of a plan in each framework that takes plans."""
    exporters = {name: one.exporter() for name, one in sorted(frameworks().items()) if one.exporter}
    signs = {"written": "+", "rounded": "~", "refused": "-"}
    rows = [
        (escaped(words), *(signs[exporter.handling(feature)] for exporter in exporters.values()))
        for feature, words in FEATURES.items()
    ]
    return table(("of a plan", *(f"`{name}`" for name in exporters)), rows)


def lint_rules() -> str:
    """What `lint` looks for in every framework's files, then in those of each."""
    frameworks_of: dict[Rule, list[str]] = {}
    known = {name: rules for name, rules in list_rules().items() if rules}
    for name, rules in known.items():
        for rule in rules:
            frameworks_of.setdefault(rule, []).append(name)
    rows = [
        (f"`{rule.key}`", rule.severity, _whose(names, [*known]), escaped(rule.finds), escaped(rule.mends))
        for rule, names in frameworks_of.items()
    ]
    return table(("rule", "severity", "framework", "what it finds", "what mends it"), rows)


def _whose(names: list[str], known: list[str]) -> str:
    """Frameworks of `known` whose rule it is, those that lack it where these are fewer; an empty name is all."""
    lacking = [f"`{name}`" for name in known if name and name not in names]
    if "" in names or not lacking:
        return "all"
    return f"all but {', '.join(lacking)}" if len(lacking) < len(names) else ", ".join(f"`{name}`" for name in names)


def assistant_tools() -> str:
    """The tools of `mcp`, what each does, and its arguments; those that must be given first."""
    tools = {name: (tool.description, tool.question) for name, tool in TOOLS.items()} | dict(AT_ONCE)
    rows = []
    for name, (description, question) in tools.items():
        fields = sorted(question.model_fields.items(), key=lambda item: not item[1].is_required())
        said = [f"`{key}`" if one.is_required() else f"[`{key}`]" for key, one in fields]
        rows.append((f"`{name}`", escaped(description), " ".join(said)))
    return table(("tool", "what it does", "arguments"), rows)
