"""Training arguments of PaddleFormers and PaddleNLP: the plan that they run, with the model that a person names.

Sizes: world = DP x sharding x TP x sep x PP; samples of a step are MBS x gradient_accumulation_steps x DP x sharding.
fleet lays ranks TP, sep, then PP and sharding by hybrid_parallel_topo_order, and replicas that share nothing outermost.
Stages: equal, unless pp_seg_method is a list, in words, of the first entry of each stage; the embedding is entry
0 (PaddleFormers, nn/pp_model.py; SegmentLayers of paddle 3.3).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.config_files import Totals, describe_config, need, read_totals, size_at
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.paddle.names import (
    DISPATCHER,
    GRANULARITY,
    MBS,
    NLP,
    NOT_PLANNED,
    ORDER,
    SEGMENTS,
    SEQUENCE,
    SHARDING,
    SIZES,
    STEPS,
    find_version,
    read_flag,
)
from mm_autoparallel.model.job.stacks import Dispatcher
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.planner.plan import Plan

ARGUMENTS = "paddle_args.yaml"
REPLICAS_OUTSIDE = "tp-cp-ep-pp-dp"
_LENGTHS = ("max_seq_len", "max_seq_length")
_DISPATCHERS: tuple[Dispatcher, ...] = ("", "alltoall", "deepep")


def is_arguments(path: Path) -> bool:
    """Whether the file at `path` has a trainer's arguments by Paddle's names."""
    try:
        if path.suffix not in (".json", ".yaml", ".yml"):
            return False
        document = read_document(path, "arguments")
    except PlannerError:
        return False
    sizes = {names[size] for names in SIZES.values() for size in ("tp", "pp", "shard", "sep")}
    return MBS in document and bool({SHARDING, *sizes} & set(document))


def describe_launch(path: Path, given: Given) -> Described:
    """What the arguments at `path` train. Raises JobError or PlanError as `read_launch_plan`."""
    document = read_document(path, "arguments")
    length = next((size_at(document, key, f"arguments {path}") for key in _LENGTHS if key in document), None)
    given = replace(given, seq_length=given.seq_length or length)
    plan = read_launch_plan(path, given)
    notes = ("workload.stack is megatron-local: nobody has measured Paddle's kernels",)
    return describe_config(path, given, "megatron-local", plan, {}, notes)


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the arguments at `path` run. Raises JobError naming what nobody says, PlanError naming the key that
    is malformed or says what no plan does."""
    document, totals = read_document(path, "arguments"), read_totals(path, given)
    world_size = need(given.world_size, path, "--world-size")
    return read_plan(document, f"arguments {path}", totals, world_size)


def _read_cuts(arguments: Mapping[str, Any], where: str) -> list[int] | None:
    """The list under pp_seg_method; None where it names a kind of layer, which is dealt evenly."""
    said = arguments.get(SEGMENTS)
    if said is None or (isinstance(said, str) and said.startswith("layer:")):
        return None
    try:
        cuts = ast.literal_eval(said) if isinstance(said, str) else said
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        cuts = None
    if not isinstance(cuts, list) or not all(type(each) is int for each in cuts):
        raise PlanError(f"{where}: {SEGMENTS} is {describe_value(said)}; layer:... or a list of numbers is expected")
    return cuts


def read_plan(arguments: Mapping[str, Any], where: str, totals: Totals, world_size: int) -> Plan:
    """The plan of a trainer's arguments. totals: layers by modality."""
    names = SIZES[find_version(arguments, where)]
    sizes = {size: _size(arguments, key, where) for size, key in names.items() if size != "shard"}
    tp, pp, sep, ep = sizes["tp"], sizes["pp"], sizes["sep"], sizes["ep"]
    _refuse_unplanned(arguments, where, sizes["vpp"] if pp > 1 else 1)
    if sizes["cp"] > 1:
        raise PlanError(f"{where}: {names['cp']} is {sizes['cp']}; {names['sep']} alone is planned (all_to_all)")
    if world_size % (tp * pp * sep):
        raise PlanError(f"{where}: TP {tp} x PP {pp} x SEP {sep} does not divide {world_size} devices")
    dp = world_size // (tp * pp * sep)
    zero = _read_sharding(arguments, where, names["shard"], dp)
    if zero > 1 and pp > 1:
        raise PlanError(f"{where}: {SHARDING} stage{zero} with PP {pp}, which the trainer refuses")
    if pp > 1 and set(totals) != {"text"}:
        raise PlanError(f"{where}: PP {pp} is planned for decoders alone, and the model has {', '.join(totals)}")
    is_outside = (
        (zero == 0 and dp > 1)
        or read_flag(arguments, "reorder_pipeline_priority", where)
        or arguments.get(ORDER, _usual_order(names)) == "sharding_first"
    )
    if ep > 1 and sizes["etp"] > 1:
        raise PlanError(f"{where}: {names['etp']} is {sizes['etp']}; 1 alone is supported by the trainer")
    said = arguments.get(DISPATCHER, "") if ep > 1 else ""
    dispatcher = next((each for each in _DISPATCHERS if each == said), None)
    if dispatcher is None:
        raise PlanError(f"{where}: {DISPATCHER} is {describe_value(said)}; alltoall and deepep are known")
    mbs, steps = size_at(arguments, MBS, where, 8), size_at(arguments, STEPS, where)
    strategy = Strategy(
        pp=pp,
        tp=tp,
        dp=dp,
        mbs=mbs,
        cp=sep,
        ep=ep,
        etp=1 if ep > 1 and tp > 1 else 0,
        vpp=sizes["vpp"] if pp > 1 else 1,
        zero=zero,
        cp_kind="all_to_all" if sep > 1 else "",
        rank_order=REPLICAS_OUTSIDE if is_outside and pp > 1 else DEFAULT_RANK_ORDER,
        dispatcher=dispatcher,
        sequence_parallel=tp == 1 or read_flag(arguments, SEQUENCE, where),
    )
    layers = {key: deal_layers(arguments, count, pp, strategy.vpp, where) for key, count in totals.items()}
    empty = next((key for key, counts in layers.items() if 0 in counts), None)
    if empty:
        raise PlanError(f"{where}: stage {layers[empty].index(0)} holds no {empty} layer")
    again = _runs_again(arguments, where)
    recompute = {key: counts if again else (0,) * len(counts) for key, counts in layers.items()}
    return Plan(strategy, layers, recompute, mbs * steps * dp)


