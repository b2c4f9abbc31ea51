"""Calculon (Isaev et al., SC 2023): a layout in its options, its own system file of an A100 80 GB.

What it cannot say, and what stands for it:

- head, loss and embedding: left out; it has transformer blocks alone.
- a gated feed-forward: a plain one of 1.5 times the width, which has the same matrices' bytes and operations.
- grouped queries: Calculon divides no keys and values by groups; as many as heads.
- flash attention: its recomputation of attention alone (`attn_only`), which keeps no scores either; `scores kept` says
  no recomputation in its place.
- bf16: its fp16, which has the same width; its system file knows no other of two bytes.
- unfused norms, rotary positions, layers per stage (it deals them evenly and rounds up): left out.

Tensor parallel ranks use its first network (a node), data and pipeline parallel ranks its second, as Megatron-LM deals
ranks. Its memory limit is checked here and not there, so that it also tells the time of what does not fit.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from others.layout import Answer, Layout, Predict, Source, Unsaid

_SYSTEM = Path("systems") / "a100_80g.json"
_GIB = 2.0**30


def load(folder: Path) -> Mapping[str, Predict]:
    """What predicts, by the name of its way of use."""
    llm = importlib.import_module("calculon.llm.llm").Llm
    system_class = importlib.import_module("calculon.system").System
    described = json.loads((folder / _SYSTEM).read_text(encoding="utf-8"))
    memory_bytes = described["mem1"]["GiB"] * _GIB
    unlimited = copy.deepcopy(described)
    for tier in ("mem1", "mem2"):
        unlimited[tier]["GiB"] = 1e9
    quiet = logging.getLogger("calculon")
    quiet.setLevel(logging.CRITICAL)

    def predict(layout: Layout, flash: str = "attn_only") -> Answer:
        model = llm(llm.Application(application(layout)), quiet)
        system = system_class(unlimited)
        try:
            model.compile(system, llm.Execution.from_json(execution(layout, flash)))
            model.run(system)
        except llm.Error as failure:
            raise Unsaid(f"Calculon: {failure}") from None
        peak_bytes = model.get_mem_tier1_cap_req()
        return Answer(1e3 * model.get_total_time(), peak_bytes, peak_bytes <= memory_bytes)

    return {"Calculon": predict, "Calculon, scores kept": lambda layout: predict(layout, "none")}


def application(layout: Layout) -> dict[str, float]:
    """Its description of the model."""
    return {
        "hidden": layout.hidden_size,
        "feedforward": layout.ffn_size * 3 // 2 if layout.gated else layout.ffn_size,
        "seq_size": layout.seq_length,
        "attn_heads": layout.num_heads,
        "attn_size": layout.head_size,
        "num_blocks": layout.num_layers,
    }


def execution(layout: Layout, flash: str = "attn_only") -> dict[str, object]:
    """Its description of the layout; `flash` is its recomputation where flash attention ran."""
    exchange = "rs_ag" if layout.sequence_parallel else "p2p_rs_ag" if layout.scatter_gather_p2p else "ar"
    return {
        "num_procs": layout.num_devices,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": 0 if layout.tp <= layout.devices_per_node else 1,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": layout.global_batch_size,
        "microbatch_size": layout.mbs,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": "full" if layout.recompute else flash if layout.flash else "none",
        "pipeline_interleaving": 1,
        "optimizer_sharding": layout.zero >= 1 and layout.dp > 1,
        "tensor_par_comm_type": exchange,
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": layout.overlap_grad_reduce and layout.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


SOURCE = Source(
    "Calculon",
    "https://github.com/calculon-ai/calculon",
    "caa4b11f8fe1fee3ba57adaacb7590d7deabd053",
    ("calculon", "systems"),
    ("psutil",),
    load,
)
