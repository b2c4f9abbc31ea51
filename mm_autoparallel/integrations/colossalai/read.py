"""Keywords of HybridParallelPlugin: the plan that they run, with the model that a person names beside them.

What goes with what: its constructor (hybrid_parallel_plugin.py of 0.5.0). Recompute by stage:
PipelineGradientCheckpointConfig, whose list is flat, chunk x PP + stage.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.config_files import (
    Totals,
    check_keys,
    describe_config,
    flag_at,
    need,
    read_totals,
    section_at,
    size_at,
)
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.python_text import read_python
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.planner.plan import Plan

PLUGIN, CHECKPOINTS, COUNTS = "HybridParallelPlugin", "gradient_checkpoint_config", "num_ckpt_layers_per_stage"
CONTEXT_KINDS = {"all_to_all": "all_to_all", "ring": "ring_attn"}
"""How context parallel ranks share attention → sequence_parallelism_mode; split_gather is sequence parallelism."""

KEYWORDS = (
    "tp_size pp_size sp_size precision zero_stage enable_all_optimization enable_fused_normalization "
    "enable_flash_attention enable_jit_fused enable_sequence_parallelism sequence_parallelism_mode parallel_output "
    "num_microbatches microbatch_size initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis "
    "max_scale max_norm broadcast_buffers ddp_bucket_cap_mb find_unused_parameters check_reduction "
    "gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload communication_dtype overlap_communication "
    "custom_policy pp_style num_model_chunks scheduler_nodes num_layers_per_stage gradient_checkpoint_config "
    "enable_metadata_cache make_vocab_size_divisible_by dp_outside overlap_p2p overlap_allgather fp8_communication "
    "use_fp8 inner_ring_size"
)


def is_plugin(path: Path) -> bool:
    """Whether the file at `path` has the plugin's keywords, or is Python that calls it."""
    try:
        if path.suffix == ".py":
            return _find_call(path) is not None
        return path.suffix == ".json" and {"tp_size", "pp_size"} <= set(read_document(path, "keywords"))
    except PlannerError:
        return False


def _find_call(path: Path) -> ast.Call | None:
    """The one call of the plugin in a Python file. Raises JobError where there are several."""
    if PLUGIN not in read_text(path, "file", "Python"):
        return None
    tree = read_python(path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == PLUGIN]
    if len(calls) > 1:
        raise JobError(f"{path}: lines {calls[0].lineno} and {calls[1].lineno} both call {PLUGIN}; one is expected")
    return calls[0] if calls else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def read_keywords(path: Path) -> Mapping[str, Any]:
    """The plugin's keywords that the file at `path` has. Raises JobError naming the one that is no plain value."""
    if path.suffix != ".py":
        return read_document(path, "keywords")
    call = _find_call(path)
    if call is None or call.args:
        raise JobError(f"{path}: a call of {PLUGIN} with keywords alone is expected")
    return {
        str(each.arg): _literal(each.value, f"{path}: line {each.value.lineno}, {each.arg}") for each in call.keywords
    }


def _literal(node: ast.expr, where: str) -> Any:
    """A plain value; of PipelineGradientCheckpointConfig(...) its keywords."""
    if isinstance(node, ast.Call) and _name(node.func) == "PipelineGradientCheckpointConfig" and not node.args:
        return {str(each.arg): _literal(each.value, where) for each in node.keywords}
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError, MemoryError):
        raise JobError(f"{where} is known only when the file runs; write the value itself there") from None


def describe_launch(path: Path, given: Given) -> Described:
    """What the plugin at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    plan = read_launch_plan(path, given)
    return describe_config(path, given, "transformers", plan, {}, ("the batch is what was said beside the keywords",))


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the keywords at `path` run. Raises JobError naming what nobody says, PlanError naming the keyword
    that is malformed or says what no plan does."""
    totals, world_size = read_totals(path, given), need(given.world_size, path, "--world-size")
    batch = need(given.global_batch_size, path, "--global-batch-size")
    return read_plan(read_keywords(path), str(path), totals, world_size, batch, given.micro_batch_size)


