"""Galvatron's cost model (Miao et al., VLDB 2023; Hetu-Galvatron): its formulas on its shipped profile, scaled.

It predicts from profiles that its user takes on the devices. The one that it ships is Llama 2 7B at 2,048 tokens in
bf16, on eight devices that it does not name (at 200 TFLOP/s they are like an A100), and collectives of two nodes. It is
scaled to a row's model by counts: a layer's forward time by its matrix operations, the head's by its own, parameters by
their number, kept activations by the numbers that a layer keeps. What it cannot say, and what stands for it:

- unfused attention: score matrices of 5 bytes a score are added to what a layer keeps (Korthikanti et al. 2022); the
  time of a layer is as with flash attention. Unfused norms: left out.
- no sequence parallelism: its formulas assert it; a row without counts as with.
- ZeRO 1: its ZeRO 2, which with asynchronous reduction keeps whole gradients too (4 + 12/n bytes a parameter).
- groups and pipelines beyond its profile: the figure of the largest profiled (16 devices).
- fewer micro-batches than stages: its formulas assert the contrary.

Layers per stage it can say.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from others.layout import Answer, Layout, Predict, Source

_MODEL = Path("galvatron") / "models" / "gpt" / "configs"
_HARDWARE = Path("galvatron") / "profile_hardware" / "hardware_configs"
_PROFILED = {"hidden_size": 4096, "ffn_size": 11008, "gated": True, "num_kv_groups": 32, "num_heads": 32}
_PROFILED_TOKENS, _PROFILED_VOCABULARY = 2048, 32000
_MIB = 2.0**20
_MEMORY_BYTES = 80 * 2.0**30
_BYTES_PER_SCORE = 5.0


def load(folder: Path) -> Mapping[str, Predict]:
    """What predicts, by the name of its way of use."""
    utilities = ModuleType("galvatron.utils")  # its own also imports what trains, which needs Triton
    utilities.__path__ = [str(folder / "galvatron" / "utils")]
    sys.modules["galvatron.utils"] = utilities
    arguments = importlib.import_module("galvatron.core.cost_model.cost_model_args")
    layer_cost = importlib.import_module("galvatron.core.cost_model.components.layer_cost")
    head_cost = importlib.import_module("galvatron.core.cost_model.components.embedding_lmhead_cost")
    pipeline = importlib.import_module("galvatron.core.cost_model.cost_model_handler").pipeline_costmodel
    strategies = importlib.import_module("galvatron.utils.strategy_utils")
    configs = importlib.import_module("galvatron.utils.config_utils")
    profile = read_profile(folder)
    hardware = arguments.ProfileHardwareArgs(
        bct_fct_coe=2,
        extra_overhead=0,
        comm_coe_dict={},
        dp_overlap_coe=profile["overlap"],
        bct_overlap_coe=profile["overlap"],
        p2p_comm_coe_dict=profile["hops"],
        costmodel_coe=1.0,
        overlap_slowdown_coe=profile["overlap"],
        allreduce_latency_per_MB_dict=profile["rings"],
        allreduce_dict=configs.remap_config(dict(profile["collectives"]), "allreduce"),
        allgather_message_size_to_latency_dict_dict=configs.remap_config_for_latency(
            profile["collectives"], "allgather"
        ),
        allreduce_message_size_to_latency_dict_dict=configs.remap_config_for_latency(
            profile["collectives"], "allreduce"
        ),
    )

    def predict(layout: Layout) -> Answer:
        sharded = {0: strategies.DPType.DDP, 3: strategies.DPType.ZERO3}.get(layout.zero, strategies.DPType.ZERO2)
        strategy = strategies.LayerStrategy(
            pp_size=layout.pp,
            tp_size=layout.tp,
            dp_size=layout.dp,
            dp_type=sharded if layout.dp > 1 else strategies.DPType.DDP,
            checkpoint=layout.recompute,
        )
        of_model = {
            "model_args": arguments.ModelArgs(
                parameter_size=profile["parameters"] * parameters(layout) / parameters(),
                seq_length=layout.seq_length,
                hidden_size=layout.hidden_size,
                layer_num=layout.num_layers,
            ),
            "train_args": arguments.TrainArgs(mixed_precision=True, async_grad_reduce=True),
            "parallel_args": arguments.ParallelArgs(
                use_zero2_for_dp=True, sequence_parallel=True, pipeline_type="pipedream_flush"
            ),
            "profile_model_args": arguments.ProfileModelArgs(**scaled(profile, layout)),
        }
        batch = {"global_batch_size": layout.global_batch_size, "chunks": layout.num_micro_batches}
        head_strategy = strategy.to_embedding_lmhead_strategy()
        head = head_cost.EmbeddingLMHeadTimeCostModel(
            strategy=head_strategy,
            sequence_length_list=[layout.seq_length],
            profile_hardware_args=hardware,
            **batch,
            **of_model,
        )
        step_s = pipeline(
            layer_num_list=[layout.num_layers],
            **{f"{name}_list": [value] for name, value in of_model.items()},
            profile_hardware_args_list=[hardware],
            strategy_list=[strategy] * layout.num_layers,
            partition=list(layout.layers_per_stage),
            chunks=layout.num_micro_batches,
            gbsz=layout.global_batch_size,
            pp_size=layout.pp,
            other_time_cost=head.gen_result()[1],
        )
        ends = head_cost.EmbeddingLMHeadMemoryCostModel(strategy=head_strategy, **batch, **of_model)
        stages = [
            end + count * layer_cost.MemoryCostModelBase(
                strategy=strategy, stage_idx=stage, **batch, **of_model
            ).get_memory_cost()["enc_total"]
            for stage, (end, count) in enumerate(
                zip(ends.get_memory_cost()["enc_total"], layout.layers_per_stage, strict=True)
            )
        ]  # fmt: skip
        peak_bytes = max(stages) * _MIB
        return Answer(1e3 * float(step_s), peak_bytes, peak_bytes <= _MEMORY_BYTES)

    return {"Galvatron's formulas": predict}


def read_profile(folder: Path) -> dict[str, Any]:
    """Its shipped profile. ms, MiB, and ms/MiB as its formulas take them; pipelines and groups beyond 16 as 16."""

    def read(path: Path) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((folder / path).read_text(encoding="utf-8"))
        return content

    times, memory = (read(_MODEL / f"{kind}_profiling_bf16_llama2-7b_all.json") for kind in ("computation", "memory"))
    bandwidths = read(_HARDWARE / "allreduce_bandwidth_2nodes_8gpus_per_node.json")
    hops = read(_HARDWARE / "p2p_bandwidth_2nodes_8gpus_per_node.json")
    rings: dict[str, float] = {"1": 0.0, "1_0": 0.0, "1_1": 0.0}
    for size in range(2, 4097):
        profiled = min(16, 2 ** (size.bit_length() - 1))
        for spread in (0, 1):
            named = f"allreduce_size_{profiled}_consec_{spread}"
            rings[f"{size}_{spread}"] = 1.0 / bandwidths.get(named, bandwidths["allreduce_size_16_consec_1"])
    tokens = str(_PROFILED_TOKENS)
    return {
        "layer": fit_times(times, "layertype_0"),
        "head": fit_times(times, "layertype_other"),
        "parameters": memory["layertype_0_sp"][tokens]["parameter_size"],
        "kept": by_size(memory["layertype_0_sp"][tokens]["tp_activation_per_bsz_dict"]),
        "whole": {kind: by_size(of) for kind, of in memory["other_memory_pp_off_sp"][tokens].items()},
        "first": {kind: by_size(of) for kind, of in memory["other_memory_pp_on_first_sp"][tokens].items()},
        "last": {kind: by_size(of) for kind, of in memory["other_memory_pp_on_last_sp"][tokens].items()},
        "rings": rings,
        "hops": {size: 1.0 / hops[f"pp_size_{min(16, 2 ** (size.bit_length() - 1))}"] for size in range(2, 1025)},
        "collectives": read(_HARDWARE / "sp_time_1nodes_8gpus_per_node.json"),
        "overlap": read(_HARDWARE / "overlap_coefficient.json")["overlap_coe"],
    }


def by_size(figures: Mapping[str, float]) -> dict[int | str, float]:
    """Tensor parallel sizes as numbers, other keys as they are."""
    return {int(size) if size.isdigit() else size: figure for size, figure in figures.items()}


def fit_times(times: Mapping[str, float], kind: str) -> np.ndarray:
    """(slope, constant) in ms of a forward by samples, least squares as its own reader fits them."""
    found = [(int(match[1]), time) for key, time in times.items() if (match := re.match(rf"{kind}_bsz(\d+)_", key))]
    samples = np.array([count for count, _ in found], dtype=float)
    return np.polyfit(samples, samples * np.array([time for _, time in found]), 1)


def scaled(profile: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """What it profiles of a model, of `layout`'s."""
    tokens = layout.seq_length / _PROFILED_TOKENS
    width = layout.hidden_size / _PROFILED["hidden_size"]
    words = layout.vocab_size / _PROFILED_VOCABULARY
    kept = {size: figure * tokens * numbers_kept(layout) / numbers_kept() for size, figure in profile["kept"].items()}
    kept["checkpoint"] = profile["kept"]["checkpoint"] * tokens * width
    if not layout.flash:
        scores_mib = _BYTES_PER_SCORE * layout.num_heads * layout.seq_length**2 / _MIB
        kept |= {size: figure + scores_mib / size for size, figure in kept.items() if isinstance(size, int)}

    def ends(of: Mapping[str, Mapping[int, float]], activations: float) -> dict[str, dict[int, float]]:
        return {
            "model_states": {size: figure * words * width for size, figure in of["model_states"].items()},
            "activation": {size: figure * activations for size, figure in of["activation"].items()},
        }

    return {
        "tp_activation_per_bsz_dict": kept,
        "other_memory_pp_off": ends(profile["whole"], tokens * words),
        "other_memory_pp_on": {
            "first_stage": ends(profile["first"], tokens * width),
            "last_stage": ends(profile["last"], tokens * words),
        },
        "forward_computation_time": profile["layer"] * operations(layout, layout.seq_length) / operations(),
        "other_time_profiled": profile["head"] * tokens * words * width,
    }


