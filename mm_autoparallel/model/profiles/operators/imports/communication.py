"""communication.json of CANN's profiler: what each collective of a step took, summed up by operation.

A network profile needs more than it says: how many ranks a group has, and at what level they stand. So what is read is
reported, and nothing of it becomes a network profile.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.model.profiles.operators.imports.found import Found

FILE_NAME = "communication.json"
NOTE = (
    "it says neither how many ranks a group has nor where they stand, which network profiles need; what it tells is "
    "summed up here alone: measure the network with `mm-autoparallel profile`"
)
_TIMES, _BANDWIDTH = "Communication Time Info", "Communication Bandwidth Info"


def read_communication(path: Path) -> Found:
    """What the file at `path` tells, by operation. Raises ProfileError naming the key that is wrong."""
    document = read_document(path, "communication file", ProfileError)
    sums: dict[str, dict[str, float]] = {}
    num_rows = 0
    for step, kinds in document.items():
        for kind, calls in _mapping(kinds, step, path).items():
            for name, told in _mapping(calls, f"{step}.{kind}", path).items():
                if name.startswith("Total"):
                    continue
                num_rows += 1
                key = f"{step}.{kind}.{name}"
                times = _mapping(_mapping(told, key, path).get(_TIMES), f"{key}.{_TIMES}", path)
                found = sums.setdefault(_operation(name), {"num_calls": 0, "transfer_ms": 0.0, "sent_mb": 0.0})
                elapsed_ms, waited_ms = (_number(times, f"{word} Time(ms)", key, path) for word in ("Elapse", "Wait"))
                found["num_calls"] += 1
                found["transfer_ms"] += max(0.0, elapsed_ms - waited_ms)
                found["sent_mb"] += _sent_mb(told, key, path)
    collectives = tuple(
        {"operation": operation, **{key: round(value, 6) for key, value in found.items()}}
        for operation, found in sorted(sums.items())
    )
    return Found(path, num_rows=num_rows, num_distinct=len(sums), notes=(NOTE,), collectives=collectives)


def _operation(name: str) -> str:
    """`hcom_allGather__123_0@group` → `allGather`."""
    return re.sub(r"_*\d.*$", "", name.split("@")[0]).removeprefix("hcom_").strip("_") or name


def _sent_mb(told: Any, key: str, path: Path) -> float:
    links = _mapping(told.get(_BANDWIDTH, {}), f"{key}.{_BANDWIDTH}", path)
    sizes = (
        _number(_mapping(link, key, path), "Transit Size(MB)", f"{key}.{name}", path) for name, link in links.items()
    )
    return max(sizes, default=0.0)


def _mapping(value: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(
            f"{key} is {describe_value(value)}; a mapping is expected", where=f"communication file {path}", key=key
        )
    return value


def _number(mapping: dict[str, Any], name: str, key: str, path: Path) -> float:
    value = mapping.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ProfileError(
            f"{key}.{name} is {describe_value(value)}; a number of at least 0 is expected",
            where=f"communication file {path}",
            key=f"{key}.{name}",
        )
    return float(value)
