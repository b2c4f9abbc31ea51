"""hash_job: the SHA-256 of all that has a say in a job's figures."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.stacks import UNKNOWN
from mm_autoparallel.model.job.workload import Workload

OWN_SOURCE = "job file"
"""The source of a device's figure that is not the catalog's."""

_OF_PRECISION = ("fp8_flops_per_s", "fp4_flops_per_s", "clock_fraction", "domain_devices")
"""Figures of devices that are newer than node groups."""

_LATER = {
    "model": (
        "train_positions",
        "post_norms",
        "gated_ffn_size",
        "delta",
        "output_gate",
        "conv_channels",
        "convolutions",
    ),
    "workload": (
        "expert_imbalance_factor",
        "overlap_all_to_all",
        "ep_kind",
        "token_rearrange",
        "expert_capacity_factor",
        "fused_matmul_fraction",
        "grad_bucket_parameters",
        "selective_operators",
        "loss_chunk_tokens",
        "text_chunk_samples",
        "length_spread_fraction",
        "variable_seq_lengths",
        "replicate_towers",
        "mask_compression",
        "facts",
        "precision",
        "tower_precision",
        "dealing_ranks",
        "samples",
        "encoder_tokens_per_sample",
        "samples_per_sequence",
        "cached_features",
    ),
    "device": (
        "host_link_bytes_per_s",
        "host_memory_bytes_per_s",
        "matrix_units",
        *_OF_PRECISION,
    ),
    "facts": (
        "dispatcher",
        "graphs",
        "drops_tokens",
        "grouped_activation",
        "joined_heads",
        "early_experts",
        "low_first_last",
        "low_parameters",
        "fp8_attention",
        "fused_casts",
        "tp_overlap",
        "compiled",
        "open_ring_fraction",
        "split_attention_factor",
        "exchanges_hops",
        "keeps_gate",
        "keeps_joint",
        "repeated_groups",
    ),
    "samples": ("videos", "frames", "frame_patches", "packing"),
}
"""Keys that are newer than plans with a hash: they count where they say something else than what holds without them."""


def hash_job(model: Model, cluster: Cluster, workload: Workload) -> str:
    """SHA-256 of the canonical JSON of all figures of a job, in hexadecimal."""
    content: dict[str, Any] = {
        "model": model.model_dump(mode="json", exclude={"name"} if model.adapters else {"name", "adapters"}),
        "cluster": describe_cluster(cluster),
        "workload": workload.model_dump(mode="json"),
    }
    for part in (*content["model"]["encoders"], content["model"]["text"]):
        for place in (part, *(part.get(name) or {} for name in ("layers", "stem", "projector", "deepstack"))):
            for key in _LATER["model"]:
                if not place.get(key, True):
                    del place[key]
        experts = (part.get("layers") or {}).get("experts") or {}
        for key in ("max_groups", "num_groups"):
            if not experts.get(key, True):
                del experts[key]
    for key in _LATER["workload"]:
        if getattr(workload, key) == Workload.model_fields[key].get_default(call_default_factory=True):
            del content["workload"][key]
    if workload.samples:
        del content["workload"]["samples"]["file"]  # what is in it has a say, as sha256 has it
        for key in _LATER["samples"]:
            if getattr(workload.samples, key) is None:
                del content["workload"]["samples"][key]
    if workload.facts:
        for key in _LATER["facts"]:
            if getattr(workload.facts, key) == getattr(UNKNOWN, key):
                del content["workload"]["facts"][key]
    for key in _LATER["device"]:
        if getattr(cluster.device, key) is None or cluster.device.sources.get(key, OWN_SOURCE) != OWN_SOURCE:
            content["cluster"]["device"].pop(key, None)
    for group, written in zip(cluster.node_groups, content["cluster"].get("node_groups", ()), strict=False):
        sources = group.device.sources if group.device else {}
        for key in _OF_PRECISION:
            if sources.get(key, OWN_SOURCE) != OWN_SOURCE:
                written["device"].pop(key, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """All of a cluster that has a say in any figure, as JSON values: names and sources have none."""
    nameless = {"name", "source", "sources"}
    document = cluster.model_dump(
        mode="json",
        exclude={
            "device": nameless,
            "levels": {"__all__": nameless},
            "node_groups": {"__all__": {"device": nameless}},
        },
    )
    kept: dict[str, Any] = _drop_unsaid(document)
    return kept


_UNSAID: dict[str, Any] = {
    "host_memory_bytes": None,
    "host_memory_fraction": 0.8,
    "node_groups": [],
    "slow_devices": [],
    "device_time_spread_fraction": 0.0,
    "devices_per_card": 1,
    "scale_ranks": None,
    "hop_bandwidth_bytes_per_s": None,
    "fp8_flops_per_s": None,
    "fp4_flops_per_s": None,
    "clock_fraction": None,
    "domain_devices": None,
    "of_node_link": False,
    "slowdown_factors": {},
}
"""Keys that change nothing with these values, and are left out of a job's hash where they have them."""


def _drop_unsaid(value: Any) -> Any:
    if isinstance(value, dict):
        said = (key for key, inner in value.items() if key not in _UNSAID or inner != _UNSAID[key])
        return {key: _drop_unsaid(value[key]) for key in said}
    return [_drop_unsaid(inner) for inner in value] if isinstance(value, list) else value
