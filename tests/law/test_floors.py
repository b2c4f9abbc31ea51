"""A file imports only from lower floors or its own room, and heavy packages only where the house allows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

# The house's floors, lowest first. A room is a folder of the package or a file at its top.
FLOORS: dict[str, int] = {
    "errors.py": 0,
    "units.py": 1,
    "files.py": 1,
    "signals.py": 1,
    "streams.py": 1,
    "validation.py": 1,
    "child_process.py": 1,
    "private.py": 1,
    "schedules": 1,
    "job": 2,
    "blocks": 3,
    "profiles": 4,
    "plan.py": 4,
    "plan_lists.py": 4,
    "footprint.py": 4,
    "problem.py": 4,
    "problem_file.py": 4,
    "costs": 5,
    "profilers": 5,
    "frameworks": 5,
    "simulate": 6,
    "placement": 7,
    "measurements": 7,
    "reports": 7,
    "search": 8,
    "api": 9,
    "hooks": 10,
    "cli": 11,
}

# Files of one floor outside folders may lean on each other in this order only.
SAME_FLOOR = {
    ("plan.py", "plan_lists.py"),
    ("problem.py", "footprint.py"),
    ("problem_file.py", "problem.py"),
    ("validation.py", "files.py"),
}

# package → where it may be imported; anywhere else it would make the core slow to start or impossible to install.
ALLOWED: dict[str, tuple[str, ...]] = {
    "torch": ("profilers/", "hooks/"),
    "torch_npu": ("profilers/npu.py",),
    "transformers": ("profilers/transformers_releases.py", "profilers/huggingface_classes.py"),
    "ortools": ("placement/",),
    "ray": ("search/engines",),
    "numba": ("simulate/",),
    "rich": ("cli/", "reports/", "api/"),
    "argparse": ("cli/", "hooks/"),
}


def room_of(path: str) -> str:
    return path.split("/")[0]


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the file imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where a name lives"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def imported_room(name: str) -> str | None:
    """The room that `mm_autoparallel.model.job.model.Model` lies in; None for other packages and the package's version."""
    parts = name.split(".")
    if parts[0] != "mm_autoparallel" or len(parts) < 2 or parts[1] == "__version__":
        return None
    return parts[1] if parts[1] in FLOORS else f"{parts[1]}.py"


def climbs(path: str, name: str) -> bool:
    room, target = room_of(path), imported_room(name)
    if target is None or target == room or (room, target) in SAME_FLOOR:
        return False
    return FLOORS[target] >= FLOORS[room]


def test_every_room_has_a_floor(sources: dict[str, ast.Module]) -> None:
    assert {room_of(path) for path in sources} - {"__init__.py"} <= FLOORS.keys()


def test_no_file_imports_upwards(sources: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{line} ({room_of(path)}, floor {FLOORS[room_of(path)]}) imports {name}"
        for path, tree in sources.items()
        if path != "__init__.py"
        for line, name in imported_modules(tree)
        if climbs(path, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_in_their_rooms(sources: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources.items()
        for line, name in imported_modules(tree)
        if not path.startswith(ALLOWED.get(name.split(".")[0], ("",)))
    ]
    assert not wrong, "\n".join(wrong)


def imported_at_once(tree: ast.Module) -> list[str]:
    """What importing the file imports: not what stands in functions, or is for type checkers."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return [name for _, name in imported_modules(ast.Module(kept, []))]


def test_the_package_itself_imports_nothing(sources: dict[str, ast.Module]) -> None:
    assert imported_at_once(sources["__init__.py"]) == ["__future__.annotations", "sys"]


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("model/job/model.py", "mm_autoparallel.pipeline.placement.place", True),
        ("pipeline/placement/cuts/solve.py", "mm_autoparallel.pipeline.simulate.step", False),
        ("reports/tables.py", "mm_autoparallel.pipeline.placement.place", True),
        ("problem.py", "mm_autoparallel.planner.plan.Plan", True),
        ("model/costs/stage.py", "numpy.array", False),
    ],
)
def test_climbing_is_recognised(path: str, name: str, expected: bool) -> None:
    assert climbs(path, name) is expected
