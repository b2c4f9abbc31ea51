"""Configurations that `lint` finds nothing in, and mistakes that are put into them one by one: seeded_configs/*.yaml.

Of each: framework and file's name; given: what is said beside it; needs_model, model_file:
whether a model is, and which of the fixtures; beside: files in its folder; good: its text; mistakes:
rule that finds it alone; changes: old text → new text; mend: what the finding's mend begins with; at: what its line
holds; also: rules that rightly find something beside it; model: of MODELS; network: looked at on NETWORK.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.api.linted import LintResult, lint_files
from mm_autoparallel.integrations.described import Given

FOLDER = Path(__file__).parent / "seeded_configs"

_DENSE: dict[str, Any] = {
    "num-layers": 26,
    "hidden-size": 2048,
    "ffn-hidden-size": 8192,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "max-position-embeddings": 8192,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "padded-vocab-size": 32000,
}
MODELS = {
    "dense": _DENSE,
    "experts": _DENSE | {"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 1024, "moe-grouped-gemm": True},
    "heads": _DENSE | {"num-attention-heads": 30, "num-query-groups": 30, "hidden-size": 1920},
    "24 layers": _DENSE | {"num-layers": 24},
    "27 layers": _DENSE | {"num-layers": 27},
    "wide": _DENSE | {"hidden-size": 8192, "ffn-hidden-size": 28672, "num-attention-heads": 64},
}
"""Name → Megatron-LM's flags of a decoder, which a person names beside a configuration."""

NETWORK = {
    "num_nodes": 2,
    "devices_per_node": 8,
    "device": "h100-80g",
    "levels": [
        {"name": "board", "num_devices": 4, "bandwidth_bytes_per_s": 450e9, "latency_ms": 0.01},
        {"name": "node", "num_devices": 8, "bandwidth_bytes_per_s": 100e9, "latency_ms": 0.02},
        {"name": "cluster", "num_devices": 16, "bandwidth_bytes_per_s": 50e9, "latency_ms": 0.04},
    ],
}
"""A cluster whose nodes have a level within."""


def read_form(name: str) -> dict[str, Any]:
    """The form called `name`."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def list_forms() -> list[str]:
    """All forms."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def lint_form(form: Mapping[str, Any], mistake: Mapping[str, Any], folder: Path) -> tuple[LintResult, dict[Path, str]]:
    """What is found in the form with `mistake` in it, and the files' texts."""
    texts = {form["file"]: form["good"], **form.get("beside", {})}
    for old, new in mistake.get("changes", {}).items():
        assert any(old in text for text in texts.values()), old
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    written = {folder / name: text for name, text in texts.items()}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    said = {**form.get("given", {}), **mistake.get("given", {})}
    if "model_file" in form:
        said["model_config"] = FOLDER.parents[1] / "fixtures" / form["model_file"]
    elif form.get("needs_model", True):
        said["model_config"] = folder / "model of the training.json"
        said["model_config"].write_text(json.dumps(MODELS[mistake.get("model", "dense")]), encoding="utf-8")
    result = lint_files(
        [folder / form["file"]],
        framework=form["framework"],
        device=form.get("device", "h100-80g"),
        cluster=NETWORK if mistake.get("network") else None,
        given=Given(**said),
    )
    return result, written
