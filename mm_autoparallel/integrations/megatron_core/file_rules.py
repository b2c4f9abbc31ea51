"""What `lint` looks for in Megatron-LM's launch files, by name; file_findings.py looks.

Grounds, of core_r0.16.0: validate_args (megatron/training/arguments.py), TransformerConfig.__post_init__, and the
checks of schedules and parallel_state.
"""

from __future__ import annotations

from mm_autoparallel.integrations import file_rules as shared
from mm_autoparallel.integrations.findings import Rule
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.said import KeyTable

SEQUENCE, HEADS, QUERY_GROUPS, EXPERTS = "--seq-length", "--num-attention-heads", "--num-query-groups", "--num-experts"
POSITIONS, VOCABULARY, VOCABULARY_STEP = "--max-position-embeddings", "--vocab-size", "--make-vocab-size-divisible-by"
_FULL = f"{flags.GRANULARITY} full"

WORLD_VARIABLE = Rule(
    "world-size-variable",
    "warning",
    "a WORLD_SIZE in the script that is not nodes x processes a node",
    "the number, or the product in its place",
)
CONNECTIONS = Rule(
    "device-max-connections",
    "error",
    f"{flags.CONNECTIONS} other than 1 with TP or CP before Blackwell, or 1 with FSDP",
    f"export {flags.CONNECTIONS}=1, or another number with FSDP",
)
NO_CONNECTIONS = Rule(
    "device-max-connections-unset",
    "warning",
    f"TP or CP above 1, and {flags.CONNECTIONS} is set nowhere in the file",
    f"export {flags.CONNECTIONS}=1",
)
ABBREVIATED = Rule("abbreviated-flag", "error", "a shortened flag; the parser takes none", "the whole flag")
UNKNOWN = Rule(
    "unknown-flag",
    "warning",
    "a flag that no known release has: where a fork changes the model by it, memory and time are of another one",
    "a file of the model (--model)",
)
ASSIGNED = Rule(
    "assigned-twice",
    "warning",
    "a variable behind a flag of sizes that is assigned two numbers, one after the other",
    "one assignment",
)

RULES = (
    *shared.SIZES,
    shared.PADDING,
    *(WORLD_VARIABLE, CONNECTIONS, NO_CONNECTIONS, shared.CONTRADICTED, shared.IDLE, ABBREVIATED, shared.MISSPELT),
    *(UNKNOWN, shared.OLD, shared.DEPRECATED, ASSIGNED, shared.PASSED_TWICE),
)

OF_KIND = (
    *shared.SIZES,
    shared.PADDING,
    *(WORLD_VARIABLE, shared.IDLE, ABBREVIATED, shared.MISSPELT, UNKNOWN, ASSIGNED, shared.PASSED_TWICE),
)
"""Those that hold for every framework whose scripts pass Megatron-LM's flags."""

_OLD = {
    flags.OLD_FULL: f"{_FULL} {flags.METHOD} uniform {flags.RECOMPUTED} 1",
    flags.OLD_METHOD: f"{_FULL} {flags.METHOD} uniform {flags.RECOMPUTED} 1",
    "--batch-size": flags.MICRO_BATCH,
    "--model-parallel-size": flags.TENSOR,
    "--warmup": "--lr-warmup-fraction",
    "--checkpoint-policy": f"{flags.GRANULARITY} and {flags.METHOD}",
    "--auto-recompute-profiling-step": f"{flags.RECOMPUTED}, of a plan",
    "--optimized-pipeline": flags.LAYOUT,
    "--manual-mbs": flags.MICRO_BATCH,
    "--fold-mode": "",
    "--triangle-attn": "--attention-backend flash",
    "--mlp-layer-fusion": "--swiglu, which is fused by itself",
    "--release-fp32-grad": "--use-precision-aware-optimizer",
    "--virtual-pipeline-model-parallel-size": flags.CHUNKS,
}
"""Flags of old releases of Megatron-LM and of ModelLink (1.0.RC1) → what says it today; empty: nothing does."""

_DEPRECATED = {
    flags.CUSTOM_FSDP: flags.MEGATRON_FSDP,
    "--enable-cuda-graph": "--cuda-graph-impl local",
    "--external-cuda-graph": "--cuda-graph-impl transformer_engine",
    "--no-weight-decay-cond-type": "--apply-wd-to-qk-layernorm",
}

_EXCLUSIVE = (
    (flags.BF16, "--fp16"),
    ("--fp8-format", "--fp4-format"),
    (flags.LAYOUT, flags.CHUNKS),
    (flags.LAYOUT, flags.LAYERS_PER_CHUNK),
    (flags.CHUNKS, flags.LAYERS_PER_CHUNK),
    *((flags.LAYOUT, other) for other in (flags.FIRST, flags.LAST, flags.COUNTS_EMBEDDING, flags.COUNTS_LOSS)),
    (flags.TORCH_FSDP, flags.SHARDED_OPTIMIZER),
    (flags.LAYERS_PER_CHUNK, flags.FIRST),
    (flags.LAYERS_PER_CHUNK, flags.LAST),
    ("--train-iters", "--train-samples"),
    ("--train-iters", "--lr-decay-samples"),
    ("--train-iters", "--rampup-batch-size"),
    ("--train-samples", "--lr-decay-iters"),
    ("--swiglu", "--squared-relu"),
    ("--enable-cuda-graph", "--external-cuda-graph"),
)
"""Pairs that Megatron-LM does not take together."""

_ANY_SHARDED = (flags.SHARDED_OPTIMIZER, flags.MEGATRON_FSDP)
_NEEDED = (
    (flags.OVERLAP_GATHER, (flags.OVERLAP_REDUCE,)),
    (flags.OVERLAP_GATHER, _ANY_SHARDED),
    (flags.OPTIMIZER_OFFLOAD, (flags.PRECISION_AWARE,)),
    (flags.USER_BUFFERS, (flags.SEQUENCE_PARALLEL,)),
)
"""Flag → those one of which Megatron-LM demands beside it."""

_IDLE = (
    (flags.SHARDING, (flags.MEGATRON_FSDP, flags.CUSTOM_FSDP)),
    (flags.MODULES, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.METHOD, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.RECOMPUTED, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.OFFLOADED, (flags.OFFLOAD,)),
    ("--num-query-groups", ("--group-query-attention",)),
)
"""Flag → those without which it does nothing."""

TABLE = KeyTable(_EXCLUSIVE, _NEEDED, _IDLE, old=_OLD, deprecated=_DEPRECATED)
"""What core_r0.16.0 makes of its flags."""
