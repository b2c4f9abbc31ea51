"""A plan of each feature (integrations/features.py), with as little else as that feature needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.layer_layout import LayerLayout
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

_LAYERS = 24


def _plan(text: tuple[int, ...] = (_LAYERS,), recompute: tuple[int, ...] = (), batch: int = 16, **sizes: Any) -> Plan:
    """A plan of `text` layers a virtual stage; MBS 1, ZeRO 1, and DP 2 unless sizes say otherwise."""
    strategy = Strategy(**{"pp": 1, "tp": 1, "dp": 2, "mbs": 1, "zero": 1} | sizes)
    return Plan(strategy, {"text": text}, {"text": recompute or (0,) * len(text)}, batch)


def _with_vision(text: tuple[int, ...], vision: tuple[int, ...]) -> Plan:
    plan, none = _plan(text, pp=len(text)), (0,) * len(text)
    return replace(plan, layers={"vision": vision, "text": text}, recompute={"vision": none, "text": none})


def _in_mode(mode: str, counts: tuple[int, ...] = (_LAYERS,)) -> Plan:
    layers = (_LAYERS // len(counts),) * len(counts)
    return replace(_plan(layers, pp=len(counts)), modes={"text": {mode: counts}})


_EVEN, _UNEVEN = (6, 6, 6, 6), (3, 7, 8, 6)
_EVEN_CHUNKS, _UNEVEN_CHUNKS = (3,) * 8, (3, 4, 2, 5, 1, 3, 4, 2)

PLANS: dict[str, Plan] = {
    "pipeline": _plan(_EVEN, pp=4),
    "uneven_stages": _plan(_UNEVEN, pp=4),
    "chunks": _plan(_EVEN_CHUNKS, pp=4, vpp=2),
    "uneven_chunks": _plan(_UNEVEN_CHUNKS, pp=4, vpp=2),
    "partial_group": _plan(_EVEN_CHUNKS, pp=4, vpp=2, batch=12),
    "encoder_first": _with_vision((5, 7, 7, 5), (4, 0, 0, 0)),
    "encoder_stages": _with_vision((0, 8, 9, 7), (3, 1, 0, 0)),
    "gpipe": _plan(_EVEN, pp=4, schedule="gpipe"),
    "low_memory_chunks": _plan(_EVEN_CHUNKS, pp=4, vpp=2, schedule="interleaved_1f1b_low_memory"),
    "split_backwards": _plan(_EVEN, pp=4, schedule="zb_h1"),
    "pieces": _plan(_EVEN, pp=4, schedule="seq_1f1b_2"),
    "tensor": _plan(tp=2),
    "whole_sequences": _plan(tp=2, zero=0, sequence_parallel=False),
    "ring": _plan(cp=2, cp_kind="ring"),
    "all_to_all": _plan(cp=2, cp_kind="all_to_all"),
    "all_gather": _plan(cp=2, cp_kind="all_gather"),
    "hierarchical": _plan(cp=4, cp_kind="hierarchical"),
    "experts": _plan(ep=2),
    "whole_experts": _plan(tp=2, ep=2, etp=1),
    "zero_0": _plan(zero=0),
    "zero_1": _plan(zero=1),
    "zero_2": _plan(zero=2),
    "zero_3": _plan(zero=3),
    "zero_2_pipeline": _plan(_EVEN, pp=4, zero=2),
    "zero_3_pipeline": _plan(_EVEN, pp=4, zero=3),
    "kept_weights": _plan(zero=3, reshard=False),
    "shards": _plan(zero=3, dp=4, shard=2),
    "recompute_all": _plan(_EVEN, _EVEN, pp=4),
    "recompute_number": _plan(_EVEN, (2, 2, 2, 2), pp=4),
    "recompute_stages": _plan(_EVEN, (3, 1, 0, 2), pp=4),
    "selective_all": _in_mode("selective"),
    "selective_some": _in_mode("selective", (12, 5)),
    "activation": _in_mode("activation"),
    "offload": _in_mode("offload"),
    "recompute_offload": _in_mode("recompute_offload"),
    "swap_attention": _in_mode("swap_attention"),
    "swap_some": _in_mode("swap_attention", (12, 5)),
    "optimizer_offload": _plan(optimizer_offload=True),
    "rank_order": _plan(_EVEN, pp=4, rank_order="tp-cp-ep-pp-dp"),
    "precision": _plan(precision="fp8_current"),
    "graphs": _plan(graphs="full"),
    "dispatcher": _plan(ep=2, dispatcher="deepep"),
    "token_overlap": _plan(_EVEN_CHUNKS, pp=4, vpp=2, ep=2, overlap_all_to_all="micro_batches"),
    "fused_products": _plan(tp=2, tp_overlap="mc2"),
    "overlaps": _plan(overlaps=Overlaps(overlap_grad_reduce=False, overlap_param_gather=False)),
    "user_buffers": _plan(tp=2, tp_overlap="user_buffers"),
    "layer_strategies": replace(
        _plan(_EVEN, (1, 0, 0, 0), pp=4, zero=0, layouts=(LayerLayout(2, 1, zero=0),)),
        modes={"text": {"tp2_dp1_zero0+recompute": (2, 0, 0, 1), "tp2_dp1_zero0": (1, 0, 6, 0)}},
    ),
    "layout": replace(
        _with_vision((0, 12, 12), (4, 0, 0)),
        strategy=Strategy(
            3, 1, 1, 1, arrangement=Arrangement("disaggregated", "inline", ModuleLayout("vision", 1, 1, 1, 1))
        ),
    ),
}
NEED_EXPERTS = {"experts", "whole_experts", "dispatcher", "token_overlap"}
