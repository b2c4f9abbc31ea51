"""Reads steps in the form of Megatron-Bridge's performance pages, each row joined to the recipe of its release.

A row states its model's sizes, its layout, its precision and what its recipe turns on: CUDA graphs, what experts'
tokens are exchanged by and behind what, operators that run once more, layers whose activations lie on the host. What
it leaves unsaid, from the recipes (src/megatron/bridge/recipes and scripts/performance): TransformerEngine with flash
attention and its fused cross-entropy; gradients accumulated and reduced in bf16 (grad_reduce_in_fp32 false); the
distributed optimizer, whose moments are bf16 for DeepSeek-V3; routers forced to balance; a shared expert beside the
exchange where no other micro-batch hides it. A node is what NVLink joins: 64 devices of GB200 and GB300, 8 of others.
Layers with experts of the releases of 2025 are the early ones of their stack (StackFacts.early_experts).

`pp_layout` is Megatron-LM's (pipeline_layout.py). Without it chunks hold ⌈(layers + modules + 1) / chunks⌉ and the last
ones the rest, or equally many where layers divide (measured pages and recipes of DeepSeek-V3).

Fine-tuning packs sequences, whose attention is taken as of whole ones (assumed: its core is a small part of a step).
LoRA adapts query, key and value alone, at a rank that the table does not state (32, assumed).
"""

from __future__ import annotations

import math
from typing import Any

from mm_autoparallel.measurements.build import build_job, check_lawful, check_world
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.pipeline_layout import read_layout
from mm_autoparallel.measurements.recompute import recompute_of
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.measurements.text_models import llama_model
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.domains import count_joined
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.stacks import Graphs
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

REQUIRED = (
    "model variant kind device n_devices precision gbs mbs seq_length tp pp cp vpp ep etp fsdp cuda_graph recompute "
    "offload_layers dispatcher a2a_overlap fused_grouped_mlp fp8_attention pp_layout measured_ms recipe num_layers "
    "hidden_size ffn_size num_heads num_kv_groups head_size vocab_size num_experts experts_active expert_ffn "
    "shared_ffn dense_layers release source"
)
OPTIONAL = "tokens_s_gpu tflops_gpu recipe_differs note"

_PRECISIONS = {"bf16": "bf16", "fp8_cs": "fp8_current", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_KINDS = ("pretrain", "sft", "lora")
_VARIANTS = {"": True, "w/ MTP": True, "w/o MTP": False, "tokendrop": True, "dropless": True}
"""Whether a DeepSeek-V3 of that name has its module that predicts one token more."""
_RANK_OF_ADAPTERS = 32

_GRAPHED_PARTS = frozenset(("attn", "mlp", "moe", "moe_preprocess", "moe_router"))
"""Of layers, that Megatron-Core records apart (its cuda_graph_scope)."""

_RATE_FRACTION = 0.03
"""What tokens a second may differ by from the step: releases round them to 128 (measured pages: at most 2.3 %)."""

_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3 (arXiv:2412.19437, section 4.2): what heads of 192 numbers are taken for."""
_GROUPS = {"max_groups": 4, "num_groups": 8}
"""Of experts, out of which DeepSeek-V3 picks a token's (section 4.2)."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    measured_ms = row.positive("measured_ms")
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=_count_replicas(row),
        mbs=row.count("mbs"),
        cp=row.count("cp"),
        ep=row.count("ep"),
        vpp=row.count("vpp"),
        etp=row.count("etp", 0),
        zero=3 if row.count("fsdp", least=0) else 1,
    )
    num_devices = check_world(row, strategy, "n_devices")
    _check_rate(row, measured_ms, num_devices)
    fsdp, device = row.count("fsdp", least=0), row.text("device")
    if fsdp and fsdp != strategy.dp * strategy.cp:
        raise Unrepresentable(
            f"FSDP shards over {fsdp} of {strategy.dp * strategy.cp} replicas, which is not understood"
        )
    known = find_device(device)
    per_node = max(DEVICES_PER_NODE, count_joined(DEVICES[known], num_devices))
    job = build_job(row, _model(row), known, num_devices, _workload(row), per_node)
    differs = row.text("recipe_differs", " ").strip()
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=f"{row.text('model')} {row.text('kind')}, {num_devices} {device}, {row.text('precision')}, "
        f"{row.text('release')}",
        job=job,
        plan=_lay(row, job, strategy),
        software="megatron-bridge",
        measured_ms=measured_ms,
        measured_bytes=None,
        out_of_memory=None,
        source=row.text("source"),
        content=row.cells,
        remarks=(f"its layout is no recipe's ({differs}), so its graphs, overlap and offload are another's",)
        if differs
        else (),
        unstated=("graphs, dispatcher and overlap",) if differs else (),
        release=row.text("release"),
    )


