"""Releases: what this script's modules are taken from, checked on import, before a name that is missing ends it."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version

LEAST = {"torch": (2, 7), "transformers": (5, 0)}
"""The pipeline runtime and DTensor as used here; Qwen2-VL's modules as transformers 5 has them."""


def find_older() -> list[str]:
    """A sentence for each package that is older than what is needed."""
    found = []
    for name, least in LEAST.items():
        major, minor = re.findall(r"\d+", version(name))[:2]
        if (int(major), int(minor)) < least:
            found.append(f"{name} {version(name)} is installed, and {'.'.join(map(str, least))} or newer is needed")
    return found


if older := find_older():
    print(f"error: {'; '.join(older)}. The hooks themselves run from torch 2.1 on.", file=sys.stderr)
    sys.exit(2)
