"""The names of PyTorch that the package uses, and which of them a release has.

    PYTHON torch_names.py FOLDER        records the torch that PYTHON imports, as FOLDER/torch-X.Y.Z.json
    python torch_names.py FOLDER WHEEL  records a wheel of torch_npu, which is read and not imported

Only names that the package uses are recorded, those that begin with one of them (`all_gather_single` behind
`all_gather`), and the parameters of functions that it gives keywords to. Needs nothing but the standard library and
torch. The records in tests/fixtures/torch_names are of PyPI's wheels (`pip install torch==2.1.0` and so on).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEVICE = "device"
"""Of a name behind `device_module(…)`: a function of `torch.cuda` and of `torch.npu`."""


@dataclass(frozen=True)
class Use:
    """A dotted name at a place of the package; keywords: of the calls there."""

    path: str
    line: int
    name: str
    keywords: frozenset[str] = field(default=frozenset())


def uses(path: str, tree: ast.Module) -> Iterator[Use]:
    """What a file uses of torch: imports, attributes of what it imports, and functions of a device's own module."""
    names: dict[str, str] = {}
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield Use(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(path, node.lineno, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign) and _is_device_module(node.value):
            modules |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    keywords = {
        id(node.func): frozenset(word.arg for word in node.keywords if word.arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        named = _dotted(node, names, modules)
        if named is not None:
            yield Use(path, getattr(node, "lineno", 0), named, keywords.get(id(node), frozenset()))


def _dotted(node: ast.AST, names: dict[str, str], modules: set[str]) -> str | None:
    """`torch.distributed.send` for `dist.send`; None for what does not begin in torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if _is_device_module(node.value) or (isinstance(node.value, ast.Name) and node.value.id in modules):
        return f"{DEVICE}.{node.attr}"
    before = _dotted(node.value, names, modules)
    return None if before is None or before.startswith(DEVICE) else f"{before}.{node.attr}"


def _is_device_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "device_module"


@lru_cache
def package_uses() -> tuple[Use, ...]:
    """Of all files of the package."""
    package = ROOT / "mm_autoparallel"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    return tuple(
        use
        for path, text in texts.items()
        if "torch" in text
        for use in uses(path.relative_to(package).as_posix(), ast.parse(text))
    )


# ----------------------------------------------------------------------------------------------------------- recording


def find(name: str) -> object:
    """What `name` stands for in the torch that is imported here. Raises AttributeError where there is nothing."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            here: object = importlib.import_module(".".join(words[:end]))
        except ImportError:
            continue
        for word in words[end:]:
            here = getattr(here, word)
        return here
    raise AttributeError(name)


def record() -> dict[str, object]:
    """Names and parameters of the torch that is imported here."""
    used = package_uses()
    names: dict[str, set[str]] = {}
    parameters: dict[str, list[str] | None] = {}
    for use in used:
        name = use.name.replace(DEVICE, "torch.cuda", 1) if use.name.startswith(f"{DEVICE}.") else use.name
        parent, _, last = name.rpartition(".")
        if not parent:
            continue
        near = names.setdefault(parent, set())
        try:
            near.update(each for each in dir(find(parent)) if each.startswith(f"{last}_"))
            found = find(name)
        except AttributeError:
            continue
        near.add(last)
        if use.keywords:
            parameters[name] = _parameters(found)
    import torch

    return {
        "version": str(torch.__version__).split("+")[0],
        "names": {parent: sorted(found) for parent, found in sorted(names.items()) if found},
        "parameters": dict(sorted(parameters.items())),
    }


def _parameters(found: object) -> list[str] | None:
    """The names of a function's parameters, or of a class's; None where it takes any, or does not say."""
    try:
        given = inspect.signature(found).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        text = getattr(getattr(found, "__init__", None) if inspect.isclass(found) else found, "__doc__", None) or ""
        words = re.findall(r"(\w+) *[:=]", text.split("->")[0])
        return sorted({word for word in words if word.islower()}) or None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in given.values()):
        return None
    return sorted(given)


def record_wheel(wheel: Path) -> dict[str, object]:
    """The functions that `torch_npu.npu` of a wheel gives, by the names that its file defines or imports."""
    wanted = {use.name.split(".")[1] for use in package_uses() if use.name.startswith(f"{DEVICE}.")}
    with zipfile.ZipFile(wheel) as archive:
        there = _names_of(archive, "torch_npu/npu/__init__.py")
    version = wheel.name.split("-")[1].split(".post")[0]
    return {"version": version, "names": {"torch_npu.npu": sorted(wanted & there)}, "parameters": {}}


def _names_of(archive: zipfile.ZipFile, path: str) -> set[str]:
    """What a module of a wheel defines or imports, `from .memory import *` included."""
    there: set[str] = set()
    for node in ast.walk(ast.parse(archive.read(path).decode())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            there.add(node.name)
        elif isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["*"]:
            inner = f"torch_npu/npu/{node.module}.py" if node.level == 1 else ""
            there |= _names_of(archive, inner) if inner in archive.namelist() else set()
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            there |= {alias.asname or alias.name for alias in node.names}
    return there


def main() -> None:
    """Write one record."""
    folder = Path(sys.argv[1])
    found = record_wheel(Path(sys.argv[2])) if len(sys.argv) > 2 else record()
    kind = "torch_npu" if len(sys.argv) > 2 else "torch"
    path = folder / f"{kind}-{found['version']}.json"
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