def _check_rate(row: Row, measured_ms: float, num_devices: int) -> None:
    """Raises TableError where tokens a second and device, which nothing else here needs, contradict the step."""
    if not row.has("tokens_s_gpu"):
        return
    told = row.positive("tokens_s_gpu")
    own = row.count("gbs") * row.count("seq_length") / num_devices / measured_ms * 1e3
    if abs(told / own - 1) > _RATE_FRACTION:
        raise row.error(
            "tokens_s_gpu",
            f"{told:g} tokens a second and device, and a step of {measured_ms:g} ms makes {own:.6g} by gbs, seq_length "
            "and n_devices; one of the five is wrong, or the rate is of all devices together",
        )


def _count_replicas(row: Row) -> int:
    num_devices = row.count("n_devices")
    ranks = row.count("pp") * row.count("tp") * row.count("cp")
    if num_devices % ranks:
        raise row.error("n_devices", f"{num_devices} devices are no multiple of PP x TP x CP = {ranks}")
    return num_devices // ranks


def _model(row: Row) -> dict[str, Any]:
    variant, kind = row.text("variant", " ").strip(), row.text("kind")
    if variant not in _VARIANTS:
        raise Unrepresentable(
            f"the variant {variant!r} is not understood; known are {', '.join(filter(None, _VARIANTS))}"
        )
    if kind not in _KINDS:
        raise Unrepresentable(f"the kind {kind!r} is not understood; known are {', '.join(_KINDS)}")
    num_heads, num_groups, num_layers = row.count("num_heads"), row.count("num_kv_groups"), row.count("num_layers")
    latent, is_deepseek = _has_latent(row), "deepseek" in row.text("model").lower()
    more: dict[str, Any] = {"latent": _LATENT} if latent else {"head_dim": row.count("head_size")}
    num_experts, num_dense = row.count("num_experts", least=0), row.count("dense_layers", least=0)
    if num_experts:
        more["experts"] = {
            "num_experts": num_experts,
            "top_k": row.count("experts_active"),
            "ffn_size": row.count("expert_ffn"),
            "shared_ffn_size": row.count("shared_ffn", least=0),
            "dense_layers": list(range(num_dense)),
            **(_GROUPS if is_deepseek else {}),
        }
    if "qwen3" in row.text("model").lower():
        more["qk_norm"] = "head"
    sizes = num_layers, row.count("hidden_size"), row.count("ffn_size"), num_heads, 0 if latent else num_groups
    model = llama_model(*sizes, row.count("vocab_size"), **more)
    model["text"]["num_mtp"] = int(is_deepseek and _VARIANTS[variant])
    if kind == "lora":
        model["adapters"] = {"rank": _RANK_OF_ADAPTERS, "targets": ["qkv"]}
    return {"name": row.text("model"), **model}


def _has_latent(row: Row) -> bool:
    """Whether its heads are DeepSeek-V3's."""
    return row.count("head_size") == _LATENT["qk_nope_head_dim"] + _LATENT["qk_rope_head_dim"]


