"""PROBLEM.json: a placement problem of people who bring their own numbers, read into the noun Problem.

A number where a list is meant stands for every entry. Keys are strict, since a misspelt `static_bytes` would plan with
zero; free text goes under `note`, `source` or any key that begins with an underscore, results of others under `known`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.pipeline.encoder_document import encoder_document
from mm_autoparallel.pipeline.laid_out import check_layouts
from mm_autoparallel.pipeline.layout import Layout, Reshard
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Mode, Problem, check_modes
from mm_autoparallel.pipeline.schedules.catalog import MAX_ACTIONS, check_rounds, find_schedule
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
from mm_autoparallel.records import Count, Factor, Flag, Name, Noun, Number, Size, Time, TimePerByte, ZeroToOne
from mm_autoparallel.validation import parse_record

_COMMENTS = ("note", "source")
_WHAT = "problem file"


def _number_or_list(value: Any) -> str:
    return "list" if isinstance(value, (list, tuple)) else "number"


# Told apart before validation, so that a mistake inside a list is not also reported as "no number".
Sizes = Annotated[
    Annotated[Size, Tag("number")] | Annotated[tuple[Size, ...], Tag("list")], Discriminator(_number_or_list)
]
Times = Annotated[
    Annotated[Time, Tag("number")] | Annotated[tuple[Time, ...], Tag("list")], Discriminator(_number_or_list)
]
_TimesPerByte = Annotated[
    Annotated[TimePerByte, Tag("number")] | Annotated[tuple[TimePerByte, ...], Tag("list")],
    Discriminator(_number_or_list),
]
_Factors = Annotated[
    Annotated[Factor, Tag("number")] | Annotated[tuple[Factor, ...], Tag("list")], Discriminator(_number_or_list)
]


class RecomputeEntry(Noun):
    """`recompute` of a block: the short form of one mode of that name; see problem.Mode."""

    extra_backward_ms: Time
    activation_bytes: Size
    restored_bytes: Size = 0.0


class LayoutEntry(Noun):
    """`layout` of a mode; see layout.Layout."""

    name: Name
    forward_ms: Time
    backward_ms: Time
    static_bytes: Size = 0.0
    activation_bytes: Size = 0.0
    transient_bytes: Size = 0.0
    tail_ms: Time = 0.0
    step_bytes: Size = 0.0
    step_once_bytes: Size = 0.0
    step_shard_bytes: Size | None = None


class ReshardEntry(Noun):
    """One of `reshards` of a block; see layout.Reshard. An empty name is the block's own layout."""

    source: Name | Literal[""]
    target: Name | Literal[""]
    forward_ms: Time
    backward_ms: Time


class ModeEntry(Noun):
    """One of `modes` of a block; see problem.Mode."""

    name: Name
    extra_forward_ms: Time = 0.0
    extra_backward_ms: Time = 0.0
    activation_bytes: Size = 0.0
    restored_bytes: Size = 0.0
    host_bytes: Size = 0.0
    layout: LayoutEntry | None = None


class BlockEntry(Noun):
    """One entry of `chain`; see problem.ChainBlock."""

    name: Name
    modality: Name
    count: Annotated[int, Field(strict=True, ge=1, le=100_000)]
    forward_ms: Time
    backward_ms: Time
    static_bytes: Size = 0.0
    activation_bytes: Size = 0.0
    recompute: RecomputeEntry | None = None
    modes: tuple[ModeEntry, ...] = ()
    layer: Flag = True
    pinned: Literal["first", "last"] | None = None
    attach: Literal["previous", "next"] | None = None
    recompute_group: Name | None = None
    transient_bytes: Size = 0.0
    tail_ms: Time = 0.0
    output_bytes: Size = 0.0
    sends_gradient: Flag = True
    microbatch_scale: tuple[Factor, ...] = ()
    host_static_bytes: Size = 0.0
    step_bytes: Size = 0.0
    step_once_bytes: Size = 0.0
    step_shard_bytes: Size | None = None
    reshards: tuple[ReshardEntry, ...] = ()
    backward_weight_ms: Time = 0.0
    kept_for_weight_bytes: Size | None = None
    split_extra_ms: Time = 0.0
    within: tuple[Number, Number] | None = None


class ProblemEntry(Noun):
    """The whole file; see problem.Problem for what the figures mean."""

    schema_name: Literal["mm-autoparallel/problem/1"] = Field(default="mm-autoparallel/problem/1", alias="schema")
    num_stages: Count
    num_chunks: Count = 1
    num_microbatches: Count
    schedule: Name
    chain: Annotated[tuple[BlockEntry, ...], Field(min_length=1)]
    memory_limit_bytes: Sizes
    stage_static_bytes: Sizes = 0.0
    stage_tail_ms: Times = 0.0
    p2p_ms: Times = 0.0
    p2p_ms_per_byte: _TimesPerByte = 0.0
    max_layers_per_chunk: Count | None = None
    host_ms_per_byte: _TimesPerByte | None = None
    stage_time_factor: _Factors | None = None
    host_limit_bytes: Sizes | None = None
    orders: tuple[str, ...] = ()
    pair_overlap_fraction: ZeroToOne = 0.0


