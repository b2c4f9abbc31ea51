"""Arguments: the flags of the script, spelled as Megatron-LM spells them, with hyphens or underscores.

Flags of Megatron launch scripts that change nothing here are accepted and listed as such by --help; those that would
change the result and cannot be honoured are refused by name.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from data import SampleShape
from failures import TrainingError
from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import read_text
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, read_csv
from model import Piece
from parallelism import Parallelism
from sizes import MODEL_SIZES, change_text, read_document

WITHOUT_EFFECT = {
    "--use-mcore-models": "the modules are Hugging Face's",
    "--group-query-attention": "Qwen2-VL's text decoder always has it; see --num-query-groups",
    "--swiglu": "Qwen2-VL's text decoder always has it",
    "--use-fused-swiglu": "the same numbers",
    "--use-fused-rmsnorm": "the same numbers",
    "--use-flash-attn": "scaled_dot_product_attention picks the kernel",
    "--no-gradient-accumulation-fusion": "there is none",
    "--variable-seq-lengths": "the samples here have one length",
    "--enable-one-logger": "the log is this script's own",
    "--reuse-fp32-param": "the 16-bit weights are kept beside the 32-bit ones",
    "--no-load-optim": "checkpoints here are weights alone",
    "--no-load-rng": "checkpoints here are weights alone",
    "--no-save-optim": "checkpoints here are weights alone",
    "--no-save-rng": "checkpoints here are weights alone",
}
WITHOUT_EFFECT_VALUED = {
    "--mm-data": "the data are the script's own photographs and tokens; see --image-size",
    "--mm-tool": "no tool of it is used",
    "--distributed-backend": "gloo on CPU, nccl on GPU, hccl on NPU",
    "--eval-interval": "nothing is evaluated",
    "--eval-iters": "nothing is evaluated",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of this script's own flags; mm_autoparallel.hooks adds those of the planner."""
    nothing = "\n".join(f"  {flag}: {why}" for flag, why in (WITHOUT_EFFECT | WITHOUT_EFFECT_VALUED).items())
    parser = argparse.ArgumentParser(
        description="Train Qwen2-VL from random weights, on a CPU, GPUs or NPUs, alone or under torchrun.",
        epilog=f"accepted and without effect:\n{nothing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_parallel(parser)
    _add_training(parser)
    for flag in WITHOUT_EFFECT:
        _add(parser, flag, action="store_true", help=argparse.SUPPRESS)
    for flag in WITHOUT_EFFECT_VALUED:
        _add(parser, flag, help=argparse.SUPPRESS)
    return parser


def _add(parser: Any, flag: str, **options: Any) -> None:
    """A flag, and its spelling with underscores."""
    parser.add_argument(flag, *{"--" + flag[2:].replace("-", "_")} - {flag}, **options)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    _add(group, "--model-size", choices=sorted(MODEL_SIZES), default="tiny", help="default: tiny")
    _add(group, "--mm-model", type=Path, help="a MindSpeed-MM model.json or Hugging Face config.json of a Qwen2-VL")
    _add(group, "--num-layers", type=_count, help="layers of the text decoder")
    _add(group, "--vision-num-layers", type=_count, help="layers of the vision encoder")
    _add(group, "--hidden-size", type=_count)
    _add(group, "--ffn-hidden-size", type=_count)
    _add(group, "--num-attention-heads", type=_count)
    _add(group, "--num-query-groups", type=_count, help="key and value groups of the text decoder")
    _add(group, "--vocab-size", type=_count)
    _add(group, "--make-vocab-size-divisible-by", type=_count, default=1, help="pads the vocabulary; default 1")
    _add(group, "--max-position-embeddings", type=_count)
    _add(group, "--normalization", choices=["RMSNorm"], default="RMSNorm")
    _add(group, "--tokenizer-type", choices=["NullTokenizer"], default="NullTokenizer")
    _add(group, "--freeze-ViT", dest="freeze_vit", action="store_true", help="the vision encoder does not train")
    _add(group, "--freeze-projector", action="store_true", help="nor do the matrices behind it")
    _add(group, "--init-method-std", type=float, default=0.02, help="spread of the random weights; default 0.02")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    _add(group, "--tensor-model-parallel-size", type=_count, default=1)
    _add(group, "--pipeline-model-parallel-size", type=_count, default=1)
    _add(group, "--context-parallel-size", type=_count, default=1, help="1 is all that is there")
    _add(group, "--num-layers-per-virtual-pipeline-stage", type=_count, help="of vision and text together")
    _add(group, "--num-virtual-stages-per-pipeline-rank", type=_count, help="chunks of each pipeline rank")
    _add(group, "--vit-layer-placement", type=_counts, metavar="N,N", help="vision layers of each virtual stage")
    _add(group, "--llm-layer-placement", type=_counts, metavar="N,N", help="text layers of each virtual stage")
    _add(group, "--vit-layer-recompute", type=_counts, metavar="N,N", help="of them, how many are recomputed")
    _add(group, "--llm-layer-recompute", type=_counts, metavar="N,N", help="of them, how many are recomputed")
    _add(
        group,
        "--pipeline-order",
        type=Path,
        metavar="FILE.csv",
        help="what each stage runs, as torch's schedules have it",
    )
    _add(group, "--recompute-granularity", choices=["full"], help="whole layers")
    _add(group, "--recompute-method", choices=["uniform", "block"], help="all layers, or the first ones of a stage")
    _add(group, "--recompute-num-layers", type=_count, help="with block: of each modality on each virtual stage")
    _add(group, "--use-distributed-optimizer", action="store_true", help="optimizer state divided among replicas")
    _add(group, "--use-torch-fsdp2", action="store_true", help="parameters divided among replicas too (FSDP2)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(group, "--micro-batch-size", type=_count, default=1)
    _add(group, "--global-batch-size", type=_count, default=8, help="default 8")
    _add(group, "--seq-length", type=_count, default=256, help="tokens of a sample, images included; default 256")
    _add(group, "--image-size", type=_count, default=280, help="side of an image in pixels; default 280")
    _add(group, "--images-per-sample", type=_count, default=1)
    _add(
        group,
        "--uneven-images",
        action="store_true",
        help="images of --image-size or less and text of any length, drawn for each sample; in training alone",
    )
    _add(
        group,
        "--balance-samples",
        action="store_true",
        help="with --uneven-images: samples are dealt to replicas and micro-batches by what they cost",
    )
    _add(group, "--train-iters", type=_count, default=20, help="default 20")
    _add(group, "--seed", type=int, default=1234)
    _add(group, "--bf16", action="store_true", help="16-bit weights and gradients, 32-bit copies and moments")
    _add(group, "--lr", type=float, default=1e-3, help="default 1e-3")
    _add(group, "--min-lr", type=float, default=0.0)
    _add(group, "--lr-decay-style", choices=["constant", "linear", "cosine"], default="constant")
    _add(group, "--lr-decay-iters", type=_count)
    _add(group, "--lr-warmup-fraction", type=float)
    _add(group, "--lr-warmup-iters", type=int, default=0)
    _add(group, "--weight-decay", type=float, default=0.0)
    _add(group, "--adam-beta1", type=float, default=0.9)
    _add(group, "--adam-beta2", type=float, default=0.999)
    _add(group, "--adam-eps", type=float, default=1e-8)
    _add(group, "--clip-grad", type=float, default=0.0, help="largest norm of all gradients; default 0, no limit")
    _add(group, "--load", type=Path, help="folder of safetensors to begin from; random weights where it holds none")
    _add(group, "--save", type=Path, help="folder for the weights, written at the end")
    _add(group, "--save-interval", type=_count, help="and after every so many iterations")
    _add(group, "--log-interval", type=_count, default=1)
    _add(group, "--log-memory", action="store_true", help="count bytes of each stage in the first iteration")
    _add(group, "--log-file", type=Path, help="write what is logged as JSON, one object a line")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text} has a number below 0")
    return values


# ----------------------------------------------------------------------------------------- what the flags amount to


def read_model_document(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config.json of the model asked for. Raises TrainingError naming a flag that does not go with others."""
    flags = {
        "num_hidden_layers": arguments.num_layers,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.ffn_hidden_size,
        "num_attention_heads": arguments.num_attention_heads,
        "num_key_value_heads": arguments.num_query_groups,
        "vocab_size": arguments.vocab_size,
        "max_position_embeddings": arguments.max_position_embeddings,
    }
    changes = {key: value for key, value in flags.items() if value is not None}
    if arguments.mm_model is not None:
        base = read_document(arguments.mm_model)
        for key, value in changes.items():
            if key != "max_position_embeddings" and value != base["text_config"][key]:
                raise TrainingError(
                    f"--mm-model {arguments.mm_model} says {key} {base['text_config'][key]} and the flags say {value}; "
                    "give one, or make them equal"
                )
    else:
        base = MODEL_SIZES[arguments.model_size]
    document = change_text(base, changes)
    if arguments.vision_num_layers:
        document["vision_config"]["depth"] = arguments.vision_num_layers
    divisor = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    vocab_size = document["text_config"]["vocab_size"]
    document["text_config"]["vocab_size"] = -(-vocab_size // divisor) * divisor
    return document


def read_shape(arguments: argparse.Namespace, document: dict[str, Any]) -> SampleShape:
    """Sequence and images of a sample. Raises TrainingError where they do not go together."""
    if arguments.balance_samples and not arguments.uneven_images:
        raise TrainingError("--balance-samples deals samples that differ, and these are alike; add --uneven-images")
    vision = document["vision_config"]
    pixels = vision["patch_size"] * vision["spatial_merge_size"]
    if arguments.image_size % pixels:
        raise TrainingError(f"--image-size {arguments.image_size} is no multiple of {pixels} pixels, one token's side")
    side = arguments.image_size // vision["patch_size"]
    shape = SampleShape(arguments.seq_length, arguments.images_per_sample, (side, side))
    needed = shape.image_tokens(vision["spatial_merge_size"]) + 2 * shape.num_images
    if needed >= arguments.seq_length:
        raise TrainingError(
            f"--seq-length {arguments.seq_length} leaves no text beside {shape.num_images} images of --image-size "
            f"{arguments.image_size}, which occupy {needed} tokens; give a longer sequence or smaller images"
        )
    return shape


def read_order(arguments: argparse.Namespace, pp: int) -> Orders | None:
    """The order of --pipeline-order; None without that flag. Raises PlanError naming line and cell that are wrong."""
    path: Path | None = arguments.pipeline_order
    if path is None:
        return None
    if pp == 1:
        raise TrainingError(f"--pipeline-order {path} orders stages, and there is one; drop it, or use more")
    try:
        return read_csv(read_text(path, "schedule", "CSV", PlanError), pp)
    except PlanError as error:
        raise error if error.where else PlanError(str(error), where=f"schedule {path}") from None


def read_parallelism(arguments: argparse.Namespace, document: dict[str, Any], world_size: int) -> Parallelism:
    """Parallelism as the flags say it. Raises TrainingError naming the flags that do not go together."""
    pp, tp = arguments.pipeline_model_parallel_size, arguments.tensor_model_parallel_size
    if arguments.context_parallel_size != 1:
        raise TrainingError("--context-parallel-size is not supported by this script; leave it at 1")
    if world_size % (pp * tp):
        raise TrainingError(
            f"--pipeline-model-parallel-size {pp} times --tensor-model-parallel-size {tp} does not divide the "
            f"{world_size} processes"
        )
    if arguments.use_torch_fsdp2 and arguments.use_distributed_optimizer:
        raise TrainingError("--use-torch-fsdp2 divides the optimizer's state already; drop --use-distributed-optimizer")
    depth = {"vision": document["vision_config"]["depth"], "text": document["text_config"]["num_hidden_layers"]}
    vpp, order = _chunks(arguments, sum(depth.values()), pp), read_order(arguments, pp)
    if order is not None:
        if vpp not in (None, order.num_chunks):
            raise TrainingError(
                f"--pipeline-order {arguments.pipeline_order} has {order.num_chunks} chunks a stage, and the flags of "
                f"virtual stages say {vpp}"
            )
        vpp = order.num_chunks
    vpp = vpp or 1
    return Parallelism(
        pp=pp,
        dp=world_size // (pp * tp),
        tp=tp,
        micro_batch_size=arguments.micro_batch_size,
        zero=int(arguments.use_distributed_optimizer),
        fsdp=arguments.use_torch_fsdp2,
        schedule="interleaved_1f1b" if vpp > 1 else "1f1b",
        pieces=_pieces(arguments, depth, pp * vpp),
        order=order,
    )


def _chunks(arguments: argparse.Namespace, num_layers: int, pp: int) -> int | None:
    """Chunks of each pipeline rank; None where no flag says it."""
    vpp, depth = arguments.num_virtual_stages_per_pipeline_rank, arguments.num_layers_per_virtual_pipeline_stage
    if vpp and depth:
        raise TrainingError(
            "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage say the same; give one"
        )
    if depth:
        if num_layers % (pp * depth):
            raise TrainingError(
                f"--num-layers-per-virtual-pipeline-stage {depth} on {pp} stages does not divide {num_layers} layers"
            )
        vpp = num_layers // (pp * depth)
    if vpp and vpp > 1 and pp == 1:
        raise TrainingError("virtual stages need a --pipeline-model-parallel-size above 1")
    return int(vpp) if vpp else None


def _pieces(arguments: argparse.Namespace, depth: dict[str, int], num_stages: int) -> tuple[tuple[Piece, ...], ...]:
    """The chain cut by the placement flags, or into stages of as equal numbers of layers as can be."""
    given = {"vision": arguments.vit_layer_placement, "text": arguments.llm_layer_placement}
    if (given["vision"] is None) != (given["text"] is None):
        raise TrainingError("--vit-layer-placement and --llm-layer-placement go together; give both")
    total = sum(depth.values())
    if num_stages > total:
        raise TrainingError(f"{num_stages} virtual stages need a layer each, and the model has {total}")
    ends = [total * k // num_stages for k in range(num_stages + 1)]
    before = {
        "vision": [min(end, depth["vision"]) for end in ends],
        "text": [max(end - depth["vision"], 0) for end in ends],
    }
    even = {modality: [b - a for a, b in itertools.pairwise(counts)] for modality, counts in before.items()}
    layers = {modality: tuple(given[modality] or even[modality]) for modality in depth}
    flags = {"vision": "--vit-layer-placement", "text": "--llm-layer-placement"}
    for modality, counts in layers.items():
        if len(counts) != num_stages or sum(counts) != depth[modality]:
            raise TrainingError(
                f"{flags[modality]} {','.join(map(str, counts))} must have {num_stages} numbers, one a virtual stage, "
                f"that sum to the {depth[modality]} layers of {modality}"
            )
    first_text = next(k for k, count in enumerate(layers["text"]) if count)
    if any(layers["vision"][first_text + 1 :]) or any(a + b == 0 for a, b in zip(*layers.values(), strict=True)):
        raise TrainingError(
            "every virtual stage must hold a layer, and no vision layer may lie after a stage that holds text layers"
        )
    return cut_chain(layers, _recompute(arguments, layers))


def _recompute(arguments: argparse.Namespace, layers: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    lists = {"vision": arguments.vit_layer_recompute, "text": arguments.llm_layer_recompute}
    uniform = {"method": arguments.recompute_method, "number": arguments.recompute_num_layers}
    if arguments.recompute_granularity is None and any(uniform.values()):
        raise TrainingError("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    if arguments.recompute_granularity and any(lists.values()):
        raise TrainingError("--recompute-granularity and --vit/--llm-layer-recompute exclude each other")
    if arguments.recompute_granularity:
        if uniform["method"] is None:
            raise TrainingError("--recompute-granularity full needs --recompute-method uniform or block")
        number = uniform["number"] or 1
        if uniform["method"] == "uniform" and number != 1:
            raise TrainingError("--recompute-method uniform recomputes each layer by itself: --recompute-num-layers 1")
        most = number if uniform["method"] == "block" else max(map(max, layers.values()))
        return {modality: tuple(min(most, count) for count in counts) for modality, counts in layers.items()}
    result = {}
    for modality, counts in layers.items():
        numbers = lists[modality] or (0,) * len(counts)
        if len(numbers) != len(counts) or any(again > held for again, held in zip(numbers, counts, strict=True)):
            flag = {"vision": "--vit-layer-recompute", "text": "--llm-layer-recompute"}[modality]
            raise TrainingError(f"{flag} needs {len(counts)} numbers, each at most the layers of its stage {counts}")
        result[modality] = numbers
    return result


def cut_chain(
    layers: dict[str, tuple[int, ...]], recompute: dict[str, tuple[int, ...]]
) -> tuple[tuple[Piece, ...], ...]:
    """What each virtual stage holds, given how many layers of each modality it has and how many of them recompute.

    `vision.pre` and `text.pre` go with their first layer, `vision.post` with the last one, `text.post` to the end.
    """
    num_stages = len(layers["text"])
    stages = []
    for k in range(num_stages):
        pieces = []
        for modality in ("vision", "text"):
            first, count = sum(layers[modality][:k]), layers[modality][k]
            if count and first == 0:
                pieces.append(Piece(modality, "pre"))
            if count:
                pieces.append(Piece(modality, "layer", first, count, recompute[modality][k]))
            ends = k == num_stages - 1 if modality == "text" else count and first + count == sum(layers[modality])
            if ends:
                pieces.append(Piece(modality, "post"))
        stages.append(tuple(pieces))
    return tuple(stages)
