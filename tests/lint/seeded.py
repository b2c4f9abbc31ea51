"""A good script, in which `lint` finds nothing, and mistakes that are put into it one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

GOOD = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=2
TP=2
PP=2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)

MODEL_ARGS=(
    --num-layers 26
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --vocab-size 32000
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 1000
    --bf16
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --pipeline-model-parallel-layout "E{first}|{last}L"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

torchrun "${{DISTRIBUTED_ARGS[@]}}" pretrain_gpt.py \\
    "${{MODEL_ARGS[@]}}" \\
    "${{TRAINING_ARGS[@]}}" \\
    "${{PARALLEL_ARGS[@]}}"
""".format(first="t" * 13, last="t" * 13)

LAYOUT = f'--pipeline-model-parallel-layout "E{"t" * 13}|{"t" * 13}L"'
VPP = "--num-virtual-stages-per-pipeline-rank 2\n    --num-layers 24"
EXPERTS = "--num-experts 8\n    --moe-router-topk 2\n    --moe-ffn-hidden-size 1024\n    --moe-grouped-gemm"


@dataclass(frozen=True)
class Mistake:
    """rule: that finds it, alone. changes: old text → new text. mend: what the finding's mend begins with. at: what its
    line holds. also: rules that rightly find something beside it."""

    rule: str
    changes: dict[str, str]
    mend: str = ""
    at: str = ""
    also: frozenset[str] = field(default_factory=frozenset)


def insert(flag: str, behind: str = "    --bf16\n") -> dict[str, str]:
    """`flag` on a line of its own."""
    return {behind: f"{behind}    {flag}\n"}