def _workload(row: Row) -> dict[str, Any]:
    if row.text("precision") not in _PRECISIONS:
        raise Unrepresentable(
            f"the precision {row.text('precision')!r} is not understood; known are {', '.join(_PRECISIONS)}"
        )
    _, operators = recompute_of(row.text("recompute", "none").replace(";", ","))
    has_experts = row.count("num_experts", least=0) > 0
    facts: dict[str, Any] = {"graphs": _graphs(row.text("cuda_graph")), "fp8_attention": row.flag("fp8_attention")}
    # user buffers are off under four bits (their recipes)
    if row.count("tp") > 1 and row.text("precision") != "nvfp4":
        facts["tp_overlap"] = "user_buffers"
    if has_experts:
        facts["dispatcher"] = row.text("dispatcher")
        facts["drops_tokens"] = row.text("variant", " ").strip() == "tokendrop"
        facts["grouped_activation"] = row.flag("fused_grouped_mlp")
        facts["early_experts"] = row.text("release").startswith("25.")
    return {
        "global_batch_size": row.count("gbs"),
        "seq_length": row.count("seq_length"),
        "precision": _PRECISIONS[row.text("precision")],
        "gradient_bytes": 2.0,
        "optimizer_bytes": 8.0 if _has_latent(row) else 12.0,
        "gradient_fusion": True,
        "cross_entropy": "fused",
        "recompute_operators": operators,
        "overlap_all_to_all": _overlap(row) if has_experts else "none",
        "facts": facts,
    }


def _graphs(text: str) -> Graphs:
    if text in ("none", "full_iteration"):
        return "none" if text == "none" else "full"
    others = sorted(set(text.split(";")) - _GRAPHED_PARTS)
    if others:
        raise Unrepresentable(
            f"the CUDA graphs of {', '.join(map(repr, others))} are not understood; none, full_iteration and parts of "
            f"layers are ({', '.join(sorted(_GRAPHED_PARTS))})"
        )
    return "partial"


def _overlap(row: Row) -> str:
    if row.flag("a2a_overlap"):
        return "micro_batches"
    return "shared_experts" if row.count("shared_ffn", least=0) else "none"


def _lay(row: Row, job: Job, strategy: Strategy) -> Plan:
    check_lawful(job, strategy)
    layers = _layers(row, job.model.text.layers.num_layers, job.model.text.num_mtp, strategy)
    offloaded = row.count("offload_layers", least=0)
    if offloaded and strategy.pp > 1:
        raise Unrepresentable("activations of some layers are offloaded beside a pipeline, and it does not say which")
    modes = {"text": {"offload": (offloaded,)}} if offloaded else {}
    return Plan(strategy, {"text": layers}, {"text": (0,) * len(layers)}, job.workload.global_batch_size, modes=modes)


def _layers(row: Row, num_layers: int, num_modules: int, strategy: Strategy) -> tuple[int, ...]:
    """Layers of each stage and chunk."""
    num_chunks = strategy.pp * strategy.vpp
    if row.has("pp_layout"):
        laid = read_layout(row.text("pp_layout"))
        if laid is None:
            raise row.error("pp_layout", f"{row.text('pp_layout')!r} is no layout such as Et*4|(t*4|)*14tmL")
        if len(laid) != num_chunks or sum(laid) != num_layers:
            raise row.error(
                "pp_layout",
                f"{row.text('pp_layout')!r} lays {sum(laid)} layers on {len(laid)} chunks, and the model has "
                f"{num_layers} and PP x VPP {num_chunks}",
            )
        return laid
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    most, left = math.ceil((num_layers + num_modules + 1) / num_chunks), num_layers
    counts: list[int] = []
    for chunk in range(num_chunks):
        counts.append(min(most, left - (num_chunks - 1 - chunk)))  # each later chunk has one at least
        left -= counts[-1]
    if left:
        raise Unrepresentable(f"{num_layers} layers are more than {num_chunks} chunks of {most}")
    return tuple(counts)
