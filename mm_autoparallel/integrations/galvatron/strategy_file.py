"""Galvatron's strategy JSON: a strategy for each layer, as its runtime reads it and its search writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.galvatron.strategies import (
    DpType,
    EndsStrategy,
    FlaggedEnds,
    LayerStrategy,
    dp_type_of,
)
from mm_autoparallel.records import MAX_LAYERS

WHAT = "Galvatron strategy"
_LISTS = ("tp_sizes_enc", "dp_types_enc", "use_sp", "checkpoint", "pp_division")
_ONES = ("cp_sizes_enc", "ep_sizes_enc", "tp_of_ep_sizes_enc")
"""Lists that hold nothing but 1 in what is read here."""
_NEIGHBOURS = "tp_consecutive_flags"
_DEFAULT_TYPES = ("ddp", "zero2")


@dataclass(frozen=True)
class Assignment:
    """A whole plan of Galvatron's: a strategy for every layer, one for embedding and head, layers of each stage."""

    layers: tuple[LayerStrategy, ...]
    ends: EndsStrategy
    division: tuple[int, ...]
    num_samples: int
    chunks: int
    pipeline_type: str
    default_dp_type: DpType

    @property
    def num_devices(self) -> int:
        """That it runs on."""
        return self.ends.pp * self.ends.degree * self.ends.dp


def format_strategy(plan: Assignment) -> str:
    """The JSON with upstream's keys in upstream's order, then `vocab_sdp`: the runtime takes ZeRO 3 of embedding and
    head from that key alone, while its search writes `embed_sdp`."""
    ends = plan.ends

    def each(values: Sequence[int] | Sequence[bool]) -> str:
        return ",".join(str(int(value)) for value in values)

    sharded = int(ends.dp_type == "zero3")
    document = {
        "pp_deg": ends.pp,
        "tp_sizes_enc": each([layer.degree for layer in plan.layers]),
        "tp_consecutive_flags": each([not layer.strided for layer in plan.layers]),
        "dp_types_enc": each([layer.dp_type == "zero3" for layer in plan.layers]),
        "use_sp": each([layer.sp > 1 for layer in plan.layers]),
        "checkpoint": each([layer.checkpoint for layer in plan.layers]),
        "world_size": plan.num_devices,
        "global_bsz": plan.num_samples,
        "chunks": plan.chunks,
        "pp_division": each(plan.division),
        "pipeline_type": plan.pipeline_type,
        "default_dp_type": plan.default_dp_type,
        "vtp": ends.degree,
        "vsp": int(ends.uses_ulysses),
        "embed_sdp": sharded,
        "vocab_sdp": sharded,
    }
    return json.dumps(document, indent=4)


def read_strategy(
    path: Path, num_devices: int, pipeline_type: str, default_dp_type: DpType, is_older: bool = False
) -> Assignment:
    """The plan at `path`; as `parse_strategy`."""
    document = read_document(path, WHAT, PlanError)
    return parse_strategy(document, f"{WHAT} {path}", num_devices, pipeline_type, default_dp_type, is_older)


