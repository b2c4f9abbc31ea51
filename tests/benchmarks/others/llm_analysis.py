"""llm-analysis (Li, 2023): a layout in its options, its own description of an A100 80 GB with NVLink.

It takes its efficiencies from its user. Here they are those of its own training examples on this device (examples/llama
in its repository): 0.5 of the peak of matrix products, 0.9 of the memory's bandwidth. A gated feed-forward and grouped
queries it can say. What it cannot, and what stands for it:

- a pipeline's bubble: it has none. `with a bubble` multiplies its compute by (micro-batches + stages − 1) /
  micro-batches, which is ours and not its own.
- a boundary between stages, reduction of gradients without ZeRO 3, layers per stage (it rounds down): left out.
- flash attention: its flag of that name, of memory alone. Unfused norms: left out.
- a head of its own: it knows a tied one alone, and divides its work by pipeline stages.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path

from others.layout import Answer, Layout, Predict, Source

_GIB = 2.0**30
_GPU = "a100-sxm-80gb"
_FLOPS_EFFICIENCY, _MEMORY_EFFICIENCY = 0.5, 0.9


def load(folder: Path) -> Mapping[str, Predict]:
    """What predicts, by the name of its way of use."""
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    logging.getLogger("__name__").setLevel(logging.CRITICAL)  # the name that it gives its logger
    gpu, dtype = config.get_gpu_config_by_name(_GPU), config.get_dtype_config_by_name("w16a16e16")

    def predict(layout: Layout) -> Answer:
        parallel = config.ParallelismConfig(
            tp_size=layout.tp,
            pp_size=layout.pp,
            dp_size=layout.dp,
            sp_size=layout.tp if layout.sequence_parallel else 1,
        )
        found = analysis.LLMAnalysis(
            config.ModelConfig(**model_config(layout)),
            gpu,
            dtype,
            parallel,
            flops_efficiency=_FLOPS_EFFICIENCY,
            hbm_memory_efficiency=_MEMORY_EFFICIENCY,
        ).training(
            batch_size_per_gpu=layout.mbs,
            global_batch_size=layout.global_batch_size,
            seq_len=layout.seq_length,
            activation_recomputation=analysis.ActivationRecomputation.FULL
            if layout.recompute
            else analysis.ActivationRecomputation.NONE,
            ds_zero=analysis.DSZeRO(layout.zero),
            flash_attn=layout.flash,
        )
        peak_bytes = found["estimated_peak_memory_per_gpu"]
        fits = peak_bytes <= gpu.mem_per_GPU_in_GB * _GIB
        return Answer(1e3 * found["latency_per_iter"], peak_bytes, fits)

    def predict_with_bubble(layout: Layout) -> Answer:
        found = predict(layout)
        bubble = (layout.num_micro_batches + layout.pp - 1) / layout.num_micro_batches
        return Answer(found.step_ms * bubble, found.peak_bytes, found.fits)

    return {"llm-analysis": predict, "llm-analysis, with a bubble": predict_with_bubble}


def model_config(layout: Layout) -> dict[str, object]:
    """Its description of the model."""
    return {
        "name": "row",
        "num_layers": layout.num_layers,
        "n_head": layout.num_heads,
        "hidden_dim": layout.hidden_size,
        "vocab_size": layout.vocab_size,
        "max_seq_len": layout.seq_length,
        "num_key_value_heads": layout.num_kv_groups,
        "ffn_embed_dim": layout.ffn_size,
        "mlp_gated_linear_units": layout.gated,
    }


SOURCE = Source(
    "llm-analysis",
    "https://github.com/cli99/llm-analysis",
    "d841e40aec8c84b9e76ba9cfbce67418adb172bd",
    ("llm_analysis",),
    ("fire",),
    load,
)
