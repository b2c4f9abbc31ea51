"""Galvatron for Paddle: the flags of its search, its space searched exactly, and the files that its trainer reads.

Source: FeixLiu/paddle-galvatron at b0bdd07, llm/auto_parallel/galvatron-llama-submit. Its search also goes through
lowest and highest degrees of layers and vocabulary; with batches that are cut into whole samples the lowest changes no
figure, and what degrees leave out lies within the space of all of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.galvatron.cost import Batch
from mm_autoparallel.integrations.galvatron.hardware import read_hardware
from mm_autoparallel.integrations.galvatron.mixes import Mixing, Resharding
from mm_autoparallel.integrations.galvatron.paddle_cost import PaddleCostModel, PaddleTraining
from mm_autoparallel.integrations.galvatron.profiles import read_model
from mm_autoparallel.integrations.galvatron.score import (
    MIB_PER_GB,
    UPSTREAM,
    Extensions,
    Score,
    Tally,
    even_division,
    reserve_of,
    reshard,
)
from mm_autoparallel.integrations.galvatron.search import Found, Part, Space, assign, search_spaces
from mm_autoparallel.integrations.galvatron.strategies import DpType, FlaggedEnds, LayerStrategy, powers
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment, numbers_at, size_at
from mm_autoparallel.records import MAX_LAYERS

RESERVE_FRACTION = 0.3
WHAT = "Galvatron strategy for Paddle"
FILE = "fine_grained_config.json"
_STAGES: dict[str, int] = {"ddp": 0, "zero2": 2, "zero3": 3}
_TYPES: dict[int, DpType] = {0: "ddp", 2: "zero2", 3: "zero3"}
_LISTS = ("dp_size_list", "sharding_stage_list", "tp_size_list", "usp_flag_list", "recompute_list", "pp_stage_idx_list")
_WORDS = {
    "time_profile_mode": ("static", "batch", "sequence"),
    "memory_profile_mode": ("static", "sequence"),
    "mixed_precision_type": ("bf16", "fp16", "fp32"),
    "sp_space": ("tp", "tp+sp"),
}
_MOST_DEVICES, _MOST_SAMPLES = 65_536, 1_000_000


@dataclass(frozen=True)
class PaddleFlags:
    """Flags of its search_dist.py, by their names and with their defaults. Paths are of files."""

    time_profile_data_path: Path | None = None
    memory_profile_data_path: Path | None = None
    overlap_coe_path: Path | None = None
    allreduce_coe_path: Path | None = None
    p2p_coe_path: Path | None = None
    sp_time_path: Path | None = None
    time_profile_mode: Literal["static", "batch", "sequence"] = "static"
    memory_profile_mode: Literal["static", "sequence"] = "static"
    num_layertype: int = 1
    hidden_size_list: int = 4096
    layernum_list: int = 12
    seqlen_list: int = 1024
    profile_gpu_num: int = 8
    search_granularity: str = "coarse-grained"
    world_size: int = 8
    min_bsz: int = 64
    max_bsz: int = 64
    bsz_step: int = 1
    max_tp_size: int = 8
    max_pp_size: int = 8
    mixed_precision_type: Literal["bf16", "fp16", "fp32"] = "bf16"
    memory_upper_limit: int = 24
    sp_space: Literal["tp", "tp+sp"] = "tp"
    layernum: int = 16
    disable_sdp: int = 0
    disable_vtp: int = 0

    @property
    def highest_degree(self) -> int:
        """Of layers and of the vocabulary. disable_vtp leaves its search degree 1 alone, of layers too."""
        return 1 if self.disable_vtp else self.max_tp_size

    @property
    def batches(self) -> range:
        """Samples of a step, as its search steps through them."""
        step = self.bsz_step
        least = max(self.min_bsz, step) // step * step
        return range(least, -(-self.max_bsz // step) * step + (0 if self.max_bsz % step else 1), step)


def read_flags(values: Mapping[str, Any]) -> PaddleFlags:
    """From values of flags by their names, None where nobody says. Raises JobError that names the flag."""
    given = {each.name: values[each.name] for each in fields(PaddleFlags) if values.get(each.name) is not None}
    flags = PaddleFlags(**given)
    for name, words in _WORDS.items():
        if getattr(flags, name) not in words:
            raise JobError(f"--{name} is {getattr(flags, name)!r}; one of {', '.join(words)} is expected", key=name)
    limits = {"memory_upper_limit": 100_000, "layernum": MAX_LAYERS, "disable_sdp": 1, "disable_vtp": 1}
    limits |= dict.fromkeys(("world_size", "max_tp_size", "max_pp_size"), _MOST_DEVICES)
    limits |= dict.fromkeys(("min_bsz", "max_bsz", "bsz_step"), _MOST_SAMPLES)
    limits |= dict.fromkeys(("hidden_size_list", "seqlen_list"), 10**9)
    for name, most in limits.items():
        value, least = getattr(flags, name), 0 if name.startswith("disable") else 1
        if not least <= value <= most:
            raise JobError(f"--{name} is {value}; a whole number from {least} to {most} is expected", key=name)
    for name in (each.name for each in fields(PaddleFlags) if each.name.endswith("_path")):
        if getattr(flags, name) is None:
            raise JobError(f"--{name} is missing; it is the file that Galvatron's profiler wrote", key=name)
    for one, other in (("profile_gpu_num", "world_size"), ("layernum_list", "layernum")):
        if getattr(flags, one) != getattr(flags, other):
            raise JobError(
                f"--{one} is {getattr(flags, one)} and --{other} {getattr(flags, other)}; they must be the same",
                key=one,
            )
    if flags.num_layertype != 1:
        raise JobError(f"--num_layertype is {flags.num_layertype}; one kind of layers is planned", key="num_layertype")
    if flags.search_granularity != "fine-grained":
        raise JobError(
            f"--search_granularity is {flags.search_granularity!r}; fine-grained is searched: a strategy a layer",
            key="search_granularity",
        )
    if not 0 < len(flags.batches) <= 1_000:
        raise JobError(
            f"--min_bsz, --max_bsz and --bsz_step give {len(flags.batches)} batch sizes; 1 to 1,000 are expected"
        )
    return flags


class PaddlePlanner:
    """Its cost model and memory rule. is_as_is: as of `PaddleTraining`. Raises JobError where a profile is missing or
    spoilt."""

    def __init__(self, flags: PaddleFlags, is_as_is: bool, extensions: Extensions = UPSTREAM) -> None:
        paths = [
            flags.allreduce_coe_path,
            flags.p2p_coe_path,
            flags.overlap_coe_path,
            flags.sp_time_path,
            flags.time_profile_data_path,
            flags.memory_profile_data_path,
        ]
        allreduce, p2p, overlap, sp_time, time, memory = (path or Path() for path in paths)
        modes = flags.time_profile_mode, flags.memory_profile_mode
        self.flags, self.extensions = flags, extensions
        self.cost = PaddleCostModel(
            read_model(time, memory, flags.seqlen_list, *modes, is_sequence_parallel=False),
            read_hardware(allreduce, p2p, overlap, sp_time, flags.world_size),
            PaddleTraining(
                flags.hidden_size_list,
                flags.seqlen_list,
                flags.mixed_precision_type != "fp32",
                flags.sp_space == "tp+sp",
                is_as_is,
            ),
        )
        self.reserve_mib = reserve_of(flags.memory_upper_limit, extensions.reserve_fraction, RESERVE_FRACTION)
        self.limit_mib = flags.memory_upper_limit * MIB_PER_GB - self.reserve_mib

    def score(self, plan: Assignment) -> Score:
        """Its step and memory of any plan. Raises JobError where a profile lacks what it uses, PlanError where its
        batch is not cut into whole samples."""
        for strategy in (plan.ends, *plan.layers):
            if plan.num_samples % (plan.chunks * strategy.dp):
                raise PlanError(
                    f"a batch of {plan.num_samples} is no multiple of {plan.chunks} accumulation steps x DP "
                    f"{strategy.dp}"
                )
        batch = Batch(plan.num_samples, plan.chunks)
        ends = plan.ends if isinstance(plan.ends, FlaggedEnds) else FlaggedEnds(**vars(plan.ends))
        kinds = [*dict.fromkeys(plan.layers)]
        costs = {kind: self.cost.layer(kind, batch) for kind in kinds}
        tally = Tally(plan, costs, self.cost.ends(ends, batch), self.resharding(kinds, batch))
        return tally.score(self.limit_mib, self.reserve_mib)

    def resharding(self, layers: Sequence[LayerStrategy], batch: Batch) -> Resharding:
        """As `reshard`."""
        return reshard(layers, batch, self.cost.hardware, self.cost.message_mib(1))


# ------------------------------------------------------------------------------------------------------------- search


def search_paddle(planner: PaddlePlanner, should_stop: Callable[[], bool] = lambda: False) -> Found:
    """The best plan of its space. Raises JobError where a profile lacks what a strategy needs, Unfinished as
    `search_spaces`."""

    return search_spaces(
        list_spaces(planner.flags),
        lambda space, left_out: list_parts(planner, space, left_out),
        lambda part, mix: planner.score(assign(part, mix, "pipedream_flush", "zero2")),
        should_stop,
    )


def list_spaces(flags: PaddleFlags) -> Iterator[Space]:
    """In its order."""
    for samples in flags.batches:
        for chunks in range(1, samples + 1):
            if samples % chunks == 0:
                for pp in powers(min(flags.world_size, flags.max_pp_size, flags.layernum)):
                    if flags.world_size % pp == 0:
                        yield Space(Batch(samples, chunks), pp, False, flags.highest_degree)


def list_parts(planner: PaddlePlanner, space: Space, left_out: Counter[str]) -> Iterator[Part]:
    """What fits of a space by the ways to hold its ends; left_out: counts what does not stand there, by reason."""
    flags, batch, pp = planner.flags, space.batch, space.pp
    devices = flags.world_size // pp
    degrees = [  # its trainer takes whole samples alone
        each
        for each in powers(min(devices, flags.highest_degree))
        if devices % each == 0 and batch.samples % (batch.chunks * (devices // each)) == 0
    ]
    layers, ends = [], []
    states, activations = planner.cost.profile.ends_degrees(pp)
    for degree in degrees:
        dp = devices // degree
        for is_sp in (False, True) if flags.sp_space == "tp+sp" else (False,):
            tp, sp = (1, degree) if is_sp else (degree, 1)
            if degree not in planner.cost.profile.layer_degrees:
                left_out[f"layers were not measured at degree {degree}"] += 1
            elif degree > 1 or not is_sp:
                kinds: tuple[DpType, ...] = ("ddp", "zero2", "zero3") if dp > 1 else ("ddp",)
                layers += [LayerStrategy(pp, tp, sp, dp, kind, again) for kind in kinds for again in (False, True)]
            if tp not in states or degree not in activations:
                left_out[f"embedding and head were not measured at degree {degree} with PP {pp}"] += 1
                continue
            sharded: tuple[DpType, ...] = ("ddp",) if flags.disable_sdp else ("ddp", "zero3")
            ends += [FlaggedEnds(pp, tp, sp, dp, kind, is_sp) for kind in sharded]
    if not layers:
        return
    costs = [planner.cost.layer(strategy, batch) for strategy in layers]
    extensions = planner.extensions
    mixing = Mixing(
        costs,
        even_division(flags.layernum, pp),
        batch.chunks,
        extensions.spread,
        extensions.counts_every_stage or extensions.spread > 0,
        planner.resharding(layers, batch) if extensions.counts_resharding else None,
    )
    for strategy in ends:
        cost = planner.cost.ends(strategy, batch)
        bound_s = mixing.quick_bound_s(cost, [planner.limit_mib] * pp)
        if bound_s < math.inf:
            yield Part(space, mixing, layers, strategy, cost, planner.limit_mib, bound_s)


# -------------------------------------------------------------------------------------------------------------- files


def format_fine_grained(plan: Assignment) -> str:
    """fine_grained_config.json with its keys in its order."""

    def each(values: Sequence[int]) -> str:
        return ",".join(str(int(value)) for value in values)

    ends = plan.ends
    document = {
        "pp_size": ends.pp,
        "vtp": ends.degree,
        "vsp_flag": int(ends.uses_ulysses),
        "embed_sdp": int(ends.dp_type == "zero3"),
        "global_batch_size": plan.num_samples,
        "gradient_accumulation_steps": plan.chunks,
        "dp_size_list": each([layer.dp for layer in plan.layers]),
        "sharding_stage_list": each([_STAGES[layer.dp_type] for layer in plan.layers]),
        "tp_size_list": each([layer.degree for layer in plan.layers]),
        "usp_flag_list": each([layer.sp > 1 for layer in plan.layers]),
        "recompute_list": each([layer.checkpoint for layer in plan.layers]),
        "pp_stage_idx_list": each([stage for stage, held in enumerate(plan.division) for _ in range(held)]),
    }
    return json.dumps(document, indent=4)


def read_fine_grained(path: Path, num_devices: int) -> Assignment:
    """The plan at `path`; as `parse_fine_grained`."""
    return parse_fine_grained(read_document(path, WHAT, PlanError), f"{WHAT} {path}", num_devices)


def parse_fine_grained(document: Mapping[str, Any], where: str, num_devices: int) -> Assignment:
    """The plan that a file holds for `num_devices`. Raises PlanError that names `where` and key, where the lists do not
    agree with each other or with the devices too."""
    lists = {name: numbers_at(document, name, where) for name in _LISTS}
    count = len(lists["tp_size_list"])
    pp = size_at(document, "pp_size", where)
    for name, values in lists.items():
        if len(values) != count:
            raise PlanError(f"{name} has {len(values)} layers, tp_size_list {count}", where=where, key=name)
    stages = lists["pp_stage_idx_list"]
    if pp > count or sorted(stages) != stages or {*stages} != {*range(pp)}:
        raise PlanError(
            f"pp_stage_idx_list does not hold the stages 0 to {pp - 1} in their order",
            where=where,
            key="pp_stage_idx_list",
        )
    for name, allowed in (("sharding_stage_list", (*_TYPES,)), ("usp_flag_list", (0, 1)), ("recompute_list", (0, 1))):
        wrong = next((value for value in lists[name] if value not in allowed), None)
        if wrong is not None:
            told = " or ".join(map(str, allowed))
            raise PlanError(f"{name} has a {wrong}; {told} is expected", where=where, key=name)
    for name in ("vsp_flag", "embed_sdp"):
        if document.get(name, 0) not in (0, 1):
            raise PlanError(f"{name} is {describe_value(document[name])}; 0 or 1 is expected", where=where, key=name)
    vtp, layers = size_at(document, "vtp", where), []
    for place in range(count):
        dp, sharding, degree, is_sp, again, _ = (lists[name][place] for name in _LISTS)
        if dp * degree * pp != num_devices:
            raise PlanError(
                f"layer {place} has DP {dp}, degree {degree} and PP {pp}, which are not {num_devices} devices",
                where=where,
                key="dp_size_list",
            )
        tp, sp = (1, degree) if is_sp else (degree, 1)
        layers.append(LayerStrategy(pp, tp, sp, dp, "ddp" if dp == 1 else _TYPES[sharding], bool(again)))
    if num_devices % (pp * vtp):
        raise PlanError(f"vtp is {vtp}, which does not divide the {num_devices // pp} devices of a stage", where=where)
    tp, sp = (1, vtp) if document.get("vsp_flag") else (vtp, 1)
    sharded: DpType = "zero3" if document.get("embed_sdp") else "ddp"
    ends = FlaggedEnds(pp, tp, sp, num_devices // pp // vtp, sharded, bool(document.get("vsp_flag")))
    division = tuple(stages.count(stage) for stage in range(pp))
    samples, chunks = (
        size_at(document, "global_batch_size", where),
        size_at(document, "gradient_accumulation_steps", where),
    )
    return Assignment(tuple(layers), ends, division, samples, chunks, "pipedream_flush", "zero2")


def map_to_trainer(plan: Assignment) -> tuple[dict[str, object], list[str]]:
    """Flags of its trainer that stand beside the file, and what to mind about them.

    By its usage text, which takes the first layer's sizes; the trainer itself takes its degrees from the vocabulary.
    """
    first = plan.layers[0]
    flags: dict[str, object] = {
        "sharding_parallel_degree": first.dp,
        "tensor_parallel_degree": first.degree,
        "pipeline_parallel_degree": plan.ends.pp,
        "recompute": any(layer.checkpoint for layer in plan.layers),
        "gradient_accumulation_steps": plan.chunks,
        "per_device_train_batch_size": plan.num_samples // plan.chunks // first.dp,
    }
    notes = []
    if plan.ends.degree != first.degree:
        notes.append(
            f"the vocabulary has degree {plan.ends.degree} and the first layer {first.degree}: the trainer takes its "
            "own degrees from the vocabulary's"
        )
    return flags, notes
