"""Costs of a job as Galvatron's profiles: what its profiler would write of the job's cluster and of its decoder.

Times are those that plans are made from (measured, traced or analytic), so that Galvatron's search, its own or the one
here, runs on a job without a run of its profiler. What its formats cannot say is left out: times of the backward (twice
the forward there), the optimizer's step, and that rings beside each other share links.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.galvatron.strategies import powers
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.collectives import form_group
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.units import GIB, MIB

SEARCH = "search.yaml"
BATCHES = range(1, 9)
"""Samples of a micro-batch: Galvatron draws a line through eight."""
MESSAGES_MIB = [1 << shift for shift in range(11)]
_LONG_MIB = 256
"""Of the message that a bandwidth is taken from."""
_HIGHEST_DEGREE, _MOST_STAGES = 8, 16
_STATES_BYTES = 16
"""Of a parameter: four times fp32."""
_PRE, _LAYER, _POST = "text_pre", "text_layer", "text_post"


def format_profiles(job: Job) -> dict[str, str]:
    """Name of a file → its text; `search.yaml` names the others. Raises JobError where the model is no decoder of one
    kind of layers or the cluster no power of two, ProfileError where a profile does not fit the job."""
    known = CostModel(job)
    names = [block.name for block in known.chain.blocks]
    if names != [_PRE, _LAYER, _POST] or job.model.text.layers.experts is not None:
        experts = " with experts" if job.model.text.layers.experts is not None else ""
        raise JobError(
            f"its model has the blocks {', '.join(names)}{experts}; Galvatron's profiles are of dense decoders with "
            "alike layers",
            where=f"job file {job.path}",
            key="model",
        )
    devices = job.cluster.num_devices
    if devices & (devices - 1):
        raise JobError(
            f"it has {devices} devices; Galvatron's degrees are powers of two",
            where=f"job file {job.path}",
            key="cluster",
        )
    layers = job.model.text.layers
    degrees = [each for each in powers(min(devices, _HIGHEST_DEGREE)) if layers.num_heads % each == 0]
    nodes, each_node = job.cluster.num_nodes, job.cluster.devices_per_node
    machines, name = f"{nodes}nodes_{each_node}gpus_per_node.json", job.model.name
    documents = {
        f"computation_profiling_bf16_{name}_all.json": _times(known, devices, job.workload.seq_length),
        f"memory_profiling_bf16_{name}_all.json": _memory(known, devices, degrees, job.workload.seq_length),
        f"allreduce_bandwidth_{machines}": _rings(known, devices),
        f"p2p_bandwidth_{machines}": _hops(known, devices),
        f"sp_time_{machines}": _messages(known, devices),
        # of two equal times beside each other, all but the hidden part of one is added to the other
        "overlap_coefficient.json": {"overlap_coe": known.lanes.data.factor},
    }
    texts = {file: json.dumps(document, indent=1) + "\n" for file, document in documents.items()}
    return texts | {SEARCH: _search(job, name, layers.hidden_size, layers.num_layers)}


def _costs(known: CostModel, **sizes: int) -> tuple[BlockCost, BlockCost, BlockCost]:
    """Of the embedding, a layer, and the norm with the head."""
    found = block_costs(known, Strategy(zero=0, **{"mbs": 1, **sizes}))  # type: ignore[arg-type]
    return found[_PRE], found[_LAYER], found[_POST]


def _times(known: CostModel, devices: int, seq_length: int) -> dict[str, float]:
    """Forward ms of a sample."""
    found = {}
    for batch in BATCHES:
        pre, layer, post = _costs(known, pp=1, tp=1, dp=devices, mbs=batch)
        found[f"layertype_0_bsz{batch}_seq{seq_length}"] = layer.forward_ms / batch
        found[f"layertype_other_bsz{batch}_seq{seq_length}"] = (pre.forward_ms + post.forward_ms) / batch
    return found


def _memory(known: CostModel, devices: int, degrees: Sequence[int], seq_length: int) -> dict[str, Any]:
    """MiB of a layer's parameters in fp32, of what it keeps of a sample, and of the ends."""
    alone = {each: _costs(known, pp=1, tp=each, dp=devices // each) for each in degrees}
    staged = {each: _costs(known, pp=2, tp=each, dp=devices // 2 // each) for each in degrees if each * 2 <= devices}
    kept = {str(each): layer.activation_bytes / MIB for each, (_, layer, _) in alone.items()}
    _, whole, _ = alone[1]
    at = str(seq_length)

    def ends(costs: dict[int, tuple[BlockCost, BlockCost, BlockCost]], places: Sequence[int]) -> dict[str, Any]:
        states = {str(each): sum(found[place].parameter_count for place in places) for each, found in costs.items()}
        held = {
            str(each): sum(found[place].activation_bytes + found[place].transient_bytes for place in places) / MIB
            for each, found in costs.items()
        }
        return {at: {"model_states": {each: n * _STATES_BYTES / MIB for each, n in states.items()}, "activation": held}}

    return {
        "layertype_0_sp": {
            at: {
                "parameter_size": whole.parameter_count * 4 / MIB,
                "tp_activation_per_bsz_dict": kept | {"checkpoint": whole.checkpoint_bytes / MIB},
            }
        },
        "other_memory_pp_off_sp": ends(alone, (0, 2)),
        "other_memory_pp_on_first_sp": ends(staged or alone, (0,)),
        "other_memory_pp_on_last_sp": ends(staged or alone, (2,)),
    }


def _rings(known: CostModel, devices: int) -> dict[str, float]:
    """MiB/ms that pass a rank in an all-reduce, of neighbours and of ranks as far apart as can be."""
    found = {}
    for group in reversed(powers(devices)[1:]):
        for is_consecutive in (1, 0) if group < devices else (1,):
            ranks = form_group(known.cluster.levels, group, 1 if is_consecutive else devices // group, known.network)
            passed_mib = 2 * (group - 1) / group * _LONG_MIB
            found[f"allreduce_size_{group}_consec_{is_consecutive}"] = passed_mib / ranks.all_reduce_ms(_LONG_MIB * MIB)
    return found


def _hops(known: CostModel, devices: int) -> dict[str, float]:
    """MiB/ms over the slowest hop of a pipeline, by its stages."""
    found = {}
    for stages in powers(min(devices, _MOST_STAGES))[1:]:
        ranks = form_group(known.cluster.levels, stages, devices // stages, known.network)
        found[f"pp_size_{stages}"] = _LONG_MIB / ranks.pass_on_ms(_LONG_MIB * MIB)
    return found


def _messages(known: CostModel, devices: int) -> dict[str, float]:
    """ms of all-reduces and all-to-alls among neighbours, by their MiB."""
    found = {}
    for group in reversed(powers(min(devices, _HIGHEST_DEGREE))[1:]):
        ranks = form_group(known.cluster.levels, group, 1, known.network)
        for mib in MESSAGES_MIB:
            found[f"allreduce_size_{group}_{mib}MB_time"] = ranks.all_reduce_ms(mib * MIB)
        for mib in MESSAGES_MIB:
            found[f"all2all_size_{group}_{mib}MB_time"] = ranks.all_to_all_ms(mib * MIB)
    return found


def _search(job: Job, name: str, hidden_size: int, num_layers: int) -> str:
    """The configuration of a search, which lies beside the profiles."""
    nodes, each_node = job.cluster.num_nodes, job.cluster.devices_per_node
    memory_gb, batch = int(job.cluster.device.memory_bytes // GIB), job.workload.global_batch_size
    kinds = ("memory_profiling", "time_profiling", "allreduce_bandwidth_config", "p2p_bandwidth_config", "sp_time")
    sections = {
        "model_info": {"model_size": name, "hidden_size": hidden_size, "num_layers": num_layers},
        "common_train_info": {"seq_length": job.workload.seq_length, "sequence_parallel": True},
        "hardware_info": {"num_nodes": nodes, "num_gpus_per_node": each_node, "memory_constraint": memory_gb},
        "batch_size_info": {"min_bsz": batch, "max_bsz": batch, "bsz_scale": batch},
        "parallelism_info": {
            "default_dp_type": "zero2",
            "pipeline_type": "pipedream_flush",
            "mixed_precision": "bf16",
        },
        "profiling_info": {
            "time_profile_mode": "batch",
            "memory_profile_mode": "static",
            **{f"{kind}_path": "." for kind in (*kinds, "overlap_coe")},
        },
        "options_info": {"output_config_path": "."},
    }
    return yaml.safe_dump({"search_engine": sections}, sort_keys=False)
