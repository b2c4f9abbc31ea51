"""The package starts fast and without torch; the command line without the solver, the compiler or numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Blocks packages, runs a statement, prints which of the heavy ones were loaded all the same.
PROBE = """
import sys
blocked, watched, statement = sys.argv[1].split(","), sys.argv[2].split(","), sys.argv[3]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
exec(statement)
print(sorted(name for name in watched if name in sys.modules), file=sys.stderr)
"""

OPTIONAL = "torch,ray,torch_npu"
HEAVY = "torch,ray,torch_npu,numpy,numba,ortools,pandas,pydantic,yaml,rich"


def loaded(blocked: str, statement: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, blocked, HEAVY, statement], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stderr.strip()


def test_importing_the_package_loads_nothing() -> None:
    assert loaded(HEAVY, "import mm_autoparallel; mm_autoparallel.__version__") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["place", "--help"]])
def test_help_needs_no_heavy_package(arguments: list[str]) -> None:
    statement = f"from mm_autoparallel.cli.main import main\nassert main({arguments!r}) == 0"
    assert loaded(HEAVY, statement) == "[]"


def test_every_module_outside_the_profilers_imports_without_torch_and_ray() -> None:
    statement = (
        "import importlib, pkgutil, mm_autoparallel\n"
        "for module in pkgutil.walk_packages(mm_autoparallel.__path__, 'mm_autoparallel.'):\n"
        "    if not module.name.startswith('mm_autoparallel.profilers.'):\n"
        "        importlib.import_module(module.name)"
    )
    names = loaded(OPTIONAL, statement)
    assert "'torch'" not in names
    assert "'ray'" not in names


def test_what_profiles_and_trains_imports_without_a_solver() -> None:
    """A training environment's pins leave no room for one; --auto-parallel-python names where the search runs."""
    statement = (
        "import importlib, pkgutil, mm_autoparallel\n"
        "rooms = ('mm_autoparallel.hooks.', 'mm_autoparallel.integrations.mindspeed_mm.')\n"
        "for module in pkgutil.walk_packages(mm_autoparallel.__path__, 'mm_autoparallel.'):\n"
        "    if module.name.startswith(rooms):\n"
        "        importlib.import_module(module.name)\n"
        "import mm_autoparallel.planner.search.space, mm_autoparallel.model.costs.stage"
    )
    assert "numba" not in loaded("ortools,numba,pandas,highspy,ray,scipy,torch", statement)
