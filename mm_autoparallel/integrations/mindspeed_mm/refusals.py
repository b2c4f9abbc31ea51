"""What of MindSpeed-MM's trainings is not planned, told before anything is profiled or trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindspeed_mm.launch_script import check_switches
from mm_autoparallel.model.job.strategy import Strategy

SUPPORTED = (
    "planned are scripts that train one model by mindspeed_mm.training.pretrain on Megatron's pipeline "
    "(pretrain_vlm.py and its like)"
)

_UNPLANNED = {
    "--fsdp2-config-path": "says how torch FSDP2 shards, and a plan divides the model into stages",
    "--use-custom-fsdp": "shards the model without a pipeline, and a plan divides it into stages",
    "--use-megatron-fsdp": "shards the model without a pipeline, and a plan divides it into stages",
    "--dist-train": "gives every part of the model devices of its own, and a plan has one set for all",
    "--encoder-pipeline-model-parallel-size": "gives encoders stages of their own, and a plan has one pipeline for all",
    "--encoder-tensor-model-parallel-size": "gives encoders tensor parallel groups of their own, and a plan has one "
    "size for all",
    "--dpo-beta": "belongs to preference training, which holds a reference model and runs two passes",
    "--ref-model": "belongs to preference training, which holds a reference model and runs two passes",
}
"""Flag → what it does that no plan says. Megatron's own parser reads them all."""

_ENTRIES = (
    ("posttrain_", "trains after pretraining (preferences, rewards): it holds other models beside the one that learns"),
    ("pretrain_videoalign", "trains a reward model with a trainer of its own"),
    ("pretrain_sora", "trains a model that makes videos or images"),
    ("pretrain_lumina", "trains a model that makes images"),
    ("pretrain_ae", "trains an autoencoder"),
    ("pretrain_omni", "trains a mixture of two transformers, one of which makes images"),
    ("pretrain_whisper", "trains an encoder and decoder with attention between them"),
    ("inference_", "runs a model and trains none"),
    ("evaluate_", "runs a model and trains none"),
)
"""How a script of a checkout is called → what it does, where that is not planned."""


def entry_reason(script: str) -> str | None:
    """Why nothing is planned for a script, by its name (posttrain_qwen2vl_dpo.py); None where that says nothing."""
    path = PurePath(script)
    for name, what in _ENTRIES:
        if path.name.startswith(name):
            return what
    if path.parts[-3:-1] == ("fsdp", "train"):
        return "trains by FSDP from a YAML, without Megatron's pipeline (`mm-autoparallel plan --script` reads that)"
    return None


def check_entry(script: str) -> None:
    """Raises JobError where what a script does, by its name, is not planned."""
    reason = entry_reason(script)
    if "mcore" in PurePath(script).parts:
        reason = "trains layers that are not profiled (`mm-autoparallel plan --script` reads it)"
    if reason:
        raise JobError(f"{script}: it {reason}, which is not planned; {SUPPORTED}")


def check_flags(passes: Callable[[str], bool], framework: str | None, where: str) -> None:
    """Raises JobError where a flag that `passes` finds in `where` ("the command line") asks for what is not planned.

    framework: the value of --ai-framework, None where it is not there.
    """
    check_switches(passes, Strategy(pp=1, tp=1, dp=1, mbs=1), where)
    if framework not in (None, "pytorch"):
        raise JobError(
            f"{where}: --ai-framework is {framework}, and blocks are profiled by torch; {SUPPORTED} on torch"
        )
    for flag, reason in _UNPLANNED.items():
        if passes(flag):
            raise JobError(f"{where}: it passes {flag}, which {reason}; {SUPPORTED}")


def find_dispatcher(document: dict[str, Any], dispatcher: str | None) -> str | None:
    """How the experts of a model.json exchange tokens where that takes no micro-batches of changing length; else None.

    Between stages these are announced (--variable-seq-lengths), and Megatron refuses that beside `allgather`, its
    default, and `alltoall_seq` (core/transformer/transformer_config.py). dispatcher: the value of
    --moe-token-dispatcher-type, which model.json overrules.
    """
    decoder = document.get("text_decoder")
    if not isinstance(decoder, dict) or not decoder.get("num_moe_experts"):
        return None
    found = decoder.get("moe_token_dispatcher_type") or dispatcher or "allgather"
    return str(found) if found in ("allgather", "alltoall_seq") else None


def check_dispatcher(document: dict[str, Any], dispatcher: str | None, strategy: Strategy) -> None:
    """Raises PlanError where `find_dispatcher` finds one and the strategy has a pipeline, or where the strategy chooses
    a dispatcher and model.json another.
    """
    own = (document.get("text_decoder") or {}).get("moe_token_dispatcher_type")
    if strategy.dispatcher and own not in (None, strategy.dispatcher):
        raise PlanError(
            f"plan: it chooses the dispatcher {strategy.dispatcher}, and text_decoder.moe_token_dispatcher_type of the "
            f"model file is {own}, which counts before the flag; take it out there"
        )
    found = find_dispatcher(document, strategy.dispatcher or dispatcher)
    if found and strategy.pp > 1:
        raise PlanError(
            f"plan: PP {strategy.pp} with experts: their token dispatcher is {found}, and Megatron refuses it beside "
            "--variable-seq-lengths, which a pipeline of MindSpeed-MM needs; pass --moe-token-dispatcher-type alltoall "
            "or plan with PP 1"
        )
