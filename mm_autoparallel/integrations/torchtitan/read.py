"""What a torchtitan configuration runs: its plan, with the model that a person names.

Ranks, innermost first: TP, CP, shards, copies, PP (distributed/parallel_dims.py). Weights are shared over shards x CP.
Stages by module_fqns_per_model_part, else dealt evenly with the embedding and the head as layers
(distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value, is_there, read_text
from mm_autoparallel.integrations.config_files import Totals, describe_config, flag_at, need, read_totals, size_at
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.integrations.torchtitan.config import Config, read_config
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
MULTI, SCHEDULE = "PipelineScheduleMulti", "schedule.csv"
ROTATIONS = {"all_gather": "allgather", "ring": "alltoall"}
"""How context parallel ranks share attention → 0.2's context_parallel_rotate_method; 0.3 gathers."""
VISION = "vision_encoder"
_LAYER = re.compile(r"layers\.(\d{1,5})")


def describe_launch(path: Path, given: Given) -> Described:
    """What the configuration at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    config = read_config(path, given)
    length = size_at(config.training, "seq_len", str(path), 2048)
    plan = read_launch_plan(path, given)
    given = replace(given, seq_length=given.seq_length or length)
    return describe_config(path, given, "transformers", plan, {}, config.notes)


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the configuration at `path` runs. Raises JobError naming what nobody says, PlanError naming the key
    that is malformed or says what no plan does."""
    config, totals = read_config(path, given), read_totals(path, given)
    beside = path.parent / SCHEDULE
    order = read_text(beside, "schedule", "CSV") if is_there(beside) else None
    return read_plan(config, str(path), totals, need(given.world_size, path, "--world-size"), order)


def read_plan(config: Config, where: str, totals: Totals, world_size: int, order: str | None) -> Plan:
    """The plan of a configuration. totals: layers by modality. order: the content of schedule.csv beside it."""
    sizes, training = config.parallelism, config.training
    copies, tp, pp, cp, ep = (
        size_at(sizes, key, where)
        for key in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "expert_parallel_degree",
        )
    )
    rest = copies * tp * pp * cp
    shards = sizes.get("data_parallel_shard_degree", -1)
    shards = world_size // rest if shards == -1 else size_at(sizes, "data_parallel_shard_degree", where)
    if shards < 1 or rest * shards != world_size:
        raise PlanError(
            f"{where}: copies {copies} x shards {shards} x TP {tp} x PP {pp} x CP {cp} is not {world_size} devices"
        )
    if flag_at(training, "enable_cpu_offload", where):
        raise PlanError(f"{where}: enable_cpu_offload keeps weights on the host, which no plan says; take it out")
    dp, zero = copies * shards, 3 if shards * cp > 1 else 0
    reshard = sizes.get("fsdp_reshard_after_forward", "default")
    if reshard not in ("default", "always", "never"):
        raise PlanError(
            f"{where}: fsdp_reshard_after_forward is {describe_value(reshard)}; always or never is expected"
        )
    etp = size_at(sizes, "expert_tensor_parallel_degree", where) if config.version == "0.2" else 1
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=dp,
        mbs=1,
        cp=cp,
        ep=ep,
        etp=etp if ep > 1 and etp != tp else 0,
        zero=zero,
        cp_kind=_read_kind(config, where) if cp > 1 else "",
        reshard=zero < 3 or reshard == "always" or (reshard == "default" and pp == 1),
        shard=shards * cp if zero == 3 and copies > 1 else 0,
        sequence_parallel=tp == 1
        or config.version == "0.2"
        or flag_at(sizes, "enable_sequence_parallel", where, usual=True),
    )
    mbs, batch = _read_batch(config, where, strategy)
    layers = read_layers(config, where, totals, pp)
    vpp = len(layers["text"]) // pp
    schedule = "interleaved_1f1b" if vpp > 1 else "1f1b"
    plan = Plan(
        replace(strategy, mbs=mbs, vpp=vpp, schedule=schedule), layers, _read_recompute(config, where, layers), batch
    )
    return _name_schedule(plan, sizes, where, order)


def _read_kind(config: Config, where: str) -> Any:
    said = config.parallelism.get("context_parallel_rotate_method", "allgather")
    for kind, word in ROTATIONS.items():
        if word == said and (config.version == "0.2" or kind == "all_gather"):
            return kind
    raise PlanError(
        f"{where}: context_parallel_rotate_method is {describe_value(said)}; allgather or alltoall is expected"
    )


def run_with(vpp: int) -> tuple[str, ...]:
    """The schedules of a pipeline whose ranks have `vpp` parts."""
    return ("interleaved_1f1b", "interleaved_1f1b_low_memory") if vpp > 1 else ("1f1b", "gpipe")


def _name_schedule(plan: Plan, sizes: Mapping[str, Any], where: str, order: str | None) -> Plan:
    """`plan` with the schedule that the configuration names, or whose order is the one in schedule.csv."""
    strategy, said = plan.strategy, sizes.get("pipeline_parallel_schedule", "1F1B")
    if strategy.pp == 1:
        return plan
    fitting = run_with(strategy.vpp)
    named = [replace(plan, strategy=replace(strategy, schedule=name)) for name in fitting]
    if said == MULTI:
        if order is None:
            raise PlanError(f"{where}: {MULTI} runs a CSV, and {SCHEDULE} is not beside it")
        found = next((each for each in named if write_csv(each).split() == order.split()), None)
    else:
        found = next(
            (each for each in named if SCHEDULES.get(each.strategy.schedule, "").lower() == str(said).lower()), None
        )
    if found is None:
        raise PlanError(
            f"{where}: pipeline_parallel_schedule is {describe_value(said)} with {strategy.vpp} "
            f"part{'s' * (strategy.vpp > 1)} a rank; planned are {', '.join(fitting)}"
        )
    return found


