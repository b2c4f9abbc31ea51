"""Facts that a job states and that cannot hold together: of its model, its attention, its precision or its stack.

A fact that nothing reads would be left out silently; what is stated is refused instead, with the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.model.job.workload import Workload

_OF_EXPERTS = ("drops_tokens", "grouped_activation", "early_experts")
_OF_SCORES, _OF_FLASH = ("fused-softmax", "torch"), ("flash-1", "flash-2", "triton")
"""Attention kernels that keep whole score matrices, and those that do not."""
_OVERLAP_OF = {
    "user_buffers": (("megatron-te",), "TransformerEngine's"),
    "asynchronous": (("transformers",), "PyTorch's"),
    "mc2": (("mindspeed", "mindspeed-mm"), "MindSpeed's"),
}
"""Whose tensor parallel traffic runs beside products, by the workload's stack."""


def fact_reasons(
    workload: Workload, *, has_experts: bool, has_shared: bool, has_latent: bool, asks_low: bool
) -> Iterator[str]:
    """Each rule that the stated facts of `workload` break, in a sentence.

    has_experts, has_shared, has_latent: whether any layer has experts, one that all tokens pass, latent attention.
    asks_low: whether the decoder's products may run in less than BF16.
    """
    stated = _list_stated(workload)
    for name in _OF_EXPERTS:
        if name in stated and not has_experts:
            yield f"facts.{name} is of layers with experts, and the model has none"
    if "joined_heads" in stated and not has_latent:
        yield "facts.joined_heads is of latent attention, and the model has none"
    if workload.overlap_all_to_all == "shared_experts" and not has_shared:
        yield "overlap_all_to_all is shared_experts, and the model has no shared expert"
    kernel = stated.get("attention")
    if kernel in _OF_SCORES and workload.attention == "flash":
        yield f"facts.attention is {kernel}, which keeps whole scores, and attention is flash, which keeps none"
    if kernel in _OF_FLASH and workload.attention == "unfused":
        yield f"facts.attention is {kernel}, which keeps no scores, and attention is unfused, which keeps them whole"
    if "fp8_attention" in stated and workload.attention == "unfused":
        yield "facts.fp8_attention is of a fused kernel, and attention is unfused"
    if not asks_low:
        for name, value in (("low_first_last", False), ("fused_casts", True)):
            if stated.get(name) is value:
                yield f"facts.{name} is of products of low precision, and those of the decoder run in bf16 alone"
    overlap = stated.get("tp_overlap", "")
    reason = overlap_reason(workload.stack, overlap)
    if reason and ("stack" in workload.model_fields_set or overlap == "mc2"):
        yield f"facts.tp_overlap is {reason}"


def overlap_reason(stack: str, overlap: str) -> str | None:
    """Why `stack` runs no products so beside tensor parallel traffic; None where it does, or none are asked for."""
    if overlap in ("", "none"):
        return None
    stacks, whose = _OVERLAP_OF[overlap]
    return None if stack in stacks else f"{overlap}, {whose} (stack {' or '.join(stacks)}), and stack is {stack}"


def overlap_reasons(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Each rule that the strategy's own choice breaks. Without TP or without sequence parallelism MindSpeed warns, and
    fuses nothing (features_manager/tensor_parallel/mc2_feature.py); Megatron-LM refuses --tp-comm-overlap there
    (megatron/training/arguments.py)."""
    reason = overlap_reason(workload.stack, strategy.tp_overlap)
    if reason:
        yield f"the strategy's tp_overlap is {reason}"
    elif strategy.tp_overlap not in ("", "none") and not strategy.divides_sequences(workload):
        without = "" if strategy.tp == 1 else " without it"
        needs = "TP above 1 and sequence parallelism"
        yield f"tp_overlap is {strategy.tp_overlap}, which needs {needs}, and TP is {strategy.tp}{without}"


def _list_stated(workload: Workload) -> dict[str, Any]:
    """Facts that are stated, but for those that say no more than that there is nothing of the kind."""
    if workload.facts is None:
        return {}
    stated = {name: getattr(workload.facts, name) for name in workload.facts.model_fields_set}
    return {name: value for name, value in stated.items() if value or name == "low_first_last"}
