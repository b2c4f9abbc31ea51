"""The block of arguments that Megatron-LM and what is built on it print: a name, dots up to column 48, a value.

megatron/training/arguments.py, _print_args: `  num_layers ...................................... 32`. Values are what
Python's str makes of them; the types come back here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.measurements.logs.log import Log

_BEGIN = re.compile(r"-{4,}\s*(?:\w+ )?arguments\s*-{4,}")
_END = re.compile(r"-{4,}\s*end of (?:\w+ )?arguments\s*-{4,}")
_ARGUMENT = re.compile(r"([A-Za-z_]\w*) (\.+) (.*)$")
_WIDTH = 48
"""Of a name and its dots together, by which a line is known whatever a launcher put before it."""

_OTHERS = re.compile(r"\s+\[(?:WARNING|INFO)\].*$")
"""What another process wrote into the same line."""

_DECIDING = frozenset(
    (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("num_key_value_heads", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "swiglu", "seq_length"),
        *("untie_embeddings_and_output_weights", "padded_vocab_size", "mm_model", "multi_latent_attention"),
        *("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel"),
        *("micro_batch_size", "global_batch_size", "bf16", "fp16", "fp8", "zero_stage", "use_distributed_optimizer"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "checkpoint_activations"),
        *("transformer_impl", "use_flash_attn", "overlap_grad_reduce", "overlap_param_gather", "cpu_optimizer"),
    )
)
"""What two blocks of one job agree in; other arguments may differ where a job is started again."""


def has_arguments(log: Log) -> bool:
    """Whether there is a whole block."""
    return next(log.find(_END), None) is not None


def read_arguments(log: Log) -> dict[str, Any]:
    """The arguments of the one job in the log; of a job that was started again, those of its last start.

    Raises TableError where there is no block, it has no end, or two blocks are of two jobs, naming the argument.
    """
    blocks: list[dict[str, Any]] = []
    where: list[int] = []
    block: dict[str, Any] | None = None
    for line in log.lines:
        if _END.search(line.text):
            if block is not None:
                blocks.append(block)
                where.append(line.number)
            block = None
        elif _BEGIN.search(line.text):
            block = {}
        elif block is not None:
            found = _ARGUMENT.search(line.text)
            if found and len(found[1]) + len(found[2]) == _WIDTH:
                block.setdefault(found[1], _typed(_OTHERS.sub("", found[3]).strip()))
    if not blocks:
        cut = "its block of arguments has no end" if block else "it has no block of arguments"
        raise log.error(
            f"{cut} (the lines from `arguments` to `end of arguments` that rank 0 prints first); give the log from its "
            "beginning, of the process that is rank 0"
        )
    merged = dict(blocks[0])  # a line may be lost where processes write at once
    for other, number in zip(blocks[1:], where[1:], strict=True):
        for name in sorted(_DECIDING & merged.keys() & other.keys()):
            one, two = merged[name], other[name]
            if _is_torn(one, two):
                merged[name] = two
            elif _is_torn(two, one):
                other[name] = one
            elif one != two:
                raise log.error(
                    f"{name} is {one} in the arguments that end in line {where[0]} and {two} in those "
                    f"that end in line {number}: two jobs in one log; divide it"
                )
        merged |= other
    return merged


def _is_torn(value: Any, other: Any) -> bool:
    """Whether `value` is `other` with what another process wrote behind it."""
    return isinstance(value, str) and value != other and value.startswith(str(other))


def _typed(text: str) -> Any:
    if text in ("None", "True", "False", ""):
        return {"None": None, "True": True, "False": False, "": None}[text]
    if re.fullmatch(r"[-+]?\d{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def plain(arguments: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that has a value; None where none has."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def whole(log: Log, arguments: Mapping[str, Any], *names: str, least: int = 1) -> int | None:
    """The whole number of at least `least` under the first of `names` that has a value; None where none has.

    Raises TableError where it is anything else.
    """
    value = plain(arguments, *names)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        name = next(name for name in names if arguments.get(name) is not None)
        raise log.error(f"{name} is {value} among the arguments; a whole number of at least {least} is expected")
    return value


def chance(log: Log, arguments: Mapping[str, Any], name: str) -> float:
    """A number from 0 to 1, 0 where there is none. Raises TableError where it is anything else."""
    value = arguments.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise log.error(f"{name} is {value} among the arguments; a number from 0 to 1 is expected")
    return float(value)
