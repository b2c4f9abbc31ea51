"""Megatron-Bridge's configuration fields (0.3.1) in Megatron-LM's flags, and back.

Fields: megatron/bridge/training/config.py and the dataclasses of megatron-core 0.16 that it extends. What overlaps in a
pipeline: megatron/bridge/training/comm_overlap.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.megatron_core import flags

Fields = Mapping[str, Any]
"""`model.tensor_model_parallel_size` → its value."""

CHUNKS, LAYOUT = "model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_layout"
BESIDE, BATCHED = "model.overlap_p2p_comm", "model.batch_p2p_comm"
PRECISION = "mixed_precision"

_DECIDED: dict[str, tuple[str, ...]] = {
    flags.MICRO_BATCH: ("train.micro_batch_size",),
    flags.GLOBAL_BATCH: ("train.global_batch_size",),
    flags.CHUNKS: (CHUNKS,),
    flags.FIRST: ("model.num_layers_in_first_pipeline_stage",),
    flags.LAST: ("model.num_layers_in_last_pipeline_stage",),
    flags.GROUP: ("model.microbatch_group_size_per_vp_stage",),
    flags.RANK_ORDER: ("dist.use_tp_pp_dp_mapping",),
    flags.SHARDED_OPTIMIZER: ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    flags.OPTIMIZER_COPIES: ("ddp.num_distributed_optimizer_instances",),
    flags.MEGATRON_FSDP: ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"),
    flags.TORCH_FSDP: ("dist.use_torch_fsdp2",),
    flags.SHARDING: ("ddp.data_parallel_sharding_strategy",),
    flags.CHECKPOINT: ("checkpoint.ckpt_format",),
    flags.OPTIMIZER_OFFLOAD: ("optimizer.optimizer_cpu_offload",),
    flags.PRECISION_AWARE: ("optimizer.use_precision_aware_optimizer",),
    flags.OVERLAP_REDUCE: ("ddp.overlap_grad_reduce",),
    flags.OVERLAP_GATHER: ("ddp.overlap_param_gather",),
}
"""Flag → its fields, where they are not `model.` and the flag's own words."""
_OF_MODEL = (
    *(flags.TENSOR, flags.PIPELINE, flags.CONTEXT, flags.EXPERT, flags.EXPERT_TENSOR, flags.SEQUENCE_PARALLEL),
    *(
        flags.USER_BUFFERS,
        flags.LAYOUT,
        flags.COUNTS_EMBEDDING,
        flags.COUNTS_LOSS,
        flags.CONTEXT_KIND,
        flags.CONTEXT_SIZES,
    ),
    *(flags.GRANULARITY, flags.METHOD, flags.RECOMPUTED, flags.MODULES, flags.OFFLOAD, flags.OFFLOADED),
    *(flags.DISPATCHER, flags.BACKEND, flags.DEEPEP, flags.SHARED_OVERLAP, flags.BATCH_OVERLAP, flags.GROUPED),
)
FIELDS: Mapping[str, tuple[str, ...]] = _DECIDED | {
    flag: (f"model.{flag.strip('-').replace('-', '_')}",) for flag in _OF_MODEL
}
_NO_FIELD = {
    *(flags.OLD_SELECTIVE, flags.OLD_FULL, flags.CUSTOM_FSDP, flags.NO_P2P_OVERLAP, flags.BF16),
    *(flags.LAYERS_PER_CHUNK, *flags.LOW_PRECISION, *flags.GRAPHS),
}
"""Spellings that Megatron-Bridge does not have, and what `to_fields` writes by itself."""
_USUAL = {flags.SHARDING: flags.SHARDINGS[0], flags.OPTIMIZER_COPIES: 1}
"""What stands where Megatron-LM's flag is left out and null is no value."""

