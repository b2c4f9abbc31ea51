"""Models that this machine has downloaded from Hugging Face's hub, by the names that they have there.

The layout is huggingface_hub's: `models--ORGANISATION--MODEL/snapshots/COMMIT/config.json` in its cache, and
`refs/main` beside `snapshots` says which commit was downloaded last.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mm_autoparallel.confinement import is_there
from mm_autoparallel.files import read_text

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PREFIX = "models--"


def find_config(name: str) -> Path | None:
    """The config.json of `ORGANISATION/MODEL` in the cache of the hub; None where it has none, or `name` is no such
    name."""
    if not _NAME.fullmatch(name):
        return None
    folder = _cache() / (_PREFIX + name.replace("/", "--"))
    main = folder / "refs" / "main"
    if not is_there(main):
        return None
    config = (
        folder
        / "snapshots"
        / read_text(main, "reference of the hub's cache", "text of a commit").strip()
        / "config.json"
    )
    return config if is_there(config) else None


def name_in_cache(config: Path) -> str:
    """What the model of a config.json in such a cache is called; empty elsewhere."""
    folder = config.parent.parent
    is_cached = folder.name == "snapshots" and folder.parent.name.startswith(_PREFIX)
    return folder.parent.name.rpartition("--")[2] if is_cached else ""


def _cache() -> Path:
    """By the variables that huggingface_hub's documentation gives."""
    for variable, inner in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if named := os.environ.get(variable):
            return Path(named).expanduser() / inner
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"
