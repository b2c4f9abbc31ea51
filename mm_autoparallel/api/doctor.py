"""What works on this machine, found out by doing what `plan` does: a small job is planned, and its proof checked."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mm_autoparallel import __version__
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.units import GIB

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job

Status = Literal["works", "absent", "broken"]

_CORE = {
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "rich": "rich",
    "numba": "numba",
    "ortools": "ortools",
}
"""What planning imports → what it is called where it is installed."""

_OPTIONAL = {
    "torch": ("torch", "needed by `profile`, `trace` and hooks; pip install 'mm-autoparallel[torch]'"),
    "transformers": ("transformers", "needed by `profile` and `trace`; pip install 'mm-autoparallel[torch]'"),
    "ray": ("ray", "needed by `plan --engine ray`; pip install 'mm-autoparallel[ray]'"),
    "highspy": ("highspy", "needed by --solver_name HIGHS; pip install 'mm-autoparallel[highs]'"),
    "starlette": ("starlette", "needed by `studio`; pip install 'mm-autoparallel[studio]'"),
    "uvicorn": ("uvicorn", "needed by `studio`; pip install 'mm-autoparallel[studio]'"),
    "mcp": ("mcp", "needed by `mcp`; pip install 'mm-autoparallel[mcp]'"),
    "argcomplete": ("argcomplete", "needed by shell completion; pip install 'mm-autoparallel[completion]'"),
}

_PATH = Path("of the doctor")
_LAYERS = {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 8, "norm": "rms"}
_SMALL: dict[str, Any] = {
    "model": {"name": "doctor", "text": {"vocab_size": 32000, "layers": _LAYERS}},
    "cluster": {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 4},
    "workload": {"global_batch_size": 16, "seq_length": 1024},
}
"""A job that is planned in a second."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried. absent: optional, and not installed. found: what it is, or what is wrong with it."""

    name: str
    status: Status
    found: str


@dataclass(frozen=True)
class Diagnosis:
    """What was tried on this machine."""

    checks: tuple[Check, ...]

    @property
    def works(self) -> bool:
        """Whether nothing is broken."""
        return all(check.status != "broken" for check in self.checks)

    def table(self) -> str:
        """A line for each check."""
        width = max(len(check.name) for check in self.checks)
        return "".join(f"{check.name:<{width}}  {check.status:<6}  {check.found}\n" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "schema": "mm-autoparallel/doctor/1",
            "works": self.works,
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose() -> Diagnosis:
    """Try what planning needs, then what is optional."""
    return Diagnosis(tuple(_list_checks()))


def _list_checks() -> Iterator[Check]:
    yield Check("mm-autoparallel", "works", f"{__version__} in {Path(__file__).parents[1]}")
    yield _check_python()
    for module, package in _CORE.items():
        yield _try(package, partial(_import, module, package))
    for folder in ("working directory", "temporary folder"):
        yield _try(folder, _write_here if folder == "working directory" else _write_temporary)
    yield from _check_frameworks()
    yield _try("kernels", _compile)
    yield _try("plan", _plan)
    yield _try("place and verify", _place)
    for module, (package, need) in _OPTIONAL.items():
        if find_spec(module) is None:
            yield Check(package, "absent", need)
        elif module == "torch":
            yield _try("torch", _try_torch)
        else:
            yield Check(package, "works", _version(package))


def _try(name: str, attempt: Callable[[], str]) -> Check:
    """Its result in words, or what stands against it."""
    try:
        return Check(name, "works", attempt())
    except (PlannerError, ImportError, OSError, RuntimeError, ValueError, AttributeError) as failure:
        words = " ".join(str(failure).split()) or type(failure).__name__
        return Check(
            name, "broken", words if isinstance(failure, PlannerError) else f"{type(failure).__name__}: {words}"
        )


def _check_python() -> Check:
    found = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    if sys.version_info < (3, 10) or platform.system() != "Linux":
        return Check("Python", "broken", f"{found}; Python 3.10 or newer on Linux is needed")
    return Check("Python", "works", found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


def _import(module: str, package: str) -> str:
    importlib.import_module(module)
    return _version(package)


def _write(folder: Path) -> str:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x" * 4096)
        file.flush()
    stat = os.statvfs(folder)
    return f"{folder}, {stat.f_bavail * stat.f_frsize / GIB:.1f} GiB free"


def _write_here() -> str:
    return _write(Path.cwd())


def _write_temporary() -> str:
    return _write(Path(tempfile.gettempdir()))


def _check_frameworks() -> Iterator[Check]:
    """Those that are registered, with the distribution of those that are not this package's; then what is broken."""
    broken: list[str] = []

    def ask() -> str:
        from mm_autoparallel.integrations.catalog import ask_frameworks

        registered, sentences = ask_frameworks()
        broken.extend(sentences)
        return ", ".join(
            one.name if one.is_own else f"{one.name} (distribution {one.distribution})" for one in registered
        )

    yield _try("frameworks", ask)
    yield from (Check("framework", "broken", sentence) for sentence in broken)


def _compile() -> str:
    """The kernels that a search runs, compiled or taken from their cache."""
    began_s = time.monotonic()
    from mm_autoparallel.pipeline.simulate.compiled import kernel_folder
    from mm_autoparallel.planner.search.watched import compile_search

    compile_search()
    return f"ready after {time.monotonic() - began_s:.1f} s, kept in {kernel_folder()}"


@cache
def _small_job() -> Job:
    from mm_autoparallel.api.jobs import describe_job

    return describe_job(**_SMALL, path=_PATH).parse(_PATH)


def _plan() -> str:
    """A small job, planned as `plan` does it."""
    from mm_autoparallel.api import plan

    result = plan(_small_job(), time_limit_s=30.0)
    how = "proven" if result.proven else f"gap {result.gap_fraction * 100:.1f} %"
    return f"a job of {len(result.search.candidates)} strategies in {result.search.elapsed_s:.1f} s, {how}"


def _place() -> str:
    """The pipeline of that job under one strategy, placed by the solver, and its proof checked without it."""
    from mm_autoparallel.api import place, verify
    from mm_autoparallel.model.costs.stage import build_problem
    from mm_autoparallel.model.job.strategy import Strategy

    placed = place(build_problem(_small_job(), Strategy(pp=4, tp=1, dp=1, mbs=1)), time_limit_s=30.0)
    with tempfile.TemporaryDirectory(prefix="mm-autoparallel-doctor-") as folder:
        path = Path(folder) / "certificate.json"
        placed.write_certificate(path)
        confirmed = verify(path, time_limit_s=60.0)
    return f"a step of {confirmed.step_ms:.2f} ms, {placed.status}, confirmed"


def _try_torch() -> str:
    from mm_autoparallel.profilers.device import count_devices, find_device_type

    kind = find_device_type()
    return f"{_version('torch')}, {count_devices()} devices of type {kind}"
