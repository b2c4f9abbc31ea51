"""The YAML of MindSpeed-LLM's FSDP trainer (train_fsdp2.py, 26.1.0) in the keys of MindSpeed-MM's, and back.

Both stand on the same code (mindspeed/fsdp): torch FSDP2 over patterns of modules, fp32 shards, Ulysses and ring, and
experts dealt out. Names and defaults: mindspeed_llm/fsdp2/utils/arguments.py; sizes: fsdp2/distributed/
parallel_state.py, which asks that all ranks share one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.yaml_text import KeyPath
from mm_autoparallel.model.readers.foreign import Section

TRAINER = "train_fsdp2.py"
MARKS = ("fsdp_size", "fsdp_modules", "tp_size", "ep_size", "ep_fsdp_size", "cp_size")
"""Keys of `parallel` that MindSpeed-MM's trainer has not."""

_LAYERS, _EXPERTS = ["model.layers.{*}"], ["model.layers.{*}.mlp.experts"]
_OTHER_KINDS = {
    "mamba3": "layers that are state spaces",
    "longcat_flash": "layers with two attentions each and experts that do nothing",
    "step35": "layers with windows, which have other heads than those without",
    "glm52": "attention to keys that an indexer chooses",
}
"""model_id → what no reader describes."""

NAMES: Mapping[KeyPath, KeyPath] = {
    ("parallel", "fully_shard_parallel_size"): ("parallel", "fsdp_size"),
    ("parallel", "expert_parallel_size"): ("parallel", "ep_size"),
    ("parallel", "expert_fully_shard_parallel_size"): ("parallel", "ep_fsdp_size"),
    ("parallel", "fsdp_plan", "reshard_after_forward"): ("parallel", "reshard_after_forward"),
    ("parallel", "recompute"): ("parallel", "recompute"),
    ("parallel", "recompute_plan", "apply_modules"): ("parallel", "recompute_modules"),
    ("training", "micro_batch_size"): ("training", "per_device_train_batch_size"),
    ("training", "gradient_accumulation_steps"): ("training", "gradient_accumulation_steps"),
}
"""Keys that a plan decides."""


def is_llm(document: Mapping[str, Any]) -> bool:
    """Whether the YAML is one of this trainer's."""
    parallel = document.get("parallel")
    return isinstance(parallel, dict) and any(key in parallel for key in MARKS)


def translate(document: Mapping[str, Any], path: Path, what: str) -> dict[str, Any]:
    """The document in the keys of MindSpeed-MM's trainer, of 26.0. path, what: how messages call it.

    Raises JobError where a value is of another type, and where the training is none that is planned.
    """
    top = Section(document, path, what=what)
    parallel, training, data, model, sped_up = (
        top.section(name, {}) for name in ("parallel", "training", "data", "model", "optimization")
    )
    if parallel.count("tp_size", 1) > 1:
        raise parallel.refuse("tp_size", "matrices divided by DTensor beside FSDP2 are not planned; 1 is expected")
    kind = model.text("model_id", "")
    if kind in _OTHER_KINDS:
        raise JobError(f"{what} {path}: model.model_id is {kind}, {_OTHER_KINDS[kind]}, which is not planned")
    if model.content.get("quant_recipe_name"):
        raise model.refuse("quant_recipe_name", "training in fewer bits is not planned; take it out to plan in bf16")
    cp, shares = parallel.count("cp_size", 1), parallel.text("cp_type", "ulysses")
    if shares not in ("ulysses", "ring"):
        raise parallel.refuse("cp_type", "ulysses or ring is expected")
    chunk = sped_up.content.get("chunk_loss_size")
    return {
        "parallel": {
            "fully_shard_parallel_size": parallel.count("fsdp_size", 1),
            "fsdp_plan": {
                "apply_modules": parallel.content.get("fsdp_modules") or [*_LAYERS, "model.embed_tokens", "lm_head"],
                "reshard_after_forward": parallel.flag("reshard_after_forward", True),
                "param_dtype": parallel.text("param_dtype", "bf16"),
                "reduce_dtype": parallel.text("reduce_dtype", "fp32"),
            },
            "ulysses_parallel_size": cp if shares == "ulysses" else 1,
            "ring_attention_size": cp if shares == "ring" else 1,
            "expert_parallel_size": parallel.count("ep_size", 1),
            "expert_fully_shard_parallel_size": parallel.count("ep_fsdp_size", 1),
            "ep_plan": {"apply_modules": parallel.content.get("ep_modules") or _EXPERTS},
            "recompute": parallel.flag("recompute", False),
            "recompute_plan": {"apply_modules": parallel.content.get("recompute_modules") or _LAYERS},
        },
        "training": {
            "micro_batch_size": training.count("per_device_train_batch_size", 8),
            "gradient_accumulation_steps": training.count("gradient_accumulation_steps", 1),
            "optimizer": training.text("optimizer", "adamw"),
            "init_model_with_meta_device": True,
        },
        "data": {"dataset_param": {"basic_parameters": {"cutoff_len": data.count("cutoff_len", 2048)}}},
        "model": {
            "model_id": kind,
            "model_name_or_path": model.text("model_name_or_path", ""),
            **({"enable_chunk_loss": True, "chunkloss_plan": {"chunk_size": chunk}} if chunk else {}),
        },
    }


def rename(changes: Mapping[KeyPath, Any], where: str) -> dict[KeyPath, Any]:
    """`changes` in this trainer's own keys. Raises PlanError for one that it does not have, or that stays as it is."""
    for path in changes:
        if path not in NAMES:
            raise PlanError(
                f"{where}: the plan changes {'.'.join(map(str, path))}, and how a sequence is shared stays as "
                "MindSpeed-LLM's trainer has it; plan with its own cp_size"
            )
    return {NAMES[path]: value for path, value in changes.items()}
