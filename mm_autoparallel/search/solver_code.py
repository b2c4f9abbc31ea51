"""What code solves problems: a fingerprint, so that bounds of other code are neither trusted nor mixed with ours."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import mm_autoparallel

#: What decides a placement, its step and its bound, and how they are written down.
SOURCES = ("problem.py", "schedules", "simulate", "placement", "search/families.py", "search/task.py")


@lru_cache
def solver_fingerprint() -> str:
    """The same for two installations exactly if they solve with the same sources and the same OR-Tools."""
    package = Path(mm_autoparallel.__file__).parent
    digest = hashlib.sha256(f"ortools {version('ortools')}".encode())
    for source in SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\n{file.relative_to(package).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