_SIZES = {
    f"model.{name}": f"--{(flag or name).replace('_', '-')}"
    for name, flag in {
        **dict.fromkeys(
            (
                *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length"),
                *("normalization", "position_embedding_type", "max_position_embeddings", "vocab_size", "add_qkv_bias"),
                *("make_vocab_size_divisible_by", "qk_layernorm", "mtp_num_layers", "moe_router_topk"),
                *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
                *("moe_layer_freq", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
                *("qk_pos_emb_head_dim", "v_head_dim", "transformer_impl", "attention_backend", "hidden_dropout"),
                *("attention_dropout", "deterministic_mode", "cuda_graph_impl", "cuda_graph_scope"),
                *("cpu_offloading_num_layers", "window_size", "linear_attention_type"),
                *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "first_last_layers_bf16"),
                *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_dot_product_attention"),
            ),
            "",
        ),
        "num_moe_experts": "num_experts",
        "padded_vocab_size": "",
    }.items()
}
"""Fields that say what is trained → flags, one word each."""
_SWITCHES = {
    "model.gated_linear_unit": (True, "--swiglu"),
    "model.add_bias_linear": (False, "--disable-bias-linear"),
    "model.share_embeddings_and_output_weights": (False, "--untie-embeddings-and-output-weights"),
    "model.gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "ddp.grad_reduce_in_fp32": (False, "--grad-reduce-in-bf16"),
}
"""Field → the value at which a switch is passed, and the switch."""
_ATTENTION = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""megatron/core/transformer/enums.py, AttnBackend, as a saved configuration has its members."""
_NONE_BUT_NAMED = ("model.cuda_graph_impl", "model.window_size", "model.linear_attention_type")
_WORD = re.compile(r"[\w.,|*()+\[\]:/-]{1,2000}")


def name_field(flag: str) -> str:
    """The first field that says what `flag` does; the flag itself where none does."""
    if flag in FIELDS:
        return FIELDS[flag][0]
    if flag in ("--num-query-groups", "--group-query-attention"):
        return "model.num_query_groups"
    if flag in (flags.BF16, "--fp16"):
        return PRECISION
    sizes = {**{of: field for field, of in _SIZES.items()}, **{of: field for field, (_, of) in _SWITCHES.items()}}
    return sizes.get(flag, flag)


def to_fields(values: flags.Values) -> dict[str, Any]:
    """The fields of decided flags; None: null. Raises KeyError for a flag that has none, which is a bug."""
    found: dict[str, Any] = {}
    for flag, words in values.items():
        if flag in _NO_FIELD or (flag == flags.CHECKPOINT and words is None):
            continue
        for field in FIELDS[flag]:
            found[field] = _value_of(flag, words)
    chunks = found[CHUNKS] or _count_chunks(str(found[LAYOUT] or ""), int(found["model.pipeline_model_parallel_size"]))
    found[CHUNKS] = chunks if chunks > 1 else None
    if chunks > 1 and flags.NO_P2P_OVERLAP in values:
        found |= {BESIDE: values[flags.NO_P2P_OVERLAP] is None, BATCHED: values[flags.NO_P2P_OVERLAP] is not None}
    if flags.BF16 in values:
        found[PRECISION] = "bf16_mixed"
    if flags.GRAPHS[0] in values:
        found["model.cuda_graph_impl"] = "none"
    return found


def _value_of(flag: str, words: tuple[str, ...] | None) -> Any:
    if flag in flags.SWITCHES:
        return words is not None
    if words is None:
        return _USUAL.get(flag)
    if flag == flags.CONTEXT_KIND:
        return words[0]
    if flag in flags.LISTS:
        return [int(word) if word.isdigit() else word for word in words]
    return int(words[0]) if words[0].isdigit() else words[0]


def _count_chunks(layout: str, pp: int) -> int:
    return (layout.count("|") + 1) // pp if layout else 1


def to_flags(fields: Fields, where: str) -> Iterator[str]:
    """Lines of Megatron-LM's flags that say what `fields` do. Raises JobError naming the field that is malformed."""
    layout = fields.get(LAYOUT)
    for flag, names in FIELDS.items():
        field, value = names[0], fields.get(names[0])
        if flag in flags.SWITCHES:  # where one of two is set, Megatron-Bridge sets both
            yield from [flag] if True in {_is_set(fields.get(name), name, where) for name in names} else []
        elif value is not None and value != [] and not (flag == flags.CHUNKS and (layout or value == 1)):
            yield _format(flag, value, field, where)
    if fields.get("comm_overlap.overlap_p2p_comm", fields.get(BESIDE)) is False and (fields.get(CHUNKS) or 1) != 1:
        yield flags.NO_P2P_OVERLAP
    yield from _list_sizes(fields, where)
    yield from _list_precision(fields, where)