def _read_batch(config: Config, where: str, strategy: Strategy) -> tuple[int, int]:
    """MBS and the global batch: local_batch_size is a replica's micro-batches together in a pipeline, one without."""
    local = size_at(config.training, "local_batch_size", where, 8)
    batch = config.training.get("global_batch_size", -1)
    batch = local * strategy.dp if batch == -1 else size_at(config.training, "global_batch_size", where)
    mbs = size_at(config.parallelism, "pipeline_parallel_microbatch_size", where) if strategy.pp > 1 else local
    if local % mbs or batch % (local * strategy.dp):
        raise PlanError(
            f"{where}: a batch of {batch} is no multiple of local_batch_size {local} (micro-batches of {mbs}) x DP "
            f"{strategy.dp}"
        )
    if strategy.pp > 1 and batch != local * strategy.dp:
        raise PlanError(
            f"{where}: global_batch_size {batch} makes {batch // (local * strategy.dp)} passes through the pipeline, "
            f"each filled and drained; plan local_batch_size {batch // strategy.dp}"
        )
    return mbs, batch


def read_layers(config: Config, where: str, totals: Totals, pp: int) -> dict[str, tuple[int, ...]]:
    """Layers of each modality on each virtual stage. Raises PlanError where they are not all dealt."""
    sizes, total = config.parallelism, totals["text"]
    others = {key: count for key, count in totals.items() if key != "text"}
    parts = sizes.get("module_fqns_per_model_part")
    counts = _count_parts(parts, where, total) if parts and pp > 1 else _deal(config, where, total, pp)
    if len(counts) % pp:
        raise PlanError(f"{where}: {len(counts)} model parts are no multiple of PP {pp}")
    if others and pp > 1 and not (parts and VISION in parts[0]):
        raise PlanError(f"{where}: PP {pp} of a model with {', '.join(others)}; {VISION} is expected in the first part")
    first = {key: (count, *(0,) * (len(counts) - 1)) for key, count in others.items()}
    return {**first, "text": counts}


def _count_parts(parts: Any, where: str, total: int) -> tuple[int, ...]:
    """Layers of each part. Raises PlanError where a layer is missing, twice there, or out of order."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise PlanError(f"{where}: module_fqns_per_model_part is {describe_value(parts)}; lists of names are expected")
    matches = [[_LAYER.fullmatch(str(name)) for name in part] for part in parts]
    found = [[int(match.group(1)) for match in part if match] for part in matches]
    if [index for part in found for index in part] != list(range(total)):
        raise PlanError(f"{where}: module_fqns_per_model_part does not hold layers.0 to layers.{total - 1} in order")
    return tuple(len(part) for part in found)


def _deal(config: Config, where: str, total: int, pp: int) -> tuple[int, ...]:
    """torchtitan's own deal: the embedding and the head count as so many layers, the first parts take one more."""
    if pp == 1:
        return (total,)
    sizes = config.parallelism
    first = sizes.get("pipeline_parallel_first_stage_less_layers", 1)
    last = sizes.get("pipeline_parallel_last_stage_less_layers", 1)
    if type(first) is not int or type(last) is not int or first < 0 or last < 0:
        raise PlanError(
            f"{where}: layers less on the first and last stage are {first!r} and {last!r}; numbers are expected"
        )
    each = size_at(sizes, "pipeline_parallel_layers_per_stage", where, 0)
    interleaved = str(sizes.get("pipeline_parallel_schedule", "1F1B")).lower() == "interleaved1f1b"
    parts = -(-(total + first + last) // each) if each else pp * (2 if interleaved else 1)
    least, more = divmod(total + first + last, parts)
    if least < max(first, last, 1) or parts % pp:
        raise PlanError(f"{where}: {total} layers are not dealt to {parts} parts; say module_fqns_per_model_part")
    counts = [least + (part < more) for part in range(parts)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _read_recompute(config: Config, where: str, layers: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of the decoder's layers; torchtitan recomputes none of an encoder's."""
    none = {key: (0,) * len(counts) for key, counts in layers.items()}
    held, said = layers["text"], config.recompute
    starts = [sum(held[:part]) for part in range(len(held))]
    if said == "full":
        return none | {"text": held}
    if isinstance(said, int):
        spread = zip(starts, held, strict=True)
        return none | {"text": tuple(sum(index % said == 0 for index in range(at, at + count)) for at, count in spread)}
    if isinstance(said, str):
        return none
    names = set(said)
    counts = []
    for start, count in zip(starts, held, strict=True):
        again = [f"layers.{index}" in names for index in range(start, start + count)]
        names -= {f"layers.{index}" for index in range(start, start + count)}
        if again != sorted(again, reverse=True):
            raise PlanError(f"{where}: layers {start} to {start + count - 1} recompute others than the first ones")
        counts.append(sum(again))
    if names:
        raise PlanError(f"{where}: {sorted(names)[0]} recomputes, and there is no such layer")
    return none | {"text": tuple(counts)}
