"""A file imports only from lower floors or its own room, and heavy packages only where the house allows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

# The house's floors, lowest first. A room is a file at the package's top, a folder there, or a folder of a wing; where
# several begin a path, the longest is its room.
FLOORS: dict[str, int] = {
    "errors.py": 0,
    "units.py": 0,
    "signals.py": 0,
    "garbage.py": 0,
    "child_process.py": 0,
    "private.py": 0,
    "confinement.py": 0,
    "files.py": 1,
    "strict_documents.py": 0,
    "streams.py": 1,
    "validation.py": 2,
    "records.py": 3,
    "samples": 3,
    # numbers only
    "pipeline/schedules": 1,
    "pipeline": 4,
    "pipeline/simulate": 5,
    "pipeline/balance": 6,
    "pipeline/placement": 6,
    "pipeline/solve": 7,
    "pipeline/certify": 9,
    # what a job is and costs
    "model": 3,
    "model/job": 4,
    "model/blocks": 5,
    "model/profiles": 5,
    "model/readers": 5,
    "model/operators": 6,
    "model/costs": 7,
    "profilers": 6,
    # where both meet
    "planner": 8,
    "reports": 9,
    "integrations": 9,
    "measurements": 10,
    "planner/search": 11,
    "planner/explain": 12,
    "lint": 12,
    "integrations/mindformers/search": 12,
    "api": 13,
    "studio": 14,
    "hooks": 14,
    "mcp": 14,
    "cli": 15,
    "__main__.py": 16,
}

# package → where it may be imported; anywhere else it would make the core slow to start or impossible to install.
ALLOWED: dict[str, tuple[str, ...]] = {
    "torch": ("profilers/", "hooks/", "integrations/torch/shipped/"),
    "torch_npu": ("profilers/npu.py",),
    "transformers": ("profilers/transformers_releases.py", "profilers/huggingface_classes.py"),
    "ortools": (
        "pipeline/placement/",
        "pipeline/certify/order_model.py",
        "pipeline/certify/v_model.py",
        "integrations/mindformers/",
    ),
    "starlette": ("studio/",),
    "uvicorn": ("studio/",),
    "ray": ("pipeline/solve/engines",),
    "numba": ("pipeline/simulate/",),
    "rich": ("cli/", "reports/", "api/"),
    "argparse": ("cli/", "hooks/"),
    "mcp": ("mcp/",),
    "mcp_types": ("mcp/",),
    "anyio": ("mcp/",),
    "pyarrow": ("samples/",),
}


def room_of(path: str) -> str:
    """The longest room that `path` begins with; the path's first part where none does."""
    parts = path.split("/")
    beginnings = ("/".join(parts[:number]) for number in range(len(parts), 0, -1))
    return next((room for room in beginnings if room in FLOORS), parts[0])


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
    """The room that `mm_autoparallel.model.job.model.Model` lies in; None for other packages and our version."""
    parts = name.split(".")
    if parts[0] != "mm_autoparallel" or len(parts) < 2 or parts[1] == "__version__":
        return None
    room = room_of("/".join(parts[1:]))
    return room if room in FLOORS else f"{parts[1]}.py"


def climbs(path: str, name: str) -> bool:
    room, target = room_of(path), imported_room(name)
    if target is None or target == room:
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
    assert imported_at_once(sources["__init__.py"]) == ["__future__.annotations"]


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("model/job/model.py", "mm_autoparallel.pipeline.placement.place", True),
        ("pipeline/placement/cuts/solve.py", "mm_autoparallel.pipeline.simulate.step", False),
        ("reports/tables.py", "mm_autoparallel.planner.search.space", True),
        ("pipeline/problem.py", "mm_autoparallel.planner.plan.Plan", True),
        ("model/costs/stage.py", "numpy.array", False),
    ],
)
def test_climbing_is_recognised(path: str, name: str, expected: bool) -> None:
    assert climbs(path, name) is expected
