"""A job's costs as a folder that Tinker's search reads: what its profiler would write of the job's decoder.

Four blocks a configuration: the embedding, a layer, the final norm, the head. The norm is measured with the head, so
that its row has weights alone. A table that the head shares with the embedding is counted at both ends, as it lies
where they are on different stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.tinker.profiles import COLUMNS, DATA, INTER, INTRA, OUT_OF_MEMORY, Config
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.profiles.collectives import form_group
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.units import MIB

BATCHES = (1, 2, 4, 8)
"""Samples of a micro-batch that Tinker measures, up to the largest that a person asks for."""
_PRE, _LAYER, _POST = "text_pre", "text_layer", "text_post"
_ROWS = ("embedding", "transformer_block", "final_norm", "post_process")
_MESSAGES_MIB = [1 << shift for shift in range(11)]
_TOKEN_BYTES, _LOSS_BYTES = 8, 4
_US_PER_MS = 1000.0
_NAME = re.compile(r"[\w.+-]{1,100}")


@dataclass(frozen=True)
class Named:
    """What a folder says of itself. task: a word at its end, may be empty. when: yymmdd-HHMMSS. source: `measured` or
    `traced`. is_fp16: of its 16-bit types, the one that the training has. more: what else its VERSION file tells."""

    model: str
    size: str
    task: str
    when: str
    source: str
    more: dict[str, Any]
    is_fp16: bool = False

    def __post_init__(self) -> None:
        for what, word in (("model_name", self.model), ("model_size", self.size), ("task_id", self.task or "_")):
            if not _NAME.fullmatch(word):
                raise JobError(f"--{what} is {word!r}; up to 100 letters, digits and . + - _ are expected")

    @property
    def folder(self) -> str:
        """Its name, as Tinker gives it."""
        return "-".join(filter(None, ("profiled-data", self.model, self.size, self.when, self.task)))


def list_configs(
    job: Job, tensor: Sequence[int], sequence: Sequence[int], max_batch: int
) -> tuple[tuple[Config, ...], tuple[str, ...]]:
    """What Tinker measures on the devices of one node of `job`, and why of the sizes asked for others are left out.

    tensor: sizes of TP; sequence: of 0 and 1, without and with sequence parallelism. Raises JobError where the model is
    no decoder of one kind of layers, or nothing is left.
    """
    check_blocks(job)
    experts, devices = job.model.text.layers.experts, job.cluster.devices_per_node
    found, left_out = [], {}
    for tp in tensor:
        for sp in sequence if tp > 1 else [each for each in sequence if each == 0]:
            for ep in range(1, devices + 1) if experts else (1,):
                reason = _reason(job, Config(tp, sp, ep))
                if reason is None:
                    found += [Config(tp, sp, ep, mbs) for mbs in BATCHES if mbs <= max_batch]
                elif ep == 1:
                    left_out[f"TP {tp}{' with sequence parallelism' if sp else ''}"] = reason
    told = tuple(f"left out: {what}: {reason}" for what, reason in left_out.items())
    if not found:
        raise JobError(f"none of the sizes asked for can be measured: {'; '.join(told) or 'give a TP'}")
    return tuple(found), told


def check_blocks(job: Job) -> None:
    """Raises JobError where the model is no decoder whose layers are all alike."""
    names = [block.name for block in CostModel(job).chain.blocks]
    if names != [_PRE, _LAYER, _POST]:
        raise JobError(
            f"its model has the blocks {', '.join(names)}; Tinker's profiles are of decoders with alike layers, the "
            "embedding before and the head behind them",
            where=str(job.path),
        )


def _reason(job: Job, config: Config) -> str | None:
    """Why Tinker measures no such configuration, or this package plans none; None where both do."""
    tp, sp, ep = config.tp, config.sp, config.ep
    devices, experts = job.cluster.devices_per_node, job.model.text.layers.experts
    if devices % (tp * ep):
        return f"TP {tp} x EP {ep} does not divide {devices} devices"
    if experts and tp > 1 and not sp:
        return "experts beside TP need sequence parallelism"
    cluster = job.cluster.model_copy(update={"num_nodes": 1})
    return unlawful_reason(job.model, cluster, job.workload, strategy_of(job, config))


def strategy_of(job: Job, config: Config) -> Strategy:
    """One stage on the devices of a node."""
    replicas = job.cluster.devices_per_node // config.tp
    return Strategy(1, config.tp, replicas, config.mbs, ep=config.ep, zero=0, sequence_parallel=bool(config.sp))


def format_folder(job: Job, configs: Iterable[Config], named: Named, is_between_known: bool) -> dict[str, str]:
    """Name of a file → its text. is_between_known: whether bandwidth between nodes is written too.

    Raises ProfileError where a profile does not fit the job, JobError where no configuration fitted its device.
    """
    known = CostModel(job)
    lines, num_fitting = [COLUMNS], 0
    for config in configs:
        reason = known.overfull_reason(strategy_of(job, config))
        rows = list(_list_rows(known, config, fits=reason is None))
        num_fitting += reason is None
        name = f"{named.model}_{named.size}_tp{config.tp}_sp{config.sp}_ep{config.ep}_mbs{config.mbs}_algo0"
        lines += [",".join((name, block, *(f"{figure:.3f}" for figure in figures))) for block, figures in rows]
        lines.append("")
    if not num_fitting:
        raise JobError(f"{job.path}: no configuration fitted a device of {job.cluster.device.name}")
    workload = job.workload
    model: dict[str, Any] = {"seq_length": workload.seq_length, "fp16": named.is_fp16, "bf16": not named.is_fp16}
    model |= {"num_layers": job.model.text.layers.num_layers}
    version = {"version_profiler": "TinkerProfiler-1.3.3", "model_name": named.model, "model_size": named.size}
    version |= {"source": named.source, "p2p_source": "analytic" if known.network is None else "measured", **named.more}
    texts = {
        DATA: "\n".join(lines) + "\n",
        f"model_info_seq{workload.seq_length}.json": json.dumps(model, indent=4) + "\n",
        "VERSION_TinkerProfiler-1.3.3.json": json.dumps(version, indent=4) + "\n",
        INTRA: _format_bandwidth(known, stride=1),
    }
    return texts | ({INTER: _format_bandwidth(known, stride=job.cluster.devices_per_node)} if is_between_known else {})


def _list_rows(known: CostModel, config: Config, fits: bool) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Name of a block, and its figures in the order of COLUMNS."""
    job = known.job
    costs = block_costs(known, strategy_of(job, config))
    layers, weight_bytes = job.model.text.layers, job.workload.weight_bytes
    tokens = job.workload.seq_length * config.mbs
    hidden_mib = tokens * layers.hidden_size * weight_bytes / (config.tp if config.sp else 1) / MIB
    norm_count = layers.hidden_size * (2 if layers.norm == "layer" else 1)
    table_count = known.table_cost([costs[name] for name in (_PRE, _LAYER, _POST)]).parameter_count
    head_count = costs[_POST].parameter_count - norm_count + (table_count if known.has_tied_table else 0.0)
    nothing = (0.0, 0.0, 0.0, 0.0, 0.0)
    sizes = (tokens * _TOKEN_BYTES / MIB, hidden_mib, hidden_mib, hidden_mib, tokens * _LOSS_BYTES / MIB)
    counts = (costs[_PRE].parameter_count, costs[_LAYER].parameter_count, float(norm_count), head_count)
    measured = (_figures(costs[_PRE]), _figures(costs[_LAYER]), nothing, _figures(costs[_POST]))
    for at, (name, count, figures) in enumerate(zip(_ROWS, counts, measured, strict=True)):
        forward_us, backward_us, kept_mib, forward_mib, backward_mib = figures if fits else (OUT_OF_MEMORY,) * 5
        weights_mib = count * weight_bytes / MIB
        yield (
            name,
            (
                *(forward_us, backward_us, sizes[at], sizes[at + 1]),
                *(weights_mib, kept_mib, forward_mib, backward_mib),
            ),
        )


def _figures(cost: BlockCost) -> tuple[float, ...]:
    """µs forward and backward, MiB kept, and MiB held beside in forward and in backward."""
    held_mib = cost.transient_bytes / MIB
    backward_ms = cost.backward_input_ms + cost.backward_weight_ms
    return cost.forward_ms * _US_PER_MS, backward_ms * _US_PER_MS, cost.activation_bytes / MIB, held_mib, held_mib


def _format_bandwidth(known: CostModel, stride: int) -> str:
    """MB of messages, and GB/s of each between two ranks `stride` apart, MB being MiB as in Tinker's own sizes."""
    hop = form_group(known.cluster.levels, 2, stride, known.network)
    found = [mib / hop.pass_on_ms(mib * MIB) for mib in _MESSAGES_MIB]
    return f"{','.join(map(str, _MESSAGES_MIB))}\n{','.join(f'{figure:.4f}' for figure in found)}\n"