Entry = TypeVar("Entry", bound=ProblemEntry)
Found = TypeVar("Found")


def read_problem(path: Path) -> Problem:
    """The problem in the file at `path`. Raises JobError naming file, key, value and what would be right."""
    return read_entry(path, ProblemEntry, problem_from_entry)


def read_entry(path: Path, record: type[Entry], build: Callable[[Entry], Found]) -> Found:
    """What `build` makes of the file at `path`, an entry of that kind. Raises JobError, which names the file."""
    document = _without_comments(read_document(path, _WHAT))
    document.pop("known", None)
    if record is ProblemEntry and "encoders" in document:
        raise JobError(f"{_WHAT} {path} has encoders, and `place` alone plans these; leave them out here")
    entry = parse_record(record, document, _WHAT, path)
    try:
        return build(entry)
    except JobError as error:
        raise JobError(f"{_WHAT} {path}: {error}") from None


def problem_from_entry(entry: ProblemEntry) -> Problem:
    """The problem that `entry` describes. Raises JobError where its parts contradict each other."""
    schedule = find_schedule(entry.schedule, entry.num_chunks)
    check_rounds(schedule, entry.num_stages, entry.num_microbatches)
    num_virtual = entry.num_stages * entry.num_chunks
    num_actions = (3 if schedule.splits else 2) * num_virtual * entry.num_microbatches
    if num_actions > MAX_ACTIONS:
        raise JobError(
            f"num_stages · num_chunks · num_microbatches makes {num_actions:,} forwards and backwards a step; at most "
            f"{MAX_ACTIONS:,} are simulated"
        )
    names = [block.name for block in entry.chain]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise JobError(f'chain holds two blocks called "{twice}"; results are given by name, so each needs its own')
    for index, block in enumerate(entry.chain):
        if block.microbatch_scale and len(block.microbatch_scale) != entry.num_microbatches:
            raise JobError(
                f"chain[{index}].microbatch_scale has {len(block.microbatch_scale)} entries; num_microbatches is "
                f"{entry.num_microbatches}, and each micro-batch needs one"
            )
        _check_split(index, block)
        if block.within and not block.within[0] < block.within[1] <= num_virtual:
            raise JobError(
                f"chain[{index}].within is {list(block.within)}: the first virtual stage it may lie on and the one "
                f"behind the last, so 0 <= first < second <= {num_virtual}"
            )
    _check_orders(entry)

    def per_stage(key: str) -> tuple[float, ...]:
        value = getattr(entry, key)
        return spread(value, entry.num_stages, key, f"num_stages is {entry.num_stages}") if value is not None else ()

    def per_hop(key: str) -> tuple[float, ...]:
        return spread(getattr(entry, key), num_virtual - 1, key, f"there are {num_virtual - 1} hops between chunks")

    problem = Problem(
        num_stages=entry.num_stages,
        num_chunks=entry.num_chunks,
        num_microbatches=entry.num_microbatches,
        schedule=entry.schedule,
        chain=tuple(_chain_block(block) for block in entry.chain),
        memory_limit_bytes=per_stage("memory_limit_bytes"),
        stage_static_bytes=per_stage("stage_static_bytes"),
        stage_tail_ms=per_stage("stage_tail_ms"),
        p2p_ms=per_hop("p2p_ms"),
        p2p_ms_per_byte=per_hop("p2p_ms_per_byte"),
        max_layers_per_chunk=entry.max_layers_per_chunk,
        host_ms_per_byte=per_stage("host_ms_per_byte"),
        stage_time_factor=per_stage("stage_time_factor"),
        host_limit_bytes=per_stage("host_limit_bytes"),
        orders=tuple(" ".join(order.split()) for order in entry.orders),
        pair_overlap_fraction=entry.pair_overlap_fraction,
    )
    check_modes(problem)
    check_layouts(problem)
    return problem


def _check_split(index: int, block: BlockEntry) -> None:
    """Raise JobError where what a block says of its weight gradient contradicts the rest of it."""
    where = f"chain[{index}]"
    if block.backward_weight_ms > block.backward_ms:
        raise JobError(
            f"{where}.backward_weight_ms is {block.backward_weight_ms:g}; it is a part of backward_ms, so at most "
            f"{block.backward_ms:g}"
        )
    if block.kept_for_weight_bytes is not None and block.kept_for_weight_bytes > block.activation_bytes:
        raise JobError(
            f"{where}.kept_for_weight_bytes is {block.kept_for_weight_bytes:g}; it is a part of activation_bytes, so "
            f"at most {block.activation_bytes:g}"
        )
    if block.split_extra_ms and not block.backward_weight_ms:
        raise JobError(
            f"{where}.split_extra_ms is {block.split_extra_ms:g} and backward_weight_ms 0: there is nothing to part, "
            f"so parting it costs nothing"
        )