def _sizes(layout: Layout | None) -> tuple[int, int, bool, float]:
    """(hidden size, feed-forward, gated, key and value groups over heads) of `layout`, or of what was profiled."""
    of = _PROFILED if layout is None else vars(layout)
    return of["hidden_size"], of["ffn_size"], bool(of["gated"]), of["num_kv_groups"] / of["num_heads"]


def parameters(layout: Layout | None = None) -> float:
    """Of a layer's matrices."""
    hidden, ffn, gated, groups = _sizes(layout)
    return hidden * (hidden * (2 + 2 * groups) + (3 if gated else 2) * ffn)


def operations(layout: Layout | None = None, seq_length: int = _PROFILED_TOKENS) -> float:
    """Of a layer's forward of one sample: matrices, and causal attention of half the scores."""
    hidden = _sizes(layout)[0]
    return 2.0 * seq_length * parameters(layout) + 2.0 * seq_length**2 * hidden


def numbers_kept(layout: Layout | None = None) -> float:
    """That a layer keeps of a token: residuals and norms 4, attention 5, feed-forward; in its own widths."""
    hidden, ffn, gated, _ = _sizes(layout)
    return 9.0 * hidden + (4 if gated else 2) * ffn


SOURCE = Source(
    "Galvatron's formulas",
    "https://github.com/PKU-DAIR/Hetu-Galvatron",
    "cea12ffb146a220643c8f99f9cb84294755d29f8",
    ("galvatron",),
    ("torch", "scipy", "pydantic"),
    load,
)
