"""Fingerprint: what a node runs, so that nodes that would measure different things are told apart before they do."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel import __version__

OF_THE_NODE = ("node_rank", "master_addr", "local_rank", "auto_parallel_python")
"""Flags that may differ between nodes: which one it is, and how it calls node 0."""

Fingerprint = dict[str, Any]
"""`versions` of packages, `files` (path from the script's folder → hash), `flags` (name → value as text)."""


def take_fingerprint(arguments: argparse.Namespace) -> Fingerprint:
    """Of this process: versions, flags, and the code of the script and of what it imported from its own folder."""
    import torch

    flags = {name: repr(value) for name, value in sorted(vars(arguments).items()) if name not in OF_THE_NODE}
    versions = {
        "mm-autoparallel": __version__,
        "torch": torch.__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
    }
    return {"versions": versions, "files": hash_files(), "flags": flags}


def describe_difference(mine: Mapping[str, Any], other: Mapping[str, Any], node: int) -> str:
    """What the node with `other` runs differently from node 0, a paragraph; empty where nothing."""
    words = []
    for part, name_of in (("versions", ""), ("files", "the code of "), ("flags", "--")):
        here, there = mine.get(part, {}), other.get(part, {})
        for key in sorted({*here, *there}):
            if here.get(key) == there.get(key):
                continue
            name = name_of + (key.replace("_", "-") if part == "flags" else key)
            how = "differs" if part == "files" else f"is {here.get(key)} on node 0 and {there.get(key)} on node {node}"
            words.append(f"{name} {how}")
    if not words:
        return ""
    more = f"; and {len(words) - 3} more" if len(words) > 3 else ""
    return (
        f"node {node} runs something else than node 0, so what they measure together would belong to neither: "
        f"{'; '.join(words[:3])}{more}. Start the same script of the same version with the same flags on every node"
    )


def hash_files() -> dict[str, str]:
    """Of the main script, and of the modules that it has imported from its own folder."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return {}
    folder = Path(script).resolve().parent
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    loaded = {Path(file).resolve() for file in files if file and file.endswith(".py")}
    own = {path for path in loaded if path.is_relative_to(folder) and "site-packages" not in path.parts}
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(own | {Path(script).resolve()})
        if path.exists()
    }