def read_plan(
    keywords: Mapping[str, Any], where: str, totals: Totals, world_size: int, batch: int, mbs: int | None
) -> Plan:
    """The plan of the plugin's keywords. totals: layers of each modality. mbs: where the keywords do not say it."""
    check_keys(keywords, KEYWORDS.split(), where)
    if set(totals) != {"text"}:
        raise PlanError(f"{where}: Colossal-AI shards decoders alone, and the model has {', '.join(totals)}")
    tp, pp, sp = (size_at(keywords, key, where) for key in ("tp_size", "pp_size", "sp_size"))
    mode = keywords.get("sequence_parallelism_mode") or "all_to_all"
    divides = flag_at(keywords, "enable_sequence_parallelism", where)
    kind = next((kind for kind, word in CONTEXT_KINDS.items() if word == mode), "")
    if divides and mode != "split_gather" and not kind:
        raise PlanError(f"{where}: sequence_parallelism_mode is {describe_value(mode)}, which is not planned")
    cp = sp if divides and kind else 1
    if world_size % (tp * pp * cp):
        raise PlanError(f"{where}: TP {tp} x PP {pp} x SP {cp} does not divide {world_size} devices")
    vpp = _read_chunks(keywords, where, pp)
    dp = world_size // (tp * pp * cp)
    mbs = size_at(keywords, "microbatch_size", where, 0) or mbs
    number = size_at(keywords, "num_microbatches", where, 0)
    if mbs is None and number and batch % (number * dp) == 0:
        mbs = batch // (number * dp)
    if mbs is None:
        raise JobError(f"{where} leaves the micro-batch to the training's code; say it with --micro-batch-size N")
    if batch % (dp * mbs):
        raise PlanError(f"{where}: a batch of {batch} is no multiple of DP {dp} x MBS {mbs}")
    zero = keywords.get("zero_stage", 0)
    if zero not in (0, 1, 2) or (zero == 2 and pp > 1):
        raise PlanError(f"{where}: zero_stage is {describe_value(zero)}; 0 and 1 are known, and 2 with pp_size 1")
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=dp,
        mbs=mbs,
        cp=cp,
        vpp=vpp,
        zero=zero,
        cp_kind="all_to_all" if cp > 1 and kind == "all_to_all" else "ring" if cp > 1 else "",
        optimizer_offload=flag_at(keywords, "cpu_offload", where),
        rank_order="tp-cp-ep-pp-dp" if flag_at(keywords, "dp_outside", where, usual=True) else DEFAULT_RANK_ORDER,
        sequence_parallel=tp == 1 or (divides and mode == "split_gather"),
    )
    layers = read_layers(keywords, where, totals["text"], pp, vpp)
    return Plan(strategy, {"text": layers}, {"text": _read_recompute(keywords, where, layers)}, batch)


def _read_chunks(keywords: Mapping[str, Any], where: str, pp: int) -> int:
    style, chunks = keywords.get("pp_style", "1f1b"), size_at(keywords, "num_model_chunks", where)
    if style not in ("1f1b", "interleaved"):
        raise PlanError(f"{where}: pp_style is {describe_value(style)}; 1f1b and interleaved are planned")
    if pp > 1 and (style == "interleaved") != (chunks > 1):
        raise PlanError(f"{where}: pp_style {style} with num_model_chunks {chunks}, which Colossal-AI refuses")
    return chunks if pp > 1 else 1


def read_counts(value: Any, length: int, where: str, key: str) -> tuple[int, ...]:
    """The list `value` of `length` whole numbers under `key`. Raises PlanError where it is none."""
    if (
        not isinstance(value, list)
        or len(value) != length
        or not all(type(each) is int and each >= 0 for each in value)
    ):
        raise PlanError(f"{where}: {key} is {describe_value(value)}; {length} whole numbers are expected")
    return tuple(value)


def read_layers(keywords: Mapping[str, Any], where: str, total: int, pp: int, vpp: int) -> tuple[int, ...]:
    """The layers of each virtual stage, of `total`. Raises PlanError where the keywords place others."""
    said = keywords.get("num_layers_per_stage")
    if said is not None:
        if vpp > 1:
            raise PlanError(f"{where}: num_layers_per_stage goes with one chunk alone in Colossal-AI")
        counts = read_counts(said, pp, where, "num_layers_per_stage")
        if sum(counts) != total:
            raise PlanError(f"{where}: num_layers_per_stage holds {sum(counts)} layers, and the model has {total}")
        return counts
    if total % (pp * vpp):
        raise PlanError(f"{where}: {total} layers are not dealt evenly to {pp * vpp} chunks; say num_layers_per_stage")
    return (total // (pp * vpp),) * (pp * vpp)


def _read_recompute(keywords: Mapping[str, Any], where: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    section = section_at(keywords, CHECKPOINTS, where)
    if not section:
        return (0,) * len(layers)
    check_keys(section, (COUNTS,), f"{where}: {CHECKPOINTS}")
    counts = read_counts(section.get(COUNTS), len(layers), where, COUNTS)
    if any(again > held for again, held in zip(counts, layers, strict=True)):
        raise PlanError(f"{where}: {COUNTS} {list(counts)} is more than the layers there, {list(layers)}")
    return counts
