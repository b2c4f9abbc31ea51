"""The flags of Megatron-LM (core_r0.16.0, megatron/training/arguments.py) that a plan decides, and what each says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

TENSOR = "--tensor-model-parallel-size"
PIPELINE = "--pipeline-model-parallel-size"
CONTEXT = "--context-parallel-size"
EXPERT = "--expert-model-parallel-size"
EXPERT_TENSOR = "--expert-tensor-parallel-size"
MICRO_BATCH = "--micro-batch-size"
GLOBAL_BATCH = "--global-batch-size"
SIZES = {TENSOR: "tp", PIPELINE: "pp", CONTEXT: "cp", EXPERT: "ep"}
"""Flag → the strategy's field. Megatron-LM's default of each is 1."""

CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
COUNTS_EMBEDDING = "--account-for-embedding-in-pipeline-split"
COUNTS_LOSS = "--account-for-loss-in-pipeline-split"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
NO_P2P_OVERLAP = "--no-overlap-p2p-communication"

SEQUENCE_PARALLEL = "--sequence-parallel"
CONTEXT_KIND = "--cp-comm-type"
CONTEXT_SIZES = "--hierarchical-context-parallel-sizes"
CONTEXT_KINDS = {"ring": "p2p", "all_to_all": "a2a", "all_gather": "all_gather", "hierarchical": "a2a+p2p"}
"""Of a workload's context_parallel, by their names here."""
RANK_ORDER = "--use-tp-pp-dp-mapping"

SHARDED_OPTIMIZER = "--use-distributed-optimizer"
OPTIMIZER_COPIES = "--num-distributed-optimizer-instances"
MEGATRON_FSDP = "--use-megatron-fsdp"
CUSTOM_FSDP = "--use-custom-fsdp"
TORCH_FSDP = "--use-torch-fsdp2"
SHARDING = "--data-parallel-sharding-strategy"
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""ZeRO 0 to 3 under Megatron-FSDP."""
CHECKPOINT = "--ckpt-format"
FSDP_CHECKPOINT = "fsdp_dtensor"
OPTIMIZER_OFFLOAD = "--optimizer-cpu-offload"
PRECISION_AWARE = "--use-precision-aware-optimizer"
OVERLAP_REDUCE = "--overlap-grad-reduce"
OVERLAP_GATHER = "--overlap-param-gather"
OF_OVERLAPS = {
    "overlap_grad_reduce": OVERLAP_REDUCE,
    "overlap_param_gather": OVERLAP_GATHER,
    "overlap_p2p": NO_P2P_OVERLAP,
}
"""Overlap of a strategy → its flag, of which the last turns it off."""


def overlap_switches(chosen: Mapping[str, bool]) -> dict[str, bool]:
    """Flag → whether it is passed, of the overlaps that a strategy chooses."""
    return {OF_OVERLAPS[name]: value != (name == "overlap_p2p") for name, value in chosen.items()}


GRANULARITY = "--recompute-granularity"
METHOD = "--recompute-method"
RECOMPUTED = "--recompute-num-layers"
MODULES = "--recompute-modules"
OLD_SELECTIVE = "--recompute-activations"
OLD_FULL = "--checkpoint-activations"
OLD_METHOD = "--activations-checkpoint-method"
"""Of 2021 and 2022: all layers recompute, by this method."""
OFFLOAD = "--fine-grained-activation-offloading"
OFFLOADED = "--offload-modules"
MODULE_NAMES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""What --recompute-modules takes (megatron/core/transformer/transformer_config.py)."""

DISPATCHER = "--moe-token-dispatcher-type"
BACKEND = "--moe-flex-dispatcher-backend"
DEEPEP = "--moe-enable-deepep"
SHARED_OVERLAP = "--moe-shared-expert-overlap"
BATCH_OVERLAP = "--overlap-moe-expert-parallel-comm"