def _check_orders(entry: ProblemEntry) -> None:
    """Raise JobError where orders are missing, of no use, wrong, or wait for one another for ever."""
    is_given = find_schedule(entry.schedule, entry.num_chunks).given_by == "problem"
    if is_given != bool(entry.orders):
        raise JobError(
            f"schedule {entry.schedule} has "
            + (
                "no orders: give one text for each stage under orders"
                if is_given
                else "an order of its own, and orders"
            )
            + ("" if is_given else " stand beside it; they go with schedule given")
        )
    if not is_given:
        return
    try:
        orders = read_orders(entry.orders, entry.num_stages, entry.num_chunks, entry.num_microbatches)
    except PlanError as error:
        raise JobError(str(error)) from None
    waiting = find_deadlock(orders, entry.num_chunks, v_shaped=False)
    if waiting:
        raise JobError(f"orders never end: {waiting}")


def problem_document(problem: Problem) -> dict[str, Any]:
    """What a file that reads back as exactly `problem` holds: defaults are left out, lists of equals are one number.
    With encoders it reads back as an EncodedProblem (encoders_file.read_any_problem).

    Where bytes come from (footprints, and what of them lies outside the allocator) decides no placement and stays out.
    """
    document: dict[str, Any] = {"schema": ProblemEntry.model_fields["schema_name"].default}
    for key, value in asdict(problem).items():
        if key in ("context_bytes", "communicator_bytes", "beside"):
            continue
        if key == "chain":
            document[key] = [_block_document(block) for block in problem.chain]
        elif key == "encoders":
            if problem.encoders:
                document[key] = [encoder_document(encoder, problem.num_stages) for encoder in problem.encoders]
        elif value == () or (key == "pair_overlap_fraction" and not value):
            continue
        elif key == "orders":
            document[key] = list(value)
        elif isinstance(value, tuple):
            document[key] = value[0] if len(set(value)) == 1 else list(value)
        elif value is not None:
            document[key] = value
    return document


def _block_document(block: ChainBlock) -> dict[str, Any]:
    fields = asdict(block)
    written: dict[str, Any] = {}
    for key, field in BlockEntry.model_fields.items():
        if key == "recompute":
            if _is_short(block.modes):
                written[key] = {name: fields["modes"][0][name] for name in RecomputeEntry.model_fields}
        elif field.is_required() or fields[key] != field.default:
            written[key] = fields[key]
    if _is_short(block.modes):
        del written["modes"]
    elif block.modes:
        written["modes"] = [_mode_document(mode) for mode in fields["modes"]]
    return written


def _mode_document(fields: dict[str, Any]) -> dict[str, Any]:
    written = {name: value for name, value in fields.items() if value}
    if fields["layout"]:
        written["layout"] = {
            name: fields["layout"][name]
            for name, field in LayoutEntry.model_fields.items()
            if field.is_required() or fields["layout"][name] != field.default
        }
    return written


def _is_short(modes: tuple[Mode, ...]) -> bool:
    """Whether `recompute` alone says it all."""
    if len(modes) != 1 or modes[0].name != RECOMPUTE or modes[0].layout:
        return False
    return not modes[0].extra_forward_ms and not modes[0].host_bytes


def _chain_block(entry: BlockEntry) -> ChainBlock:
    values = {name: getattr(entry, name) for name in BlockEntry.model_fields if name not in ("recompute", "modes")}
    values["reshards"] = tuple(Reshard(**each.model_dump()) for each in entry.reshards)
    modes = tuple(_mode(mode) for mode in entry.modes)
    if entry.recompute is not None:
        if modes:
            raise JobError(
                f'block "{entry.name}" has both recompute and modes; recompute is the short form of one mode called '
                f'"{RECOMPUTE}", so write it as one of the modes'
            )
        modes = (Mode(RECOMPUTE, **entry.recompute.model_dump()),)
    return ChainBlock(**values, modes=modes)


def _mode(entry: ModeEntry) -> Mode:
    layout = Layout(**entry.layout.model_dump()) if entry.layout else None
    return Mode(**entry.model_dump(exclude={"layout"}), layout=layout)


def spread(value: float | tuple[float, ...], length: int, key: str, why: str) -> tuple[float, ...]:
    """`value` for each of so many. Raises JobError where a list has another length. why: it is that."""
    if not isinstance(value, tuple):
        return (float(value),) * length
    if len(value) != length:
        raise JobError(f"{key} has {len(value)} entries; {why}, so it needs {length}, or one number for all")
    return tuple(float(item) for item in value)


def _without_comments(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_comments(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in _COMMENTS
        }
    if isinstance(value, list):
        return [_without_comments(item) for item in value]
    return value
