"""What tables call a device → the catalog's device, and how many of it share a node."""

from __future__ import annotations

import re

from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.job.devices import DEVICES

_VARIANTS = ((re.compile(r"\bH100\b.*\b96 ?GB\b.*\b500 ?W\b", re.I), "h100-96g-500w"),)
"""Pattern of a variant that the catalog has, and its name there."""

_FAMILIES = (
    (re.compile(r"\bA100\b", re.I), "a100-80g", 80),
    (re.compile(r"\bH100\b", re.I), "h100-80g", 80),
    (re.compile(r"\bA800\b", re.I), "a800-80g", 80),
    (re.compile(r"\bH800\b", re.I), "h800-80g", 80),
    (re.compile(r"\bH20\b", re.I), "h20-96g", 96),
    (re.compile(r"\bH200\b", re.I), "h200-141g", 141),
    (re.compile(r"\bB200\b", re.I), "b200-192g", 192),
    (re.compile(r"\bB300\b", re.I), "b300-288g", 288),
    (re.compile(r"\bGB200\b", re.I), "gb200-192g", 192),
    (re.compile(r"\bGB300\b", re.I), "gb300-288g", 288),
    (re.compile(r"\b910C|\bA3\b", re.I), "ascend-910c-64g", 64),
    (re.compile(r"\bAscend\b|\b910B", re.I), "ascend-910b-64g", 64),
)
"""Pattern, catalogued device, its memory in GB as it is sold."""

_MEMORY = re.compile(r"\b(\d+) ?(?:GB|G)\b", re.I)

_OTHER_VARIANTS = re.compile(r"\bPCI-?e\b|\bNVL\b|\b\d+ ?W\b|\bSuper\b|\bGH200\b", re.I)
"""Variants with another clock, power limit or link than the catalogued device of that family."""

DEVICES_PER_NODE = 8
"""DGX A100, H100 and B200 and Atlas 800T A2: eight devices a node (their datasheets)."""


def find_device(text: str) -> str:
    """The catalog's name for what a table calls `text`: that name itself, or a family name in it.

    "A100" without its memory counts as the 80 GB one. Raises Unrepresentable where the device, or that variant of it,
    is not in the catalog.
    """
    if text in DEVICES:
        return text
    known = f"known are {', '.join(DEVICES)}"
    memory = _MEMORY.search(text)
    variants = [name for pattern, name in _VARIANTS if pattern.search(text)]
    if variants:
        return variants[0]
    for pattern, name, memory_gb in _FAMILIES:
        if pattern.search(text):
            variant = _OTHER_VARIANTS.search(text)
            if memory and abs(int(memory[1]) - memory_gb) > memory_gb // 20:
                raise Unrepresentable(f"the device {text!r} has {memory[1]} GB, and {name} has {memory_gb}; {known}")
            if variant:
                raise Unrepresentable(
                    f"the device {text!r} is a variant ({variant[0]}) that differs from {name}; {known}"
                )
            if name not in DEVICES:
                break
            return name
    raise Unrepresentable(f"the device {text!r} is not in the catalog; {known}")
