"""What every test may ask for: where the repository is, and the package's source as it stands."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
from forked_cli import ForkedCli
from forked_ranks import ForkedRanks
from hypothesis import HealthCheck, settings

import mm_autoparallel
from mm_autoparallel.streams import telling

REPOSITORY = Path(__file__).parent.parent
PACKAGE = Path(mm_autoparallel.__file__).parent

# No test fails for being slow on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Else Python looks through all that is loaded after 700 new objects: a fifth of the time of collecting tests, and two
# thirds of that of parsing the package's source.
gc.set_threshold(100_000, 50, 100)

# A shell that runs its tests in the background ignores Ctrl-C for them, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What starts processes, by the fixtures that do.
IN_PROCESSES = {"run_cli", "forked_cli", "forked_ranks", "launch", "profiled", "workplace", "logs"}


RECORD = Path(__file__).parent / "seconds.json"
"""How long tests took, of those that took some time; `make seconds` writes it anew."""

#: From so many seconds on `make quick` leaves a test out, `make check` does, and all but `make nightly` do.
SLOW_S, LONG_S, NIGHTLY_S = 0.1, 1.5, 3.0

#: So does `make quick` tests of a fixture that several tests of a file share and that takes so long: else the next one
#: that asks for it pays.
SLOW_FIXTURE_S = 1.0

#: Never left out of `make check`: laws, brute force of another hand, commands of the documentation, training on gloo.
CORE = (
    "tests/law/",
    "tests/oracle/",
    "tests/docs/",
    "tests/examples/test_qwen2vl_training_runs.py",
    "tests/frameworks/test_torch_export.py",
    "tests/frameworks/test_torch_shared.py",
)


def mark_by_seconds(items: list[pytest.Item]) -> None:
    """Mark what was recorded to take long."""
    known = read_record()
    for item in items:
        took_s = known.get(item.nodeid, 0.0)
        shared = (_shared_name(item.nodeid, name) for name in getattr(item, "fixturenames", ()))
        if took_s >= SLOW_S or any(known.get(name, 0.0) >= SLOW_FIXTURE_S for name in shared):
            item.add_marker(pytest.mark.slow)
        if took_s >= LONG_S and not item.nodeid.startswith(CORE):
            item.add_marker(pytest.mark.nightly if took_s >= NIGHTLY_S else pytest.mark.long)


def _shared_name(nodeid: str, fixture: str) -> str:
    """What a fixture that tests of one file share is recorded by."""
    return f"{nodeid.partition('::')[0]} {fixture}"


class Timing:
    """Tells `Recording`, whichever process it is in, how long a fixture took that tests of one file share, or all. A
    plugin, since what a conftest says of fixtures is not asked about those of all tests.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """One of them."""
        began_s = time.monotonic()
        result = yield
        if fixturedef.scope != "function":
            kind = SHARED if fixturedef.scope in ("class", "module") else FOR_ALL
            took = _shared_name(request.node.nodeid, fixturedef.argname), time.monotonic() - began_s
            request._pyfuncitem.user_properties.append((kind, took))
        return result


SHARED, FOR_ALL = "what a shared fixture took", "what a fixture of all tests took"


class Recording:
    """Sums set-up, call and tear-down of every test, whichever process ran it, and has what shared fixtures took. What
    a fixture of all tests took is not the first one's.
    """

    def __init__(self) -> None:
        self._took_s: dict[str, float] = defaultdict(float)
        self._shared_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._took_s[report.nodeid] += report.duration
        for kind, took in report.user_properties if report.when == "teardown" else ():
            name, took_s = cast("tuple[str, float]", took)
            if kind == FOR_ALL:
                self._took_s[report.nodeid] -= took_s
            elif kind == SHARED and took_s >= SLOW_FIXTURE_S:
                self._shared_s[name] = took_s

    def pytest_sessionfinish(self) -> None:
        """Keep what is known of tests that did not run."""
        found = read_record() | self._took_s | self._shared_s
        slow = {name: round(found[name], 1) for name in sorted(found) if found[name] >= SLOW_S}
        RECORD.write_text(json.dumps(slow, indent=0, ensure_ascii=True) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help="write tests/seconds.json anew")


