"""Arguments: the flags of the script, spelled as Megatron-LM spells them, with hyphens or underscores."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from model import Sizes

WITHOUT_EFFECT = {
    "--use-mcore-models": "the modules are this script's own",
    "--use-flash-attn": "scaled_dot_product_attention picks the kernel",
    "--no-gradient-accumulation-fusion": "there is none",
    "--mock-data": "the tokens are drawn at random, whatever is said",
}
WITHOUT_EFFECT_VALUED = {
    "--tokenizer-type": "there are no words; see --vocab-size",
    "--moe-token-dispatcher-type": "tokens are dealt by all-to-all",
    "--eval-interval": "nothing is evaluated",
    "--eval-iters": "nothing is evaluated",
    "--cp-comm-type": "there is no context parallelism",
}


class ArgumentsError(Exception):
    """Flags that do not go together; the message names them and what would be right."""


@dataclass(frozen=True)
class Division:
    """How training is divided. layers, recomputed: of each virtual stage, chunk x PP + stage.

    divides_sequence: tensor parallel ranks divide sequences outside of matrices.
    """

    pp: int
    tp: int
    dp: int
    ep: int
    zero: int
    mbs: int
    num_micro_batches: int
    layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    divides_sequence: bool


def make_parser() -> argparse.ArgumentParser:
    """The parser of this script's own flags; mm_autoparallel.hooks adds those of the planner."""
    nothing = "\n".join(f"  {flag}: {why}" for flag, why in (WITHOUT_EFFECT | WITHOUT_EFFECT_VALUED).items())
    parser = argparse.ArgumentParser(
        description="Train a GPT from random weights on random tokens, alone or under torchrun.",
        epilog=f"accepted and without effect:\n{nothing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, **options: object) -> None:
        parser.add_argument(flag, *{"--" + flag[2:].replace("-", "_")} - {flag}, **options)  # type: ignore[arg-type]

    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size"):
        add(flag, type=_count, required=True)
    for flag in ("--ffn-hidden-size", "--num-query-groups", "--max-position-embeddings", "--num-experts"):
        add(flag, type=_count)
    for flag, usual in (
        ("--make-vocab-size-divisible-by", 128),
        ("--moe-router-topk", 2),
        ("--tensor-model-parallel-size", 1),
        ("--pipeline-model-parallel-size", 1),
        ("--context-parallel-size", 1),
        ("--expert-model-parallel-size", 1),
        ("--micro-batch-size", 1),
        ("--global-batch-size", 8),
        ("--train-iters", 10),
        ("--log-interval", 1),
    ):
        add(flag, type=_count, default=usual)
    for flag in ("--expert-tensor-parallel-size", "--num-virtual-stages-per-pipeline-rank"):
        add(flag, type=_count)
    for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--recompute-num-layers"):
        add(flag, type=_count)
    for flag in ("--swiglu", "--group-query-attention", "--disable-bias-linear", "--use-distributed-optimizer"):
        add(flag, action="store_true")
    for flag in ("--sequence-parallel", "--moe-router-force-load-balancing"):
        add(flag, action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--pipeline-model-parallel-layout")
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    add("--position-embedding-type", choices=["learned_absolute", "rope"], default="learned_absolute")
    add("--recompute-granularity", choices=["full"])
    add("--recompute-method", choices=["uniform", "block"])
    for flag, value in (("--attention-dropout", 0.1), ("--hidden-dropout", 0.1), ("--lr", 1e-3), ("--clip-grad", 1.0)):
        add(flag, type=float, default=value)
    add("--init-method-std", type=float, default=0.02)
    add("--seed", type=int, default=1234)
    for flag in WITHOUT_EFFECT:
        add(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in WITHOUT_EFFECT_VALUED:
        add(flag, help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    """The model of the flags. Raises ArgumentsError naming a flag that this script has no code for."""
    if not arguments.untie_embeddings_and_output_weights:
        raise ArgumentsError("embedding and head are two matrices here; give --untie-embeddings-and-output-weights")
    if arguments.attention_dropout or arguments.hidden_dropout:
        raise ArgumentsError("nothing is dropped here; give --attention-dropout 0 and --hidden-dropout 0")
    if arguments.num_experts and not arguments.disable_bias_linear:
        raise ArgumentsError("experts have no biases here; give --disable-bias-linear beside --num-experts")
    width, heads = arguments.hidden_size, arguments.num_attention_heads
    groups = arguments.num_query_groups or heads if arguments.group_query_attention else heads
    if width % heads or heads % groups:
        raise ArgumentsError(f"--hidden-size {width}, {heads} heads and {groups} query groups do not divide each other")
    usual = int(4 * width * 2 / 3) // 64 * 64 if arguments.swiglu else 4 * width
    step = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    return Sizes(
        num_layers=arguments.num_layers,
        hidden_size=width,
        ffn_size=arguments.ffn_hidden_size or usual,
        num_heads=heads,
        num_kv_groups=groups,
        vocab_size=-(-arguments.vocab_size // step) * step,
        seq_length=arguments.seq_length,
        rms=arguments.normalization == "RMSNorm",
        gated=arguments.swiglu,
        biased=not arguments.disable_bias_linear,
        rotary=arguments.position_embedding_type == "rope",
        num_experts=arguments.num_experts or 0,
        top_k=arguments.moe_router_topk,
        deals_evenly=arguments.moe_router_force_load_balancing,
        init_std_scale=arguments.init_method_std,
    )


def read_division(arguments: argparse.Namespace, sizes: Sizes, world_size: int) -> Division:
    """How the flags divide training among `world_size` processes. Raises ArgumentsError where that cannot be."""
    pp, tp = arguments.pipeline_model_parallel_size, arguments.tensor_model_parallel_size
    ep, mbs, batch = arguments.expert_model_parallel_size, arguments.micro_batch_size, arguments.global_batch_size
    if arguments.context_parallel_size != 1 or arguments.expert_tensor_parallel_size not in (None, tp):
        raise ArgumentsError("context parallelism, and experts divided otherwise than layers, are not run here")
    if world_size % (pp * tp):
        raise ArgumentsError(f"{world_size} processes are no multiple of PP {pp} x TP {tp}")
    dp = world_size // (pp * tp)
    if dp % ep or (sizes.num_experts or 1) % ep:
        raise ArgumentsError(f"EP {ep} divides {dp} replicas or {sizes.num_experts} experts into no whole parts")
    if batch % (dp * mbs):
        raise ArgumentsError(f"--global-batch-size {batch} is no multiple of {dp} replicas x --micro-batch-size {mbs}")
    if arguments.sequence_parallel and sizes.seq_length % tp:
        raise ArgumentsError(f"--sequence-parallel divides --seq-length {sizes.seq_length} by TP {tp}; give a multiple")
    layers = _read_layers(arguments, sizes.num_layers, pp)
    return Division(
        pp=pp,
        tp=tp,
        dp=dp,
        ep=ep,
        zero=int(arguments.use_distributed_optimizer),
        mbs=mbs,
        num_micro_batches=batch // (dp * mbs),
        layers=layers,
        recomputed=_read_recompute(arguments, layers),
        divides_sequence=arguments.sequence_parallel,
    )


def _read_layers(arguments: argparse.Namespace, num_layers: int, pp: int) -> tuple[int, ...]:
    layout = arguments.pipeline_model_parallel_layout
    if layout:
        counts = [sum(int(count or 1) for count in re.findall(r"t(?:\*(\d+))?", cell)) for cell in layout.split("|")]
    else:
        chunks = pp * (arguments.num_virtual_stages_per_pipeline_rank or 1)
        first, last = arguments.decoder_first_pipeline_num_layers, arguments.decoder_last_pipeline_num_layers
        even = (num_layers - (first or 0) - (last or 0)) // max(1, chunks - (first is not None) - (last is not None))
        counts = [even] * chunks
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
    if sum(counts) != num_layers or len(counts) % pp or 0 in counts:
        raise ArgumentsError(f"{num_layers} layers are divided as {counts} among PP {pp}; each stage needs its share")
    return tuple(counts)


def _read_recompute(arguments: argparse.Namespace, layers: tuple[int, ...]) -> tuple[int, ...]:
    if arguments.recompute_granularity is None:
        return (0,) * len(layers)
    if arguments.recompute_method == "uniform":
        return layers
    return tuple(min(arguments.recompute_num_layers or 1, count) for count in layers)