def _refuse_unplanned(arguments: Mapping[str, Any], where: str, vpp: int) -> None:
    words = str(arguments.get("pipeline_parallel_config") or "").split()
    for key, what in NOT_PLANNED.items():
        if (key in words or read_flag(arguments, key, where)) and (key != "best_unbalanced_scheduler" or vpp > 1):
            raise PlanError(f"{where}: {key} is set: {what}, which no plan says; take it out")


def _usual_order(names: Mapping[str, str]) -> str:
    """What either trainer takes where nobody says it."""
    return "pp_first" if names is SIZES[NLP] else "sharding_first"


def _size(arguments: Mapping[str, Any], key: str, where: str) -> int:
    """A size, of which -1 and 0 mean 1."""
    return 1 if arguments.get(key) in (-1, 0) else size_at(arguments, key, where)


def _read_sharding(arguments: Mapping[str, Any], where: str, key: str, dp: int) -> int:
    """ZeRO. Raises PlanError where some replicas share and others do not, or weights lie on the host."""
    said = arguments.get(SHARDING)
    said = {True: "stage1", False: "", None: ""}.get(said, said) if said in (True, False, None) else said
    if said not in ("", "stage1", "stage2", "stage3"):
        raise PlanError(f"{where}: {SHARDING} is {describe_value(said)}; stage1, stage2 and stage3 are planned")
    shard = arguments.get(key, -1)
    shard = arguments.get("sharding_degree", -1) if shard in (-1, None) else shard
    if said and shard not in (-1, dp, None):
        raise PlanError(
            f"{where}: {key} is {describe_value(shard)} of {dp} replicas; sharding over all of them is planned"
        )
    return int(said[-1]) if said else 0


def deal_layers(arguments: Mapping[str, Any], count: int, pp: int, vpp: int, where: str) -> tuple[int, ...]:
    """The layers of each virtual stage, of `count`. Raises PlanError where they are not dealt."""
    cuts, stages = _read_cuts(arguments, where), pp * vpp
    if cuts is None or pp == 1:
        if count % stages:
            raise PlanError(f"{where}: {count} layers are not dealt evenly to {stages} stages; say {SEGMENTS}")
        return (count // stages,) * stages
    if vpp > 1:
        raise PlanError(f"{where}: {SEGMENTS} is a list, which goes with one chunk a stage alone")
    if len(cuts) not in (pp, pp + 1) or cuts[0] != 0:
        raise PlanError(f"{where}: {SEGMENTS} {list(cuts)}; it begins with 0 and has {pp} entries, one a stage")
    bounds = [0, *(cut - 1 for cut in cuts[1:pp]), count]
    held = tuple(after - before for before, after in pairwise(bounds))
    if min(held) < 0:
        raise PlanError(f"{where}: {SEGMENTS} {list(cuts)} gives {list(held)} of {count} layers to the stages")
    return held


def _runs_again(arguments: Mapping[str, Any], where: str) -> bool:
    """Whether layers run again in the backward. Raises PlanError naming what runs a part of them again."""
    for key in ("no_recompute_layers", "refined_recompute", "recompute_modules"):
        if arguments.get(key):
            raise PlanError(f"{where}: {key} is {describe_value(arguments[key])}, which no plan says; take it out")
    granularity = arguments.get(GRANULARITY)
    if "recompute" in arguments or find_version(arguments, where) == NLP:
        if not read_flag(arguments, "recompute", where):
            return False
        granularity = granularity or "full"
    if granularity is None:
        return False
    number, method = arguments.get("recompute_num_layers"), arguments.get("recompute_method")
    if granularity != "full" or number not in (None, 1) or method not in (None, "uniform"):
        raise PlanError(
            f"{where}: {GRANULARITY} {describe_value(granularity)}, recompute_method {describe_value(method)} and "
            f"recompute_num_layers {describe_value(number)}; planned is full, uniform, 1"
        )
    return True
