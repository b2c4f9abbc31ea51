"""Files that `make quick` does not import hold no test that it runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SLOW = "@pytest.mark.slow\ndef test_marked() -> None:\n    assert 1\n"
NEW = "def test_new() -> None:\n    assert 1\n"


@pytest.fixture
def left_out(
    repository: Path, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], bool]:
    """Whether a file with this source is, where `test_long` and `fixture` of it were recorded."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(repository / "tests" / "conftest.py"))
    record = {"test_file.py::test_long": 0.2, "test_file.py::test_drawn[1]": 5.0, "test_file.py fixture": 1.0}
    monkeypatch.setattr(conftest, "REPOSITORY", tmp_path)
    monkeypatch.setattr(conftest, "read_record", lambda: record)

    def ask(source: str) -> bool:
        (tmp_path / "test_file.py").write_text(source, encoding="utf-8")
        return bool(conftest.has_slow_tests_alone(tmp_path / "test_file.py"))

    return ask


@pytest.mark.parametrize(
    "source",
    [
        SLOW,
        SLOW.replace("slow", "nightly"),
        SLOW.replace("slow\n", 'slow\n@pytest.mark.parametrize(\n    "n",\n    [1, 2],\n)\n'),
        SLOW + NEW.replace("new", "long"),
        NEW.replace("()", "(run_cli: RunCli)"),
        NEW.replace("()", "(\n    tmp_path: Path, fixture: int\n)"),
        f"pytestmark = [pytest.mark.slow]\n\n{NEW}",
    ],
)
def test_slow_tests_alone_are_left_out(left_out: Callable[[str], bool], source: str) -> None:
    assert left_out(source)


@pytest.mark.parametrize(
    "source",
    [
        "",
        NEW,
        SLOW + NEW,
        f"async {NEW}" + SLOW,
        SLOW + f"class TestAll:\n    {NEW}",
        SLOW + NEW.replace("new()", "drawn(n: int)"),
        SLOW + '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2])\n' + NEW,
        f'pytestmark = pytest.mark.skipif(True, reason="slow")\n\n{NEW}',
    ],
)
def test_others_are_imported(left_out: Callable[[str], bool], source: str) -> None:
    assert not left_out(source)


@pytest.mark.nightly
def test_no_quick_test_is_lost(repository: Path, pytestconfig: pytest.Config) -> None:
    """The same expression in other words has every file imported."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(repository / "tests" / "conftest.py"))
    files = [str(path) for path in (repository / "tests").rglob("test_*.py") if conftest.has_slow_tests_alone(path)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", f"({conftest.QUICK})", *files]
    told = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert files
    assert told.returncode == 5, told.stdout  # pytest's own: no test was collected