MISTAKES = {
    "world": Mistake(
        "world-size",
        {"NNODES=2": "NNODES=3", "PP=2\n": "PP=5\n", LAYOUT: ""},
        "--world-size 30",
        "--tensor-model-parallel-size",
        also=frozenset({"layer-sum"}),
    ),
    "world variable": Mistake(
        "world-size-variable", {"TP=2\n": "TP=2\nWORLD_SIZE=32\n"}, "WORLD_SIZE=16", "WORLD_SIZE=32"
    ),
    "batch": Mistake(
        "batch-divisible",
        {"--global-batch-size 128": "--global-batch-size 130"},
        "--global-batch-size 132",
        "--global-batch-size",
    ),
    "expert ranks": Mistake(
        "expert-ranks",
        insert(f"{EXPERTS}\n    --expert-model-parallel-size 8"),
        "--expert-tensor-parallel-size 1",
        "--expert-model-parallel-size",
    ),
    "experts": Mistake(
        "experts-divisible",
        insert(f"{EXPERTS.replace('8', '6')}\n    --expert-model-parallel-size 4\n    --expert-tensor-parallel-size 1"),
        "",
        "--expert-model-parallel-size",
    ),
    "heads": Mistake(
        "heads-divisible",
        {
            "heads 32": "heads 31",
            "--group-query-attention\n    --num-query-groups 8\n": "",
            "--hidden-size 2048": "--hidden-size 1984",
        },
        "",
        "--num-attention-heads",
    ),
    "sequence": Mistake(
        "sequence-divisible", {"--seq-length 4096": "--seq-length 4095"}, "--seq-length 4096", "--seq-length"
    ),
    "positions": Mistake(
        "sequence-positions",
        {"--seq-length 4096": "--seq-length 8192"},
        "--max-position-embeddings 8192",
        "--max-position-embeddings",
    ),
    "layer sum": Mistake("layer-sum", {"|tttt": "|ttttt"}, "", "--pipeline-model-parallel-layout"),
    "not equal": Mistake(
        "layer-sum", {LAYOUT: "", "--num-layers 26": "--num-layers 27"}, "", "--pipeline-model-parallel-size"
    ),
    "empty stage": Mistake(
        "empty-stage", {"Et": "E|t", "PP=2\n": "PP=4\n", "ttL": "|ttL"}, "", "--pipeline-model-parallel-layout"
    ),
    "chunks": Mistake(
        "chunk-micro-batches",
        {LAYOUT: VPP, "    --num-layers 26\n": "", "PP=2\n": "PP=4\n", "NNODES=2": "NNODES=1", "size 128": "size 30"},
        "--global-batch-size 32",
        "--global-batch-size",
    ),
    "zero": Mistake(
        "zero-pipeline",
        {
            "--use-distributed-optimizer": "--use-megatron-fsdp\n"
            "    --data-parallel-sharding-strategy optim_grads_params",
            "CONNECTIONS=1": "CONNECTIONS=8",
        },
        "--use-distributed-optimizer",
        "--pipeline-model-parallel-size",
    ),
    "connections": Mistake(
        "device-max-connections",
        {"CONNECTIONS=1": "CONNECTIONS=8"},
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "CUDA_DEVICE",
    ),
    "no connections": Mistake(
        "device-max-connections-unset",
        {"export CUDA_DEVICE_MAX_CONNECTIONS=1\n": ""},
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    "exclusive": Mistake("flags-contradict", insert("--fp16"), "", "--fp16"),
    "gather alone": Mistake(
        "flags-contradict", {"    --overlap-grad-reduce\n": ""}, "--overlap-grad-reduce", "--overlap-param-gather"
    ),
    "selective and a method": Mistake(
        "flags-contradict",
        insert("--recompute-activations\n    --recompute-method block"),
        "--recompute-granularity full",
        "--recompute-method",
    ),
    "sequence parallel": Mistake("flag-without-effect", {"TP=2\n": "TP=1\n"}, "", "--sequence-parallel"),
    "modules": Mistake(
        "flag-without-effect", insert("--recompute-modules core_attn"), "--recompute-granularity", "--recompute-modules"
    ),
    "expert TP": Mistake(
        "flag-without-effect", insert("--expert-tensor-parallel-size 2"), "", "--expert-tensor-parallel-size"
    ),
    "short": Mistake(
        "abbreviated-flag",
        {"--overlap-grad-reduce": "--overlap-grad-reduce\n    --context-parallel-si 1"},
        "--context-parallel-size",
        "--context-parallel-si 1",
    ),
    "misspelt": Mistake(
        "misspelt-flag",
        insert("--overlap_moe_expert_parallel_com"),
        "--overlap-moe-expert-parallel-comm",
        "--overlap_moe",
    ),
    "of a fork": Mistake(
        "unknown-flag", insert("--attention-head-type multiquery"), "--model", "--attention-head-type"
    ),
    "old": Mistake(
        "old-flag", insert("--checkpoint-activations"), "--recompute-granularity full", "--checkpoint-activations"
    ),
    "of ModelLink": Mistake("old-flag", insert("--mlp-layer-fusion"), "--swiglu", "--mlp-layer-fusion"),
    "deprecated": Mistake(
        "deprecated-flag",
        insert("--external-cuda-graph"),
        "--cuda-graph-impl transformer_engine",
        "--external-cuda-graph",
    ),
    "too many": Mistake(
        "recompute-above-held",
        insert("--recompute-granularity full\n    --recompute-method block\n    --recompute-num-layers 30"),
        "--recompute-num-layers 13",
        "--recompute-num-layers",
        also=frozenset({"needless-recompute"}),
    ),
    "padding": Mistake(
        "vocabulary-padding",
        {"--vocab-size 32000": "--vocab-size 1100"},
        "--make-vocab-size-divisible-by 1",
        "--vocab-size",
    ),
    "assigned": Mistake("assigned-twice", {"TP=2\n": "TP=4\nTP=2\n"}, "", "TP=2"),
    "passed": Mistake(
        "passed-twice", insert("--micro-batch-size 2\n    --micro-batch-size 1"), "", "--micro-batch-size 1"
    ),
    "wide": Mistake(
        "tensor-across-nodes",
        {
            "TP=2\n": "TP=16\n",
            "PP=2\n": "PP=1\n",
            f"    {LAYOUT}\n": "",
            "--num-query-groups 8": "--num-query-groups 16",
        },
        "--tensor-model-parallel-size 8",
        "--tensor-model-parallel-size",
        also=frozenset({"vocabulary-padding"}),
    ),
    "memory": Mistake(
        "out-of-memory",
        {
            "--hidden-size 2048": "--hidden-size 6144",
            "--ffn-hidden-size 8192": "--ffn-hidden-size 24576",
            "4096\n": "16384\n",
        },
        "--recompute-granularity full --recompute-method block --recompute-num-layers",
        "--micro-batch-size",
    ),
    "imbalance": Mistake(
        "stage-imbalance",
        {LAYOUT: f'--pipeline-model-parallel-layout "E{"t" * 18}|{"t" * 8}L"'},
        "without --pipeline-model-parallel-layout",
        "--pipeline-model-parallel-layout",
    ),
    "recompute": Mistake(
        "needless-recompute",
        insert("--recompute-granularity full\n    --recompute-method block\n    --recompute-num-layers 5"),
        "without --recompute-granularity",
        "--recompute-num-layers",
    ),
    "bubble": Mistake(
        "few-micro-batches",
        {"--global-batch-size 128": "--global-batch-size 8"},
        "--global-batch-size",
        "--global-batch-size",
    ),
    "unsharded": Mistake(
        "optimizer-not-sharded",
        {"    --use-distributed-optimizer\n": "", "    --overlap-param-gather\n": ""},
        "--use-distributed-optimizer",
        "--pipeline-model-parallel-size",
    ),
    "not read": Mistake("not-read", {"    --bf16\n": ""}),
}
"""Name → what is put in."""
