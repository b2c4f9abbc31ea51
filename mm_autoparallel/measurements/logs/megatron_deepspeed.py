"""Reads logs of Megatron-DeepSpeed: Megatron-LM's arguments with spellings of its own, and DeepSpeed's lines.

What shards is DeepSpeed's configuration, which it prints (`zero_optimization_stage`), and else `zero_stage`. It keeps
fp16 gradients in two bytes. Sources: github deepspeedai/Megatron-DeepSpeed, megatron/arguments.py and training.py;
bigscience-workshop/Megatron-DeepSpeed, the same files.
"""

from __future__ import annotations

import re
from typing import Any

from mm_autoparallel.measurements.logs.arguments import has_arguments, read_arguments, whole
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.logs.megatron import read_shared
from mm_autoparallel.measurements.logs.run import Run

_IS_DEEPSPEED = re.compile(r"(?:^|\s)deepspeed \.+ (?:True|False)\b")
_STAGE = re.compile(r"zero_optimization_stage \.+ (\d)")
_FLASH = ["use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder"]
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def is_megatron_deepspeed(log: Log) -> bool:
    """Whether the arguments are those of a Megatron with DeepSpeed in it, which may run without."""
    return has_arguments(log) and next(log.find(_IS_DEEPSPEED), None) is not None


def read_run(log: Log, facts: Facts) -> Run:
    """The run. Raises TableError or JobError with what is missing, contradicts or is not understood."""
    arguments = read_arguments(log)
    configured = log.find_same(_STAGE, "DeepSpeed's ZeRO stage")
    zero = int(configured) if configured is not None else whole(log, arguments, "zero_stage", least=0) or 0
    if arguments.get("deepspeed") is False:
        zero = int(arguments.get("use_distributed_optimizer") is True)
    return read_shared(
        log,
        facts,
        arguments,
        software="megatron-deepspeed",
        stack="megatron-deepspeed",
        flash=any(arguments.get(name) is True for name in _FLASH),
        zero=zero,
        more={"overlap_grad_reduce": False, "overlap_param_gather": False, "gradient_bytes": 2.0},
        adapt=lambda sizes: _adapt(log, sizes),
    )


def _adapt(log: Log, sizes: dict[str, Any]) -> None:
    """Spellings of DeepSpeed's and BigScience's arguments in Megatron-LM's."""
    norm = str(sizes.get("normalization", "LayerNorm"))
    sizes["normalization"] = _NORMS.get(norm, norm)
    groups = sizes.pop("num_key_value_heads", None)
    if groups and groups != sizes.get("num_attention_heads"):
        sizes |= {"group_query_attention": True, "num_query_groups": groups}
    experts = str(sizes.pop("num_experts", None) or "[1]")
    if set(re.findall(r"\d+", experts)) != {"1"}:
        raise log.error(f"num_experts is {experts}: DeepSpeed's experts are not represented")
    if sizes.get("glu_activation"):
        sizes["swiglu"] = True
        sizes.setdefault("ffn_hidden_size", 4 * sizes.get("hidden_size", 0))
    if sizes.get("add_position_embedding") is False and sizes["position_embedding_type"] == "learned_absolute":
        sizes["position_embedding_type"] = "none"
