"""The table of model types, made of what tests/profilers/trace/model_types_census.py recorded of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doc_tables import escaped, table

RECORD = Path(__file__).parents[2] / "tests" / "fixtures" / "model_types.json"


def model_types() -> str:
    """How many are read in which way, and a row of each."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    types: dict[str, dict[str, Any]] = record["types"]
    ways = [_way(told) for told in types.values()]
    counted = ", ".join(f"{ways.count(way)} {way}" for way in ("described", "taken apart", "in part", "refused"))
    rows = [
        (f"`{name}`", way, _parts(told), f"{told['parameters']:,}" if "parameters" in told else "", _remark(told))
        for (name, told), way in zip(types.items(), ways, strict=True)
    ]
    head = ("type", "read", "parts: layers/kinds", "parameters", "remark, or reason")
    release = f"{record['of_release']} types of transformers {record['transformers']}"
    some = "All" if len(types) == record["of_release"] else f"{len(types)} of the"
    return f"{some} {release} have a record: {counted}.\n\n{table(head, rows)}"


def _way(told: dict[str, Any]) -> str:
    if "refusal" in told:
        return "refused"
    return "in part" if any("cannot be run" in remark for remark in told["remarks"]) else str(told["route"])


def _parts(told: dict[str, Any]) -> str:
    return ", ".join(f"{name} {layers}/{kinds}" for name, layers, kinds in told.get("parts", ()))


def _remark(told: dict[str, Any]) -> str:
    said = [told["refusal"]] if "refusal" in told else list(told["remarks"])
    if told.get("idle") and not any("reached by no forward" in remark for remark in said):
        said.append(f"{told['idle']:,} parameters that no step reaches")
    return escaped("; ".join(said))
