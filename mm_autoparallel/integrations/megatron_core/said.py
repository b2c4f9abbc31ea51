"""What a launch passes in Megatron-LM's flags, as Said: scripts, MODEL_ARGS, and codes whose fields are such flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.megatron_core import file_rules as rules
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.layers import read_layers
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.integrations.said import Place, Said

KEYS = {
    **{name: flag for flag, name in flags.SIZES.items()},
    "etp": flags.EXPERT_TENSOR,
    "mbs": flags.MICRO_BATCH,
    "global_batch_size": flags.GLOBAL_BATCH,
    "group": flags.GROUP,
    "num_layers": flags.NUM_LAYERS,
    "recomputed": flags.RECOMPUTED,
    "recompute": flags.RECOMPUTED,
    "heads": rules.HEADS,
    "query_groups": rules.QUERY_GROUPS,
    "experts": rules.EXPERTS,
    "seq_length": rules.SEQUENCE,
    "positions": rules.POSITIONS,
    "vocab_size": rules.VOCABULARY,
    "vocab_step": rules.VOCABULARY_STEP,
    "zero": flags.SHARDED_OPTIMIZER,
}
"""Quantity → its flag."""

LAYER_FLAGS = (flags.LAYOUT, flags.FIRST, flags.LAST, flags.PIPELINE, flags.NUM_LAYERS)
"""Those that decide which layers are where, the first that is passed."""


def number_of(passed: Passed, flag: str) -> int | None:
    """The number that `flag` passes; None where there is none, or the machine alone knows it."""
    try:
        return passed.number(flag, least=0)
    except PlanError:
        return None


def say(
    passed: Passed,
    path: Path,
    world_size: int | None,
    per_node: int | None,
    place: Callable[[str], Place],
    name: Callable[[str], str] = lambda flag: flag,
) -> Said:
    """What the file at `path` says, whose flags are `passed`. place: where a flag, by its name in the file, stands.
    name: what a flag is called there."""
    numbers = {quantity: number_of(passed, flag) for quantity, flag in KEYS.items() if quantity != "zero"}
    numbers |= {"world_size": world_size, "per_node": per_node, "zero": _read_zero(passed)}
    numbers["vocab_step"] = numbers["vocab_step"] or 128
    numbers["divides"] = int(passed.has(flags.SEQUENCE_PARALLEL))
    if not passed.has("--group-query-attention"):
        del numbers["query_groups"]
    if passed.words.get(flags.METHOD) != ("block",):
        del numbers["recomputed"]
    at = next(filter(passed.has, LAYER_FLAGS), flags.NUM_LAYERS)
    return Said(
        path,
        {quantity: number for quantity, number in numbers.items() if number is not None},
        {quantity: name(flag) for quantity, flag in (KEYS | {"layers": at}).items()},
        place,
        partial(_holds, passed),
        name,
        _read_layers(passed, numbers["num_layers"], numbers["pp"] or 1),
        table=rules.TABLE,
        mends={"zero": name(flags.SHARDED_OPTIMIZER)},
        most_zero=1,
    )


def _holds(passed: Passed, condition: str) -> bool:
    flag, _, values = condition.partition("=")
    return passed.has(flag) and (not values or next(iter(passed.words[flag]), "") in values.split("|"))


def _read_zero(passed: Passed) -> int:
    """ZeRO, as far as FSDP's flags say it."""
    kind = next(iter(passed.words.get(flags.SHARDING, ())), None) if passed.has(flags.MEGATRON_FSDP) else None
    if passed.has(flags.TORCH_FSDP) or kind == flags.SHARDINGS[3]:
        return 3
    return 2 if kind == flags.SHARDINGS[2] else int(passed.has(flags.SHARDED_OPTIMIZER))


def _read_layers(passed: Passed, number: int | None, pp: int) -> tuple[int, ...] | str | None:
    """Layers of each virtual stage; what is wrong with them; None where the file does not say."""
    if not number or any(passed.has(one) and passed.has(other) for one, other in rules.TABLE.exclusive):
        return None
    try:
        return read_layers(passed, number, pp)
    except PlanError as failure:
        return failure.reason