USER_BUFFERS = "--tp-comm-overlap"
FUSED = "--fused-products"
"""Of products that are fused with TP's traffic: no flag of Megatron-LM's; a dialect that has one spells it."""
SWAPPED = "--swapped-attention"
REACTIVATED = "--recomputed-activations"
BY_ONE_SWITCH = {"swap_attention": SWAPPED, "activation": REACTIVATED}
"""Modes that a dialect runs in all layers or in none, likewise."""
SCHEDULE = "--schedule-of-stages"
"""The name of an order that Megatron-LM has not, likewise."""
DEEPSPEED_EXPERTS, REARRANGED, CAPACITY = "--deepspeed-experts", "--rearranged-tokens", "--expert-capacity-factor"
"""Of DeepSpeed's layer with experts, likewise."""

GROUPED = "--moe-grouped-gemm"
BF16 = "--bf16"
LOW_PRECISION = ("--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--fp8-param-gather", "--fp16")
GRAPHS = ("--cuda-graph-impl", "--cuda-graph-scope", "--enable-cuda-graph", "--external-cuda-graph")

NUM_LAYERS = "--num-layers"
MTP = "--mtp-num-layers"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

SWITCHES = frozenset(
    {
        *(COUNTS_EMBEDDING, COUNTS_LOSS, NO_P2P_OVERLAP, SEQUENCE_PARALLEL, RANK_ORDER, SHARDED_OPTIMIZER),
        *(MEGATRON_FSDP, CUSTOM_FSDP, TORCH_FSDP, OPTIMIZER_OFFLOAD, PRECISION_AWARE, OVERLAP_REDUCE, OVERLAP_GATHER),
        *(
            OLD_SELECTIVE,
            OLD_FULL,
            OFFLOAD,
            DEEPEP,
            FUSED,
            SWAPPED,
            REACTIVATED,
            DEEPSPEED_EXPERTS,
            REARRANGED,
            SHARED_OVERLAP,
            BATCH_OVERLAP,
            BF16,
            "--fp16",
        ),
        *("--fp8-param-gather", "--enable-cuda-graph", "--external-cuda-graph"),
        *("--swiglu", "--quick-geglu", "--squared-relu", "--group-query-attention", "--multi-latent-attention"),
        *("--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm", "--untie-embeddings-and-output-weights"),
        *(GROUPED, "--moe-shared-expert-gate", "--use-rotary-position-embeddings"),
        *("--no-position-embedding", "--no-gradient-accumulation-fusion", "--cross-entropy-loss-fusion"),
        *("--deterministic-mode", "--use-flash-attn", "--first-last-layers-bf16", USER_BUFFERS),
        *("--apply-residual-connection-post-layernorm", "--is-hybrid-model", "--retro-add-retriever"),
    }
)
"""Flags that take no value; words of the shell that stand behind one belong to something else."""

ADAPTED = "--lora-target-modules"
LISTS = frozenset({CONTEXT_KIND, CONTEXT_SIZES, MODULES, OFFLOADED, "--cuda-graph-scope", ADAPTED})
"""Flags that take several values."""

Values = Mapping[str, tuple[str, ...] | None]
"""Flag → what it passes, () for a switch; None: it must not be passed."""


def list_passed(values: Values) -> Iterator[str]:
    """Each flag that is passed, with its words, as a line of a shell script has it."""
    for flag, words in values.items():
        if words is not None:
            yield " ".join((flag, *words))


def set_flags(words: Sequence[str], values: Values) -> tuple[str, ...]:
    """`words` of a command line with each flag of `values` as it has it: behind all others, or not at all."""
    left: list[str] = []
    is_old = False
    for word in words:
        if word.startswith("--"):
            is_old = f"--{word[2:].partition('=')[0].replace('_', '-')}" in values
        if not is_old:
            left.append(word)
    added = [word for flag, behind in values.items() if behind is not None for word in (flag, *behind)]
    return (*left, *added)
