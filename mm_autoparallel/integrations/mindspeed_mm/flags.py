"""The flags of Megatron and MindSpeed-MM that a plan decides, and what they are called in a strategy."""

from __future__ import annotations

PIPELINE = "--pipeline-model-parallel-size"
TENSOR = "--tensor-model-parallel-size"
CONTEXT = "--context-parallel-size"
EXPERT = "--expert-model-parallel-size"
CHUNKS = "--virtual-pipeline-model-parallel-size"
MICRO_BATCH = "--micro-batch-size"
GLOBAL_BATCH = "--global-batch-size"
MODEL = "--mm-model"
SHARDED_OPTIMIZER = "--use-distributed-optimizer"
SEQUENCE_PARALLEL = "--sequence-parallel"
VARIABLE_LENGTHS = "--variable-seq-lengths"
"""MindSpeed's: stages tell each other how long what they send is. Without it buffers have the script's sequence length,
and neither vision between stages nor a batch of another length has that."""
EMPTY_OPTIMIZER = "--enable-dummy-optimizer"
DISPATCHER = "--moe-token-dispatcher-type"
SHARED_OVERLAP = "--moe-shared-expert-overlap"
FUSED = "--use-ascend-mc2"
HETERO, HETERO_SCALE = "--hetero-parallel", "--hetero-encoder-mbs-scale"

CONTEXT_KIND = "--context-parallel-algo"
ALL_TO_ALL = "ulysses_cp_algo"
"""The one kind of context parallelism that all parts of a model share in MindSpeed-MM."""

SIZES = {PIPELINE: "pp", TENSOR: "tp", CONTEXT: "cp", EXPERT: "ep", CHUNKS: "vpp"}
"""Flag → the strategy's field. Megatron's default of each is 1."""