def _is_set(value: Any, field: str, where: str) -> bool:
    if value not in (None, True, False):
        raise JobError(f"{where}: {field} is {describe_value(value)}; true or false is expected")
    return value is True


def _list_sizes(fields: Fields, where: str) -> Iterator[str]:
    for field, flag in _SIZES.items():
        value = fields.get(field)
        if value is None or (field in _NONE_BUT_NAMED and value == "none"):
            continue
        if field == "model.attention_backend":
            value = _name_attention(value)
        if flag in flags.SWITCHES or isinstance(value, bool):
            yield from [flag] if _is_set(value, field, where) else []
        else:
            yield _format(flag, value, field, where)
    for field, (turned, switch) in _SWITCHES.items():
        if field in fields and fields[field] is turned:
            yield switch
    groups, heads = fields.get("model.num_query_groups"), fields.get("model.num_attention_heads")
    if groups not in (None, heads):
        yield "--group-query-attention"
        yield _format("--num-query-groups", groups, "model.num_query_groups", where)
    yield from ("--hidden-dropout 0.0",) if "model.hidden_dropout" not in fields else ()
    yield from ("--attention-dropout 0.0",) if "model.attention_dropout" not in fields else ()


def _name_attention(value: Any) -> Any:
    """`flash` of `flash`, of `AttnBackend.flash`, and of a saved member."""
    if isinstance(value, Mapping):
        members = value.get("_args_")
        number = members[0] if isinstance(members, list) and members else value.get("_value_")
        return _ATTENTION.get(number, "auto") if isinstance(number, int) else "auto"
    return str(value).rpartition(".")[2]


def _list_precision(fields: Fields, where: str) -> Iterator[str]:
    """A recipe's name, or the section that a saved configuration has. bf16 where nothing is said, as recipes have."""
    said = fields.get(PRECISION) or "bf16_mixed"
    section = {key: fields[f"{PRECISION}.{key}"] for key in _LOW if fields.get(f"{PRECISION}.{key}")}
    kind, _, low = str(said).removesuffix("_mixed").partition("_with_")
    if kind not in ("bf16", "fp16") or (low and low not in _NAMED):
        names = ", ".join(f"bf16_with_{name}_mixed" for name in _NAMED)
        raise JobError(f"{where}: {PRECISION} is {describe_value(said)}; known are bf16_mixed, fp16_mixed, {names}")
    yield "--fp16" if kind == "fp16" or fields.get(f"{PRECISION}.fp16") is True else flags.BF16
    for key, value in {**_NAMED.get(low, {}), **section}.items():
        flag = {"fp8": "--fp8-format", "fp4": "--fp4-format"}.get(key, f"--{key.replace('_', '-')}")
        yield flag if value is True else _format(flag, value, f"{PRECISION}.{key}", where)


_LOW = (
    *("fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_dot_product_attention"),
)
_NAMED: dict[str, dict[str, Any]] = {
    "fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "fp8_current_scaling": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
"""What recipes are called → what they set (megatron/bridge/training/mixed_precision.py)."""


def _format(flag: str, value: Any, field: str, where: str) -> str:
    """The flag and its words. Raises JobError for what no flag says."""
    if flag == flags.LAYOUT and isinstance(value, list):
        value = _format_layout(value, where)
    words = value if isinstance(value, list) and flag in flags.LISTS else [value]
    texts = [str(word).replace(" ", "") for word in words]
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{where}: {field} is no finite number")
    if isinstance(value, Mapping) or not all(_WORD.fullmatch(text) for text in texts):
        raise JobError(f"{where}: {field} is {describe_value(value)}, which is no value that is read there")
    return " ".join((flag, *(text if re.fullmatch(r"[\w.:/-]+", text) else f"'{text}'" for text in texts)))


def _format_layout(cells: list[Any], where: str) -> str:
    """Lists of names in the place of letters (megatron/core/transformer/pipeline_parallel_layer_layout.py)."""
    letters = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
    try:
        return "|".join("".join(letters[str(name)] for name in cell) for cell in cells)
    except (KeyError, TypeError):
        raise JobError(
            f"{where}: {LAYOUT} holds {describe_value(cells)}; lists of {', '.join(letters)} are expected"
        ) from None
