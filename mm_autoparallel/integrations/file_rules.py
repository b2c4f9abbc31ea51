"""What `lint` looks for in files of every framework, by name; said_findings.py looks. Frameworks add rules."""

from __future__ import annotations

from mm_autoparallel.integrations.findings import Rule

WORLD = Rule(
    "world-size", "error", "devices that are no whole number of replicas (TP x PP x CP)", "the devices or a size"
)
WIDE_TENSOR = Rule(
    "tensor-across-nodes", "warning", "tensor parallel groups that cross nodes", "TP up to the devices of a node"
)
BATCH = Rule("batch-divisible", "error", "a global batch that is no multiple of DP x MBS", "the next multiple")
CHUNKS = Rule(
    "chunk-micro-batches",
    "error",
    "VPP with micro-batches that are no multiple of PP",
    "a batch that gives a multiple",
)
UNFILLED = Rule(
    "micro-batches-below-stages",
    "error",
    "fewer micro-batches than stages, where the framework does not start so",
    "as many as stages",
)
LAYERS = Rule(
    "layer-sum",
    "error",
    "stages that hold other layers than the model has, or cannot be equal",
    "a layout, or first and last layers, that add up",
)
EMPTY = Rule("empty-stage", "warning", "a stage or chunk without a decoder layer", "a layout with a layer there")
TOO_MANY = Rule(
    "recompute-above-held",
    "warning",
    "recompute of more layers than a stage holds",
    "as many as a stage holds, or fewer",
)
EXPERT_RANKS = Rule(
    "expert-ranks",
    "error",
    "EP x ETP that does not divide TP x CP x DP (the default of ETP is TP in Megatron-LM)",
    "ETP 1, or another EP",
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
    "sequence-positions",
    "error",
    "a sequence longer than the model has positions",
    "as many positions as the sequence is long",
)
PADDING = Rule(
    "vocabulary-padding", "note", "a vocabulary of which padding is above 1 %", "padding to a smaller multiple"
)
ZERO = Rule(
    "zero-pipeline",
    "error",
    "gradients or weights sharded (ZeRO 2, 3) with PP above 1, where the framework does not run so",
    "ZeRO 1, or PP 1",
)
SIZES = (
    *(WORLD, BATCH, EXPERT_RANKS, EXPERTS_DEALT, HEADS_DEALT, SEQUENCE_DEALT, SEQUENCE_LONG, LAYERS, EMPTY, CHUNKS),
    *(ZERO, TOO_MANY, WIDE_TENSOR),
)
"""Of the sizes that a file of any framework says; UNFILLED, PADDING: of those that ask for it."""

CONTRADICTED = Rule(
    "flags-contradict", "error", "two flags or keys that the framework does not take together", "one of them taken out"
)
IDLE = Rule(
    "flag-without-effect",
    "warning",
    "a flag or key that another cancels, or that needs one beside it",
    "see the message",
)
MISSPELT = Rule("misspelt-flag", "error", "a flag or key that is unknown, and nearly a known one", "the known one")
OLD = Rule("old-flag", "error", "a flag or key of an old release, which no present one takes", "what took its place")
DEPRECATED = Rule("deprecated-flag", "warning", "a flag or key that has a new name", "the new name")
PASSED_TWICE = Rule(
    "passed-twice",
    "warning",
    "a flag that is passed twice with two values, of which the last holds",
    "one of them",
)
KEY_TWICE = Rule("key-twice", "error", "a key that stands twice in one mapping, of which one holds", "one of them")
