"""What `lint` looks for in Megatron-LM's launch files, by name; file_findings.py looks.

Grounds, of core_r0.16.0: validate_args (megatron/training/arguments.py), TransformerConfig.__post_init__, and the
checks of schedules and parallel_state.
"""

from __future__ import annotations

from mm_autoparallel.integrations.findings import Rule
from mm_autoparallel.integrations.megatron_core import flags

SEQUENCE, HEADS, QUERY_GROUPS, EXPERTS = "--seq-length", "--num-attention-heads", "--num-query-groups", "--num-experts"
POSITIONS, VOCABULARY, VOCABULARY_STEP = "--max-position-embeddings", "--vocab-size", "--make-vocab-size-divisible-by"
_FULL = f"{flags.GRANULARITY} full"

WORLD = Rule(
    "world-size", "error", "devices that are no whole number of replicas (TP x PP x CP)", "the devices or a size"
)
WORLD_VARIABLE = Rule(
    "world-size-variable",
    "warning",
    "a WORLD_SIZE in the script that is not nodes x processes a node",
    "the number, or the product in its place",
)
BATCH = Rule("batch-divisible", "error", "a global batch that is no multiple of DP x MBS", "the next multiple")
EXPERT_RANKS = Rule(
    "expert-ranks",
    "error",
    "EP x ETP that does not divide TP x CP x DP (the default of ETP is TP)",
    f"{flags.EXPERT_TENSOR} 1, or another EP",
)
EXPERTS_DEALT = Rule("experts-divisible", "error", "a number of experts that EP does not divide", "another EP")
HEADS_DEALT = Rule(
    "heads-divisible", "error", "attention heads, or key and value groups, that TP does not divide", "another TP"
)
SEQUENCE_DEALT = Rule(
    "sequence-divisible",
    "error",
    "a sequence length that 2 x CP, or TP with sequence parallelism, does not divide",
    "the next multiple",
)
SEQUENCE_LONG = Rule(
    "sequence-positions", "error", f"a sequence longer than {POSITIONS}", f"{POSITIONS} of that length"
)
LAYERS = Rule(
    "layer-sum",
    "error",
    "stages that hold other layers than the model has, or cannot be equal",
    "a layout, or first and last layers, that add up",
)
EMPTY = Rule("empty-stage", "warning", "a stage or chunk without a decoder layer", "a layout with a layer there")
CHUNKS = Rule(
    "chunk-micro-batches",
    "error",
    "VPP with micro-batches that are no multiple of PP",
    "a batch that gives a multiple",
)
ZERO = Rule(
    "zero-pipeline",
    "error",
    "gradients or weights sharded by FSDP (ZeRO 2, 3) with PP above 1",
    f"{flags.SHARDED_OPTIMIZER} in its place, or PP 1",
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
CONTRADICTED = Rule(
    "flags-contradict", "error", "two flags that Megatron-LM does not take together", "one of them taken out"
)
IDLE = Rule(
    "flag-without-effect", "warning", "a flag that another cancels, or that needs one beside it", "see the message"
)
ABBREVIATED = Rule("abbreviated-flag", "error", "a shortened flag; the parser takes none", "the whole flag")
MISSPELT = Rule("misspelt-flag", "error", "a flag that is nearly a known one", "the known one")
OLD = Rule("old-flag", "error", "a flag of an old release, with which no present one starts", "what took its place")
DEPRECATED = Rule("deprecated-flag", "warning", "a flag that has a new name", "the new name")
TOO_MANY = Rule(
    "recompute-above-held",
    "warning",
    f"{flags.RECOMPUTED} above the layers of every stage",
    "as many as a stage holds, or fewer",
)
PADDING = Rule(
    "vocabulary-padding",
    "note",
    "a vocabulary of which padding is above 1 %",
    f"a smaller {VOCABULARY_STEP}",
)
ASSIGNED = Rule(
    "assigned-twice",
    "warning",
    "a variable behind a flag of sizes that is assigned two numbers, one after the other",
    "one assignment",
)
PASSED_TWICE = Rule(
    "passed-twice", "warning", "a flag that is passed twice with two values, of which the last holds", "one of them"
)
WIDE_TENSOR = Rule(
    "tensor-across-nodes", "warning", "tensor parallel groups that cross nodes", "TP up to the devices of a node"
)

RULES = (
    *(WORLD, WORLD_VARIABLE, BATCH, EXPERT_RANKS, EXPERTS_DEALT, HEADS_DEALT, SEQUENCE_DEALT, SEQUENCE_LONG, LAYERS),
    *(EMPTY, CHUNKS, ZERO, CONNECTIONS, NO_CONNECTIONS, CONTRADICTED, IDLE, ABBREVIATED, MISSPELT, OLD, DEPRECATED),
    *(TOO_MANY, PADDING, ASSIGNED, PASSED_TWICE, WIDE_TENSOR),
)

OF_KIND = (WORLD, WORLD_VARIABLE, BATCH, WIDE_TENSOR, IDLE, ABBREVIATED, MISSPELT, ASSIGNED, PASSED_TWICE)
"""Those that hold for every framework whose scripts pass Megatron-LM's flags."""

OLD_FLAGS = {
    flags.OLD_FULL: f"{_FULL} {flags.METHOD} uniform {flags.RECOMPUTED} 1",
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

DEPRECATED_FLAGS = {
    flags.CUSTOM_FSDP: flags.MEGATRON_FSDP,
    "--enable-cuda-graph": "--cuda-graph-impl local",
    "--external-cuda-graph": "--cuda-graph-impl transformer_engine",
    "--no-weight-decay-cond-type": "--apply-wd-to-qk-layernorm",
}

EXCLUSIVE = (
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

ANY_SHARDED = (flags.SHARDED_OPTIMIZER, flags.MEGATRON_FSDP)
NEEDED = (
    (flags.OVERLAP_GATHER, (flags.OVERLAP_REDUCE,)),
    (flags.OVERLAP_GATHER, ANY_SHARDED),
    (flags.OPTIMIZER_OFFLOAD, (flags.PRECISION_AWARE,)),
    ("--tp-comm-overlap", (flags.SEQUENCE_PARALLEL,)),
)
"""Flag → those one of which Megatron-LM demands beside it."""

USELESS = (
    (flags.SHARDING, (flags.MEGATRON_FSDP, flags.CUSTOM_FSDP)),
    (flags.MODULES, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.METHOD, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.RECOMPUTED, (flags.GRANULARITY, flags.OLD_SELECTIVE)),
    (flags.OFFLOADED, (flags.OFFLOAD,)),
    ("--num-query-groups", ("--group-query-attention",)),
)
"""Flag → those without which it does nothing."""
