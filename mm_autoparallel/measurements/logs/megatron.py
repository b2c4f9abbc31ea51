"""Reads logs of Megatron-LM's pretrain_gpt.py, and what Megatron-DeepSpeed and MindSpeed-LLM share with it.

Everything that decides stands in the block of arguments, defaults included: sizes, layout, precision, batch, recompute,
attention. The vocabulary is what `padded vocab` says, or the arguments; the devices of a node are not printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.logs.arguments import chance, has_arguments, plain, read_arguments, whole
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.logs.progress import (
    ran_out_of_memory,
    read_devices_per_node,
    read_flops_per_s,
    read_padded_vocabulary,
    read_peaks,
    read_resting,
    read_stage_parameters,
    read_steps,
    read_world_size,
)
from mm_autoparallel.measurements.logs.run import Run
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.megatron_precision import MegatronPrecision, read_megatron_precision
from mm_autoparallel.validation import describe_unfit

Arguments = Mapping[str, Any]

_FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp8_e4m3": ((None, False), "matrix products in FP8"),
    "fp8_hybrid": ((None, False), "matrix products in FP8"),
    "optimizer": ((None, "adam", "fused_adamw", "fused_torch_adamw", "fused_ema_adamw"), "another optimizer than Adam"),
    "use_torch_fsdp2": ((None, False), "weights sharded by torch's FSDP2"),
    "fine_grained_activation_offloading": ((None, False), "activations offloaded to the host"),
    "cpu_offloading": ((None, False), "activations offloaded to the host"),
    "enable_cuda_graph": ((None, False), "CUDA graphs"),
    "external_cuda_graph": ((None, False), "CUDA graphs"),
    "cuda_graph_impl": ((None, False, "none"), "CUDA graphs"),
    "perform_rl_step": ((None, False), "reinforcement learning"),
    "num_distributed_optimizer_instances": ((None, 1), "optimizer states sharded within a part of the replicas"),
    "account_for_embedding_in_pipeline_split": ((None, False), "an embedding that counts as a layer of its stage"),
    "account_for_loss_in_pipeline_split": ((None, False), "a loss that counts as a layer of its stage"),
    "pipeline_model_parallel_layout": ((None,), "a pipeline layout of its own"),
    "pipeline_model_parallel_split_rank": ((None, 0), "an encoder and a decoder"),
    "variable_seq_lengths": ((None, False), "samples of unequal lengths"),
    "decoder_pipeline_split_rank": ((None, 0), "an encoder and a decoder"),
    "noop_layers": ((None,), "layers that do nothing"),
    "swap_attention": ((None, False), "activations swapped to the host"),
    "swap_optimizer": ((None, False), "optimizer states swapped to the host"),
    "adaptive_memory_optimization": ((None, False), "memory that is managed while it runs"),
    "schedules_method": ((None,), "a pipeline schedule of its own"),
    "tp_2d": ((None, False), "tensor parallelism in two dimensions"),
    "expert_interval": ((None, 0, 1, 2), "experts in some layers"),
    "enable_zbh1_pipeline": ((None, False), "a pipeline schedule of its own"),
    "ds_sequence_parallel_size": ((None, 1), "DeepSpeed's sequence parallelism"),
    "lora_r": ((None, 0), "adapters"),
    "lora_target_modules": ((None, "[]"), "adapters"),
}
"""Arguments that change memory or time in a way that no row here can say: their harmless values, and what the others
make of a run."""

_DERIVED = (
    *("encoder_num_layers", "decoder_num_layers", "encoder_seq_length", "decoder_seq_length", "spec", "model_type"),
    *("padded_vocab_size", "vocab_size", "position_embedding_type", "transformer_impl"),
)
"""What the framework fills in by itself, or what is read here in its place."""

_POSITIONS = {
    "learned_absolute": "learned_absolute",
    "absolute": "learned_absolute",
    "rope": "rope",
    "rotary": "rope",
    "yarn": "yarn",
    "mrope": "mrope",
    "none": "none",
    "alibi": "none",  # a bias on scores, without a parameter
}


def is_megatron(log: Log) -> bool:
    """Whether there is such a block of arguments at all; readers of what is built on it are asked before."""
    return has_arguments(log)


def read_run(log: Log, facts: Facts) -> Run:
    """The run of Megatron-LM. Raises TableError or JobError with what is missing, contradicts or is not understood."""
    arguments = read_arguments(log)
    local = arguments.get("transformer_impl", "local") == "local" or "local" in str(arguments.get("spec") or "")
    legacy = arguments.get("use_legacy_models") is True or arguments.get("use_mcore_models") is False
    return read_shared(
        log,
        facts,
        arguments,
        software="megatron-lm" if legacy or "transformer_impl" not in arguments else "megatron-core",
        stack="megatron-local" if local else "megatron-te",
        flash=plain(arguments, "use_flash_attn") is True or (not local and _backend(log, arguments)),
        zero=_zero(log, arguments),
        more={"gradient_fusion": arguments.get("gradient_accumulation_fusion") is True},
    )


def _backend(log: Log, arguments: Arguments) -> bool:
    """Whether TransformerEngine runs attention without score matrices; `auto` chooses a backend that does."""
    backend = str(arguments.get("attention_backend") or "auto").removeprefix("AttnBackend.")
    if backend not in ("auto", "flash", "fused", "unfused", "local"):
        raise log.error(f"attention_backend is {backend}; auto, flash, fused, unfused and local are understood")
    return backend not in ("unfused", "local")


def _zero(log: Log, arguments: Arguments) -> int:
    if arguments.get("use_megatron_fsdp") or arguments.get("use_custom_fsdp"):
        kinds = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        kind = arguments.get("data_parallel_sharding_strategy") or "no_shard"
        if kind not in kinds:
            raise log.error(f"data_parallel_sharding_strategy is {kind}; known are {', '.join(kinds)}")
        return kinds.index(kind)
    return int(arguments.get("use_distributed_optimizer") is True)


def read_shared(
    log: Log,
    facts: Facts,
    arguments: Arguments,
    *,
    software: str,
    stack: str,
    flash: bool,
    zero: int,
    more: Mapping[str, Any],
    adapt: Callable[[dict[str, Any]], None] = lambda _: None,
    model: Mapping[str, Any] | None = None,
) -> Run:
    """The run of a framework that prints Megatron-LM's arguments.

    flash: attention keeps no scores. adapt: brings the framework's own spellings of sizes into Megatron-LM's. more:
    keys of the workload, in place of what the arguments say. model: where it does not stand among the arguments.
    """
    refuse_foreign(log, arguments)
    low = _check_precision(log, arguments)
    strategy = _read_strategy(log, arguments, zero)
    recompute_all, operators, num_recomputed = _read_recompute(log, arguments)
    batch = _count(log, arguments, "global_batch_size", default=strategy.dp * strategy.mbs)  # its own default
    in_fp32 = arguments.get(
        "accumulate_allreduce_grads_in_fp32"
    )  # bf16 turns it on, unless an optimizer says otherwise
    half = in_fp32 is False or (arguments.get("fp16") is True and in_fp32 is None)
    workload = {
        "global_batch_size": batch,
        "seq_length": _count(log, arguments, "seq_length"),
        "sequence_parallel": arguments.get("sequence_parallel") is True and strategy.tp > 1,
        "attention": "flash" if flash else "unfused",
        "hidden_dropout": chance(log, arguments, "hidden_dropout") > 0,
        "attention_dropout": chance(log, arguments, "attention_dropout") > 0,
        "overlap_grad_reduce": arguments.get("overlap_grad_reduce") is True,
        "overlap_param_gather": arguments.get("overlap_param_gather") is True,
        "scatter_gather_p2p": arguments.get("scatter_gather_tensors_in_pipeline") is True,
        "recompute_operators": operators,
        "stack": stack,
        "gradient_bytes": 2.0 if half else 4.0,
        "deterministic": arguments.get("deterministic_mode") is True,
        "facts": _read_facts(arguments, flash) | low.facts,
        **({"precision": low.precision} if low.precision != "bf16" else {}),
        **more,
    }
    if arguments.get("overlap_p2p_comm") is not None:
        workload["overlap_p2p"] = arguments["overlap_p2p_comm"] is True or strategy.vpp == 1
    if arguments.get("cross_entropy_fusion_impl") == "te" and arguments.get("cross_entropy_loss_fusion"):
        workload["cross_entropy"] = "fused"
    peaks, first_step = read_peaks(log)
    return Run(
        software=software,
        model=model or _read_model(log, facts, arguments, strategy, adapt),
        strategy=strategy,
        workload=workload,
        steps=read_steps(log),
        first_layers=whole(log, arguments, "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
        last_layers=whole(log, arguments, "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
        recompute_all=recompute_all,
        num_recomputed=num_recomputed,
        devices_per_node=read_devices_per_node(log),
        rank_peak_bytes=peaks,
        rank_resting_bytes=read_resting(log),
        first_step=first_step,
        stage_parameters=read_stage_parameters(log),
        flops_per_s=read_flops_per_s(log),
        out_of_memory=ran_out_of_memory(log),
    )


def _read_facts(arguments: Arguments, flash: bool) -> dict[str, Any]:
    """What this run does otherwise than its stack, by the switches that are printed."""
    facts: dict[str, Any] = {}
    if arguments.get("gradient_accumulation_fusion") is not None:
        facts["writes_gradients"] = arguments["gradient_accumulation_fusion"] is not True
    activation = "bias_swiglu_fusion" if arguments.get("swiglu") is True else "bias_gelu_fusion"
    switches = [arguments.get(name) for name in (activation, "use_fused_swiglu", "apply_rope_fusion")]
    switches.append(arguments.get("use_fused_rotary_pos_emb"))
    if any(switch is not None for switch in switches):
        facts["elementwise"] = "operators" if False in switches else "fused"
    if arguments.get("use_fused_rmsnorm") is not None:
        facts["norms"] = "fused" if arguments["use_fused_rmsnorm"] is True else "operators"
    if not flash and arguments.get("masked_softmax_fusion") is not None:
        facts["attention"] = "fused-softmax" if arguments["masked_softmax_fusion"] is True else "torch"
    return facts


def refuse_foreign(log: Log, arguments: Arguments) -> None:
    """Raises TableError for the first argument that asks for something that no row can say."""
    for name, (harmless, what) in _FOREIGN.items():
        value = arguments.get(name)
        if value not in harmless:
            raise log.error(f"{name} is {value}: the run has {what}, which no row here can say")


def _check_precision(log: Log, arguments: Arguments) -> MegatronPrecision:
    """What linear layers multiply in. Raises TableError where that is not half precision, or no recipe known here."""
    halves = [name for name in ("bf16", "fp16") if arguments.get(name) is True]
    if len(halves) == 2:
        raise log.error("bf16 and fp16 are both True; one of the two is expected")
    if not halves:
        raise log.error(
            "neither bf16 nor fp16 is True: the run is in fp32, and calibrations are of half-precision products"
        )
    try:
        return read_megatron_precision(arguments)
    except ValueError as failure:
        raise log.error(str(failure)) from None


def _count(log: Log, arguments: Arguments, *names: str, default: int | None = None) -> int:
    """A whole number of at least 1 under the first name that has one."""
    value = whole(log, arguments, *names)
    if value is None and default is None:
        raise log.error(f"{names[0]} is missing among the arguments; a whole number of at least 1 is expected")
    return default or 0 if value is None else value


def _read_strategy(log: Log, arguments: Arguments, zero: int) -> Strategy:
    """The layout; data parallel ranks are what is left of the world, which everything that tells it must agree on."""
    world = _count(log, arguments, "world_size")
    told = read_world_size(log)
    if told is not None and told != world:
        raise log.error(f"world_size is {world} among the arguments, and `using world size` says {told}")
    tp = _count(log, arguments, "tensor_model_parallel_size", "model_parallel_size", default=1)
    pp = _count(log, arguments, "pipeline_model_parallel_size", default=1)
    cp = _count(log, arguments, "context_parallel_size", default=1)
    ranks = f"PP {pp} x TP {tp} x CP {cp}"
    if world % (pp * tp * cp):
        raise log.error(f"world_size is {world}, which {ranks} does not divide")
    dp = world // (pp * tp * cp)
    if (stated := plain(arguments, "data_parallel_size")) is not None and stated != dp:
        raise log.error(f"world_size {world} and {ranks} leave DP {dp}, and data_parallel_size is {stated}")
    return Strategy(
        pp=pp,
        tp=tp,
        cp=cp,
        dp=dp,
        mbs=_count(log, arguments, "micro_batch_size"),
        ep=_count(log, arguments, "expert_model_parallel_size", "moe_expert_parallel_size", default=1),
        etp=(whole(log, arguments, "expert_tensor_parallel_size", least=0) or 0) if arguments.get("num_experts") else 0,
        vpp=_read_chunks(log, arguments, pp),
        zero=zero,
        optimizer_offload=arguments.get("cpu_optimizer") is True or arguments.get("optimizer_cpu_offload") is True,
        rank_order="tp-cp-ep-pp-dp" if arguments.get("use_tp_pp_dp_mapping") is True else "tp-cp-ep-dp-pp",
    )


def _read_chunks(log: Log, arguments: Arguments, pp: int) -> int:
    stated = whole(log, arguments, "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    per_chunk = whole(log, arguments, "num_layers_per_virtual_pipeline_stage")
    if stated is None and per_chunk is not None:
        num_layers = _count(log, arguments, "num_layers")
        if num_layers % (pp * per_chunk):
            raise log.error(f"num_layers {num_layers} is no multiple of PP {pp} x {per_chunk} layers a chunk")
        stated = num_layers // (pp * per_chunk)
    return stated or 1


def _read_recompute(log: Log, arguments: Arguments) -> tuple[bool, tuple[str, ...], int]:
    """Whether all layers recompute, which operators of all others do, and else how many layers of a chunk do."""
    granularity = plain(arguments, "recompute_granularity")
    if granularity is None and arguments.get("checkpoint_activations") is True:
        granularity = "full"  # Megatron-LM of 2021, and Megatron-DeepSpeed until 2023
    operators: tuple[str, ...] = ()
    if arguments.get("recompute_activation_function") is True:
        operators = ("mlp_act",)
    if granularity in (None, "none"):
        return False, operators, 0
    if granularity == "selective":
        modules = str(plain(arguments, "recompute_modules") or "core_attn")
        names = [name.strip(" '\"") for name in modules.strip("[]").split(",")]
        try:
            _, operators = recompute_of(",".join(names))
        except Unrepresentable as reason:
            raise log.error(f"recompute_modules is {modules}: {reason}") from None
        return False, operators, 0
    if granularity != "full":
        raise log.error(f"recompute_granularity is {granularity}; full and selective are understood")
    method = plain(arguments, "recompute_method", "activations_checkpoint_method") or "uniform"
    num_layers = whole(log, arguments, "recompute_num_layers", "checkpoint_num_layers") or 1
    if method == "block":
        return False, operators, num_layers
    if method != "uniform":
        raise log.error(f"recompute_method is {method}; uniform and block are understood")
    if num_layers > 1:
        raise log.error(f"recompute_num_layers is {num_layers}: groups of layers that recompute are not represented")
    return True, (), 0


def _read_model(
    log: Log, facts: Facts, arguments: Arguments, strategy: Strategy, adapt: Callable[[dict[str, Any]], None]
) -> Mapping[str, Any]:
    sizes = {key: value for key, value in arguments.items() if value is not None and key not in _DERIVED}
    kind = str(plain(arguments, "position_embedding_type") or "learned_absolute").removeprefix("PositionEmbeddingType.")
    if kind not in _POSITIONS:
        raise log.error(f"position_embedding_type is {kind}; known are {', '.join(_POSITIONS)}")
    sizes["position_embedding_type"] = _POSITIONS[kind]
    sizes["tensor_model_parallel_size"] = strategy.tp
    adapt(sizes)
    padded = read_padded_vocabulary(log) or plain(arguments, "padded_vocab_size")
    if padded is not None:
        sizes["padded_vocab_size"] = padded
    else:
        stated = plain(arguments, "vocab_size")
        sizes["vocab_size"] = facts.count(log, "vocab_size", stated)
    section = Section(sizes, log.path, what="arguments of log")
    try:
        return read_megatron_arguments(section).model_dump(mode="json")
    except ValidationError as failure:
        raise log.error(f"its arguments make no model: {describe_unfit(failure)}") from None
    except JobError as failure:
        raise log.error(failure.reason) from None
