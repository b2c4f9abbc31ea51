"""What a row's source and note tell of the software that ran it, where the table has no column for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.model.job.stacks import FACTS

_REPOSITORIES = {
    "Aleph-Alpha": "aleph-alpha",
    "bigscience-workshop": "bigscience",
    "InternLM/InternEvo": "internevo",
    "mosaicml/llm-foundry": "llm-foundry",
    "Ascend/MindSpeed-LLM": "mindspeed-llm",
    "Ascend/MindSpeed-MM": "mindspeed-mm",
}
"""Whose repository published a row → what it ran: frameworks publish what they themselves reach."""

_KERNELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("flash_attentionv1", {"attention": "flash-1"}),
    ("flash_attention2", {"attention": "flash-2"}),
    ("fused", {"attention": "fused-softmax"}),
    ("torch", {"attention": "torch"}),
)
_MCORE = re.compile(r"\bMcore\b")
"""MindSpeed-LLM's scripts for Megatron-core turn fused rotation and SwiGLU on, those for its older models do not."""
_STATED_BY_PAGE: tuple[tuple[re.Pattern[str], dict[str, str]], ...] = (
    (re.compile(r"^github NVIDIA/Megatron-LM@\w+ README\.md\b"), {"tp_overlap": "user_buffers"}),
)
"""Pages that state of all their runs what a table has no column for: Megatron-LM's README lists --tp-comm-overlap: then
products take tensor parallel traffic in pieces (TransformerEngine's user buffers)."""
_NOTED_KERNEL = re.compile(r"\bkernel ([A-Za-z0-9_.+ ]+)")


def find_software(software: str, source: str) -> str:
    """`software` where a table names one that publishes nothing of its own, else that of the source's repository."""
    named = next((name for repository, name in _REPOSITORIES.items() if f"github {repository}" in source), None)
    return named or software


def noted_facts(note: str, software: str, recompute: str, source: str = "") -> dict[str, Any]:
    """Facts of one run: what the page that published it states of all runs there, kernels that its note names, and what
    full recompute covers of its software."""
    found: dict[str, Any] = {}
    for pattern, facts in _STATED_BY_PAGE:
        found |= facts if pattern.search(source) else {}
    kernel = _NOTED_KERNEL.search(note)
    if kernel:
        found |= next((facts for name, facts in _KERNELS if kernel[1].startswith(name)), {})
        if "RMS kernel" in kernel[1]:
            found["norms"] = "fused"
    if software == "mindspeed-llm" and _MCORE.search(note):
        found["elementwise"] = "fused"
    if recompute == "full" and software in FACTS and FACTS[software].split == "modules":
        found["recomputes_ends"] = True
    return found


def split_modules(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage where embedding, layers, final norm and head are dealt out in equal counts, the first stages
    one more."""
    num_modules = num_layers + 3
    counts = [num_modules // num_stages + (stage < num_modules % num_stages) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 2
    return counts


def stated(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As a key of a workload; nothing where nothing is stated."""
    return {"facts": dict(facts)} if facts else {}
