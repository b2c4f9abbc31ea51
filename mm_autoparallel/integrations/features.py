"""What a plan can decide, feature by feature: every exporter says of each what becomes of it."""

from __future__ import annotations

from typing import Literal

Handling = Literal["written", "rounded", "refused"]
"""Of a plan that has the feature: the files say it; they say something that keeps less memory, told in a sentence; or
no file is written, and the refusal names it."""

FEATURES: dict[str, str] = {
    "pipeline": "PP, equal stages",
    "uneven_stages": "any number of layers a stage",
    "chunks": "VPP, equal chunks",
    "uneven_chunks": "any number of layers a chunk",
    "partial_group": "VPP with micro-batches that are no multiple of PP",
    "encoder_first": "an encoder whole on the first stage",
    "encoder_stages": "an encoder over several stages",
    "gpipe": "gpipe",
    "low_memory_chunks": "interleaved_1f1b_low_memory",
    "tensor": "TP with sequence parallelism",
    "whole_sequences": "TP without sequence parallelism",
    "ring": "CP by ring",
    "all_to_all": "CP by all_to_all",
    "all_gather": "CP by all_gather",
    "hierarchical": "CP hierarchical",
    "experts": "EP",
    "whole_experts": "ETP 1 beside TP",
    "zero_0": "ZeRO 0",
    "zero_1": "ZeRO 1",
    "zero_2": "ZeRO 2 with PP 1",
    "zero_3": "ZeRO 3 with PP 1",
    "zero_2_pipeline": "ZeRO 2 with PP above 1",
    "zero_3_pipeline": "ZeRO 3 with PP above 1",
    "kept_weights": "ZeRO 3, weights kept from forward to backward",
    "shards": "ZeRO 3, several copies of the weights",
    "recompute_all": "recompute of all layers",
    "recompute_number": "recompute, the same number a stage",
    "recompute_stages": "recompute, any number a stage",
    "selective_all": "selective, all layers",
    "selective_some": "selective, some layers",
    "activation": "activation",
    "offload": "offload of activations",
    "recompute_offload": "recompute with inputs on the host",
    "optimizer_offload": "optimizer on the host",
    "rank_order": "ranks tp-cp-ep-pp-dp",
    "precision": "a precision below bf16 that was chosen",
    "graphs": "CUDA graphs that were chosen",
    "dispatcher": "a dispatcher of tokens that was chosen",
    "token_overlap": "an overlap of the experts' exchange that was chosen",
}
"""Key → what it is, for people. tests/frameworks/featured_plans.py has a plan of each."""