def parse_strategy(
    document: Mapping[str, Any],
    where: str,
    num_devices: int,
    pipeline_type: str,
    default_dp_type: DpType,
    is_older: bool = False,
) -> Assignment:
    """The plan that a file holds. The arguments before the last stand where files of older searches leave a key out;
    is_older: as 2.4.0 takes it, whose strategies say which devices are neighbours, and whose figures depend on what is
    said of ends that nothing divides.

    Raises PlanError that names `where` and key, where the lists do not agree too.
    """
    pp, devices = size_at(document, "pp_deg", where), size_at(document, "world_size", where, num_devices)
    degrees = numbers_at(document, "tp_sizes_enc", where)
    count = len(degrees)
    lists = {name: numbers_at(document, name, where, [0] * count) for name in ("dp_types_enc", "use_sp", "checkpoint")}
    lists |= {name: numbers_at(document, name, where, [1] * count) for name in (*_ONES, _NEIGHBOURS)}
    for name, values in lists.items():
        if len(values) != count:
            raise PlanError(f"{name} has {len(values)} layers, tp_sizes_enc {count}", where=where, key=name)
        allowed = (1,) if name in _ONES or (name == _NEIGHBOURS and not is_older) else (0, 1)
        wrong = next((value for value in values if value not in allowed), None)
        if wrong is not None:
            raise PlanError(
                f"{name} has a {wrong}; {' or '.join(map(str, allowed))} is expected", where=where, key=name
            )
    even = [count // pp] * (pp - 1) + [count - count // pp * (pp - 1)]
    division = numbers_at(document, "pp_division", where, even)
    if len(division) != pp or sum(division) != count or min(division) < 1:
        raise PlanError(
            f"pp_division deals {sum(division)} layers to {len(division)} stages; there are {count} and pp_deg is {pp}",
            where=where,
            key="pp_division",
        )
    default = str(document.get("default_dp_type", default_dp_type))
    if default not in _DEFAULT_TYPES:
        raise PlanError(f"default_dp_type is {default!r}; ddp or zero2 is expected", where=where, key="default_dp_type")
    kind: DpType = "zero2" if default == "zero2" else "ddp"

    def strategy(degree: int, is_sp: bool, is_fully: bool, name: str) -> EndsStrategy:
        if degree < 1 or devices % (pp * degree):
            raise PlanError(
                f"{name} has a {degree}, which does not divide {devices} devices and {pp} stages", where=where, key=name
            )
        dp = devices // pp // degree
        tp, sp = (1, degree) if is_sp else (degree, 1)
        return EndsStrategy(pp, tp, sp, dp, dp_type_of(dp, is_fully, kind))

    layers = []
    columns = (lists[name] for name in ("dp_types_enc", "use_sp", "checkpoint", _NEIGHBOURS))
    for degree, fully, is_sp, again, is_near in zip(degrees, *columns, strict=True):
        each = strategy(degree, bool(is_sp), bool(fully), "tp_sizes_enc")
        layers.append(LayerStrategy(each.pp, each.tp, each.sp, each.dp, each.dp_type, bool(again), not is_near))
    sharded = document.get("embed_sdp", document.get("vocab_sdp", 0))
    is_ulysses = bool(document.get("vsp", 0))
    ends = strategy(size_at(document, "vtp", where, 1), is_ulysses, bool(sharded), "vtp")
    if is_older:
        ends = FlaggedEnds(pp, ends.tp, ends.sp, ends.dp, "zero3" if sharded else kind, is_ulysses)
    return Assignment(
        tuple(layers),
        ends,
        tuple(division),
        size_at(document, "global_bsz", where),
        size_at(document, "chunks", where),
        str(document.get("pipeline_type", pipeline_type)),
        kind,
    )


def size_at(document: Mapping[str, Any], key: str, where: str, usual: int | None = None) -> int:
    """A whole number of at least 1. Raises PlanError that names the key."""
    value = document.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        found = (
            "is missing" if value is None else f"is {describe_value(value)}; a whole number of at least 1 is expected"
        )
        raise PlanError(f"{key} {found}", where=where, key=key)
    return value


def numbers_at(document: Mapping[str, Any], key: str, where: str, usual: Sequence[int] | None = None) -> list[int]:
    """Numbers between commas. Raises PlanError that names the key."""
    value = document.get(key)
    if value is None and usual is not None:
        return [*usual]
    words = value.split(",") if isinstance(value, str) else []
    if not 0 < len(words) <= MAX_LAYERS or not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        found = "is missing" if value is None else f"is {describe_value(value)}"
        raise PlanError(f"{key} {found}; numbers between commas are expected, such as 1,1,2,2", where=where, key=key)
    return [int(word) for word in words]