QUICK = "not slow and not nightly"
"""What `make quick` runs: a file without such a test is not even imported, which for some takes seconds."""


@cache
def read_record() -> dict[str, float]:
    """How long tests took at `make seconds`, and fixtures that they share, in s by their names."""
    known: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return known


#: A test with its decorators and arguments as ruff formats them; where any begins; a mark that leaves it out.
TEST = re.compile(r"^((?:@.*\n(?:[ )\]].*\n)*)*)def (test\w*)\(([^()]*)\)", re.MULTILINE)
BEGINNING = re.compile(r"^(?:async def|def|class) [Tt]est", re.MULTILINE)
SLOW_MARK = re.compile(r"^(?:pytestmark = .*|@)pytest\.mark\.(?:slow|nightly)\b", re.MULTILINE)


def has_slow_tests_alone(path: Path) -> bool:
    """Whether the source of a file and the record say that each of its tests is slow: it is marked so, asks for a
    fixture that starts processes or took long, or took long itself. A new test is none of these, nor is one of several
    parameters: the file that has one is imported.
    """
    nodeid, source, known = path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"), read_record()

    def is_slow(decorators: str, name: str, arguments: str) -> bool:
        asked = {*re.findall(r"\w+", arguments)}
        shared_s = max((known.get(_shared_name(nodeid, fixture), 0.0) for fixture in asked), default=0.0)
        took_s = known.get(f"{nodeid}::{name}", 0.0)
        marked = SLOW_MARK.search(decorators) is not None
        return marked or not IN_PROCESSES.isdisjoint(asked) or shared_s >= SLOW_FIXTURE_S or took_s >= SLOW_S

    tests = TEST.findall(source)
    if not tests or len(tests) < len(BEGINNING.findall(source)):
        return False
    mark = SLOW_MARK.search(source)
    return (mark is not None and mark[0].startswith("pytestmark")) or all(is_slow(*test) for test in tests)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file of slow tests alone out of `make quick` before it is imported."""
    if config.getoption("markexpr") != QUICK or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    return has_slow_tests_alone(collection_path) or None


def pytest_collection_finish() -> None:
    """What is loaded stays: no look for garbage goes through it again."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Timing())
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recording())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes are slow: `make quick` is for what a room computes."""
    mark_by_seconds(items)
    for item in items:
        if IN_PROCESSES & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """No test's time limit pays for the compilation that a fresh machine needs. Where the solver lives in another
    environment (tests/hooks/older_torch.py), it is not this one's to compile.
    """
    if find_spec("numba") is None:
        return
    from mm_autoparallel.planner.search.watched import compile_search

    compile_search()


@pytest.fixture
def told_on_terminal() -> Iterator[None]:
    """What the package tells is printed on standard error, as by the command line."""
    with telling():
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def package() -> Path:
    """The package's folder: the checkout's, or where it is installed."""
    return PACKAGE


@pytest.fixture(scope="session")
def sources() -> dict[str, ast.Module]:
    """The package's files, parsed: path relative to the package (`model/costs/memory.py`) → syntax tree."""
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    gc.freeze()
    return trees


@pytest.fixture(scope="session")
def forked_cli() -> Iterator[ForkedCli]:
    server = ForkedCli()
    yield server
    server.close()


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[ForkedRanks]:
    """Ranks of the training scripts, torch and the example's model loaded once."""
    server = Path(__file__).parent / "cli" / "forked_ranks.py"
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    python = os.environ.get("TRAINING_PYTHON", sys.executable)
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = ForkedRanks([python, str(server)], environment)
    yield ranks
    ranks.close()


@pytest.fixture
def run_cli(tmp_path: Path, forked_cli: ForkedCli) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `mm-autoparallel ARGUMENTS` as a user does, in a process of its own, in an empty folder."""

    def run(*arguments: str | Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        return forked_cli.run([*map(str, arguments)], tmp_path, timeout_s)

    return run


@pytest.fixture(scope="session")
def web(repository: Path) -> Path:
    """The source of the page, where its tools are installed."""
    web = repository / "studio" / "web"
    if not shutil.which("npx") or not (web / "node_modules").is_dir():
        pytest.skip("needs node and `npm ci` in studio/web")
    return web
