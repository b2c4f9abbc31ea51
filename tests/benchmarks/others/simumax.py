"""SimuMax 1.2 (Moore Threads, 2026): a layout in its options, its A100 with the NVLink of its manual.

It ships one A100, with PCIe inside the node: its efficiencies by operator are taken, and the networks of the first
example in its manual (docs/system.md), which has this device with NVLink and 200 Gb/s between nodes. A layout fits by
the rule of its own search: the peak with what the allocator reserves, and 6 GiB besides, within the device.

It can say gated feed-forwards, grouped queries, head and loss, flash attention or none, unfused norms, gradients in
bf16 (`bf16 gradients`: whatever the row says), and other numbers of layers on the first and the last stage. What it
cannot, and what stands for it:

- other numbers of layers on stages between: it deals them evenly.
- which flash attention: it knows one. Learned positions, norms with biases: as without.
- ZeRO 2 and 3: it warns and counts ZeRO 1, so these are refused here.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from others.layout import Answer, Layout, Predict, Source, Unsaid

_DEVICE = Path("configs") / "system" / "a100_pcie.json"
_MANUAL = Path("docs") / "system.md"
_FIRST_EXAMPLE = re.compile(r"^```json\n(.*?)^```", re.DOTALL | re.MULTILINE)
_GIB = 2.0**30
_MARGIN_BYTES = 6 * _GIB
"""Its search keeps so much free of every device (`gmi_error`)."""


def load(folder: Path) -> Mapping[str, Predict]:
    """What predicts, by the name of its way of use."""
    config = importlib.import_module("simumax.core.config")
    perf = importlib.import_module("simumax.core.perf_llm")
    system = describe_system(folder)
    memory_bytes = system["accelerator"]["mem_gbs"] * _GIB

    def predict(layout: Layout) -> Answer:
        simulated = perf.PerfLLM()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simulated.configure(
                strategy_config=config.StrategyConfig.init_from_dict(strategy(layout)),
                model_config=config.ModelConfig.init_from_dict(model(layout)),
                system_config=config.SystemConfig.init_from_dict(system),
            )
            simulated.run_estimate()
            peaks = simulated.get_pp_stage_peak_mem(simulated.analysis_mem(), "peak_mem_with_reserved")
            cost = simulated.analysis_cost()
        peak_bytes = max(peaks.values())
        step_ms = cost.get("duration_time_per_iter")
        return Answer(in_ms(step_ms), peak_bytes, peak_bytes + _MARGIN_BYTES <= memory_bytes)

    def predict_bf16_gradients(layout: Layout) -> Answer:
        return predict(replace(layout, gradient_bytes=2.0))

    return {"SimuMax": predict, "SimuMax, bf16 gradients": predict_bf16_gradients}


def describe_system(folder: Path) -> dict[str, Any]:
    """Its A100 with the networks of its manual's first example."""
    described: dict[str, Any] = json.loads((folder / _DEVICE).read_text(encoding="utf-8"))
    found = _FIRST_EXAMPLE.search((folder / _MANUAL).read_text(encoding="utf-8"))
    if found is None:
        raise Unsaid(f"SimuMax: {_MANUAL} has no example of a system any more")
    return described | {"networks": json.loads(found[1])["networks"]}


def in_ms(figure: object) -> float:
    """A time as its results have it: ms, or text with a unit."""
    if isinstance(figure, (int, float)):
        return float(figure)
    number, unit = str(figure).split()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def model(layout: Layout) -> dict[str, object]:
    """Its description of the model."""
    return {
        "hidden_size": layout.hidden_size,
        "head_num": layout.num_heads,
        "kv_head_num": layout.num_kv_groups,
        "head_size": layout.head_size,
        "intermediate_size": layout.ffn_size,
        "layer_num": layout.num_layers,
        "vocab_size": layout.vocab_size,
        "use_swiglu": layout.gated,
    }


def strategy(layout: Layout) -> dict[str, object]:
    """Its description of the layout. Raises Unsaid for ZeRO 2 and 3."""
    if layout.zero > 1:
        raise Unsaid(f"SimuMax ignores ZeRO {layout.zero}")
    fp32_gradients = layout.gradient_bytes > 2
    return {
        "seq_len": layout.seq_length,
        "micro_batch_size": layout.mbs,
        "micro_batch_num": layout.num_micro_batches,
        "dtype": "bf16",
        "world_size": layout.num_devices,
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "zero_state": layout.zero,
        "enable_sequence_parallel": layout.sequence_parallel,
        "use_fused_norm": layout.fused_norm,
        "use_flash_sdp": layout.flash,
        "use_math_sdp": not layout.flash,
        "use_fp32_accum_grad": fp32_gradients,
        "grad_reduce_in_bf16": not fp32_gradients,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "enable_recompute": layout.recompute,
        "recompute_granularity": "full_block" if layout.recompute else None,
        "recompute_layer_num": layout.num_layers if layout.recompute else 0,
        **_ends(layout.layers_per_stage),
    }


def _ends(layers: tuple[int, ...]) -> dict[str, object]:
    """Layers of the first and the last stage where these have their own number and those between are equal."""
    if len({*layers}) == 1 or len({*layers[1:-1]}) > 1:
        return {}
    return {"num_layers_in_first_pipeline_stage": layers[0], "num_layers_in_last_pipeline_stage": layers[-1]}


SOURCE = Source(
    "SimuMax",
    "https://github.com/MooreThreads/SimuMax",
    "4dcaae513ba7679d56c116a17cd4a691ec41e252",
    ("simumax", "configs", "docs"),
    ("pandas", "sympy"),
    load,
)
