"""What code solves problems: a fingerprint, so that bounds of other code are neither trusted nor mixed with ours."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import version

from mm_autoparallel.files import hash_sources

#: What decides a placement, its step and its bound, and how they are written down.
SOURCES = ("pipeline",)


@lru_cache
def solver_fingerprint() -> str:
    """The same for two installations exactly if they solve with the same sources and the same OR-Tools."""
    told = f"ortools {version('ortools')}, {hash_sources(SOURCES)}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]
